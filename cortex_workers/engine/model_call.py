"""One model call of a step: the request, the tries within the step, the cleaned answer.

No database connection is held while the model thinks.
Source: decision S6; rulings 15, 42, 59; issue: provider errors are retried in the step or fail the run.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt

from cortex_workers import probes, telemetry
from cortex_workers.engine import boundary, storable
from cortex_workers.engine.execution import Answered, Execution
from cortex_workers.errors import (
    DeferredModelCall,
    LeaseLost,
    ModelFailed,
    ModelUnavailable,
    RefusedForNow,
    RunInterrupted,
)
from cortex_workers.host import clean_text, foreign
from cortex_workers.ports import ModelClient, Token
from cortex_workers.schemas.agent import LONGEST_S
from cortex_workers.schemas.ids import TOOL_CALL
from cortex_workers.schemas.llm import Message, ModelReply, ModelRequest, ToolCall


def call_model(ex: Execution, tools: tuple[str, ...]) -> Answered:
    """Ask the model for the next step.

    Raises: ModelFailed when it refuses for good, RefusedForNow when the provider wants a long pause,
    LeaseLost, HandOff while it waits between two tries.
    """
    request = _request(ex, tools)
    client = ex.rt.resolve_model(request.model)
    started = datetime.now(UTC)
    probes.reach("model.before")
    attempts = ex.agent.model_attempts or ex.rt.settings.model_attempts
    retrying = Retrying(
        retry=retry_if_exception_type(ModelUnavailable),
        stop=stop_after_attempt(attempts),
        wait=lambda state: _pause(ex, state),
        sleep=lambda seconds: _sleep(ex, seconds),
        before_sleep=lambda state: _note_retry(ex, state),
        reraise=True,
    )
    try:
        with telemetry.span("cortex.model_call", run_id=ex.run_id, step=ex.next_step, model=request.model):
            reply = retrying(_once, ex, client, request)
    except ModelUnavailable as error:
        telemetry.MODEL_CALLS.labels("failed").inc()
        raise ModelFailed(f"the model was not available in {attempts} tries: {error.message}") from error
    telemetry.MODEL_CALLS.labels("answered").inc()
    probes.reach("model.after")
    return _answered(ex, reply, request, started)


def _request(ex: Execution, tools: tuple[str, ...]) -> ModelRequest:
    agent = ex.agent
    shown = tuple(spec.definition() for spec in agent.tools if spec.name in tools)
    return ModelRequest(
        model=agent.model,
        system=ex.row["system_prompt"] if ex.row["system_prompt"] is not None else agent.instructions,
        messages=ex.conversation(),
        tools=shown,
        max_tokens=agent.max_tokens,
        temperature=agent.temperature,
        settings=agent.model_settings,
        timeout_s=agent.model_timeout_s or ex.rt.settings.model_timeout_s,
        run_id=ex.run_id,
        step=ex.next_step,
        deferral=ex.deferral,
    )


def _once(ex: Execution, client: ModelClient, request: ModelRequest) -> ModelReply:
    """One try. Foreign exceptions are failures for good: a bug in a client is not cured by repeating it."""
    try:
        reply = _asked(ex, client, request)
    except (ModelUnavailable, ModelFailed, LeaseLost, RefusedForNow, boundary.HandOff):
        raise
    except DeferredModelCall as deferral:
        raise _well_formed(deferral) from None
    except TimeoutError as error:
        raise ModelUnavailable(f"the model did not answer within {request.timeout_s:g} s") from error
    except BaseException as error:  # foreign code: whatever a model client raises must end in the row
        foreign.let_through(error)
        raise ModelFailed(f"the model client raised {type(error).__name__}") from error
    if not isinstance(reply, ModelReply):
        raise ModelFailed(f"the model client answered with a {type(reply).__name__}; it returns a ModelReply")
    return reply


def _well_formed(deferral: DeferredModelCall) -> DeferredModelCall:
    """A client's deferral as a row can keep it.

    Raises: ModelFailed when its fields are not what they must be.
    """
    for name in ("kind", "reason", "ref"):
        text = getattr(deferral, name)
        if text is not None and not isinstance(text, str):
            raise ModelFailed(f"the model client put the call off with a {name} that is no text")
        setattr(deferral, name, clean_text(text)[0] if text is not None else None)
    for name in ("ttl", "poll_after"):
        time = getattr(deferral, name)
        if time is not None and (not isinstance(time, timedelta) or time < timedelta(0)):
            raise ModelFailed(f"the model client put the call off with a {name} that is no time to come")
        setattr(deferral, name, min(time, timedelta(seconds=LONGEST_S)) if time is not None else None)
    deferral.kind = deferral.kind or "deferred"
    return deferral


def _asked(ex: Execution, client: ModelClient, request: ModelRequest) -> Any:
    if ex.agent.stream:
        return _on_loop(ex, partial(_collect, ex), client.stream(request), request)
    answer = client.complete(request)
    if inspect.isawaitable(answer):
        return _on_loop(ex, _await, answer, request)
    return answer


def _on_loop(ex: Execution, function: Any, subject: Any, request: ModelRequest) -> Any:
    try:
        return ex.rt.loops.call(
            "models", function, subject, cancel=ex.held, timeout_s=request.timeout_s, name=request.model
        )
    except RunInterrupted as error:
        # Somebody asked the run to stop here; a model call may be repeated elsewhere, an effect may not.
        raise boundary.HandOff(ex.held.stop_requested or error.message) from error


async def _await(answer: Any) -> Any:
    return await answer


async def _collect(ex: Execution, stream: AsyncIterator[Any]) -> ModelReply:
    """Read a stream to its end, letting whoever watches see its tokens; its last delta carries the whole reply."""
    reply: ModelReply | None = None
    sink, index = ex.rt.tokens, 0
    async for delta in stream:
        reply = delta.reply or reply
        if sink is not None and delta.content:
            sink.push(Token(ex.run_id, ex.next_step, index, clean_text(delta.content)[0]))
            index += 1
    if reply is None:
        raise ModelUnavailable("the model's stream ended before its answer was complete")
    return reply


def _pause(ex: Execution, state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome is not None else None
    wanted = _seconds(getattr(error, "retry_after_s", None))
    backoff = float(ex.rt.settings.model_backoff_s) * 2.0 ** (state.attempt_number - 1)
    pause = max(wanted, 0.0) if wanted is not None else backoff
    if pause > ex.rt.settings.model_wait_max_s:
        raise RefusedForNow(
            "the model's provider asks for a long pause", retry_in_s=min(pause, 300.0), reason="provider"
        )
    return pause


def _seconds(wanted: Any) -> float | None:
    """What a provider asks for; None where it is no time."""
    if isinstance(wanted, bool) or not isinstance(wanted, int | float) or math.isnan(wanted):
        return None
    return float(wanted)


def _sleep(ex: Execution, seconds: float) -> None:
    """Wait between two tries, but not past a lost lease, a stop request or a drain."""
    woken = threading.Event()
    remaining = seconds
    while remaining > 0:
        boundary.check(ex)
        woken.wait(min(remaining, 0.25))
        remaining -= 0.25
    boundary.check(ex)


def _note_retry(ex: Execution, state: RetryCallState) -> None:
    telemetry.MODEL_CALLS.labels("retried").inc()
    telemetry.event(
        "model.retry", "warning", run_id=ex.run_id, step=ex.next_step, attempt=state.attempt_number
    )


def _answered(ex: Execution, reply: ModelReply, request: ModelRequest, started: datetime) -> Answered:
    content, marked = clean_text(reply.content)
    calls = []
    for call in reply.tool_calls:
        name, bad_name = clean_text(call.name)
        arguments, bad_arguments = storable.arguments(call.arguments)
        marked = marked or bad_name or bad_arguments
        calls.append(ToolCall(id=_unique(ex, call.id), name=name, arguments=arguments))
    message = Message(role="assistant", content=content, tool_calls=tuple(calls), raw=_with_ids(reply, calls))
    return Answered(
        message=message,
        usage=reply.usage.model_copy(update={"requests": reply.usage.requests or 1}),
        model=storable.text(reply.model or request.model),
        finish_reason=storable.text(reply.finish_reason),
        started_at=started,
        marked=marked,
    )


def _unique(ex: Execution, provided: str) -> str:
    """A call id that no other call of this run has; a fresh one is derived where the provider repeats or omits it."""
    base, _ = clean_text(provided[:200])
    chosen, count = base, 1
    while not chosen or chosen in ex.call_ids:
        count += 1
        chosen = f"{base or TOOL_CALL}-{ex.next_step}-{count}"
    ex.call_ids.add(chosen)
    return chosen


def _with_ids(reply: ModelReply, calls: list[ToolCall]) -> dict[str, Any] | None:
    """The provider's opaque items; its own call ids are kept where ours differ, by position."""
    raw: dict[str, Any] | None = storable.document(reply.raw)
    theirs = [call.id for call in reply.tool_calls]
    if theirs == [call.id for call in calls]:
        return raw
    return {**(raw or {}), "provider_call_ids": storable.document(theirs)}

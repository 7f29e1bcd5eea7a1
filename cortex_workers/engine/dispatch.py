"""One handler, called once: its timeout, its errors, its result as the model reads it.

Source: rulings 4, 8; runs.md 6.4, 6.7, 6.11.
"""

from __future__ import annotations

import json
import time
from typing import Any

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from cortex_workers import probes, telemetry
from cortex_workers.engine import boundary, gates
from cortex_workers.engine.execution import Execution, Planned, Result
from cortex_workers.errors import EffectUncertain, RunInterrupted, StoreUnavailable
from cortex_workers.host import ResultNotEncodable, clean_text, cut_result, encode_result, foreign
from cortex_workers.lease.loops import ToolTimeout
from cortex_workers.store import transcript
from cortex_workers.store.unit import Unit

NEVER_ENTERED = "never entered"
"""The late result of a holder that lost its term before the handler: a proof that nothing happened (ruling 4)."""


class Uncertain(Exception):
    """The call may have taken effect and nobody can say; its record stays started."""


def run_handler(ex: Execution, planned: Planned) -> Result:
    """Call the handler.

    Raises: Uncertain for an unsafe call that passed our timeout, said so itself, or was interrupted; LeaseLost and
    HandOff for a safe one that was interrupted.
    """
    timeout = timeout_s(ex, planned)
    deadline = time.monotonic() + timeout if timeout is not None else None
    try:
        with telemetry.span(
            "cortex.tool_call", run_id=ex.run_id, call_id=planned.call.id, tool=planned.call.name
        ):
            value = _call(ex, planned, timeout, deadline)
    except ToolTimeout as error:
        if error.data.get("entered") is False:
            return _failed(planned, error.message)  # it is known that nothing happened
        return _not_a_failure(planned, f"the tool did not return within {timeout:g} s")
    except EffectUncertain as error:
        return _not_a_failure(planned, foreign.words(error) or error.code)
    except RunInterrupted as error:
        return _interrupted(ex, planned, error)
    except BaseException as error:  # noqa: BLE001  foreign code: a tool's error is something the model reads
        foreign.let_through(error)
        return _failed(planned, foreign.told(error))
    probes.reach("tool.after_handler")
    return _success(ex, planned, value)


def timeout_s(ex: Execution, planned: Planned) -> float | None:
    """The timeout of one call: the tool's own, else the setting's."""
    own = planned.spec.timeout_s if planned.spec is not None else None
    return own if own is not None else ex.rt.settings.tool_timeout_s


def _call(ex: Execution, planned: Planned, timeout: float | None, deadline: float | None) -> Any:
    tool, ready = planned.tool, planned.ready
    assert tool is not None and ready is not None
    ctx = gates.context(ex, planned, deadline)
    if tool.is_async:
        return ex.rt.loops.call(
            "tools",
            tool.call_async,
            ready,
            ctx,
            cancel=None,
            timeout_s=timeout,
            name=planned.call.name,
            on_late=lambda late: _late(ex, planned, late),
        )
    return ex.rt.threads.run_with_timeout(
        lambda: tool.call(ready, ctx),
        timeout,
        planned.call.name,
        on_late=lambda late: _late(ex, planned, late),
    )


def _not_a_failure(planned: Planned, text: str) -> Result:
    if planned.safe:
        return _failed(planned, text)
    raise Uncertain(text)


def _interrupted(ex: Execution, planned: Planned, error: RunInterrupted) -> Result:
    """The handler left because its run stops here: a safe call has no result and runs again elsewhere."""
    if planned.safe:
        boundary.check_hold(ex)
    return _not_a_failure(planned, foreign.words(error) or error.code)


def _failed(planned: Planned, text: str) -> Result:
    return gates.failed(planned, planned.as_it_ran(clean_text(text)[0]))


def _success(ex: Execution, planned: Planned, value: Any) -> Result:
    try:
        text = encode_result(value)
    except ResultNotEncodable as error:
        return _failed(planned, str(error))
    cleaned, marked = clean_text(text)
    cut = cut_result(cleaned, ex.rt.settings.result_bytes)
    return Result(planned, "complete", planned.as_it_ran(cut), marked=marked)


def _late(ex: Execution, planned: Planned, late: Any) -> None:
    """A handler returned after its run had moved on: keep it as evidence (ruling 8), also past a short outage."""
    retrying = Retrying(
        retry=retry_if_exception_type(StoreUnavailable),
        stop=stop_after_delay(ex.rt.settings.lease_ttl_s),
        wait=wait_fixed(1.0),
        reraise=True,
    )
    retrying(keep_late, ex, planned, _evidence(ex, late))
    telemetry.event(
        "tool.late_result", "warning", run_id=ex.run_id, call_id=planned.call.id, tool=planned.call.name
    )


def _evidence(ex: Execution, late: Any) -> str:
    if isinstance(late, BaseException):
        return json.dumps({"raised": type(late).__name__, "text": foreign.words(late)[:2000]})
    try:
        text = clean_text(encode_result(late))[0]
    except ResultNotEncodable as error:
        return json.dumps({"returned": type(late).__name__, "text": str(error)[:2000]})
    return cut_result(text, ex.rt.settings.result_bytes)


def keep_late(ex: Execution, planned: Planned, text: str) -> bool:
    """The one write outside the fence, keyed by the start record's own term."""
    if planned.safe:
        return False

    def work(unit: Unit) -> bool:
        return transcript.write_late_result(unit, ex.term, planned.call.id, text)

    return ex.rt.database.run(work)


def late_text(ex: Execution, result: Result) -> str:
    """A result in hand as evidence, when its fenced write was refused."""
    return cut_result(result.text, ex.rt.settings.result_bytes)

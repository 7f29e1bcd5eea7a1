"""The gates of one tool call, each final: schema, list, authorizer, approval.

Source: runs.md 6.3, 6.7, 8.8; decisions R12, R15; rulings 3, 44.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import jsonschema

from cortex_workers.engine.authority import backoff_s
from cortex_workers.engine.execution import Execution, Planned, Result
from cortex_workers.errors import RefusedForNow, RequiresApproval
from cortex_workers.host import BadArguments, ToolContext, clean_text, cut_result, encode_result, foreign
from cortex_workers.schemas.agent import LONGEST_S
from cortex_workers.schemas.base import same_json
from cortex_workers.schemas.llm import ToolCall
from cortex_workers.schemas.suspension import PendingKind
from cortex_workers.store.transitions import Row


def context(ex: Execution, planned: Planned | None = None, deadline: float | None = None) -> ToolContext:
    """What the authorizer and a handler are told of one call (of the step, where there is no call yet)."""
    return ToolContext(
        run_id=ex.run_id,
        step=planned.step_index if planned is not None else ex.next_step,
        call_id=planned.call.id if planned is not None else "",
        agent=ex.agent.name,
        scope=ex.row["scope"],
        principal=ex.principal,
        session_id=ex.row["session_id"],
        attempt=int(planned.row.get("attempt", 1)) if planned is not None and planned.row else 1,
        deadline=deadline,
        cancelled=lambda: ex.held.lost,
        draining=lambda: ex.rt.drain.is_set() or ex.held.stop_requested is not None,
    )


def visible_tools(ex: Execution) -> tuple[str, ...]:
    """The names the model is shown in this step: the agent's list, narrowed by the authorizer.

    Raises: RefusedForNow when the authorizer fails: neither every tool nor none is a guess to make.
    """
    names = tuple(spec.name for spec in ex.agent.tools)
    authorizer = ex.rt.host.authorizer if ex.rt.host is not None else None
    if authorizer is None:
        return names
    try:
        allowed = set(authorizer.visible(context(ex), names))
    except BaseException as error:  # noqa: BLE001  foreign code: what it cannot tell now, it may tell later
        foreign.let_through(error)
        raise RefusedForNow(
            f"the authorizer could not tell which tools may be seen: {foreign.told(error)[:300]}",
            retry_in_s=backoff_s(int(ex.row["hand_backs"])),
            reason=f"authorizer: {foreign.told(error)}"[:200],
        ) from error
    return tuple(name for name in names if name in allowed)


def plan(
    ex: Execution,
    calls: Sequence[ToolCall],
    step_index: int,
    message_seq: int | None,
    provider_ids: Sequence[str] = (),
) -> list[Planned]:
    """The calls of one turn in the model's order, with their tools."""
    host = ex.rt.host
    planned = []
    for ordinal, call in enumerate(calls):
        spec = ex.agent.tool(call.name)
        tool = host.tools.get(call.name) if host is not None and spec is not None else None
        provider = provider_ids[ordinal] if ordinal < len(provider_ids) else call.id
        planned.append(
            Planned(
                call,
                ordinal,
                step_index,
                message_seq,
                spec,
                tool,
                provider_call_id=clean_text(provider[:200])[0],
            )
        )
    return planned


def judge(ex: Execution, planned: Planned, verdict: Row | None = None) -> Result | None:
    """Take one call through the gates.

    Returns a result when the call ends here (answered, denied, or it cannot run); otherwise None, with ``ready`` set
    for a call that may run and ``waits_for`` for one that needs a person or a machine outside.
    """
    if planned.spec is None or planned.tool is None:
        return failed(planned, f"there is no tool named {planned.call.name[:64]!r} here")
    if verdict is not None and verdict["outcome"] == "answered":
        return _answered(ex, planned, verdict)
    planned.adjudicated = verdict is not None
    if verdict is not None and verdict["outcome"] != "granted":
        return denied(planned, str(verdict["note"] or "rejected"))
    arguments = _arguments(planned, verdict)
    try:
        planned.ready = planned.tool.validate(arguments)
    except BadArguments as error:
        _refuse_changed_tool(ex, planned, arguments, str(error), approved=verdict is not None)
        return failed(planned, planned.as_it_ran(clean_text(str(error))[0]))
    if verdict is not None:
        planned.granted = _still_same(planned, verdict)
    return _authorize(ex, planned)


def _arguments(planned: Planned, verdict: Row | None) -> str:
    amended = amended_in(verdict, planned.call.id)
    if amended is None:
        return planned.call.arguments
    planned.executed_args = json.dumps(amended, ensure_ascii=False, sort_keys=True)
    planned.amended_by = (verdict or {}).get("approver")
    return planned.executed_args


def _still_same(planned: Planned, verdict: Row) -> bool:
    """Whether what would run is what the approver saw; if not, they are asked again (bug case C23)."""
    assert planned.ready is not None
    seen = verdict.get("payload")
    amended = amended_in(verdict, planned.call.id) is not None
    return amended or seen is None or same_json(seen, planned.ready.canonical)


def amended_in(verdict: Row | None, call_id: str) -> dict[str, Any] | None:
    """The arguments a person put in place of the model's, for the whole pause or for this call."""
    decision = (verdict or {}).get("decision") or {}
    mine = (decision.get("calls") or {}).get(call_id) or {}
    whole: dict[str, Any] | None = decision.get("amended_arguments")
    own: dict[str, Any] | None = mine.get("amended_arguments")
    return whole if whole is not None else own


def _refuse_changed_tool(ex: Execution, planned: Planned, arguments: str, why: str, approved: bool) -> None:
    """An approved call that fits the version the run was frozen on, and not the handler here: wait for another worker.

    The approval is not used up, and no other tool runs in its place (bug case C36).
    Raises: RefusedForNow.
    """
    assert planned.spec is not None and planned.tool is not None
    if not approved or planned.tool.spec.parameters == planned.spec.parameters:
        return
    validator = jsonschema.validators.validator_for(planned.spec.parameters)(planned.spec.parameters)
    if validator.is_valid(json.loads(arguments or "{}")):
        wait_s = backoff_s(int(ex.row["hand_backs"]))
        raise RefusedForNow(why, retry_in_s=wait_s, reason=f"tool changed: {clean_text(why)[0]}"[:200])


def _authorize(ex: Execution, planned: Planned) -> Result | None:
    """Ask the authorizer about the arguments that will run; a fresh denial beats an approval."""
    assert planned.spec is not None and planned.ready is not None
    needs = planned.spec.needs_approval
    ttl = planned.spec.approval_ttl_s
    authorizer = ex.rt.host.authorizer if ex.rt.host is not None else None
    if authorizer is not None:
        # A copy: what it does to the arguments must not reach the handler, nor what the approver sees.
        arguments = copy.deepcopy(planned.ready.canonical)
        try:
            authorizer.authorize(context(ex, planned), planned.call.name, arguments, planned.granted)
        except RequiresApproval as escalation:
            needs = True
            if escalation.ttl is not None:
                if not isinstance(escalation.ttl, timedelta) or escalation.ttl <= timedelta(0):
                    return denied(
                        planned, "the authorizer asked for an approval with a ttl that is no time to come"
                    )
                ttl = min(escalation.ttl.total_seconds(), float(LONGEST_S))
        except BaseException as error:  # noqa: BLE001  foreign code: any other error of an authorizer is its denial
            foreign.let_through(error)
            return denied(planned, foreign.words(error) or type(error).__name__)
    if needs and not planned.granted:
        planned.waits_for, planned.ttl_s = PendingKind.APPROVAL, ttl
    elif planned.spec.tool_class == "external":
        planned.waits_for, planned.ttl_s = PendingKind.EXTERNAL, planned.spec.external_ttl_s
    return None


def _answered(ex: Execution, planned: Planned, verdict: Row) -> Result:
    """What somebody outside says the call returned, with what it really ran with (ruling 44, bug case C24)."""
    planned.adjudicated = "decision" in verdict
    _arguments(planned, verdict)
    if verdict["error"] is not None:
        return failed(planned, planned.as_it_ran(clean_text(str(verdict["error"])[: foreign.MAX_TEXT])[0]))
    text, marked = clean_text(encode_result(verdict["content"]))
    text = cut_result(planned.as_it_ran(text), ex.rt.settings.result_bytes)
    return Result(planned, "complete", text, marked=marked)


def failed(planned: Planned, text: str) -> Result:
    """A call that could not run or whose handler failed: the model reads why."""
    return Result(planned, "fail", json.dumps({"error": text}, ensure_ascii=False), error=text[:2000])


def denied(planned: Planned, text: str) -> Result:
    """A call that was forbidden, rejected or left unanswered: the model reads why."""
    return Result(planned, "deny", json.dumps({"error": text}, ensure_ascii=False), error=text[:2000])

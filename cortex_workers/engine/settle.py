"""What a person says of an uncertain effect: happened (with its result), did not happen, or stop.

Source: decision R13; rulings 6, 7, 30.
"""

from __future__ import annotations

import json
from typing import Any

from cortex_workers.engine import decide as deciding
from cortex_workers.engine import decision_shape, dispatch, refusals
from cortex_workers.engine.decide import Pause
from cortex_workers.engine.execution import as_it_ran
from cortex_workers.engine.runtime import Runtime
from cortex_workers.engine.validate import checked_json
from cortex_workers.errors import InputTooLarge, InvalidDecision, InvalidState
from cortex_workers.host import ResultNotEncodable, cut_result, encode_result
from cortex_workers.schemas.checkpoint import Checkpoint, CheckpointKind, Decision, SettleOutcome
from cortex_workers.schemas.ids import CHECKPOINT
from cortex_workers.store import checkpoints, sessions, suspensions, tables, transcript, transitions, turns
from cortex_workers.store.transitions import Guard, Move, Row
from cortex_workers.store.unit import Unit


def settle(
    rt: Runtime,
    checkpoint_id: str,
    decision: Decision,
    scope: str | None,
    *,
    now: bool = False,
    principal: bytes | None = None,
) -> Checkpoint:
    """Settle an uncertain effect; the run goes on with the result, runs the call again, or ends.

    ``now`` overrides the wait before a call that did not happen is run again (recorded); said later, it ends that wait.
    Raises: as ``decide``.
    """
    with refusals.told("settle", CHECKPOINT, checkpoint_id, decision.actor):
        return _settle(rt, checkpoint_id, decision, scope, now, principal)


def _settle(
    rt: Runtime,
    checkpoint_id: str,
    decision: Decision,
    scope: str | None,
    now: bool,
    principal: bytes | None,
) -> Checkpoint:
    decision, text = _with_result(rt, decision_shape.checked(decision, rt.settings.input_bytes))
    pause = deciding.load_pause(rt, checkpoint_id, scope)
    recorded = deciding.already(rt, pause, decision)
    if recorded is not None:
        if now and decision.outcome is SettleOutcome.DID_NOT_HAPPEN:
            rt.database.run(lambda unit: turns.hurry(unit, pause.run, decision.actor))
        return recorded
    _check_shape(pause, decision)

    def work(unit: Unit) -> Checkpoint | None:
        return _write(rt, unit, pause, decision, text, now, principal)

    done = rt.database.run(work)
    return done if done is not None else deciding.lost(rt, checkpoint_id, decision, scope)


def _with_result(rt: Runtime, decision: Decision) -> tuple[Decision, str]:
    """The decision with its result as JSON, and the text that the model reads.

    Raises: InvalidDecision, UnstorableText, InputTooLarge.
    """
    if decision.outcome is not SettleOutcome.HAPPENED:
        if decision.result is not None:
            raise InvalidDecision("a result belongs to the outcome happened")
        return decision, ""
    try:
        text = encode_result(decision.result)
    except ResultNotEncodable as error:
        raise InvalidDecision(str(error)) from None
    if len(text) > rt.settings.input_bytes:
        raise InputTooLarge(f"the result is larger than {rt.settings.input_bytes} bytes")
    result = text if isinstance(decision.result, str) else json.loads(text)
    checked_json(result, "the result")
    return decision.model_copy(update={"result": result}), cut_result(text, rt.settings.result_bytes)


def _check_shape(pause: Pause, decision: Decision) -> None:
    if pause.checkpoint["kind"] != CheckpointKind.UNCERTAIN_EFFECT:
        raise InvalidDecision("only an uncertain effect is settled; approve or reject this checkpoint")
    if decision.outcome is None:
        raise InvalidDecision("settle with one of: happened, did_not_happen, stop")


def _write(
    rt: Runtime, unit: Unit, pause: Pause, decision: Decision, text: str, now: bool, principal: bytes | None
) -> Checkpoint | None:
    sessions.lock(unit, pause.run["session_id"])
    call = pause.pending[0]
    by = decision.decided_by or decision.actor or "unknown"
    moved = _move(rt, unit, pause, decision, call, now)
    if moved is None:
        return None
    sessions.touch(unit, pause.run["session_id"])
    outcome = decision.outcome
    assert outcome is not None
    if outcome is SettleOutcome.HAPPENED:
        told = as_it_ran(text, call["executed_args"], call["amended_by"])
        transcript.settle_result(unit, pause.run["id"], call, transitions.base(moved, 1), told, by)
    else:
        transcript.note_settled(unit, pause.run["id"], call["call_id"], str(outcome), by)
    suspensions.answer_all(unit, pause.suspension["id"], decision.actor or "unknown", "settle")
    public = decision.model_dump(mode="json", exclude_none=True, exclude={"decided_at"})
    closed = checkpoints.close(
        unit,
        "settled",
        [tables.checkpoints.c.id == pause.checkpoint["id"]],
        {"decision": public, "decider_principal": principal},
        int(moved["revision"]),
    )
    if not closed:
        raise InvalidState("the checkpoint was closed in the same moment")
    return checkpoints.to_checkpoint(unit, closed[0])


def _move(rt: Runtime, unit: Unit, pause: Pause, decision: Decision, call: Row, now: bool) -> Row | None:
    guard = Guard(suspension_id=pause.suspension["id"], revision=pause.run["revision"])
    data: dict[str, Any] = {"checkpoint_id": pause.checkpoint["id"], "outcome": str(decision.outcome)}
    if decision.outcome is SettleOutcome.STOP:
        values = {
            "error_code": "effect_uncertain",
            "error_text": f"stopped with an uncertain call of {call['tool']}: {decision.reason or 'no reason given'}"[
                :4000
            ],
        }
        return turns.move(
            unit, "stop", pause.run, guard, Move(values=values, actor=decision.actor, data=data)
        )
    if decision.outcome is SettleOutcome.HAPPENED:
        return turns.move(unit, "settle", pause.run, guard, Move(seqs=1, actor=decision.actor, data=data))
    values = {}
    proven = call.get("late_result") == dispatch.NEVER_ENTERED
    if now:
        data["now"] = True
    elif not proven:
        wait_s = transcript.seconds_until_settled(
            unit, pause.run["id"], call["call_id"], _settle_s(rt, pause, call)
        )
        if wait_s > 0:
            values = turns.delay(wait_s, rt.settings.sweep_interval_s)
    return turns.move(unit, "settle", pause.run, guard, Move(values=values, actor=decision.actor, data=data))


def _settle_s(rt: Runtime, pause: Pause, call: Row) -> float:
    spec = pause.agent.tool(call["tool"])
    timeout = (spec.timeout_s if spec is not None else None) or rt.settings.tool_timeout_s
    if timeout is None:
        return rt.settings.uncertain_settle_no_timeout_s
    return timeout + rt.settings.uncertain_settle_s

"""A decision becomes an instruction and a ready run, or the run's end: one transaction.

Source: runs.md 3.5, 6.7, T08 to T10; decisions R2, R14; rulings 6, 39, 44 to 48; bug cases C01, C46.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cortex_workers.engine import decision_shape, host_checkpoint, refusals
from cortex_workers.engine.continue_run import resolved_agent
from cortex_workers.engine.runtime import Runtime
from cortex_workers.engine.validate import checked_id
from cortex_workers.errors import (
    CheckpointNotFound,
    InvalidState,
    SessionClosed,
    SuspensionExpired,
)
from cortex_workers.schemas.agent import AgentDefinition
from cortex_workers.schemas.checkpoint import Checkpoint, CheckpointKind, Decision
from cortex_workers.schemas.ids import CHECKPOINT
from cortex_workers.store import checkpoints, runs, sessions, suspensions, tables, transcript, turns
from cortex_workers.store.transitions import Guard, Move, Row
from cortex_workers.store.unit import Unit


@dataclass(slots=True)
class Pause:
    """A checkpoint with everything a decision is checked against, as read before the transaction."""

    checkpoint: Row
    run: Row
    suspension: Row
    agent: AgentDefinition
    pending: list[Row] = field(default_factory=list)


def decide(
    rt: Runtime, checkpoint_id: str, decision: Decision, scope: str | None, principal: bytes | None = None
) -> Checkpoint:
    """Record the first decision on an approval checkpoint and make its run go on (or end).

    A repeat with the same content returns what was recorded and changes nothing.
    Raises: InvalidId, CheckpointNotFound, InvalidDecision, InvalidState (``recorded`` carries the first decision),
    SuspensionExpired, SessionClosed. Nothing is written by a refusal.
    """
    with refusals.told("decide", CHECKPOINT, checkpoint_id, decision.actor):
        return _decide(rt, checkpoint_id, decision, scope, principal)


def _decide(
    rt: Runtime, checkpoint_id: str, decision: Decision, scope: str | None, principal: bytes | None
) -> Checkpoint:
    decision = decision_shape.checked(decision, rt.settings.input_bytes)
    pause = _load(rt, checkpoint_id, scope)
    if not isinstance(pause, Pause):
        return host_checkpoint.record(rt, pause, decision, principal)
    recorded = already(rt, pause, decision)
    if recorded is not None:
        return recorded
    decision_shape.check(pause.checkpoint["kind"], pause.pending, pause.agent, decision)
    done = rt.database.run(lambda unit: _write(unit, pause, decision, principal))
    return done if done is not None else _lost(rt, checkpoint_id, decision, scope, principal)


def ends_run(pause: Pause, decision: Decision) -> bool:
    """Whether a decision ends its run: a rejection does, unless the agent returns it to the model.

    A deferred model call has nothing to return: its rejection always ends the run (runs.md T12).
    """
    return not decision.approved and (_deferred(pause) or pause.agent.on_rejection == "fail")


def _deferred(pause: Pause) -> bool:
    return bool(pause.checkpoint["kind"] == CheckpointKind.DEFERRED_MODEL_CALL)


def _lost(
    rt: Runtime, checkpoint_id: str, decision: Decision, scope: str | None, principal: bytes | None
) -> Checkpoint:
    # Imported here: it needs this module for what a decision writes.
    from cortex_workers.engine.half_decided import half_decided

    pause = load_pause(rt, checkpoint_id, scope)
    if pause.checkpoint["state"] == "pending" and pause.suspension["ended_at"] is not None:
        return half_decided(rt, pause, decision, principal)
    return lost(rt, checkpoint_id, decision, scope)


def load_pause(rt: Runtime, checkpoint_id: str, scope: str | None) -> Pause:
    """Read a checkpoint of this scope (or below) with its run, pause and calls.

    Raises: InvalidId, CheckpointNotFound.
    """
    found = _load(rt, checkpoint_id, scope)
    if not isinstance(found, Pause):
        raise CheckpointNotFound(f"the checkpoint {checkpoint_id} stops no run: its host wrote it")
    return found


def _load(rt: Runtime, checkpoint_id: str, scope: str | None) -> Pause | Row:
    """The same, or the row of a host's own checkpoint, which stops no run."""
    checked_id(CHECKPOINT, checkpoint_id)
    with rt.database.read() as unit:
        row = checkpoints.get(unit, checkpoint_id, scope)
        if row is None:
            raise CheckpointNotFound(f"there is no checkpoint {checkpoint_id} in this scope")
        if row["suspension_id"] is None:
            return row
        run = runs.get(unit, row["run_id"])
        suspension = suspensions.get(unit, row["suspension_id"])
        if run is None or suspension is None:
            raise CheckpointNotFound(f"the run of checkpoint {checkpoint_id} is gone")
        spec = runs.spec(unit, run["id"]) or {}
        pending = suspensions.pending(unit, row["suspension_id"])
    agent = resolved_agent(rt, {**run, "overrides": spec.get("overrides")})
    return Pause(row, run, suspension, agent, pending)


def already(rt: Runtime, pause: Pause, decision: Decision) -> Checkpoint | None:
    """What was recorded, when the checkpoint is decided and this is the same decision again (ruling 46).

    Raises: InvalidState when it was decided otherwise, or closed without a decision.
    """
    if pause.checkpoint["state"] == "pending":
        return None
    with rt.database.read() as unit:
        shown = checkpoints.to_checkpoint(unit, pause.checkpoint)
    if shown.decision is not None and shown.closed_as in ("decided", "settled"):
        if shown.decision.same_content(decision):
            return shown
        word = "approved" if shown.decision.approved else "rejected"
        said = str(shown.decision.outcome) if shown.decision.outcome is not None else word
        raise InvalidState(f"the checkpoint was {shown.closed_as} already: {said}", recorded=shown.decision)
    raise InvalidState(f"the checkpoint is closed: {shown.closed_as}", recorded=shown.decision)


def _write(unit: Unit, pause: Pause, decision: Decision, principal: bytes | None) -> Checkpoint | None:
    session = sessions.lock(unit, pause.run["session_id"])
    if session is not None and session["gated_at"] is not None:
        raise SessionClosed("the session is paused by an operator; lift the pause before deciding")
    moved = _move_run(unit, pause, decision)
    if moved is None:
        return None
    sessions.touch(unit, pause.run["session_id"])
    suspensions.answer_all(unit, pause.suspension["id"], decision.actor or "unknown", "decide")
    closed = record(unit, pause, decision, principal, int(moved["revision"]), "decided")
    if closed is None:
        raise InvalidState("the checkpoint was closed in the same moment")
    adjudicate(unit, pause, decision, principal)
    if ends_run(pause, decision):
        deny_waiting(unit, pause, _rejection_text(decision))
    return checkpoints.to_checkpoint(unit, closed)


def _move_run(unit: Unit, pause: Pause, decision: Decision) -> Row | None:
    guard = Guard(suspension_id=pause.suspension["id"], revision=pause.run["revision"])
    actor = decision.actor
    if not ends_run(pause, decision):
        data = {"checkpoint_id": pause.checkpoint["id"], "approved": decision.approved}
        name = "repeat" if _deferred(pause) else "decide"
        return turns.move(unit, name, pause.run, guard, Move(actor=actor, data=data))
    values = {
        "error_code": "checkpoint_rejected",
        "error_text": f"checkpoint rejected: {_reason(pause, decision)}"[:4000],
    }
    data = {"checkpoint_id": pause.checkpoint["id"], "approved": False}
    return turns.move(unit, "reject", pause.run, guard, Move(values=values, actor=actor, data=data))


def record(
    unit: Unit, pause: Pause, decision: Decision, principal: bytes | None, revision: int, name: str
) -> Row | None:
    """Close a pending checkpoint with a decision; None when somebody closed it first."""
    public = decision.model_dump(mode="json", exclude_none=True, exclude={"decided_at"})
    closed = checkpoints.close(
        unit,
        name,
        [tables.checkpoints.c.id == pause.checkpoint["id"]],
        {"decision": public, "decider_principal": principal},
        revision,
    )
    return closed[0] if closed else None


def _rejection_text(decision: Decision) -> str:
    by = decision.decided_by or decision.actor or "the approver"
    return f"rejected by {by}: {decision.reason or 'no reason given'}"


def _reason(pause: Pause, decision: Decision) -> str:
    """Why it was rejected: the decision's own reason, else those of the calls in their order (runs.md K21)."""
    if decision.reason:
        return decision.reason
    calls = decision.calls or {}
    given = [calls[call_id].reason for call_id in ids(pause.pending) if call_id in calls]
    return "; ".join(text for text in given if text) or "no reason given"


def verdict_of(decision: Decision, call_id: str) -> tuple[str, str | None]:
    """What a decision means for one call: the outcome, and what the model may be told (runs.md K20)."""
    if decision.calls is None:
        return ("granted", decision.reason) if decision.approved else ("denied", _rejection_text(decision))
    mine = decision.calls[call_id]
    if mine.approved:
        return "granted", mine.reason or decision.reason
    return "denied", mine.reason or _rejection_text(decision)


def adjudicate(unit: Unit, pause: Pause, decision: Decision, principal: bytes | None) -> None:
    """Write what a decision means for each call of its pause."""
    write_verdicts(
        unit,
        pause,
        {call_id: verdict_of(decision, call_id) for call_id in ids(pause.pending)},
        approver=decision.decided_by or decision.actor,
        principal=principal,
        scope_of_verdict="pause" if decision.calls is None else "call",
    )


def write_verdicts(
    unit: Unit,
    pause: Pause,
    verdicts: Mapping[str, tuple[str, str | None]],
    approver: str | None = None,
    principal: bytes | None = None,
    authority: str = "person",
    scope_of_verdict: str = "pause",
) -> None:
    """One adjudication per call of a pause, its outcome and note by call id (ruling 48)."""
    rounds = checkpoints.rounds(unit, pause.run["id"], [call["call_id"] for call in pause.pending])
    checkpoints.adjudicate(
        unit,
        [
            {
                "run_id": pause.run["id"],
                "session_id": pause.run["session_id"],
                "scope": pause.run["scope"],
                "call_id": call["call_id"],
                "attempt": rounds.get(call["call_id"], 0) + 1,
                "checkpoint_id": pause.checkpoint["id"],
                "suspension_id": pause.suspension["id"],
                "workload": pause.run["workload"] or pause.run["agent"],
                "specialist": pause.run["agent"],
                "outcome": verdicts[call["call_id"]][0],
                "scope_of_verdict": scope_of_verdict,
                "authority": authority,
                "disposition": None if verdicts[call["call_id"]][0] == "granted" else "refused_by_operator",
                "approver": approver,
                "approver_principal": principal,
                "note": verdicts[call["call_id"]][1],
            }
            for call in pause.pending
        ],
    )


def deny_waiting(unit: Unit, pause: Pause, text: str) -> None:
    """Close the calls of a pause that ended its run."""
    transcript.close_pending(unit, pause.run["id"], ids(pause.pending), text[:2000])


def ids(calls: Sequence[Row]) -> list[str]:
    """The ids of calls."""
    return [call["call_id"] for call in calls]


def lost(rt: Runtime, checkpoint_id: str, decision: Decision, scope: str | None) -> Checkpoint:
    """Tell why no row matched: decided by somebody else (perhaps with the same words), too late, or moved on.

    Raises: SuspensionExpired, InvalidState.
    """
    pause = load_pause(rt, checkpoint_id, scope)
    recorded = already(rt, pause, decision)
    if recorded is not None:
        return recorded
    if pause.run["state"] == "paused" and pause.suspension["overdue"]:
        raise SuspensionExpired(
            f"the deadline of this pause was {pause.suspension['expires_at']:%Y-%m-%d %H:%M:%S} UTC"
        )
    raise InvalidState("the pause was left in the meantime")

"""How a holder lets a run go: a pause, a hand-off, a slice's end, a hand-back. Each is one transaction.

Source: runs.md 5.8, 6.5; rulings 2, 4, 15, 20, 44.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cortex_workers import probes, telemetry
from cortex_workers.engine import persist, storable
from cortex_workers.engine.batch import Batch
from cortex_workers.engine.bus import Asked
from cortex_workers.engine.execution import Answered, Execution, Planned, Result
from cortex_workers.errors import DeferredModelCall, LeaseLost, RefusedForNow
from cortex_workers.schemas.base import digest
from cortex_workers.schemas.checkpoint import CheckpointKind
from cortex_workers.schemas.ids import CHECKPOINT, SUSPENSION, new_id
from cortex_workers.schemas.suspension import PendingKind, SuspendReason
from cortex_workers.store import checkpoints, sessions, suspensions, transcript, transitions, turns
from cortex_workers.store.transitions import Guard, Move, Row
from cortex_workers.store.unit import Unit


def pause(
    ex: Execution, waiting: Sequence[Planned], answered: Answered | None, turn_results: Sequence[Result] = ()
) -> Row:
    """Pause the run for calls of one kind, results in hand included; approvals get one checkpoint for all of them.

    Raises: LeaseLost (nothing is written).
    """
    ttls = [ttl for item in waiting if (ttl := _ttl(ex, item.ttl_s)) is not None]
    names = ", ".join(dict.fromkeys(item.call.name for item in waiting))
    kind = waiting[0].waits_for or PendingKind.APPROVAL
    approval = kind is PendingKind.APPROVAL
    # A question's own deadline is worked out with it, in the transaction of the pause.
    question = _Question(
        transition="pause",
        kind=CheckpointKind.TOOL_APPROVAL if approval else None,
        pending_kind=kind,
        reason=f"approval required for: {names}" if approval else f"results wanted of: {names}",
        ttl_s=min(ttls) if ttls else None,
        on_expiry=_on_expiry(ex, waiting),
    )
    return _pause(ex, question, waiting, Batch(ex, answered, waits=waiting, turn_results=turn_results))


def pause_uncertain(ex: Execution, item: Planned, why: str) -> Row:
    """Pause the run and ask what became of a started call; no deadline, no policy applies (ruling 6).

    Raises: LeaseLost (nothing is written).
    """
    question = _Question(
        transition="uncertain",
        kind=CheckpointKind.UNCERTAIN_EFFECT,
        pending_kind=PendingKind.UNCERTAIN_EFFECT,
        reason=f"outcome unknown of: {item.call.name}",
        ttl_s=None,
        on_expiry="fail",
        metadata={"why": storable.text(why[:500]), "attempt": int(item.row.get("attempt", 1))},
    )
    return _pause(ex, question, [item], Batch(ex))


def pause_deferred(ex: Execution, deferral: DeferredModelCall) -> Row:
    """Pause the run because its model client put the call off: a person is asked, or the call is made again later.

    The step was not taken: no step row, no tokens, the same index again (runs.md 6.9).
    Raises: LeaseLost (nothing is written).
    """
    asks = deferral.poll_after is None
    own = deferral.ttl.total_seconds() if deferral.ttl is not None else None
    question = _Question(
        transition="pause",
        kind=CheckpointKind.DEFERRED_MODEL_CALL if asks else None,
        pending_kind=PendingKind.APPROVAL if asks else PendingKind.EXTERNAL,
        reason=(deferral.reason or f"the model call waits: {deferral.kind}")[:500],
        ttl_s=_ttl(ex, own),
        on_expiry="fail",
        metadata={"kind": str(CheckpointKind.DEFERRED_MODEL_CALL), "deferral_kind": deferral.kind[:100]},
        deferral=deferral,
    )
    return _pause(ex, question, (), Batch(ex))


_REASONS = {
    PendingKind.APPROVAL: SuspendReason.APPROVAL,
    PendingKind.UNCERTAIN_EFFECT: SuspendReason.APPROVAL,
    PendingKind.EXTERNAL: SuspendReason.EXTERNAL_TOOL,
    PendingKind.ASK: SuspendReason.AGENT_REPLY,
}
"""The seed's three reasons; what a pause really asks is the kind of its calls (ruling 44)."""


_ANSWERABLE_BY = {PendingKind.EXTERNAL: "machine", PendingKind.ASK: "bus"}


class _Question:
    """What one pause asks."""

    def __init__(
        self,
        transition: str,
        kind: CheckpointKind | None,
        pending_kind: PendingKind,
        reason: str,
        ttl_s: float | None,
        on_expiry: str,
        metadata: Mapping[str, Any] | None = None,
        deferral: DeferredModelCall | None = None,
    ) -> None:
        self.transition = transition
        self.kind = kind
        self.pending_kind = pending_kind
        self.reason = reason
        self.ttl_s = ttl_s
        self.on_expiry = on_expiry
        self.metadata = dict(metadata or {})
        self.deferral = deferral
        self.asked: Asked | None = None


def _ttl(ex: Execution, own: float | None) -> float | None:
    """A call's deadline: its own, else the agent's, else the setting's; zero means none."""
    for ttl in (own, ex.agent.suspension_ttl_s, ex.rt.settings.suspension_ttl_s):
        if ttl is not None:
            return ttl if ttl > 0 else None
    return None


def _on_expiry(ex: Execution, waiting: Sequence[Planned]) -> str:
    """A pause fails the run when any of its calls says so."""
    policies = {
        (item.spec.on_expiry if item.spec is not None and item.spec.on_expiry else ex.agent.on_expiry)
        for item in waiting
    }
    return "fail" if "fail" in policies else "return_to_model"


def _pause(ex: Execution, question: _Question, waiting: Sequence[Planned], batch: Batch) -> Row:
    ids = {"suspension_id": new_id(SUSPENSION), "checkpoint_id": new_id(CHECKPOINT)}

    def work(unit: Unit) -> tuple[Row, int]:
        sessions.touch(unit, ex.row["session_id"])
        if question.pending_kind is PendingKind.ASK:
            assert ex.rt.bus is not None
            question.asked = ex.rt.bus.write_asks(unit, ex, waiting, ids["suspension_id"])
            question.ttl_s = question.asked.ttl_s
        row, base = _let_go(unit, ex, question.transition, batch, {"suspension_id": ids["suspension_id"]})
        _write_pause(unit, ex, question, waiting, row, ids)
        probes.reach("pause.before_commit")
        return row, base

    with ex.held.ending():
        row, base = persist.write(ex, work, persist.moved_by(ex, question.transition, batch.seqs))
    batch.settle(base)
    ex.left_as = str(row["state"])
    telemetry.event(
        "run.paused", run_id=ex.run_id, checkpoint_id=ids["checkpoint_id"], kind=str(question.kind)
    )
    probes.reach("pause.after_commit")
    return row


def _write_pause(
    unit: Unit,
    ex: Execution,
    question: _Question,
    waiting: Sequence[Planned],
    row: Row,
    ids: Mapping[str, str],
) -> None:
    """The suspension, its calls and its checkpoint, after the run has been moved. Lock order: ruling 68."""
    step_index = _step_of(question, waiting, row)
    suspension = {
        "id": ids["suspension_id"],
        "run_id": ex.run_id,
        "session_id": ex.row["session_id"],
        "scope": ex.row["scope"],
        "run_revision": row["revision"],
        "reason": _REASONS[question.pending_kind],
        "step_index": step_index,
        "next_step": row["next_step"],
        "messages_upto": int(row["next_seq"]) - 1,
        "usage": row["usage"],
        "digest": digest([[item.call.id, item.call.name, item.call.arguments] for item in waiting]),
        "on_expiry": question.on_expiry,
    }
    deferral, poll_s = question.deferral, None
    if deferral is not None:
        suspension.update(deferral_kind=deferral.kind[:100], deferral_ref=deferral.ref)
        poll_s = deferral.poll_after.total_seconds() if deferral.poll_after is not None else None
    pending = [_pending_row(ex, question, item, ids["suspension_id"]) for item in waiting]
    suspensions.add(unit, suspension, question.ttl_s, pending, poll_s)
    if question.kind is None:
        return
    checkpoint = _checkpoint_row(ex, question, waiting, step_index, ids)
    checkpoints.open_(unit, checkpoint, int(row["revision"]))


def _pending_row(ex: Execution, question: _Question, item: Planned, suspension_id: str) -> dict[str, Any]:
    return {
        "suspension_id": suspension_id,
        "call_id": item.call.id,
        "run_id": ex.run_id,
        "session_id": ex.row["session_id"],
        "ordinal": item.ordinal,
        "kind": question.pending_kind,
        "answerable_by": _ANSWERABLE_BY.get(question.pending_kind, "person"),
        "reply_with": question.asked.tokens[item.call.id] if question.asked is not None else None,
        "payload": item.ready.canonical if item.ready is not None else None,
    }


def _checkpoint_row(
    ex: Execution, question: _Question, waiting: Sequence[Planned], step_index: int, ids: Mapping[str, str]
) -> dict[str, Any]:
    tools = list(dict.fromkeys(item.call.name for item in waiting))
    return {
        "id": ids["checkpoint_id"],
        "scope": ex.row["scope"],
        "run_id": ex.run_id,
        "agent": ex.row["agent"],
        "suspension_id": ids["suspension_id"],
        "kind": question.kind,
        "reason": question.reason[:500],
        "step_index": step_index,
        "metadata": {"suspension_id": ids["suspension_id"], "tools": tools, **question.metadata},
    }


def _step_of(question: _Question, waiting: Sequence[Planned], row: Row) -> int:
    """The step that asked: that of the calls, or the one that a deferred model call has not taken yet."""
    if question.deferral is not None:
        return int(row["next_step"])
    return waiting[0].step_index if waiting[0].row else max(int(row["next_step"]) - 1, 0)


def _let_go(
    unit: Unit,
    ex: Execution,
    name: str,
    batch: Batch,
    values: Mapping[str, Any],
    data: Mapping[str, Any] | None = None,
) -> tuple[Row, int]:
    """The transition under the fence, then what the batch carries."""
    what = Move(
        values={**batch.values(), **values},
        seqs=batch.seqs,
        worker_id=ex.rt.worker_id,
        data=data,
    )
    row = turns.move(unit, name, ex.row, Guard(term=ex.term), what)
    if row is None:
        telemetry.FENCED_WRITES.inc()
        raise LeaseLost(run_id=ex.run_id)
    base = transitions.base(row, batch.seqs)
    batch.write(unit, base)
    return row, base


def hand_off(ex: Execution, reason: str, answered: Answered | None, take_back: Planned | None = None) -> Row:
    """Give the run to another worker with everything in hand; a start record never entered is taken back.

    Raises: LeaseLost (nothing is written).
    """
    batch = Batch(ex, answered)

    def work(unit: Unit) -> tuple[Row, int]:
        row, base = _let_go(
            unit, ex, "hand_off", batch, {"interrupted_reason": reason[:200]}, {"reason": reason[:200]}
        )
        if take_back is not None:
            transcript.take_back(unit, ex.term, take_back.call.id)
        probes.reach("hand_off.before_commit")
        return row, base

    row = _finish_letting_go(ex, "hand_off", work, batch, "drain" if reason == "drain" else "stop")
    probes.reach("hand_off.after_commit")
    return row


def end_slice(ex: Execution, delay_s: float = 0.0, why: str = "slice") -> Row:
    """Give the slot back; the run goes on in another task.

    Raises: LeaseLost (nothing is written).
    """
    batch = Batch(ex)
    wait = turns.delay(delay_s, ex.rt.settings.sweep_interval_s) if delay_s > 0 else {}

    def work(unit: Unit) -> tuple[Row, int]:
        return _let_go(unit, ex, "slice_end", batch, wait, {"reason": why})

    return _finish_letting_go(ex, "slice_end", work, batch, "slice")


def _finish_letting_go(
    ex: Execution, name: str, work: Callable[[Unit], tuple[Row, int]], batch: Batch, why: str
) -> Row:
    with ex.held.ending():
        row, base = persist.write(ex, work, persist.moved_by(ex, name, batch.seqs))
    batch.settle(base)
    ex.left_as = "slice_end" if name == "slice_end" else "handed_off"
    telemetry.HAND_OFFS.labels(why).inc()
    telemetry.event("run.handed_off", run_id=ex.run_id, why=why, step=ex.next_step)
    return row


def hand_back(ex: Execution, refusal: RefusedForNow) -> Row | None:
    """Put a run that cannot go on now back where it was; it waits without a worker and nothing is counted.

    What was done in this term is kept: then it is a slice's end with a wait.
    Returns None when somebody else moved it meanwhile.
    """
    if ex.acted or ex.results:
        return end_slice(ex, refusal.retry_in_s, refusal.reason)
    with ex.held.ending():
        row = hand_back_claimed(
            ex.rt.database.run,
            ex.row,
            ex.term,
            refusal.retry_in_s,
            ex.rt.settings.sweep_interval_s,
            refusal.reason,
        )
    telemetry.event("run.handed_back", run_id=ex.run_id, reason=refusal.reason, retry_in_s=refusal.retry_in_s)
    return row


def hand_back_claimed(
    run: Callable[..., Any], row: Row, term: Any, delay_s: float, sweep_s: float, reason: str
) -> Row | None:
    """Undo a claim that dispatched nothing: the former state, its instruction and its place (tables.md)."""
    fresh = row["queue_class"] == "start"
    values: dict[str, Any] = {"hand_backs": int(row["hand_backs"]) + 1}
    if delay_s > 0:
        values.update(turns.delay(delay_s, sweep_s))
    if fresh:
        values.update(started_at=None, history_upto=None, history_floor=None)
    name = "hand_back_reclaimable" if row["before"] == "reclaimable" else "hand_back"
    if name == "hand_back_reclaimable":
        values["handed_off"] = row["handed_off"]

    def work(unit: Unit) -> Row | None:
        what = Move(
            values=values, worker_id=term.owner, data={"reason": reason[:200], "wait_s": round(delay_s, 3)}
        )
        return turns.move(unit, name, row, Guard(term=term), what)

    moved: Row | None = run(work)
    return moved

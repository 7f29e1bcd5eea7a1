"""The calls of one turn: gates first, then one after another, with the exact commits of ruling 2.

An unsafe call runs between two commits: its start record before the handler, its outcome before anything else is
dispatched. Safe results stay in hand and travel with the next fenced transaction.
Source: rulings 1, 2, 4; decision R12.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum

from cortex_workers import probes
from cortex_workers.engine import boundary, dispatch, gates, suspend, uncertain
from cortex_workers.engine.batch import Batch, save
from cortex_workers.engine.bus import AskRefused, Moved
from cortex_workers.engine.execution import Answered, Execution, Planned, Result
from cortex_workers.errors import LeaseLost
from cortex_workers.schemas.suspension import PendingKind
from cortex_workers.store import admissions, checkpoints, transcript
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit


class TurnEnd(Enum):
    """How a turn ended."""

    GO_ON = "go_on"
    PAUSED = "paused"


def new_turn(ex: Execution, answered: Answered) -> TurnEnd:
    """Commit the model's answer and handle the calls it asks for.

    The commit is the pause itself when nothing can be dispatched.
    """
    raw = answered.message.raw or {}
    planned = gates.plan(
        ex, answered.message.tool_calls, ex.next_step, None, raw.get("provider_call_ids", ())
    )
    early = {id(item): result for item in planned if (result := gates.judge(ex, item)) is not None}
    waiting = [item for item in planned if item.waits_for is not None]
    runnable = [item for item in planned if id(item) not in early and item.waits_for is None]
    reason = boundary.stop_reason(ex)
    if reason is not None:
        # An answer that arrives in a drain is stored with the hand-off, without a start record (ruling 2).
        suspend.hand_off(ex, reason, answered)
        return TurnEnd.PAUSED
    if waiting and not runnable:
        return pause_for(ex, waiting, answered, list(early.values()))
    first_is_unsafe = bool(runnable) and not runnable[0].safe and not runnable[0].control
    starts = [runnable[0]] if first_is_unsafe and boundary.may_start(ex) else []
    batch = Batch(ex, answered, starts)
    save(ex, batch)
    probes.reach("turn.after_commit")
    for item in planned:
        item.message_seq = ex.last_message_seq
    return run_turn(ex, planned, early, waiting, started=starts[0] if starts else None)


def first_kind(waiting: Sequence[Planned]) -> list[Planned]:
    """The calls a pause is for: one kind at a time, approvals first, then external tools, then replies (R12)."""
    order = (PendingKind.APPROVAL, PendingKind.EXTERNAL, PendingKind.ASK)
    kind = min((item.waits_for for item in waiting if item.waits_for is not None), key=order.index)
    return [item for item in waiting if item.waits_for is kind]


def pause_for(
    ex: Execution,
    waiting: Sequence[Planned],
    answered: Answered | None = None,
    turn_results: Sequence[Result] = (),
) -> TurnEnd:
    """Pause for what waits, one kind at a time; a question that cannot be put after all is an ordinary result."""
    left = list(waiting)
    while left:
        try:
            suspend.pause(ex, first_kind(left), answered, turn_results)
            return TurnEnd.PAUSED
        except Moved:
            continue
        except AskRefused as error:
            if answered is not None:
                save(ex, Batch(ex, answered))
                for item in (*left, *(result.planned for result in turn_results)):
                    item.message_seq = ex.last_message_seq
                ex.results.extend(turn_results)
                answered, turn_results = None, ()
            refused = [item for item in left if item.call.id in error.refusals]
            ex.results.extend(gates.failed(item, error.refusals[item.call.id]) for item in refused)
            left = [item for item in left if item not in refused]
    return TurnEnd.GO_ON


def continued_turn(
    ex: Execution, verdicts: dict[str, Row], rows: dict[str, Row], calls: Sequence[Planned]
) -> TurnEnd:
    """Handle the outstanding calls of a stored turn: answered, cut off, or never reached."""
    early: dict[int, Result] = {}
    for item in calls:
        item.row = dict(rows.get(item.call.id, {}))
        if item.row.get("state") == "started" and not item.safe:
            settled = uncertain.resolve(ex, item)
            if settled is uncertain.Verdict.GIVEN_AWAY:
                return TurnEnd.PAUSED
            if isinstance(settled, Result):
                early[id(item)] = settled
                continue
        result = gates.judge(ex, item, verdicts.get(item.call.id))
        if result is not None:
            early[id(item)] = result
    waiting = [item for item in calls if item.waits_for is not None]
    return run_turn(ex, list(calls), early, waiting)


def run_turn(
    ex: Execution,
    planned: Sequence[Planned],
    early: dict[int, Result],
    waiting: Sequence[Planned],
    started: Planned | None = None,
) -> TurnEnd:
    """Run what may run in the model's order, then pause for what waits."""
    phase = time.monotonic()
    for index, item in enumerate(planned):
        if id(item) in early:
            ex.results.append(early[id(item)])
            continue
        if item in waiting:
            continue
        if item.control:
            boundary.check(ex)
            _act(ex, item)
            continue
        if item.safe:
            boundary.check(ex)
            ex.results.append(dispatch.run_handler(ex, item))
            continue
        following = _next_unsafe(planned, early, waiting, index)
        if started is not item:
            started = _record(ex, item)
        result = _run_unsafe(ex, item)
        if result is None:
            return TurnEnd.PAUSED
        started = _store_outcome(ex, result, following)
    if waiting:
        return pause_for(ex, waiting)
    if ex.results and time.monotonic() - phase > ex.rt.settings.phase_commit_s:
        save(ex, Batch(ex))
    return TurnEnd.GO_ON


def _next_unsafe(
    planned: Sequence[Planned], early: dict[int, Result], waiting: Sequence[Planned], index: int
) -> Planned | None:
    """The call dispatched right after this one, when it is unsafe: its start record travels with our outcome."""
    for item in planned[index + 1 :]:
        if id(item) in early or item in waiting:
            continue
        return None if item.safe or item.control else item
    return None


def _act(ex: Execution, item: Planned) -> None:
    """A call that the engine carries out itself: its rows, its outcome and the results in hand are one transaction."""
    bus = ex.rt.bus
    if bus is None:
        ex.results.append(gates.failed(item, "messages between agents are not turned on here"))
        return
    batch = Batch(ex)
    batch.results.append(Result(item, "complete", ""))

    def act(unit: Unit) -> None:
        batch.results[-1] = Result(item, "complete", bus.act(unit, ex, item))

    while True:
        try:
            save(ex, batch, first=act)
            break
        except Moved:
            boundary.check(ex)
    probes.reach("message.after_commit")


def _record(ex: Execution, item: Planned) -> Planned:
    """The start record of an unsafe call, in a transaction of its own, with the results in hand."""
    boundary.check(ex)
    probes.reach("tool.before_start_record")
    save(ex, Batch(ex, None, [item]))
    return item


def _run_unsafe(ex: Execution, item: Planned) -> Result | None:
    """Dispatch an unsafe call whose start record is stored; None when the run was given away instead.

    Raises: LeaseLost, having left the proof that the handler was never entered.
    """
    probes.reach("tool.after_start_record")
    try:
        boundary.check_hold(ex)
    except LeaseLost:
        dispatch.keep_late(ex, item, dispatch.NEVER_ENTERED)
        raise
    except boundary.HandOff as hand_off:
        suspend.hand_off(ex, hand_off.reason, None, take_back=item)
        return None
    try:
        return dispatch.run_handler(ex, item)
    except dispatch.Uncertain as error:
        settled = uncertain.resolve(ex, item, why=str(error))
    if settled is uncertain.Verdict.RUN_AGAIN:
        return _run_unsafe(ex, _record(ex, item))
    return settled if isinstance(settled, Result) else None


def _store_outcome(ex: Execution, result: Result, following: Planned | None) -> Planned | None:
    """The outcome of an unsafe call, before anything else is dispatched; carries the next start record."""
    ex.results.append(result)
    carried = following if following is not None and boundary.may_start(ex) else None
    try:
        save(ex, Batch(ex, None, [carried] if carried is not None else []))
    except LeaseLost:
        dispatch.keep_late(ex, result.planned, dispatch.late_text(ex, result))
        raise
    probes.reach("tool.after_outcome")
    return carried


def load_verdicts(ex: Execution, calls: Sequence[Planned]) -> tuple[dict[str, Row], dict[str, Row]]:
    """What was decided on calls that waited, and the calls' rows."""
    with ex.rt.database.read() as unit:
        rows = {row["call_id"]: row for row in transcript.load_calls(unit, ex.run_id, ex.last_step_index)}
        asked = [
            item.call.id
            for item in calls
            if rows.get(item.call.id, {}).get("state") in ("pending", "started")
        ]
        verdicts = checkpoints.verdicts(unit, ex.run_id, asked) if asked else {}
        answers = admissions.answers(unit, ex.run_id, asked) if asked else {}
    # An answered call may have been approved before: the decision tells what it ran with.
    verdicts.update({call_id: {**verdicts.get(call_id, {}), **found} for call_id, found in answers.items()})
    return verdicts, rows

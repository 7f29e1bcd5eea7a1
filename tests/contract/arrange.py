"""Every transition of the run machine, how it is applied, and what it takes to be allowed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

from sqlalchemy import text

from cortex_workers.schemas.ids import RUN, SUSPENSION, new_id
from cortex_workers.schemas.lease import Term
from cortex_workers.schemas.lifecycle import RUN as RUN_MACHINE
from cortex_workers.schemas.lifecycle import Fence, LeaseEffect, RunState, Transition
from cortex_workers.store import transitions, turns
from cortex_workers.store.database import Database
from cortex_workers.store.transitions import Guard, Move, Row
from cortex_workers.testing import factory
from cortex_workers.testing.clock import StoppedClock

TTL_S = 60.0
PAUSE_S = 3600.0
START_BY_S = 10.0
PAUSE_FENCES = {Fence.LIVE_PAUSE, Fence.THIS_PAUSE, Fence.OVERDUE_PAUSE}
MOVES = [row for row in RUN_MACHINE if row.sources]

WRONG: dict[Fence, Sequence[str]] = {
    Fence.CLAIMABLE: ["revision", "earlier revision"],
    Fence.REVISION: ["revision", "earlier revision"],
    Fence.OWNER: ["owner", "revision", "earlier revision", "lease over"],
    Fence.TERM: ["owner", "revision", "earlier revision"],
    Fence.LAPSED: ["lease not over"],
    Fence.LIVE_PAUSE: ["pause", "revision", "earlier revision", "overdue", "overdue by nothing"],
    Fence.THIS_PAUSE: ["pause", "revision", "earlier revision"],
    Fence.OVERDUE_PAUSE: ["pause", "revision", "not overdue", "not overdue by the least"],
    Fence.OVERDUE_START: ["not overdue"],
}
"""The ways in which each fence can be wrong while the run is in the right state."""


@dataclass(frozen=True)
class Attempt:
    """One try of a transition: the guard it names and the time at which it is made."""

    guard: Guard
    seconds_later: float


def arrange(
    database: Database, clock: StoppedClock, row: Transition, state: RunState, session: str | None = None
) -> Row:
    """A run in a state, looking as much as possible like one that the transition is for."""
    start_by = clock.at + timedelta(seconds=START_BY_S) if row.fence is Fence.OVERDUE_START else None
    run = factory.a_run(database, session=session, start_by=start_by)
    if state is RunState.CREATED:
        return _only_in_later_rooms(database, run, state)
    if state is RunState.READY:
        return factory.an_answered_run(database, run=_paused(database, run)) if _of_a_pause(row) else run
    if state is RunState.PAUSED:
        return _paused(database, run)
    if _of_a_pause(row):
        run = factory.an_answered_run(database, run=_paused(database, run))
    running = factory.a_running_run(database, run=run, ttl_s=TTL_S)
    if state is RunState.RUNNING:
        return running
    if state is RunState.RECLAIMABLE:
        return factory.a_reclaimable_run(database, run=running, handed_off=True)
    if state is RunState.INCOMPLETE:
        left = factory.a_reclaimable_run(database, run=running, handed_off=True)
        return factory.move(database, "close_reclaimable", left, Guard(revision=left["revision"]))
    return factory.an_ended_run(database, state, run=running)


def _of_a_pause(row: Transition) -> bool:
    return row.fence in PAUSE_FENCES


def _paused(database: Database, run: Row) -> Row:
    running = factory.a_running_run(database, run=run, ttl_s=TTL_S)
    return factory.a_paused_run(database, run=running, ttl_s=PAUSE_S)


def _only_in_later_rooms(database: Database, run: Row, state: RunState) -> Row:
    # No transition leads there yet, so this test of refusals writes the state itself.
    with database.transaction() as unit:
        unit.execute(text("update runs set state = :state where id = :id"), {"state": state, "id": run["id"]})
    return factory.now(database, run["id"])


def right(row: Transition, run: Row) -> Attempt:
    """The guard and the time with which a transition is allowed, should the run be in a source state."""
    term = Term(run_id=run["id"], owner=run["lease_owner"] or factory.OWNER, revision=run["revision"])
    suspension_id = run["suspension_id"] or new_id(SUSPENSION)
    guard = Guard(term=term, revision=run["revision"], suspension_id=suspension_id)
    later = {Fence.LAPSED: TTL_S, Fence.OVERDUE_PAUSE: PAUSE_S, Fence.OVERDUE_START: START_BY_S}
    return Attempt(guard, later.get(row.fence, 0.0))


def wrong(row: Transition, run: Row, how: str) -> Attempt:
    """The same with one thing wrong."""
    attempt = right(row, run)
    guard, term = attempt.guard, attempt.guard.term
    assert term is not None and guard.revision is not None
    if how in ("revision", "earlier revision"):
        revision = run["revision"] + (1 if how == "revision" else -1)
        return replace(
            attempt,
            guard=replace(guard, revision=revision, term=term.model_copy(update={"revision": revision})),
        )
    if how == "owner":
        return replace(attempt, guard=replace(guard, term=term.model_copy(update={"owner": "worker-z"})))
    if how == "pause":
        return replace(attempt, guard=replace(guard, suspension_id=new_id(SUSPENSION)))
    least = 0.000001
    times = {
        "lease over": TTL_S,
        "lease not over": TTL_S - least,
        "overdue": PAUSE_S + 1,
        "overdue by nothing": PAUSE_S,
        "not overdue": 0.0,
        "not overdue by the least": PAUSE_S - least,
    }
    return replace(attempt, seconds_later=times[how])


def what(row: Transition) -> Move:
    """What this transition needs to carry so that its row is well formed."""
    values = {"suspension_id": new_id(SUSPENSION)} if row.target == RunState.PAUSED else {}
    taken = {"owner": "worker-b", "lease_ttl_s": TTL_S} if row.lease is LeaseEffect.TAKE else {}
    return Move(values=values, seqs=2, actor="ops", worker_id="worker-b", data={"reason": "test"}, **taken)


def attempt(
    database: Database, clock: StoppedClock, row: Transition, run: Row, how: Attempt, move: Move
) -> Row | None:
    """Try it in a transaction of its own, at its time."""
    with _later(clock, how.seconds_later):
        if row.name == "claim":
            return database.run(lambda unit: transitions.apply(unit, "claim", run["id"], how.guard, move))
        return database.run(lambda unit: turns.move(unit, row.name, run, how.guard, move))


@contextmanager
def _later(clock: StoppedClock, seconds: float) -> Iterator[None]:
    began = clock.at
    clock.advance(seconds)
    try:
        yield
    finally:
        clock.set(began)


def fresh_id() -> str:
    """The id of a run that nobody stored."""
    return new_id(RUN)

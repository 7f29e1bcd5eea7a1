"""Every row of the run machine, in every state, with the right fence and with each wrong one."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from sqlalchemy import text

from cortex_workers.schemas.lifecycle import (
    CLAIMABLE_RUN_STATES,
    RUN,
    Announce,
    Fence,
    LeaseEffect,
    RunState,
    Transition,
    transition,
)
from cortex_workers.store import clock as store_clock
from cortex_workers.store import runs, transitions, turns
from cortex_workers.store.database import Database
from cortex_workers.store.transitions import Move, Row
from cortex_workers.testing import factory
from cortex_workers.testing.clock import StoppedClock, stopped_clock
from tests.contract import arrange, snapshot
from tests.contract.conftest import Told

NAMES = [row.name for row in arrange.MOVES]
CHECKPOINT_NEWS = {Announce.CHECKPOINT_CREATED, Announce.CHECKPOINT_RESOLVED}
ALWAYS = {"state", "state_since", "revision", "next_seq"}


@pytest.fixture
def clock() -> Iterator[StoppedClock]:
    with stopped_clock() as clock:
        yield clock


@pytest.mark.invariant("I2")
@pytest.mark.parametrize("state", list(RunState))
@pytest.mark.parametrize("name", NAMES)
def test_only_the_right_fence_in_a_source_state_moves_a_run(
    common_database: Database, common_told: Told, clock: StoppedClock, name: str, state: RunState
) -> None:
    row, move = transition("run", name), arrange.what(transition("run", name))
    run = arrange.arrange(common_database, clock, row, state)
    before = snapshot.of_run(common_database, run["id"], run["session_id"])
    common_told.clear()
    for how in arrange.WRONG[row.fence]:
        refused = arrange.attempt(common_database, clock, row, run, arrange.wrong(row, run, how), move)
        assert refused is None, f"{name} went through with a wrong fence: {how}"
        assert snapshot.of_run(common_database, run["id"], run["session_id"]) == before, how
        assert common_told == [], how

    moved = arrange.attempt(common_database, clock, row, run, arrange.right(row, run), move)

    if state in row.sources:
        assert moved is not None
        check_success(common_database, row, before, moved, move)
        check_told(row, moved, common_told)
    else:
        assert moved is None
        assert snapshot.of_run(common_database, run["id"], run["session_id"]) == before
        assert common_told == []


@pytest.mark.parametrize("name", [row.name for row in arrange.MOVES if row.name != "claim"])
def test_a_run_that_shares_its_session_moves_by_the_same_rules(
    common_database: Database, common_told: Told, clock: StoppedClock, name: str
) -> None:
    row, move = transition("run", name), arrange.what(transition("run", name))
    run = arrange.arrange(common_database, clock, row, RunState(row.sources[0]), session=arrange.fresh_id())
    before = snapshot.of_run(common_database, run["id"], run["session_id"])
    common_told.clear()
    for how in arrange.WRONG[row.fence]:
        assert (
            arrange.attempt(common_database, clock, row, run, arrange.wrong(row, run, how), move) is None
        ), how
        assert snapshot.of_run(common_database, run["id"], run["session_id"]) == before, how
        assert common_told == [], how

    moved = arrange.attempt(common_database, clock, row, run, arrange.right(row, run), move)

    assert moved is not None
    check_success(common_database, row, before, moved, move)
    # Its session's turn is told of as well, so one that is handed back may be told of here.
    told = [news.kind for news in common_told]
    assert len(told) == len(set(told))
    assert {str(news) for news in row.announces if news not in CHECKPOINT_NEWS} <= set(told)


def check_success(database: Database, row: Transition, before: snapshot.Rows, moved: Row, move: Move) -> None:
    """One revision more, one event of the same transaction, and exactly the columns that the table names."""
    (old,) = before["runs"]
    rows = snapshot.of_run(database, moved["id"], moved["session_id"])
    (new,) = rows["runs"]
    assert {name: moved[name] for name in new} == new
    assert (new["state"], new["revision"]) == (row.target, old["revision"] + 1)
    check_event(database, row, before, rows, move)
    check_lease(row, old, new)
    check_counts(row, old, new)
    check_session(row, before, rows)
    check_pause(row, before, rows, new)
    assert snapshot.changed(old, new) <= allowed(row), "a column changed that the table does not name"


def check_event(
    database: Database, row: Transition, before: snapshot.Rows, rows: snapshot.Rows, move: Move
) -> None:
    (old,), (new,) = before["runs"], rows["runs"]
    (event,) = [item for item in rows["events"] if item not in before["events"]]
    assert (event["kind"], event["revision"]) == (f"run.{row.name}", new["revision"])
    assert (event["scope"], event["session_id"]) == (new["scope"], new["session_id"])
    assert (event["actor"], event["worker_id"], event["data"]) == (move.actor, move.worker_id, move.data)
    # The caller's ordinals come first, then the event's own.
    assert new["next_seq"] == old["next_seq"] + move.seqs + 1
    assert event["run_seq"] == new["next_seq"] - 1
    assert transitions.base(new, move.seqs) == old["next_seq"]
    with database.read() as unit:
        wrote = unit.one(
            text(
                "select r.xmin::text = e.xmin::text from runs r, events e"
                " where r.id = cast(:run as text) and e.id = cast(:event as text)"
            ).bindparams(run=new["id"], event=event["id"])
        )
    assert wrote is not None and wrote[0], "the event was written by another transaction than the run"


def check_lease(row: Transition, old: Row, new: Row) -> None:
    if row.lease is LeaseEffect.TAKE:
        assert new["lease_owner"] == "worker-b"
        assert (new["lease_expires_at"] - new["claimed_at"]).total_seconds() == arrange.TTL_S
    else:
        assert (new["lease_owner"], new["lease_expires_at"]) == (None, None)
    fenced = old["lease_expires_at"] if row.lease is LeaseEffect.FENCE else old["fenced_until"]
    assert new["fenced_until"] == fenced


def check_counts(row: Transition, old: Row, new: Row) -> None:
    lapses = old["reclaim_count"] + row.counts_reclaim
    assert new["reclaim_count"] == (0 if row.good_end else lapses)
    assert new["reclaim_total"] == old["reclaim_total"] + row.counts_reclaim
    assert new["queue_class"] == ("begun" if row.begins else old["queue_class"])
    assert new["instruction"] == (row.instruction or old["instruction"])
    assert (new["completed_at"] is not None) is row.ends


def check_session(row: Transition, before: snapshot.Rows, rows: snapshot.Rows) -> None:
    (old,), (new,) = before["sessions"], rows["sessions"]
    assert new["completion_seq"] == old["completion_seq"] + row.ends
    assert rows["runs"][0]["completion_seq"] == (new["completion_seq"] if row.ends else None)
    assert snapshot.changed(old, new) <= ({"completion_seq", "last_event_at"} if row.ends else set())


def check_pause(row: Transition, before: snapshot.Rows, rows: snapshot.Rows, new: Row) -> None:
    if row.ends_pause_as is None:
        assert rows["suspensions"] == before["suspensions"]
        return
    (pause,) = [item for item in rows["suspensions"] if item["id"] == new["suspension_id"]]
    assert (pause["ended_as"], pause["ended_at"] is not None) == (row.ends_pause_as, True)


def allowed(row: Transition) -> set[str]:
    """The columns that a transition may change, as its row of the table says."""
    names = {*ALWAYS, "wait_reason"}
    if row.lease is not LeaseEffect.NONE:
        names |= {
            "lease_owner",
            "lease_expires_at",
            "claimed_at",
            "started_at",
            "leased_time",
            "fenced_until",
        }
    if row.target in CLAIMABLE_RUN_STATES:
        names |= {"rank", "not_before", "notified_at", "notified_count", "handed_off"}
    if row.why in ("hand_off", "lapse"):
        names |= {"interrupted_at", "interrupted_reason"}
    if row.begins or row.instruction:
        names |= {"queue_class", "instruction"}
    if row.counts_reclaim or row.good_end:
        names |= {"reclaim_count", "reclaim_total"}
    if row.ends:
        names |= {"completed_at", "completion_seq"}
    if row.target == RunState.PAUSED:
        names |= {"suspension_id"}
    return names


def check_told(row: Transition, moved: Row, told: Told) -> None:
    expected = [str(news) for news in row.announces if news not in CHECKPOINT_NEWS]
    assert [news.kind for news in told] == expected
    assert all((news.run_id, news.revision) == (moved["id"], moved["revision"]) for news in told)


# --- What the grid does not say -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [row.name for row in arrange.MOVES if row.fence is Fence.TERM])
def test_a_term_holds_when_its_lease_is_over_and_nobody_took_the_run(
    common_database: Database, clock: StoppedClock, name: str
) -> None:
    row = transition("run", name)
    run = arrange.arrange(common_database, clock, row, RunState.RUNNING)
    how = replace(arrange.right(row, run), seconds_later=10 * arrange.TTL_S)
    assert arrange.attempt(common_database, clock, row, run, how, Move()) is not None


@pytest.mark.parametrize("name", [row.name for row in arrange.MOVES if row.fence is Fence.THIS_PAUSE])
def test_this_pause_holds_after_its_deadline(
    common_database: Database, clock: StoppedClock, name: str
) -> None:
    row = transition("run", name)
    run = arrange.arrange(common_database, clock, row, RunState.PAUSED)
    how = replace(arrange.right(row, run), seconds_later=10 * arrange.PAUSE_S)
    assert arrange.attempt(common_database, clock, row, run, how, Move()) is not None


def test_a_pause_without_a_deadline_is_live_for_ever_and_never_overdue(
    common_database: Database, clock: StoppedClock
) -> None:
    run = factory.a_paused_run(common_database, ttl_s=None)
    years = 10 * 365 * 86_400.0
    overdue = replace(arrange.right(transition("run", "expire"), run), seconds_later=years)
    assert arrange.attempt(common_database, clock, transition("run", "expire"), run, overdue, Move()) is None
    live = replace(overdue, seconds_later=years)
    assert arrange.attempt(common_database, clock, transition("run", "decide"), run, live, Move()) is not None


def test_at_its_deadline_a_pause_belongs_to_the_sweep(common_database: Database, clock: StoppedClock) -> None:
    decide, expire = transition("run", "decide"), transition("run", "expire")
    run = factory.a_paused_run(common_database, ttl_s=arrange.PAUSE_S)
    at_the_deadline = replace(arrange.right(decide, run), seconds_later=arrange.PAUSE_S)
    assert arrange.attempt(common_database, clock, decide, run, at_the_deadline, Move()) is None
    assert arrange.attempt(common_database, clock, expire, run, at_the_deadline, Move()) is not None


@pytest.mark.invariant("I3")
def test_the_answer_to_a_former_pause_does_not_fit_the_present_one(
    common_database: Database, clock: StoppedClock
) -> None:
    first = factory.a_paused_run(common_database)
    answered = factory.an_answered_run(common_database, run=first)
    second = factory.a_paused_run(common_database, run=factory.a_running_run(common_database, run=answered))
    before = snapshot.of_run(common_database, second["id"], second["session_id"])
    decide = transition("run", "decide")
    stale = arrange.right(decide, {**first, "revision": second["revision"]})
    assert arrange.attempt(common_database, clock, decide, second, stale, Move()) is None
    assert snapshot.of_run(common_database, second["id"], second["session_id"]) == before
    assert arrange.attempt(common_database, clock, decide, second, arrange.right(decide, second), Move())


def test_a_run_that_has_begun_is_not_cancelled_for_not_being_started(
    common_database: Database, clock: StoppedClock
) -> None:
    row = transition("run", "start_by")
    run = arrange.arrange(common_database, clock, row, RunState.RUNNING)
    begun = factory.move(common_database, "slice_end", run, arrange.right(row, run).guard)
    overdue = arrange.right(row, begun)
    assert begun["state"] == RunState.READY
    assert arrange.attempt(common_database, clock, row, begun, overdue, Move()) is None


def test_lapses_wait_longer_each_time_and_a_good_end_forgets_them(
    common_database: Database, common_told: Told, clock: StoppedClock
) -> None:
    run = factory.a_run(common_database)
    waits, told = [], []
    for _ in range(4):
        run = factory.a_running_run(common_database, run=run, ttl_s=0.0)
        common_told.clear()
        run = factory.a_reclaimable_run(common_database, run=run)
        waits.append(((run["not_before"] - run["state_since"]).total_seconds(), run["wait_reason"]))
        told.append(len(common_told))
        clock.set(run["not_before"])
        common_database.run(lambda unit, run=run: clear_wait(unit, run["id"]))
    assert waits == [(0.0, None), (30.0, "later"), (120.0, "later"), (120.0, "later")]
    assert told == [1, 0, 0, 0], "a run that waits is told of when its wait is over"
    assert (run["reclaim_count"], run["reclaim_total"]) == (4, 4)
    run = factory.a_running_run(common_database, run=run)
    run = factory.a_reclaimable_run(common_database, run=run, handed_off=True)
    assert (run["reclaim_count"], run["reclaim_total"]) == (0, 4)


def clear_wait(unit: object, run_id: str) -> None:
    unit.execute(  # type: ignore[attr-defined]
        text("update runs set wait_reason = null where id = :id"), {"id": run_id}
    )


def test_leased_time_counts_only_while_a_lease_was_live(
    common_database: Database, clock: StoppedClock
) -> None:
    run = factory.a_running_run(common_database, ttl_s=60.0)
    clock.advance(25)
    run = factory.a_reclaimable_run(common_database, run=run, handed_off=True)
    clock.advance(1000)
    run = factory.a_running_run(common_database, run=run, ttl_s=60.0)
    clock.advance(1000)
    run = factory.a_reclaimable_run(common_database, run=run)
    assert run["leased_time"] == pytest.approx(25 + 60)


@pytest.mark.parametrize("state", list(RunState))
def test_a_taken_id_stores_nothing_whatever_became_of_its_run(
    common_database: Database, common_told: Told, clock: StoppedClock, state: RunState
) -> None:
    run = arrange.arrange(common_database, clock, transition("run", "claim"), state)
    before = snapshot.of_run(common_database, run["id"], run["session_id"])
    common_told.clear()
    again = {
        "id": run["id"],
        "scope": run["scope"],
        "agent": run["agent"],
        "agent_digest": run["agent_digest"],
        "session_id": run["session_id"],
        "session_seq": 9,
    }
    spec = {"run_id": run["id"], "input": "other", "request_digest": "other", "config": {}}
    assert common_database.run(lambda unit: runs.insert_runs(unit, [again], [spec], Move())) == []
    assert snapshot.of_run(common_database, run["id"], run["session_id"]) == before
    assert common_told == []


def test_a_new_run_is_ready_at_revision_one_with_its_event(
    common_database: Database, common_told: Told
) -> None:
    common_told.clear()
    run = factory.a_run(common_database)
    rows = snapshot.of_run(common_database, run["id"], run["session_id"])
    (event,) = rows["events"]
    assert (run["state"], run["revision"], run["instruction"]) == ("ready", 1, "start")
    assert (event["kind"], event["run_seq"], event["revision"]) == ("run.enqueue", 0, 1)
    assert run["next_seq"] == 1
    assert [(news.kind, news.revision) for news in common_told] == [("RunReady", 1)]


@pytest.mark.parametrize("name", [row.name for row in RUN])
def test_the_hook_is_called_inside_the_transaction_and_can_undo_it(
    common_database: Database, clock: StoppedClock, name: str
) -> None:
    row = transition("run", name)
    seen: list[tuple[str, str | None, str]] = []

    def hook(unit: object, moved: Transition, before: str | None, after: Row) -> None:
        seen.append((moved.name, before, after["state"]))
        raise Undo

    told = Told()
    hooked = Database(common_database._settings, told.append, [hook])
    try:
        if not row.sources:
            with pytest.raises(Undo):
                factory.a_run(hooked)
            assert seen == [("enqueue", None, "ready")]
            return
        run = arrange.arrange(common_database, clock, row, RunState(row.sources[0]))
        before = snapshot.of_run(common_database, run["id"], run["session_id"])
        with pytest.raises(Undo):
            arrange.attempt(hooked, clock, row, run, arrange.right(row, run), arrange.what(row))
        assert seen == [(name, row.sources[0], row.target)]
        assert snapshot.of_run(common_database, run["id"], run["session_id"]) == before
        assert told == []
    finally:
        hooked.dispose()


class Undo(Exception):
    """What the hook raises."""


def test_nothing_is_told_before_the_commit(common_database: Database, common_told: Told) -> None:
    run = factory.a_run(common_database)
    common_told.clear()
    with common_database.transaction() as unit:
        guard = transitions.Guard(revision=run["revision"])
        assert turns.move(unit, "cancel_ready", run, guard, Move()) is not None
        assert common_told == []
    assert [news.kind for news in common_told] == ["RunCancelled"]


def test_a_clock_that_stands_still_is_let_go() -> None:
    with stopped_clock():
        assert "clock_timestamp" not in str(store_clock.wall())
    assert "clock_timestamp" in str(store_clock.wall())

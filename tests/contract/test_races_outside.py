"""Answers from outside, deferred model calls and the ends of the ledger, each with everybody else who may come.

`SECOND` is the race matrix one after the other: what each comer gets who is too late, in every cell and for every kind
of pause; a refusal writes nothing. `CONTESTS` is the same at one instant, for every pair that wants the same row.

Every cell stands in `SECOND` (`test_whoever_comes_second_is_told`). At one instant (`test_two_who_come_at_once` with
the contest of this name; with a number, a test of `test_races.py` that is named below):

| first, second | results | approve | reject | cancel | sweep | continue | lapse | holder writes |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
| results | result*-* | results-approve | results-reject | result*-cancel | result*-sweep-* | result*-claim | - | - |
| approve | results-approve | 1, 2 | 3 | 4 | 5 | approve-claim | - | - |
| reject | results-reject | 3 | reject-reject | reject-cancel | reject-sweep-* | reject-claim | - | - |
| cancel | results-cancel | 4 | reject-cancel | cancel-cancel | 6 | 7 | lapse-cancel | 8 |
| sweep | result*-sweep-* | 5 | reject-sweep-* | 6 | 9 | sweep-claim | - | - |
| continue | *-claim | approve-claim | reject-claim | 7 | sweep-claim | 10, claim-claim | 11, lapse-claim | 12 |
| lapse | again-lapse, other-lapse | - | - | lapse-cancel | - | lapse-claim | 13 | lapse-write-* |
| holder completed | again-write, other-write | - | - | 8 | - | - | lapse-write-* | - |

1 two_who_approve_with_the_same_words, 2 two_different_approvals, 3 an_approval_and_a_rejection, 4
an_approval_and_a_cancel, 5 an_approval_and_the_sweep, 6 a_cancel_and_the_sweep, 7 a_claim_and_a_cancel, 8
a_holder_that_ends_its_run_and_a_cancel, 9 two_sweeps_expire, 10 those_who_continue_a_run, 11 a_lapse_and_a_renewal, 12
a_claim_that_looked_before, 13 two_sweeps_count_one_lapse. A holder that lets its run wait: results-pause.

A deferred model call has rows of its own in `SECOND` and the contests deferral-* and polled-*; what ends an admission
has give_up-* and close-*. Two API processes at once are in `fleet/test_two_apis.py`; a decision whose other half is
missing ("finishes recording") is in `engine/test_decide.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Select, Table, event, literal_column, select

from cortex_workers import Client
from cortex_workers.errors import (
    AdmissionConflict,
    ClosureRefused,
    InvalidState,
    NotContinuable,
    NotPausedYet,
    NotSuspended,
    RequiresApproval,
    ResumeAlreadyStarted,
    RunAlreadyDone,
    RunLeased,
    SuspensionExpired,
)
from cortex_workers.schemas.admission import ResumeAdmission
from cortex_workers.store import tables
from cortex_workers.store.transitions import Row
from cortex_workers.testing import factory
from cortex_workers.testing.clock import StoppedClock, stopped_clock
from tests.contract import paused, snapshot
from tests.contract.meeting import Referee
from tests.contract.paused import TTL_S, Visitors
from tests.contract.test_races import WAYS, attempt, meet, rounds
from tests.engine.world import World

DONE, AGAIN, NOTHING = "done", "again", "nothing"
"""Wrote; was given what another wrote; found nothing to do, which is an answer too."""
ENDED = {"sweep": NOTHING, "poll": NOTHING, "lapse": NOTHING, "write": NOTHING}
Word = str | type[Exception]


@pytest.fixture
def client(common_world: World) -> Iterator[Client]:
    factory.an_agent(common_world.database)
    with common_world.client() as client:
        yield client


def word(outcome: Any) -> Word:
    if isinstance(outcome, Exception):
        return type(outcome)
    return DONE if outcome else NOTHING


def writers(world: World, run: Row) -> set[str]:
    """The transactions that last wrote any row of a run: whoever wrote a row that is still there, stands here."""
    found: set[str] = set()
    with world.database.read() as unit:
        for table in tables.metadata.tables.values():
            if table is tables.runs or "run_id" in table.c:
                mine = table.c[("id" if table is tables.runs else "run_id")] == run["id"]
                found |= {str(row[0]) for row in unit.execute(_writer(table).where(mine))}
    return found


def session_writer(world: World, run: Row) -> str:
    with world.database.read() as unit:
        return str(unit.scalar(_writer(tables.sessions).where(tables.sessions.c.id == run["session_id"])))


def _writer(table: Table) -> Select[Any]:
    return select(literal_column(f"{table.name}.xmin::text")).select_from(table)


# --- One after the other: every cell ----------------------------------------------------------------------------------

DECIDED = {"approve": AGAIN, "approve_otherwise": InvalidState, "reject": InvalidState}
REJECTED = {"approve": InvalidState, "reject": AGAIN, "reject_otherwise": InvalidState}
CLOSED = {"approve": InvalidState, "reject": InvalidState}
OVER = {**ENDED, "cancel": InvalidState, "claim": RunAlreadyDone}
READY = {**ENDED, "cancel": DONE, "claim": DONE}
HELD = {**ENDED, "cancel": DONE, "claim": RunLeased, "write": DONE}
NO_RESULTS = {"results": NotSuspended, "result": NotSuspended}
TOO_LATE = {"results": SuspensionExpired, "result": SuspensionExpired}
YET = {"results": NotPausedYet, "result": NotPausedYet}
KNOWN = {
    "results": AGAIN,
    "result": AGAIN,
    "other_results": AdmissionConflict,
    "other_result": AdmissionConflict,
}

SECOND: dict[str, dict[str, Mapping[str, Word]]] = {
    "approval": {
        "approve": {**READY, **DECIDED, **NO_RESULTS},
        "reject": {**OVER, **REJECTED, **NO_RESULTS},
        "cancel": {**OVER, **CLOSED, **NO_RESULTS},
        "sweep": {**OVER, **CLOSED, **NO_RESULTS},
        "claim": {**HELD, **DECIDED, **NO_RESULTS},
        "lapse": {**READY, **DECIDED, **NO_RESULTS},
        "write": {**OVER, **DECIDED, **NO_RESULTS},
    },
    "outside": {
        "results": {**READY, **DECIDED, **KNOWN},
        "result": {**READY, **DECIDED, **KNOWN},
        "cancel": {**OVER, **DECIDED, **NO_RESULTS},
        "sweep": {**OVER, **DECIDED, **TOO_LATE},
        "claim": {**HELD, **DECIDED, **KNOWN},
        "lapse": {**READY, **DECIDED, **KNOWN},
        "write": {**OVER, **DECIDED, **KNOWN},
    },
    "deferral": {
        "approve": {**READY, **DECIDED, **YET},
        "reject": {**OVER, **REJECTED, **NO_RESULTS},
        "cancel": {**OVER, **CLOSED, **NO_RESULTS},
        "sweep": {**OVER, **CLOSED, **NO_RESULTS},
        "claim": {**HELD, **DECIDED, **YET},
        "lapse": {**READY, **DECIDED, **YET},
        "write": {**OVER, **DECIDED, **NO_RESULTS},
    },
    "polled": {
        "poll": {**READY, **YET},
        "cancel": {**OVER, **NO_RESULTS},
        "sweep": {**OVER, **NO_RESULTS},
        "claim": {**HELD, **YET},
        "lapse": {**READY, **YET},
        "write": {**OVER, **NO_RESULTS},
    },
}
OPENS = {"approval": "approve", "outside": "results", "deferral": "approve", "polled": "poll"}
"""What lets a run of each kind go on: those who continue it can only come after."""
ROWS = [(kind, first) for kind, rows in SECOND.items() for first in rows]


@pytest.mark.invariant("I2")
@pytest.mark.parametrize(("kind", "first"), ROWS)
def test_whoever_comes_second_is_told(
    common_world: World, client: Client, subtests: pytest.Subtests, kind: str, first: str
) -> None:
    row = SECOND[kind][first]
    refused = [second for second, expected in row.items() if expected != DONE]
    for seconds in [refused, *([second] for second in row if second not in refused)]:
        with stopped_clock() as clock:
            visitors = Visitors(common_world, client, getattr(paused, kind)(common_world.database))
            come_first(visitors, OPENS[kind], first, clock)
            for second in seconds:
                with subtests.test(msg=f"{kind}: {first}, then {second}"):
                    come_second(visitors, second, row[second])


def come_second(visitors: Visitors, second: str, expected: Word) -> None:
    database, run = visitors.world.database, visitors.run
    before = snapshot.of_run(database, run["id"], run["session_id"])
    outcome = attempt(visitors.act(second))
    after = snapshot.of_run(database, run["id"], run["session_id"])
    assert word(outcome) == (DONE if expected == AGAIN else expected), outcome
    if isinstance(outcome, ResumeAdmission):
        assert not outcome.fresh
    assert (before == after) is (expected != DONE)


def come_first(visitors: Visitors, opens: str, first: str, clock: StoppedClock) -> None:
    """Let somebody come first, with all that has to be before."""
    if first == "sweep":
        clock.advance(TTL_S)
    if first in ("claim", "lapse", "write"):
        assert visitors.act(opens)()
        assert visitors.take("worker-x")
    if first == "lapse":
        clock.advance(60.0)
    if first != "claim":
        assert visitors.act(first)()


# --- At one instant ---------------------------------------------------------------------------------------------------

End = tuple[Any, Any, str, int]
"""What becomes of both (one word, or several where it depends on who looked when), the state of the run, who wrote."""


@dataclass(frozen=True)
class Contest:
    """Two who come to a run that waits: what becomes of them in order, the other way round, and only ever at once."""

    kind: str
    first: str
    second: str
    in_order: End
    reversed: End
    at_s: float | None = None
    """How long the run has waited by then; None: the clock goes on."""
    at_once: tuple[End, ...] = ()


ENDING = {"reject", "reject_otherwise", "cancel", "sweep", "give_up", "close", "write"}
DUE, ALMOST = TTL_S, TTL_S - 0.000001
LATE = (SuspensionExpired, InvalidState)
MISSED = (NotContinuable, RunLeased, RunAlreadyDone)
"""A claim that found the row locked looks what became of the run, perhaps before the other has committed."""


def same(kind: str, first: str, second: str, end: End, at_s: float | None = None) -> Contest:
    """One end in either order."""
    return Contest(kind, first, second, end, end, at_s)


CONTESTS = {
    # Two answers, through either door.
    "results-results": same("outside", "results", "results", (DONE, DONE, "ready", 1)),
    "results-result": same("outside", "results", "result", (DONE, DONE, "ready", 1)),
    "result-result": same("outside", "result", "result", (DONE, DONE, "ready", 1)),
    "results-other_results": Contest(
        "outside",
        "results",
        "other_results",
        (DONE, AdmissionConflict, "ready", 1),
        (AdmissionConflict, DONE, "ready", 1),
    ),
    "results-other_result": Contest(
        "outside",
        "results",
        "other_result",
        (DONE, AdmissionConflict, "ready", 1),
        (AdmissionConflict, DONE, "ready", 1),
    ),
    "result-other_result": Contest(
        "outside",
        "result",
        "other_result",
        (DONE, AdmissionConflict, "ready", 1),
        (AdmissionConflict, DONE, "ready", 1),
    ),
    "results-first_of_two": Contest(
        "two_outside",
        "results",
        "result",
        (DONE, DONE, "ready", 1),
        (InvalidState, DONE, "paused", 1),
    ),
    "results-other_first_of_two": Contest(
        "two_outside",
        "results",
        "other_result",
        (DONE, AdmissionConflict, "ready", 1),
        (InvalidState, DONE, "paused", 1),
    ),
    "results-first_of_two_again": same("two_outside", "result", "result", (DONE, DONE, "paused", 1)),
    "results-first_of_two_otherwise": Contest(
        "two_outside",
        "result",
        "other_result",
        (DONE, AdmissionConflict, "paused", 1),
        (AdmissionConflict, DONE, "paused", 1),
    ),
    # The last one empties what was kept of the first.
    "results-both_of_two": same("two_outside", "result", "last_result", (DONE, DONE, "ready", 1)),
    # An answer and whoever else.
    "results-cancel": Contest(
        "outside", "results", "cancel", (DONE, DONE, "cancelled", 2), (NotSuspended, DONE, "cancelled", 1)
    ),
    "result-cancel": Contest(
        "outside", "result", "cancel", (DONE, DONE, "cancelled", 2), (NotSuspended, DONE, "cancelled", 1)
    ),
    "results-sweep-due": same("outside", "results", "sweep", (SuspensionExpired, DONE, "failed", 1), DUE),
    "results-sweep-almost": same("outside", "results", "sweep", (DONE, NOTHING, "ready", 1), ALMOST),
    "result-sweep-due": same("two_outside", "result", "sweep", (SuspensionExpired, DONE, "failed", 1), DUE),
    "result-sweep-almost": same("two_outside", "result", "sweep", (DONE, NOTHING, "paused", 1), ALMOST),
    "results-claim": Contest(
        "outside", "results", "claim", (DONE, DONE, "running", 2), (DONE, MISSED, "ready", 1)
    ),
    "result-claim": Contest(
        "outside", "result", "claim", (DONE, DONE, "running", 2), (DONE, MISSED, "ready", 1)
    ),
    "results-pause": Contest(
        "running", "pause", "results", (DONE, DONE, "ready", 2), (DONE, NotPausedYet, "paused", 1)
    ),
    "results-approve": Contest(
        "approval",
        "results",
        "approve",
        (RequiresApproval, DONE, "ready", 1),
        (NotSuspended, DONE, "ready", 1),
    ),
    "results-reject": Contest(
        "approval",
        "results",
        "reject",
        (RequiresApproval, DONE, "failed", 1),
        (NotSuspended, DONE, "failed", 1),
    ),
    "results-host_question": same("asked_by_host", "results", "approve", (DONE, DONE, "ready", 2)),
    "again-claim": same("admitted", "results", "claim", (DONE, DONE, "running", 1)),
    "other-claim": same("admitted", "other_results", "claim", (AdmissionConflict, DONE, "running", 1)),
    "again-lapse": same("silent", "results", "lapse", (DONE, DONE, "reclaimable", 1)),
    "other-lapse": same("silent", "other_result", "lapse", (AdmissionConflict, DONE, "reclaimable", 1)),
    "again-write": same("begun", "result", "write", (DONE, DONE, "completed", 1)),
    "other-write": same("begun", "other_results", "write", (AdmissionConflict, DONE, "completed", 1)),
    # Decisions, and whoever is not in `test_races.py`.
    "approve-claim": Contest(
        "approval", "approve", "claim", (DONE, DONE, "running", 2), (DONE, MISSED, "ready", 1)
    ),
    "reject-claim": same("approval", "reject", "claim", (DONE, MISSED, "failed", 1)),
    "reject-reject": Contest(
        "approval",
        "reject",
        "reject_otherwise",
        (DONE, InvalidState, "failed", 1),
        (InvalidState, DONE, "failed", 1),
    ),
    "reject-cancel": Contest(
        "approval",
        "reject",
        "cancel",
        (DONE, InvalidState, "failed", 1),
        (InvalidState, DONE, "cancelled", 1),
    ),
    "reject-sweep-due": same("approval", "reject", "sweep", (LATE, DONE, "failed", 1), DUE),
    "reject-sweep-almost": same("approval", "reject", "sweep", (DONE, NOTHING, "failed", 1), ALMOST),
    "cancel-cancel": Contest(
        "approval",
        "cancel",
        "cancel",
        (DONE, InvalidState, "cancelled", 1),
        (InvalidState, DONE, "cancelled", 1),
    ),
    "sweep-claim": same("outside", "sweep", "claim", (DONE, MISSED, "failed", 1), DUE),
    "claim-claim": Contest(
        "admitted", "claim", "rival", (DONE, MISSED, "running", 1), (MISSED, DONE, "running", 1)
    ),
    "lapse-claim": Contest(
        "silent", "lapse", "claim", (DONE, DONE, "running", 2), (DONE, MISSED, "reclaimable", 1)
    ),
    "lapse-cancel": Contest(
        "silent", "lapse", "cancel", (DONE, DONE, "cancelled", 2), (NOTHING, DONE, "cancelled", 1)
    ),
    "lapse-write-due": same("begun", "lapse", "write", (DONE, NOTHING, "reclaimable", 1), DUE),
    "lapse-write-almost": same("begun", "lapse", "write", (NOTHING, DONE, "completed", 1), ALMOST),
    # A deferred model call that a person is asked about.
    "deferral-approve-approve": same("deferral", "approve", "approve", (DONE, DONE, "ready", 1)),
    "deferral-approve-otherwise": Contest(
        "deferral",
        "approve",
        "approve_otherwise",
        (DONE, InvalidState, "ready", 1),
        (InvalidState, DONE, "ready", 1),
    ),
    "deferral-approve-reject": Contest(
        "deferral", "approve", "reject", (DONE, InvalidState, "ready", 1), (InvalidState, DONE, "failed", 1)
    ),
    "deferral-approve-cancel": Contest(
        "deferral", "approve", "cancel", (DONE, DONE, "cancelled", 2), (InvalidState, DONE, "cancelled", 1)
    ),
    "deferral-reject-cancel": Contest(
        "deferral",
        "reject",
        "cancel",
        (DONE, InvalidState, "failed", 1),
        (InvalidState, DONE, "cancelled", 1),
    ),
    "deferral-approve-sweep-due": same("deferral", "approve", "sweep", (LATE, DONE, "failed", 1), DUE),
    "deferral-approve-sweep-almost": same(
        "deferral", "approve", "sweep", (DONE, NOTHING, "ready", 1), ALMOST
    ),
    "deferral-approve-claim": Contest(
        "deferral", "approve", "claim", (DONE, DONE, "running", 2), (DONE, MISSED, "ready", 1)
    ),
    "deferral-approve-results": Contest(
        "deferral",
        "approve",
        "results",
        (DONE, NotPausedYet, "ready", 1),
        (DONE, RequiresApproval, "ready", 1),
    ),
    # One that is made again by itself.
    "polled-poll-poll": Contest(
        "polled", "poll", "poll", (DONE, NOTHING, "ready", 1), (NOTHING, DONE, "ready", 1)
    ),
    "polled-poll-cancel": Contest(
        "polled", "poll", "cancel", (DONE, DONE, "cancelled", 2), (NOTHING, DONE, "cancelled", 1)
    ),
    "polled-poll-sweep-due": Contest(
        "polled", "poll", "sweep", (DONE, NOTHING, "ready", 1), (NOTHING, DONE, "failed", 1), DUE
    ),
    "polled-poll-sweep-almost": same("polled", "poll", "sweep", (DONE, NOTHING, "ready", 1), ALMOST),
    "polled-poll-claim": Contest(
        "polled", "poll", "claim", (DONE, DONE, "running", 2), (DONE, MISSED, "ready", 1)
    ),
    "polled-poll-results": Contest(
        "polled", "poll", "results", (DONE, NotPausedYet, "ready", 1), (DONE, NotSuspended, "ready", 1)
    ),
    # The ledger: an answer is given up, or its run closed.
    "give_up-claim": Contest(
        "admitted",
        "give_up",
        "claim",
        (DONE, MISSED, "failed", 1),
        (ResumeAlreadyStarted, DONE, "running", 1),
    ),
    "give_up-give_up": same("admitted", "give_up", "give_up", (DONE, DONE, "failed", 1)),
    "give_up-cancel": Contest(
        "admitted",
        "give_up",
        "cancel",
        (DONE, InvalidState, "failed", 1),
        (InvalidState, DONE, "cancelled", 1),
    ),
    "give_up-results": same("admitted", "give_up", "results", (DONE, DONE, "failed", 1)),
    "give_up-other_result": same(
        "admitted", "give_up", "other_result", (DONE, AdmissionConflict, "failed", 1)
    ),
    "close-claim": Contest(
        "cut_off",
        "close",
        "claim",
        (DONE, MISSED, "incomplete", 1),
        ((ClosureRefused, InvalidState, RunLeased), DONE, "running", 1),
    ),
    "close-cancel": Contest(
        "cut_off",
        "close",
        "cancel",
        (DONE, InvalidState, "incomplete", 1),
        (InvalidState, DONE, "cancelled", 1),
    ),
    "close-close": same("cut_off", "close", "close", (DONE, DONE, "incomplete", 1)),
    "close-lapse": Contest(
        "silent",
        "close",
        "lapse",
        (DONE, NOTHING, "incomplete", 1),
        (DONE, DONE, "incomplete", 2),
        # It asked about the run as it was before the lapse.
        at_once=((InvalidState, DONE, "reclaimable", 1),),
    ),
    "close-settle": Contest(
        "uncertain",
        "close",
        "settle",
        (DONE, InvalidState, "incomplete", 1),
        (InvalidState, DONE, "ready", 1),
    ),
    "close-results": same("cut_off", "close", "results", (DONE, DONE, "incomplete", 1)),
}


@pytest.mark.invariant("I1")
@pytest.mark.invariant("I2")
@WAYS
@pytest.mark.parametrize("name", CONTESTS)
def test_two_who_come_at_once(
    common_world: World, common_referee: Referee, client: Client, name: str, way: str
) -> None:
    contest = CONTESTS[name]
    for _ in rounds(way):
        with stopped_clock() if contest.at_s is not None else nullcontext() as clock:
            run = getattr(paused, contest.kind)(common_world.database)
            if clock is not None and contest.at_s is not None:
                clock.advance(contest.at_s)
            found = contend(common_world, common_referee, Visitors(common_world, client, run), contest, way)
        ends = {"first, second": [contest.in_order], "second, first": [contest.reversed]}
        possible = ends.get(way, [contest.in_order, contest.reversed, *contest.at_once])
        assert any(fits(end, found) for end in possible), (found, possible)
        check_ledger(common_world, run)


def contend(world: World, referee: Referee, visitors: Visitors, contest: Contest, way: str) -> list[Any]:
    """What became of both, the state of the run, and how many transactions wrote."""
    # Read before they meet, so that both begin with the same rows in view.
    _ = visitors.calls, visitors.question, visitors.holder
    before = {*writers(world, visitors.run), session_writer(world, visitors.run)}
    first, second = visitors.act(contest.first), visitors.act(contest.second)
    outcomes = meet(world, referee, visitors.run, way, first, second)
    wrote = writers(world, visitors.run) - before
    state = world.run(visitors.run["id"])["state"]
    # Who tried to end the run gave its place in the session back; anybody else who lost left the session alone.
    assert {contest.first, contest.second} & ENDING or session_writer(world, visitors.run) in before | wrote
    return [*(word(outcome) for outcome in outcomes), state, len(wrote)]


def fits(end: End, found: list[Any]) -> bool:
    return all(
        got in want if isinstance(want, tuple) else got == want for want, got in zip(end, found, strict=True)
    )


def check_ledger(world: World, run: Row) -> None:
    """At most one answer a pause, told once; a start and a giving up exclude each other; a pause ends once."""
    mine = lambda table: world.rows(table, table.c.run_id == run["id"])  # noqa: E731
    admitted = mine(tables.resume_admissions)
    assert len({row["suspension_id"] for row in admitted}) == len(admitted)
    kinds = [row["kind"] for row in mine(tables.resume_receipts)]
    assert len(kinds) == len(set(kinds)) and not {"start", "expiry"} <= set(kinds)
    assert (
        len([item for item in world.told if item.run_id == run["id"] and item.kind == "ResumeAdmitted"]) <= 1
    )
    live = [row for row in mine(tables.suspensions) if row["ended_at"] is None]
    state = world.run(run["id"])["state"]
    assert [row["id"] for row in live] == (
        [world.run(run["id"])["suspension_id"]] if state == "paused" else []
    )


# --- Between two looks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["results", "result"])
def test_an_answer_whose_pause_commits_while_it_looks_is_admitted(
    common_world: World, client: Client, door: str
) -> None:
    """It saw the run still running and then its pause: nobody was quicker, so it is no late answer."""
    run = paused.running(common_world.database)
    visitors = Visitors(common_world, client, run)
    assert visitors.calls
    with after_the_first_look(client, visitors.pause):
        admitted = visitors.act(door)()
    assert isinstance(admitted, ResumeAdmission) and admitted.fresh
    assert common_world.run(run["id"])["state"] == "ready"
    check_ledger(common_world, run)


@contextmanager
def after_the_first_look(client: Client, act: Callable[[], Any]) -> Iterator[None]:
    """Do something in another session, right after this client's first statement about a run."""
    looks: list[str] = []
    engine = client.runtime.database.engine

    def look(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "FROM runs" in statement:
            looks.append(statement)
            if len(looks) == 1:
                act()

    event.listen(engine, "after_cursor_execute", look)
    try:
        yield
    finally:
        event.remove(engine, "after_cursor_execute", look)
    assert looks

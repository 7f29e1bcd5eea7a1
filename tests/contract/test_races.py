"""Two callers at the same row in the same instant, and each time the same two one after the other.

The race is real: both are stopped at the lock they need first, and let go together. Whoever is first, there is one
winner, the loser is told why, and what is stored is what the winner wrote.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import text

from cortex_workers import Client
from cortex_workers.engine import expire
from cortex_workers.errors import InvalidState, NotSuspended, RunIdReused, SuspensionExpired
from cortex_workers.schemas.checkpoint import Checkpoint
from cortex_workers.schemas.ids import RUN, new_id
from cortex_workers.schemas.lease import Term
from cortex_workers.schemas.run import Enqueued
from cortex_workers.store import claims, leases, tables, turns
from cortex_workers.store.claims import Claimer, TurnTaken
from cortex_workers.store.transitions import Guard, Move, Row
from cortex_workers.store.unit import Unit
from cortex_workers.testing import factory
from cortex_workers.testing.clock import stopped_clock
from tests.contract import snapshot
from tests.contract.meeting import Referee, in_background, together
from tests.engine.world import World
from tests.waiting import wait_until

ROUNDS = 3
Act = Callable[[], Any]


@pytest.fixture
def client(common_world: World) -> Iterator[Client]:
    factory.an_agent(common_world.database)
    with common_world.client() as client:
        yield client


@dataclass
class Meeting:
    """A pair at one run: met at a lock, met at a barrier, or one after the other in either order."""

    world: World
    referee: Referee
    run: Row

    def outcomes(self, way: str, first: Act, second: Act) -> list[Any]:
        """What became of both, in their order."""
        if way == "first, second":
            return [attempt(first), attempt(second)]
        if way == "second, first":
            late = attempt(second)
            return [attempt(first), late]
        if way == "at the lock":
            with (
                self.referee.holding("sessions", self.run["session_id"]) as holder,
                in_background(lambda: attempt(first), lambda: attempt(second)) as both,
            ):
                # One that can tell without the lock that it is too late has answered already.
                wait_until(
                    lambda: self.referee.waiters() + sum(one.done() for one in both) == 2,
                    what="both to be stopped at the lock",
                )
                holder.rollback()
                return [one.result() for one in both]
        return together(first, second)


def attempt(act: Act) -> Any:
    try:
        return act()
    except Exception as error:  # noqa: BLE001  the loser's error is what the test is about
        return error


WAYS = pytest.mark.parametrize("way", ["first, second", "second, first", "at the lock", "at once"])


def rounds(way: str) -> range:
    return range(ROUNDS if way == "at once" else 1)


def meet(world: World, referee: Referee, run: Row, way: str, first: Act, second: Act) -> list[Any]:
    world.told.clear()
    outcomes = Meeting(world, referee, run).outcomes(way, first, second)
    check_history(world, run["id"])
    return outcomes


def check_history(world: World, run_id: str) -> None:
    """One event a revision, whoever won."""
    row, events = world.run(run_id), world.events(run_id)
    assert [event["revision"] for event in events] == list(range(1, row["revision"] + 1))


def won(outcomes: list[Any], order: str) -> list[bool]:
    """Who went through; in the twins that is who came first."""
    through = [not isinstance(outcome, Exception) and bool(outcome) for outcome in outcomes]
    if order == "first, second":
        assert through[0]
    if order == "second, first":
        assert through[1]
    return through


def the_checkpoint(world: World, run: Row) -> Row:
    (row,) = world.rows(tables.checkpoints, tables.checkpoints.c.run_id == run["id"])
    return row


def loser(outcomes: list[Any]) -> Any:
    (error,) = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    return error


# --- Decisions ----------------------------------------------------------------------------------------------------


@WAYS
def test_two_who_approve_with_the_same_words_both_get_the_one_decision(
    common_world: World, common_referee: Referee, client: Client, way: str
) -> None:
    for _ in range(ROUNDS):
        run = factory.a_paused_run(common_world.database)
        asked = factory.checkpoint_of(common_world.database, run)
        outcomes = meet(
            common_world,
            common_referee,
            run,
            way,
            lambda asked=asked: client.decide(asked, approved=True, decided_by="ann"),
            lambda asked=asked: client.decide(asked, approved=True, decided_by="bob"),
        )
        assert all(isinstance(outcome, Checkpoint) for outcome in outcomes), outcomes
        assert outcomes[0] == outcomes[1], "the second is shown the first decision"
        now = common_world.run(run["id"])
        assert (now["state"], now["revision"]) == ("ready", run["revision"] + 1)
        check_told_once(common_world, run)


@WAYS
def test_of_two_different_approvals_one_is_recorded_and_the_other_is_told_so(
    common_world: World, common_referee: Referee, client: Client, way: str
) -> None:
    for _ in rounds(way):
        run = factory.a_paused_run(common_world.database)
        asked = factory.checkpoint_of(common_world.database, run)
        outcomes = meet(
            common_world,
            common_referee,
            run,
            way,
            lambda asked=asked: client.decide(asked, approved=True, reason="fine"),
            lambda asked=asked: client.decide(asked, approved=True, reason="go on"),
        )
        assert sorted(won(outcomes, way)) == [False, True]
        error, kept = loser(outcomes), the_checkpoint(common_world, run)["decision"]["reason"]
        assert isinstance(error, InvalidState)
        assert error.recorded.reason == kept
        assert outcomes[["fine", "go on"].index(kept)].decision.reason == kept
        check_told_once(common_world, run)


@pytest.mark.invariant("I4")
@WAYS
def test_of_an_approval_and_a_rejection_one_is_recorded_and_the_run_follows_it(
    common_world: World, common_referee: Referee, client: Client, way: str
) -> None:
    for _ in rounds(way):
        run = factory.a_paused_run(common_world.database)
        asked = factory.checkpoint_of(common_world.database, run)
        outcomes = meet(
            common_world,
            common_referee,
            run,
            way,
            lambda asked=asked: client.decide(asked, approved=True),
            lambda asked=asked: client.decide(asked, approved=False, reason="no"),
        )
        approved, rejected = won(outcomes, way)
        assert approved is not rejected
        now, kept = common_world.run(run["id"]), the_checkpoint(common_world, run)
        assert now["state"] == ("ready" if approved else "failed")
        assert (kept["state"], kept["decision"]["approved"]) == ("resolved", approved)
        assert isinstance(loser(outcomes), InvalidState)
        assert loser(outcomes).recorded.approved is approved
        check_told_once(common_world, run)


@WAYS
def test_of_an_approval_and_a_cancel_the_run_ends_cancelled_either_way(
    common_world: World, common_referee: Referee, client: Client, way: str
) -> None:
    """A cancel that comes second takes the run from ready; an approval that comes second is refused."""
    for _ in rounds(way):
        run = factory.a_paused_run(common_world.database)
        asked = factory.checkpoint_of(common_world.database, run)
        outcomes = meet(
            common_world,
            common_referee,
            run,
            way,
            lambda asked=asked: client.decide(asked, approved=True),
            lambda run=run: client.cancel(run["id"]),
        )
        approved, cancelled = won(outcomes, "any order")
        now, kept = common_world.run(run["id"]), the_checkpoint(common_world, run)
        assert cancelled
        assert now["state"] == "cancelled"
        assert kept["closed_as"] == ("decided" if approved else "cancelled")
        assert now["revision"] == run["revision"] + (2 if approved else 1)
        if not approved:
            assert isinstance(loser(outcomes), InvalidState)
        check_told_once(common_world, run)


@WAYS
def test_of_an_approval_and_the_sweep_only_one_finds_the_pause_its_own(
    common_world: World, common_referee: Referee, client: Client, way: str
) -> None:
    """At one instant a pause is live or overdue, never both: whoever comes, the clock has decided."""
    for overdue in (False, True):
        with stopped_clock() as clock:
            run = factory.a_paused_run(common_world.database, ttl_s=60.0)
            asked = factory.checkpoint_of(common_world.database, run)
            clock.advance(60.0 if overdue else 59.999999)
            outcomes = meet(
                common_world,
                common_referee,
                run,
                way,
                lambda asked=asked: client.decide(asked, approved=True),
                lambda run=run: expire.expire_pause(client.runtime, run["suspension_id"]),
            )
        approved, expired = won(outcomes, "any order")
        assert (approved, expired) == (not overdue, overdue)
        assert common_world.run(run["id"])["state"] == ("failed" if overdue else "ready")
        if overdue:
            # Before the sweep it is too late; after the sweep there is nothing to decide.
            assert isinstance(outcomes[0], SuspensionExpired | InvalidState)
        check_told_once(common_world, run)


@pytest.mark.parametrize("approved", [True, False])
def test_a_decision_that_waited_past_the_deadline_is_too_late(
    common_world: World, common_referee: Referee, client: Client, approved: bool
) -> None:
    with stopped_clock() as clock:
        run = factory.a_paused_run(common_world.database, ttl_s=60.0)
        asked = factory.checkpoint_of(common_world.database, run)
        before = snapshot.of_run(common_world.database, run["id"], run["session_id"])
        with (
            common_referee.holding("sessions", run["session_id"]) as holder,
            in_background(lambda: attempt(lambda: client.decide(asked, approved=approved))) as (late,),
        ):
            common_referee.wait_for_waiters()
            clock.advance(60.0)
            holder.rollback()
            assert isinstance(late.result(), SuspensionExpired)
        assert snapshot.of_run(common_world.database, run["id"], run["session_id"]) == before


@WAYS
def test_two_sweeps_expire_a_pause_once(
    common_world: World, common_referee: Referee, client: Client, way: str
) -> None:
    for _ in rounds(way):
        run = factory.a_paused_run(common_world.database, ttl_s=0.0)
        expire_it = lambda run=run: expire.expire_pause(client.runtime, run["suspension_id"])  # noqa: E731
        outcomes = meet(common_world, common_referee, run, way, expire_it, expire_it)
        assert sorted(outcomes) == [False, True]
        assert common_world.run(run["id"])["revision"] == run["revision"] + 1
        check_told_once(common_world, run)


@WAYS
def test_of_a_cancel_and_the_sweep_one_ends_the_run(
    common_world: World, common_referee: Referee, client: Client, way: str
) -> None:
    for _ in rounds(way):
        run = factory.a_paused_run(common_world.database, ttl_s=0.0)
        outcomes = meet(
            common_world,
            common_referee,
            run,
            way,
            lambda run=run: client.cancel(run["id"]),
            lambda run=run: expire.expire_pause(client.runtime, run["suspension_id"]),
        )
        cancelled, expired = won(outcomes, way)
        assert cancelled is not expired
        assert common_world.run(run["id"])["state"] == ("cancelled" if cancelled else "failed")
        check_told_once(common_world, run)


def check_told_once(world: World, run: Row) -> None:
    """Whoever lost told nobody: each kind of news at most once a revision, the checkpoint's once."""
    news = [(item.kind, item.revision) for item in world.told if item.run_id == run["id"]]
    assert len(news) == len(set(news)), news
    assert len([kind for kind, _ in news if kind == "CheckpointResolved"]) == 1


# --- Claims and leases --------------------------------------------------------------------------------------------


def claimer(owner: str) -> Claimer:
    return Claimer(owner, 60.0, "main", [factory.AGENT.digest()])


def claim(world: World, run: Row, owner: str) -> list[Row]:
    try:
        return world.database.run(lambda unit: claims.claim_named(unit, claimer(owner), run["id"]))
    except TurnTaken:
        return []


@pytest.mark.invariant("I1")
@pytest.mark.parametrize("way", ["first, second", "second, first", "at once"])
@pytest.mark.parametrize("arranged", [factory.a_run, factory.an_answered_run, factory.a_reclaimable_run])
def test_of_those_who_continue_a_run_one_holds_it(
    common_world: World, common_referee: Referee, arranged: Callable[..., Row], way: str
) -> None:
    for _ in rounds(way):
        run = arranged(common_world.database)
        outcomes = meet(
            common_world,
            common_referee,
            run,
            way,
            lambda run=run: claim(common_world, run, "worker-a"),
            lambda run=run: claim(common_world, run, "worker-b"),
        )
        assert sorted(won(outcomes, way)) == [False, True]
        now = common_world.run(run["id"])
        (mine,) = [row for rows in outcomes for row in rows]
        assert (now["state"], now["lease_owner"], now["revision"]) == (
            "running",
            mine["lease_owner"],
            run["revision"] + 1,
        )


@pytest.mark.invariant("I1")
def test_of_twenty_who_continue_a_run_one_holds_it(common_world: World) -> None:
    run = factory.a_run(common_world.database)
    works = [lambda owner=owner: claim(common_world, run, f"worker-{owner}") for owner in range(20)]
    found = [rows for rows in together(*works) if rows]
    assert len(found) == 1
    assert common_world.run(run["id"])["revision"] == 2


@pytest.mark.parametrize("way", ["first, second", "second, first", "at once"])
def test_of_a_lapse_and_a_renewal_the_row_says_who_was_first(
    common_world: World, common_referee: Referee, client: Client, way: str
) -> None:
    for _ in rounds(way):
        run = factory.a_running_run(common_world.database, ttl_s=0.0)
        term = factory.term_of(run)
        outcomes = meet(
            common_world,
            common_referee,
            run,
            way,
            lambda run=run: expire.lapse(client.runtime, run["id"]),
            lambda term=term: renew(common_world, term),
        )
        lapsed, renewed = won(outcomes, way)
        now = common_world.run(run["id"])
        # A renewal that met the lapse passed over the locked row; the second read tells it apart.
        assert lapsed is not renewed
        assert now["state"] == ("reclaimable" if lapsed else "running")
        assert now["reclaim_total"] == int(lapsed)
        assert holds(common_world, term) is not lapsed


def renew(world: World, term: Term) -> dict[str, Any]:
    """What the keeper does: renew, and while the row was only locked, again."""
    while True:
        found = world.database.run(lambda unit: leases.renew(unit, term.owner, [term], 60.0))
        if found or not holds(world, term):
            return found


def holds(world: World, term: Term) -> bool:
    with world.database.read() as unit:
        return leases.reread(unit, [term.run_id])[term.run_id].confirms(term)


@WAYS
def test_two_sweeps_count_one_lapse_once(
    common_world: World, common_referee: Referee, client: Client, way: str
) -> None:
    for _ in rounds(way):
        run = factory.a_running_run(common_world.database, session=new_id(RUN), ttl_s=0.0)
        lapse = lambda run=run: expire.lapse(client.runtime, run["id"])  # noqa: E731
        outcomes = meet(common_world, common_referee, run, way, lapse, lapse)
        assert sorted(outcomes) == [False, True]
        assert common_world.run(run["id"])["reclaim_total"] == 1


@pytest.mark.parametrize("way", ["first, second", "second, first", "at once"])
def test_of_a_claim_and_a_cancel_the_run_is_cancelled_and_a_holder_is_fenced(
    common_world: World, common_referee: Referee, client: Client, way: str
) -> None:
    for _ in rounds(way):
        run = factory.a_run(common_world.database)
        outcomes = meet(
            common_world,
            common_referee,
            run,
            way,
            lambda run=run: claim(common_world, run, "worker-a"),
            lambda run=run: client.cancel(run["id"]),
        )
        claimed, cancelled = won(outcomes, "any order")
        now = common_world.run(run["id"])
        assert cancelled
        assert now["state"] == "cancelled"
        assert (now["fenced_until"] is not None) is claimed
        if claimed:
            (row,) = outcomes[0]
            before = snapshot.of_run(common_world.database, run["id"], run["session_id"])
            assert finish(common_world, row) is None
            assert snapshot.of_run(common_world.database, run["id"], run["session_id"]) == before


def finish(world: World, row: Row) -> Row | None:
    guard = Guard(term=factory.term_of(row))
    return world.database.run(lambda unit: turns.move(unit, "complete", row, guard, Move()))


@pytest.mark.invariant("I2")
@WAYS
def test_of_a_holder_that_ends_its_run_and_a_cancel_one_wins(
    common_world: World, common_referee: Referee, client: Client, way: str
) -> None:
    for _ in rounds(way):
        run = factory.a_running_run(common_world.database)
        outcomes = meet(
            common_world,
            common_referee,
            run,
            way,
            lambda run=run: finish(common_world, run),
            lambda run=run: client.cancel(run["id"]),
        )
        completed, cancelled = won(outcomes, way)
        assert completed is not cancelled
        now = common_world.run(run["id"])
        assert now["state"] == ("completed" if completed else "cancelled")
        assert now["completion_seq"] == 1
        if completed:
            assert isinstance(outcomes[1], InvalidState | NotSuspended)


# --- Producers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["first, second", "second, first", "at once"])
def test_the_same_request_twice_is_one_run(
    common_world: World, common_referee: Referee, client: Client, way: str
) -> None:
    for _ in rounds(way):
        run_id = new_id(RUN)
        send = lambda run_id=run_id: client.enqueue("support", "hello", run_id=run_id)  # noqa: E731
        outcomes = Meeting(common_world, common_referee, {}).outcomes(way, send, send)
        assert all(isinstance(outcome, Enqueued) for outcome in outcomes), outcomes
        assert sorted(outcome.fresh for outcome in outcomes) == [False, True]
        assert len({(outcome.id, outcome.session_id) for outcome in outcomes}) == 1
        check_history(common_world, run_id)
        assert len(common_world.rows(tables.run_specs, tables.run_specs.c.run_id == run_id)) == 1


@pytest.mark.parametrize("way", ["first, second", "second, first", "at once"])
def test_one_id_for_two_requests_is_a_conflict_for_the_second(
    common_world: World, common_referee: Referee, client: Client, way: str
) -> None:
    for _ in rounds(way):
        run_id = new_id(RUN)
        outcomes = Meeting(common_world, common_referee, {}).outcomes(
            way,
            lambda run_id=run_id: client.enqueue("support", "hello", run_id=run_id),
            lambda run_id=run_id: client.enqueue("support", "good-bye", run_id=run_id),
        )
        assert sorted(won(outcomes, way)) == [False, True]
        assert isinstance(loser(outcomes), RunIdReused)
        (spec,) = common_world.rows(tables.run_specs, tables.run_specs.c.run_id == run_id)
        assert spec["input"] == ("hello" if won(outcomes, way)[0] else "good-bye")
        sessions_of = common_world.rows(
            tables.sessions, tables.sessions.c.id == common_world.run(run_id)["session_id"]
        )
        assert len(sessions_of) == 1


@pytest.mark.parametrize("way", ["first, second", "second, first", "at once"])
def test_two_who_open_one_conversation_share_it_and_take_turns(
    common_world: World, common_referee: Referee, client: Client, way: str
) -> None:
    for _ in rounds(way):
        key = new_id(RUN)
        outcomes = Meeting(common_world, common_referee, {}).outcomes(
            way,
            lambda key=key: client.enqueue("support", "one", session=key),
            lambda key=key: client.enqueue("support", "two", session=key),
        )
        assert all(isinstance(outcome, Enqueued) for outcome in outcomes), outcomes
        check_turns(common_world, [outcome.id for outcome in outcomes])


def check_turns(world: World, run_ids: list[str]) -> None:
    """One conversation, places in a row, and the first may be claimed."""
    rows = sorted((world.run(run_id) for run_id in run_ids), key=lambda row: row["session_seq"])
    assert len({row["session_id"] for row in rows}) == 1
    assert [row["session_seq"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["wait_reason"] for row in rows] == [None] + ["turn"] * (len(rows) - 1)


def test_many_who_join_and_many_who_claim_leave_one_running(common_world: World, client: Client) -> None:
    for _ in range(ROUNDS):
        key = new_id(RUN)
        first = client.enqueue("support", "first", session=key).id
        made = [first]

        def join(key: str = key, made: list[str] = made) -> str:
            made.append(client.enqueue("support", "more", session=key).id)
            return made[-1]

        def take(made: list[str] = made) -> list[Row]:
            found = [claim(common_world, {"id": run_id}, "worker-a") for run_id in list(made)]
            return [row for rows in found for row in rows]

        outcomes = together(join, take, join, take, join, take)
        assert [item for item in outcomes if isinstance(item, Exception)] == []
        rows = [common_world.run(run_id) for run_id in made]
        running = [row["id"] for row in rows if row["state"] == "running"]
        assert running in ([first], []), "only the first has the turn"
        waiting = [row["wait_reason"] for row in rows if row["state"] == "ready" and row["id"] != first]
        assert waiting == ["turn"] * 3


def test_a_session_of_its_own_that_is_joined_while_its_run_is_claimed(
    common_world: World, client: Client
) -> None:
    """Whoever is first: the two share it, the one that runs is the only one, and it ends the long way."""
    for _ in range(ROUNDS * 2):
        alone = client.enqueue("support", "alone")
        claimed, joined = together(
            lambda alone=alone: claim(common_world, {"id": alone.id}, "worker-a"),
            lambda alone=alone: client.enqueue("support", "me too", session=alone.session_id),
        )
        assert not isinstance(claimed, Exception) and isinstance(joined, Enqueued)
        first, second = common_world.run(alone.id), common_world.run(joined.id)
        assert (first["shared"], first["serial"], second["wait_reason"]) == (True, True, "turn")
        row = claimed[0] if claimed else claim(common_world, first, "worker-a")[0]
        assert claim(common_world, second, "worker-b") == []
        assert finish(common_world, row) is not None
        assert claim(common_world, second, "worker-b")


@pytest.mark.invariant("I1")
def test_a_claim_that_looked_before_another_committed_is_told_by_the_index(common_world: World) -> None:
    """Between its look and its write somebody took the turn: only the unique index can know."""
    database, key = common_world.database, new_id(RUN)
    first, second = (factory.a_run(database, session=key) for _ in range(2))
    common_world.sql("update runs set wait_reason = null where id = :id", id=second["id"])
    with database.engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
        late = Unit(connection)
        assert late.scalar(text("select count(*) from runs")) > 1
        assert claim(common_world, first, "worker-a")
        with pytest.raises(TurnTaken):
            claims.claim_named(late, claimer("worker-b"), second["id"])
        connection.rollback()
    assert common_world.run(second["id"])["state"] == "ready"

"""The keeper on a real Postgres: one statement a pass, the second read, the trust window, outages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import event, select, text, update

from cortex_workers.embedded import PostgresNode
from cortex_workers.errors import LeaseLost
from cortex_workers.lease.held import now
from cortex_workers.lease.keeper import DrainRequest, Held, LeaseKeeper
from cortex_workers.lease.slots import Slots
from cortex_workers.schemas.lease import Term
from cortex_workers.settings import Settings, load_settings
from cortex_workers.store import tables, workers
from cortex_workers.store.transitions import Guard
from tests.contract.rows import Rows
from tests.waiting import DEADLINE_S, wait_until

ME, OTHER = "host:1:aaaaaaaa", "host:2:bbbbbbbb"
Make = Callable[..., tuple[Rows, LeaseKeeper]]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[tuple[Rows, LeaseKeeper]] = []

    def start(
        url: str, settings: Settings | None = None, slots: int = 4, **more: Any
    ) -> tuple[Rows, LeaseKeeper]:
        rows = Rows(url, settings)
        register(rows, slots)
        keeper = LeaseKeeper(rows.database, rows.settings, ME, slots=Slots(slots), **more)
        made.append((rows, keeper))
        keeper.start()
        assert keeper.kick(DEADLINE_S)
        return rows, keeper

    yield start
    for rows, keeper in made:
        keeper.stop()
        rows.close()


def register(rows: Rows, slots: int) -> None:
    rows.database.run(lambda unit: workers.register(unit, ME, version="1", reader_version=1, slots=slots))


def hasty(url: str) -> Settings:
    """Leases that are renewed five times a second and trusted for a second."""
    return load_settings(database_url=url, lease_ttl_s=60, lease_renew_s=0.2, lease_trust_s=1)


def kick(keeper: LeaseKeeper) -> None:
    assert keeper.kick(DEADLINE_S), "no pass was made"


@contextmanager
def lease_statements(rows: Rows) -> Iterator[list[str]]:
    sent: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        sent.append(statement)

    event.listen(rows.database.lease_engine, "before_cursor_execute", note)
    yield sent
    event.remove(rows.database.lease_engine, "before_cursor_execute", note)


@contextmanager
def locked(rows: Rows, run_id: str) -> Iterator[None]:
    with rows.database.transaction() as unit:
        unit.one(select(tables.runs.c.id).where(tables.runs.c.id == run_id).with_for_update())
        yield


def expiry(rows: Rows, held: Held) -> Any:
    return rows.run(held.term.run_id)["lease_expires_at"]


def test_a_pass_renews_two_hundred_runs_by_one_statement_and_loses_none_that_is_locked(
    database_url: str, make: Make
) -> None:
    rows, keeper = make(database_url)
    held = [keeper.hold(term) for term in rows.claimed(ME, 200)]
    unlucky = held[17]
    before = {one.term.run_id: expiry(rows, one) for one in held}
    with locked(rows, unlucky.term.run_id):
        with lease_statements(rows) as sent:
            kick(keeper)
        assert len([one for one in sent if "UPDATE runs" in one]) == 1
        assert [one for one in held if expiry(rows, one) == before[one.term.run_id]] == [unlucky]
        assert not unlucky.lost
        assert unlucky.trusted()
    kick(keeper)
    assert expiry(rows, unlucky) > before[unlucky.term.run_id]
    assert not any(one.lost for one in held)


def test_nothing_is_renewed_when_nothing_is_held_but_the_worker_is_heard_of(
    database_url: str, make: Make
) -> None:
    rows, keeper = make(database_url)
    (term,) = rows.claimed(ME)
    keeper.hold(term).release()
    before = heartbeat_at(rows)
    with lease_statements(rows) as sent:
        kick(keeper)
        wait_until(lambda: heartbeat_at(rows) > before, what="the heartbeat")
    assert [one for one in sent if " runs" in one] == []


def heartbeat_at(rows: Rows) -> Any:
    with rows.database.read() as unit:
        return unit.scalar(select(tables.workers.c.heartbeat_at).where(tables.workers.c.id == ME))


def taken_over(rows: Rows, term: Term) -> None:
    rows.move("lapse", term.run_id)
    rows.claim(OTHER, [term.run_id])


def cancelled(rows: Rows, term: Term) -> None:
    rows.move("cancel_running", term.run_id, Guard(revision=term.revision))


def deleted(rows: Rows, term: Term) -> None:
    with rows.database.transaction() as unit:
        unit.execute(tables.runs.delete().where(tables.runs.c.id == term.run_id))


@pytest.mark.parametrize("lose", [taken_over, cancelled, deleted])
def test_a_run_that_was_taken_is_lost_after_the_second_read(database_url: str, make: Make, lose: Any) -> None:
    rows, keeper = make(database_url)
    told: list[str] = []
    lost, kept = (keeper.hold(term) for term in rows.claimed(ME, 2, ttl_s=0))
    lost.on_stop(lambda: told.append("lost"))
    kept.on_stop(lambda: told.append("kept"))
    lose(rows, lost.term)
    assert lost.trusted()
    kick(keeper)
    assert (lost.lost, kept.lost) == (True, False)
    assert not lost.trusted()
    assert told == ["lost"]
    assert keeper.terms() == [kept.term]
    with pytest.raises(LeaseLost):
        lost.wait_trusted()


def test_a_new_term_of_the_same_run_in_the_same_process_does_not_speak_for_the_old_one(
    database_url: str, make: Make
) -> None:
    rows, keeper = make(database_url)
    (term,) = rows.claimed(ME, ttl_s=0)
    old = keeper.hold(term)
    rows.move("lapse", term.run_id)
    (again,) = rows.claim(ME, [term.run_id])
    new = keeper.hold(again)
    before = expiry(rows, new)
    kick(keeper)
    assert (old.lost, new.lost) == (True, False)
    assert expiry(rows, new) > before
    old.release()
    assert keeper.terms() == [again]


def test_a_released_run_is_in_no_later_renewal(database_url: str, make: Make) -> None:
    rows, keeper = make(database_url)
    first, second = (keeper.hold(term) for term in rows.claimed(ME, 2))
    before = expiry(rows, first)
    with first:
        assert len(keeper.terms()) == 2
    kick(keeper)
    assert keeper.terms() == [second.term]
    assert expiry(rows, first) == before
    assert not first.lost


def test_a_worker_that_ends_a_term_itself_is_not_told_that_it_lost_it(database_url: str, make: Make) -> None:
    rows, keeper = make(database_url)
    (term,) = rows.claimed(ME)
    held = keeper.hold(term)
    with held.ending():
        rows.move("complete", term.run_id, Guard(term=term))
        # The end is committed, and the keeper looks before the run has left its set.
        kick(keeper)
        assert keeper.terms() == [term]
    assert not held.lost
    assert keeper.terms() == []


def test_an_end_that_fails_leaves_the_run_held(database_url: str, make: Make) -> None:
    rows, keeper = make(database_url)
    (term,) = rows.claimed(ME)
    held = keeper.hold(term)
    with pytest.raises(LeaseLost), held.ending():
        raise LeaseLost()
    assert keeper.terms() == [term]
    cancelled(rows, term)
    kick(keeper)
    assert held.lost


def test_a_stop_request_arrives_with_the_renewal_once(database_url: str, make: Make) -> None:
    rows, keeper = make(database_url)
    told: list[str] = []
    (term,) = rows.claimed(ME)
    held = keeper.hold(term)
    held.on_stop(lambda: told.append("stop"))
    held.on_stop(lambda: told.append("not any more"))()
    with rows.database.transaction() as unit:
        unit.execute(
            update(tables.runs).where(tables.runs.c.id == term.run_id).values(stop_requested_reason="pause")
        )
    kick(keeper)
    kick(keeper)
    assert (held.stop_requested, held.lost, told) == ("pause", False, ["stop"])
    held.on_stop(lambda: told.append("at once"))
    assert told == ["stop", "at once"]


def test_a_callback_that_fails_costs_nobody_the_renewal(database_url: str, make: Make) -> None:
    rows, keeper = make(database_url)
    bad, good = (keeper.hold(term) for term in rows.claimed(ME, 2, ttl_s=0))
    told: list[str] = []

    def fail() -> None:
        raise ValueError("a bug of somebody else")

    bad.on_stop(fail)
    bad.on_stop(lambda: told.append("second"))
    taken_over(rows, bad.term)
    kick(keeper)
    assert told == ["second"]
    before = expiry(rows, good)
    kick(keeper)
    assert expiry(rows, good) > before


def test_tripping_the_fence_loses_everything_now_and_later(database_url: str, make: Make) -> None:
    rows, keeper = make(database_url)
    told: list[str] = []
    terms = rows.claimed(ME, 3)
    held = [keeper.hold(term) for term in terms[:2]]
    held[0].on_stop(lambda: told.append("lost"))
    assert keeper.trip() == terms[:2]
    assert told == ["lost"]
    assert all(one.lost for one in held)
    assert keeper.hold(terms[2]).lost
    assert keeper.terms() == []


def test_somebody_asks_the_worker_to_drain(database_url: str, make: Make) -> None:
    asked: list[DrainRequest] = []
    rows, keeper = make(database_url, on_drain_request=asked.append)
    rows.database.run(lambda unit: workers.request_drain(unit, ME, "cli:ann", "deploy", pause_sessions=True))
    kick(keeper)
    kick(keeper)
    wait_until(lambda: asked, what="the request to arrive")
    assert asked == [DrainRequest("cli:ann", "deploy", True)]
    assert keeper.drain_request == asked[0]


def test_a_process_that_was_full_says_soon_that_it_is_not(database_url: str, make: Make) -> None:
    rows, keeper = make(database_url, slots=2)
    slots = keeper_slots(keeper)
    assert slots.try_enter("start")
    assert slots.try_enter("begun")
    kick(keeper)
    wait_until(lambda: slots_used(rows) == 2, what="the full process to be written down")
    slots.note_start_rank(41)
    slots.leave("start")
    wait_until(lambda: slots_used(rows) == 1, what="the free slot to be written down")
    with rows.database.read() as unit:
        assert unit.scalar(select(tables.workers.c.last_start_rank).where(tables.workers.c.id == ME)) == 41


def keeper_slots(keeper: LeaseKeeper) -> Slots:
    return keeper._slots


def slots_used(rows: Rows) -> int:
    with rows.database.read() as unit:
        return int(unit.scalar(select(tables.workers.c.slots_used).where(tables.workers.c.id == ME)))


# --- Outages ----------------------------------------------------------------------------------------------------------


def test_trust_ends_while_postgres_is_frozen_and_comes_back_with_it(
    own_postgres: PostgresNode, make: Make
) -> None:
    rows, keeper = make(own_postgres.url, hasty(own_postgres.url))
    (term,) = rows.claimed(ME)
    held = keeper.hold(term)
    assert held.wait_trusted()
    own_postgres.freeze()
    try:
        wait_until(lambda: not held.trusted(), what="trust to end")
        assert not held.wait_trusted(0.1)
        assert not held.lost
        waiter, answers = waiting_for_trust(held)
    finally:
        own_postgres.thaw()
    waiter.join(DEADLINE_S)
    assert answers == [True]
    assert not held.lost


def test_who_waits_for_trust_hears_that_the_run_was_taken_meanwhile(
    own_postgres: PostgresNode, make: Make
) -> None:
    rows, keeper = make(own_postgres.url, hasty(own_postgres.url))
    (term,) = rows.claimed(ME)
    held = keeper.hold(term)
    with locked(rows, term.run_id):
        wait_until(lambda: not held.trusted(), what="trust to end")
        waiter, answers = waiting_for_trust(held)
        assert not held.lost
        # It waits for the row and so comes before the keeper, which never waits.
        canceller = threading.Thread(target=cancelled, args=(rows, term))
        canceller.start()
        wait_until(lambda: waits_for_a_lock(own_postgres.url), what="the cancel to wait for the row")
    canceller.join(DEADLINE_S)
    waiter.join(DEADLINE_S)
    assert answers == [LeaseLost]


def waits_for_a_lock(url: str) -> bool:
    with psycopg.connect(url) as connection:
        waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
        (count,) = connection.execute(waiting).fetchone() or (0,)
        return count > 0


def waiting_for_trust(held: Held) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []

    def wait() -> None:
        try:
            answers.append(held.wait_trusted())
        except LeaseLost as error:
            answers.append(type(error))

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, answers


def test_trust_counts_from_before_the_renewal_was_sent(database_url: str, make: Make) -> None:
    rows, keeper = make(database_url, hasty(database_url))
    (term,) = rows.claimed(ME)
    held = keeper.hold(term)
    seen: dict[str, bool] = {}

    def on_its_way(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "UPDATE runs" in statement and not seen:
            sent_at = now()
            seen["before"] = wait_until(held.trusted, what="a confirmed renewal")
            wait_until(lambda: now() > sent_at + keeper.trust_s, what="a whole window to pass on the way")
        elif "UPDATE workers" in statement and "before" in seen and "after" not in seen:
            # The renewal has been confirmed by now.
            seen["after"] = held.trusted()

    event.listen(rows.database.lease_engine, "before_cursor_execute", on_its_way)
    wait_until(lambda: "after" in seen, what="the heartbeat behind the renewal")
    assert seen == {"before": True, "after": False}
    assert held.wait_trusted(DEADLINE_S)


def test_a_claim_that_took_long_is_trusted_for_the_rest_of_the_window(database_url: str, make: Make) -> None:
    rows, keeper = make(database_url)
    young, old = (
        keeper.hold(term, age_s=age) for term, age in zip(rows.claimed(ME, 2), (2990.0, 3001.0), strict=True)
    )
    assert young.trusted()
    assert not old.trusted()
    kick(keeper)
    assert old.trusted()


def test_a_killed_connection_costs_nothing(database_url: str, make: Make) -> None:
    rows, keeper = make(database_url)
    (term,) = rows.claimed(ME)
    held = keeper.hold(term)
    kick(keeper)
    before = expiry(rows, held)
    kill_the_lease_connections(rows)
    kick(keeper)
    assert expiry(rows, held) > before
    assert held.trusted()


def kill_the_lease_connections(rows: Rows) -> None:
    with rows.database.read(lease=True) as unit:
        backend = unit.scalar(text("select pg_backend_pid()"))
    url = rows.settings.require_database()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("select pg_terminate_backend(%s)", (backend,))
        wait_until(
            lambda: (
                connection.execute("select 1 from pg_stat_activity where pid = %s", (backend,)).fetchone()
                is None
            ),
            what="the connection to be gone",
        )


def test_the_keeper_goes_on_after_postgres_was_restarted(own_postgres: PostgresNode, make: Make) -> None:
    rows, keeper = make(own_postgres.url, hasty(own_postgres.url))
    (term,) = rows.claimed(ME)
    held = keeper.hold(term)
    own_postgres.stop()
    wait_until(lambda: not held.trusted(), what="trust to end")
    own_postgres.start()
    assert held.wait_trusted(DEADLINE_S)
    before = expiry(rows, held)
    wait_until(lambda: expiry(rows, held) > before, what="the next renewal")
    assert not held.lost


def test_a_keeper_that_ended_holds_nothing(database_url: str, make: Make) -> None:
    rows, keeper = make(database_url)
    (term,) = rows.claimed(ME)
    held = keeper.hold(term)
    keeper.stop()
    assert held.lost
    before = expiry(rows, held)
    assert not keeper.kick(0.0)
    assert expiry(rows, held) == before

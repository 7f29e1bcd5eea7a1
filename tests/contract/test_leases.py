"""Leases in the store: renewed in one statement, never brought back, given up in one statement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, select, update

from cortex_workers.schemas.lease import Term
from cortex_workers.schemas.lifecycle import RunState
from cortex_workers.schemas.notifications import RunReady, RunReclaimable
from cortex_workers.store import clock, leases, sessions, tables
from cortex_workers.store.transitions import Guard
from cortex_workers.store.unit import Unit
from tests.contract.rows import Rows

ME, OTHER = "host:1:aaaaaaaa", "host:2:bbbbbbbb"


@pytest.fixture
def rows(database_url: str) -> Iterator[Rows]:
    made = Rows(database_url)
    yield made
    made.close()


def renew(rows: Rows, terms: list[Term], ttl_s: float = 60.0) -> dict[str, leases.Renewed]:
    return rows.database.run(lambda unit: leases.renew(unit, ME, terms, ttl_s))


def hand_off(rows: Rows, terms: list[Term]) -> list[str]:
    return [row["id"] for row in rows.database.run(lambda unit: leases.hand_off_all(unit, ME, terms, ME))]


@contextmanager
def statements(rows: Rows) -> Iterator[list[str]]:
    """What is sent meanwhile."""
    sent: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        sent.append(statement)

    event.listen(rows.database.engine, "before_cursor_execute", note)
    yield sent
    event.remove(rows.database.engine, "before_cursor_execute", note)


@contextmanager
def locked(rows: Rows, table: Any, row_id: str) -> Iterator[None]:
    """Somebody else's open transaction holds a row."""
    with rows.database.transaction() as unit:
        assert unit.one(select(table.c.id).where(table.c.id == row_id).with_for_update()) is not None
        yield


def test_one_statement_renews_two_hundred_leases_and_passes_over_the_one_that_is_locked(rows: Rows) -> None:
    terms = rows.claimed(ME, 200)
    unlucky = terms[17].run_id
    before = rows.run(unlucky)
    with locked(rows, tables.runs, unlucky), statements(rows) as sent:
        renewed = renew(rows, terms, ttl_s=600)
    assert len(sent) == 1
    assert renewed.keys() == {term.run_id for term in terms} - {unlucky}
    assert rows.run(unlucky)["lease_expires_at"] == before["lease_expires_at"]
    assert renew(rows, terms, ttl_s=600).keys() == {term.run_id for term in terms}


def test_a_renewal_moves_the_expiry_and_nothing_else(rows: Rows) -> None:
    (term,) = rows.claimed(ME, ttl_s=5)
    before = rows.run(term.run_id)
    renewed = renew(rows, [term], ttl_s=600)[term.run_id]
    after = rows.run(term.run_id)
    assert after["lease_expires_at"] == renewed.expires_at
    assert after["lease_expires_at"] - before["lease_expires_at"] > timedelta(seconds=500)
    assert {**after, "lease_expires_at": 0} == {**before, "lease_expires_at": 0}


def test_a_lease_that_is_over_and_that_nobody_took_is_renewed(rows: Rows) -> None:
    (term,) = rows.claimed(ME, ttl_s=0)
    assert term.run_id in renew(rows, [term])


def test_a_renewal_reads_back_that_a_stop_is_wanted(rows: Rows) -> None:
    term, other = rows.claimed(ME, 2)
    with rows.database.transaction() as unit:
        unit.execute(
            update(tables.runs).where(tables.runs.c.id == term.run_id).values(stop_requested_reason="pause")
        )
    reasons = {run_id: found.stop_requested_reason for run_id, found in renew(rows, [term, other]).items()}
    assert reasons == {term.run_id: "pause", other.run_id: None}


def lapsed(rows: Rows, term: Term) -> None:
    rows.move("lapse", term.run_id)


def taken_over(rows: Rows, term: Term) -> None:
    lapsed(rows, term)
    rows.claim(OTHER, [term.run_id])


def claimed_again(rows: Rows, term: Term) -> None:
    lapsed(rows, term)
    rows.claim(ME, [term.run_id])


def completed(rows: Rows, term: Term) -> None:
    renew(rows, [term])
    rows.move("complete", term.run_id, Guard(term=term))


def cancelled(rows: Rows, term: Term) -> None:
    rows.move("cancel_running", term.run_id, Guard(revision=term.revision))


WAYS_TO_LOSE = [lapsed, taken_over, claimed_again, completed, cancelled]


@pytest.mark.parametrize("lose", WAYS_TO_LOSE)
@pytest.mark.invariant("I2")
def test_a_renewal_never_brings_a_lost_lease_back(rows: Rows, lose: Any) -> None:
    (term,) = rows.claimed(ME, ttl_s=0)
    lose(rows, term)
    before = rows.run(term.run_id)
    assert renew(rows, [term]) == {}
    assert rows.run(term.run_id) == before


@pytest.mark.parametrize("lose", WAYS_TO_LOSE)
def test_a_second_read_tells_a_lost_lease_from_a_locked_one(rows: Rows, lose: Any) -> None:
    lost, held = rows.claimed(ME, 2, ttl_s=0)
    lose(rows, lost)
    with locked(rows, tables.runs, held.run_id), rows.database.read() as unit:
        holding = leases.reread(unit, [lost.run_id, held.run_id, "arun_gone"])
    assert holding.keys() == {lost.run_id, held.run_id}
    assert not holding[lost.run_id].confirms(lost)
    assert holding[held.run_id].confirms(held)


def test_giving_up_everything_is_one_statement_and_no_lapse(rows: Rows) -> None:
    terms = rows.claimed(ME, 3)
    (strangers,) = rows.claimed(OTHER, 1)
    expiry = {term.run_id: rows.run(term.run_id)["lease_expires_at"] for term in terms}
    rows.told.clear()
    with statements(rows) as sent:
        assert sorted(hand_off(rows, terms)) == sorted(expiry)
    assert len([one for one in sent if "UPDATE runs" in one]) == 1
    for run_id, expires_at in expiry.items():
        after = rows.run(run_id)
        assert (after["state"], after["handed_off"], after["queue_class"]) == ("reclaimable", True, "begun")
        assert (after["reclaim_count"], after["reclaim_total"]) == (0, 0)
        assert after["fenced_until"] == expires_at
        assert after["wait_reason"] is None
    assert {(told.run_id, told.hand_off) for told in rows.told if isinstance(told, RunReclaimable)} == {
        (run_id, True) for run_id in expiry
    }
    assert rows.run(strangers.run_id)["lease_owner"] == OTHER


def test_giving_up_includes_a_lease_that_is_over_but_not_one_that_was_taken(rows: Rows) -> None:
    over, taken = rows.claimed(ME, 2, ttl_s=0)
    taken_over(rows, taken)
    assert hand_off(rows, [over, taken]) == [over.run_id]
    assert rows.run(taken.run_id)["lease_owner"] == OTHER


def test_giving_up_waits_for_no_locked_row(rows: Rows) -> None:
    free, busy = rows.claimed(ME, 2)
    with locked(rows, tables.runs, busy.run_id):
        assert hand_off(rows, [free, busy]) == [free.run_id]
    assert hand_off(rows, [free, busy]) == [busy.run_id]


def test_giving_up_a_turn_leaves_the_turn_with_the_run_that_was_given_up(rows: Rows) -> None:
    first, second = rows.ready_in_session(2)
    terms = rows.claim(ME, [first])
    assert rows.run(second)["wait_reason"] == "turn"
    rows.told.clear()
    assert hand_off(rows, terms) == [first]
    assert (rows.run(first)["wait_reason"], rows.run(second)["wait_reason"]) == (None, "turn")
    assert [(told.kind, told.run_id) for told in rows.told] == [("RunReclaimable", first)]


def test_a_run_given_up_in_a_gated_session_waits_and_is_told_to_nobody(rows: Rows) -> None:
    (run_id,) = rows.ready_in_session(1)
    terms = rows.claim(ME, [run_id])
    with rows.database.transaction() as unit:
        unit.execute(
            update(tables.sessions)
            .where(tables.sessions.c.id == rows.run(run_id)["session_id"])
            .values(gated_at=clock.wall())
        )
    rows.told.clear()
    assert hand_off(rows, terms) == [run_id]
    assert rows.run(run_id)["wait_reason"] == "gate"
    assert rows.told == []


def test_giving_up_waits_for_no_session_that_somebody_works_on(rows: Rows) -> None:
    shared = rows.claim(ME, rows.ready_in_session(1))
    own = rows.claimed(ME)
    session_id = rows.run(shared[0].run_id)["session_id"]
    with locked(rows, tables.sessions, session_id):
        assert hand_off(rows, shared + own) == [own[0].run_id]
    assert hand_off(rows, shared + own) == [shared[0].run_id]


def test_a_claim_that_slipped_in_goes_back_as_if_it_had_not_been_made(rows: Rows) -> None:
    known, start, reclaimed = rows.claimed(ME, 3, ttl_s=0)
    lapsed(rows, reclaimed)
    before = {term.run_id: state_of_waiting(rows, term.run_id) for term in (reclaimed,)}
    renew(rows, [known, start])
    rows.claim(ME, [reclaimed.run_id])
    rows.told.clear()
    moved = rows.database.run(lambda unit: leases.hand_back_strays(unit, ME, [known], ME))
    assert {row["id"] for row in moved} == {start.run_id, reclaimed.run_id}
    assert state_of_waiting(rows, reclaimed.run_id) == before[reclaimed.run_id]
    back = rows.run(start.run_id)
    assert (back["state"], back["queue_class"], back["instruction"]) == ("ready", "start", "start")
    assert (back["started_at"], back["history_upto"], back["fenced_until"]) == (None, None, None)
    assert {type(told) for told in rows.told} == {RunReady, RunReclaimable}
    assert rows.run(known.run_id)["state"] == RunState.RUNNING


def state_of_waiting(rows: Rows, run_id: str) -> dict[str, Any]:
    row = rows.run(run_id)
    names = (
        "state",
        "instruction",
        "queue_class",
        "reclaim_count",
        "reclaim_total",
        "wait_reason",
        "fenced_until",
    )
    return {name: row[name] for name in names}


def test_a_claim_that_slipped_in_gives_its_turn_back(rows: Rows) -> None:
    first, second = rows.ready_in_session(2)
    rows.claim(ME, [first])
    rows.database.run(lambda unit: leases.hand_back_strays(unit, ME, [], ME))
    assert (rows.run(first)["state"], rows.run(first)["wait_reason"]) == ("ready", None)
    assert rows.run(second)["wait_reason"] == "turn"


def test_a_run_that_becomes_shared_meanwhile_is_not_given_up_behind_its_sessions_back(rows: Rows) -> None:
    (term,) = rows.claimed(ME)
    session_id = rows.run(term.run_id)["session_id"]

    def join(unit: Unit) -> None:
        sessions.lock(unit, session_id)
        sessions.share(unit, session_id, serial=True)

    joined: list[str] = []

    def just_before(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "fenced_until" in statement and "UPDATE runs" in statement and not joined:
            joined.append(session_id)
            rows.database.run(join)

    event.listen(rows.database.engine, "before_cursor_execute", just_before)
    assert hand_off(rows, [term]) == []
    assert rows.run(term.run_id)["shared"]
    assert hand_off(rows, [term]) == [term.run_id]
    assert rows.run(term.run_id)["wait_reason"] is None


def test_an_event_tells_which_worker_gave_up(rows: Rows) -> None:
    (term,) = rows.claimed(ME)
    hand_off(rows, [term])
    with rows.database.read() as unit:
        found = unit.all(
            select(tables.events.c.kind, tables.events.c.worker_id)
            .where(tables.events.c.run_id == term.run_id)
            .order_by(tables.events.c.run_seq.desc())
        )
    assert tuple(found[0]) == ("run.watchdog", ME)

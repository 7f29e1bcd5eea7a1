"""What may be claimed, in which order, and what a claim brings with it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import text

from cortex_workers.schemas.ids import SUSPENSION, new_id
from cortex_workers.schemas.lifecycle import RunState
from cortex_workers.store import claims, workers
from cortex_workers.store.claims import READER_VERSION, Claimer
from cortex_workers.store.database import Database
from cortex_workers.store.transitions import Row
from cortex_workers.testing import factory
from cortex_workers.testing.clock import StoppedClock, stopped_clock

ME = Claimer("worker-a", 60.0, "main", [factory.AGENT.digest(), "another version"])


@pytest.fixture
def clock() -> Iterator[StoppedClock]:
    with stopped_clock() as clock:
        yield clock


def claim(database: Database, run: Row, claimer: Claimer = ME, **more: Any) -> list[Row]:
    return database.run(lambda unit: claims.claim_named(unit, claimer, run["id"], **more))


def claim_next(
    database: Database, *, starts: bool = True, batch: int = 1, claimer: Claimer = ME
) -> list[str]:
    found = database.run(lambda unit: claims.claim_next(unit, claimer, starts=starts, batch=batch))
    return [row["id"] for row in found]


def edit(database: Database, run: Row, change: str) -> None:
    """Give a run what a later room, or a newer version, would have given it."""
    with database.transaction() as unit:
        unit.execute(text(f"update runs set {change} where id = :id"), {"id": run["id"]})


@pytest.mark.parametrize("state", list(RunState))
def test_only_a_ready_or_reclaimable_run_is_claimed(database: Database, state: RunState) -> None:
    later = state in (RunState.CREATED, RunState.INCOMPLETE)
    run = factory.a_run(database) if later else factory.a_run_in(database, state)
    if later:
        edit(database, run, f"state = '{state}'")
    run = factory.now(database, run["id"])
    claimable = state in (RunState.READY, RunState.RECLAIMABLE)
    assert bool(claim(database, run)) is claimable
    assert claim_next(database) == []
    assert claimable or factory.now(database, run["id"]) == run


@pytest.mark.parametrize("reason", ["hold", "gate", "turn", "no_worker", "later"])
def test_a_run_that_waits_is_not_claimed(database: Database, reason: str) -> None:
    run = factory.a_run(database)
    edit(database, run, f"wait_reason = '{reason}'")
    assert claim(database, run) == []
    assert claim_next(database) == []


def test_a_run_is_claimed_from_its_time_on(database: Database, clock: StoppedClock) -> None:
    run = factory.a_run(database)
    edit(database, run, f"not_before = '{clock.at.isoformat()}'::timestamptz + interval '5 seconds'")
    clock.advance(4.999999)
    assert claim(database, run) == [] and claim_next(database) == []
    clock.advance(0.000001)
    assert claim_next(database) == [run["id"]]


def test_a_run_stored_by_newer_code_is_left_to_it(database: Database) -> None:
    run = factory.a_run(database)
    edit(database, run, f"min_reader = {READER_VERSION + 1}")
    assert claim(database, run) == [] and claim_next(database) == []


def test_a_worker_claims_only_the_versions_it_serves(database: Database) -> None:
    run = factory.a_run(database)
    stranger = Claimer("worker-b", 60.0, "main", ["another version"])
    nobody = Claimer("worker-c", 60.0, "main", [])
    for claimer in (stranger, nobody):
        assert claim(database, run, claimer) == [] and claim_next(database, claimer=claimer) == []
    assert claim_next(database) == [run["id"]]


def test_a_pool_takes_its_own_runs_and_a_named_one_only_when_asked_to(database: Database) -> None:
    run = factory.a_run(database, pool="gpu")
    assert claim_next(database) == []
    assert claim(database, run, any_pool=False) == []
    assert claim(database, run)


def test_the_answer_to_one_pause_is_not_claimed_in_the_name_of_another(database: Database) -> None:
    run = factory.an_answered_run(database)
    assert claim(database, run, suspension_id=new_id(SUSPENSION)) == []
    assert claim(database, run, suspension_id=run["suspension_id"])


def test_begun_runs_go_first_and_in_the_order_in_which_they_came_back(
    database: Database, clock: StoppedClock
) -> None:
    first_start = factory.a_run(database)
    second_start = factory.a_run(database)
    begun = []
    for arrange in (factory.an_answered_run, factory.a_reclaimable_run, factory.an_answered_run):
        clock.advance(1)
        begun.append(arrange(database)["id"])
    clock.advance(1)
    assert [claim_next(database)[0] for _ in range(5)] == [*begun, first_start["id"], second_start["id"]]
    assert claim_next(database) == []


def test_starts_go_by_rank_so_that_tenants_take_turns(database: Database) -> None:
    database.run(lambda unit: workers.register(unit, "worker-a", version="1", reader_version=1, slots=1))
    many = [factory.a_run(database, scope="tenant=big")["id"] for _ in range(3)]
    one = factory.a_run(database, scope="tenant=small")["id"]
    order = [claim_next(database)[0] for _ in range(4)]
    assert order.index(one) < 2
    assert [run_id for run_id in order if run_id != one] == many


def test_without_a_slot_for_starts_only_begun_runs_are_claimed(database: Database) -> None:
    factory.a_run(database)
    assert claim_next(database, starts=False) == []
    begun = factory.an_answered_run(database)
    assert claim_next(database, starts=False) == [begun["id"]]


def test_a_few_at_once_are_runs_of_their_own_sessions(database: Database) -> None:
    shared = factory.a_run(database, session="talk")
    alone = [factory.a_run(database)["id"] for _ in range(5)]
    assert claim_next(database, batch=3) == alone[:3]
    assert claim_next(database, batch=3) == alone[3:]
    assert claim_next(database, batch=3) == [shared["id"]]


def test_a_claim_brings_all_that_the_loop_needs(database: Database, clock: StoppedClock) -> None:
    run = factory.a_run(database, text="Refund order 17")
    (row,) = claim(database, run)
    assert (row["before"], row["input"], row["principal"], row["system_prompt"]) == (
        "ready",
        "Refund order 17",
        None,
        None,
    )
    assert (row["lease_owner"], row["lease_expires_at"] - clock.at, row["started_at"]) == (
        "worker-a",
        row["lease_expires_at"] - row["claimed_at"],
        clock.at,
    )
    assert row["instruction"] == "start"


@pytest.mark.parametrize("arrange", [factory.a_reclaimable_run, factory.an_answered_run])
def test_history_is_fixed_by_the_first_claim(database: Database, arrange: Callable[..., Row]) -> None:
    factory.an_ended_run(database, RunState.COMPLETED, session="talk")
    run = arrange(database, session="talk")
    assert (run["history_upto"], run["history_floor"]) == (1, 0)
    with database.transaction() as unit:
        unit.execute(text("update sessions set completion_seq = 9, history_floor = 5"))
    (row,) = claim(database, run)
    assert (row["history_upto"], row["history_floor"]) == (1, 0)


def test_a_run_whose_session_is_paused_is_not_claimed_though_nobody_marked_it(database: Database) -> None:
    """The gate is looked at again under the session's lock."""
    run = factory.a_run(database, session="talk")
    with database.transaction() as unit:
        unit.execute(text("update sessions set gated_at = clock_timestamp()"))
    assert claim(database, run) == [] and claim_next(database) == []

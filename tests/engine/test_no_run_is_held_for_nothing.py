"""What is claimed is worked on, given back or left to its lease: no failure in between leaves it held for ever."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import text

from cortex_workers import Client
from cortex_workers.engine import slot
from cortex_workers.engine.ahead import Ahead, Claimed
from cortex_workers.errors import StoreUnavailable
from cortex_workers.store import workers
from tests.engine.world import World
from tests.waiting import DEADLINE_S, wait_until


def test_a_client_in_a_worker_process_never_touches_the_workers_row(world: World) -> None:
    worker = world.worker()
    with Client(world.settings(), scope="tenant=acme") as client:
        assert client.runtime.worker_id != worker.rt.worker_id
    with world.database.read() as unit:
        row = workers.get(unit, worker.rt.worker_id)
    assert row is not None
    assert row.ended_at is None
    assert row.alive


def test_two_clients_of_one_process_hold_under_names_of_their_own(world: World) -> None:
    with Client(world.settings(), scope="tenant=a") as one, Client(world.settings(), scope="tenant=a") as two:
        assert one.runtime.worker_id != two.runtime.worker_id
        # Neither ever held anything, so neither has a row to end.
        with world.database.read() as unit:
            assert workers.list_all(unit, include_ended=True) == []


def test_a_store_that_fails_after_a_claim_costs_no_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.shop([{"say": "Hello."}])
    worker = world.worker()
    run_id = world.client().enqueue("support", "hello").id
    world.client().enqueue("support", "one more that a nudge could tell of")

    def away(_fact: object) -> None:
        raise StoreUnavailable()

    worker.rt.nudge = away
    slot.work(worker.rt, run_id, "start")
    assert worker.rt.keeper.terms() == []
    assert world.run(run_id)["state"] == "completed"


def test_a_hand_back_that_fails_leaves_the_run_to_its_lease(world: World) -> None:
    world.shop([{"say": "Hello."}])
    worker = world.worker()
    claimed = worker.claim(world.client().enqueue("support", "hello").id)
    with world.database.transaction() as unit:
        unit.execute(text("lock table runs in access exclusive mode"))
        with pytest.raises(StoreUnavailable):
            slot.give_back(worker.rt, claimed, "reserve")
    assert worker.rt.keeper.terms() == []


def test_the_watcher_of_the_shelf_outlives_a_failure(world: World) -> None:
    world.shop([{"say": "Hello."}])
    worker = world.worker()
    first, second = (worker.claim(world.client().enqueue("support", "hello").id) for _ in range(2))
    given: list[str] = []
    seen = threading.Event()

    def give_back(item: Claimed) -> None:
        given.append(item.row["id"])
        if len(given) == 1:
            raise StoreUnavailable()
        seen.set()

    shelf = Ahead(give_back)
    shelf.put([first])
    wait_until(lambda: bool(given), what="the first to be given back")
    shelf.put([second])
    assert seen.wait(DEADLINE_S)
    assert given == [first.row["id"], second.row["id"]]
    assert first.held.term not in worker.rt.keeper.terms()

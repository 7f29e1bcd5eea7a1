"""Worker rows: who is live, what they serve, how many slots are free, who was asked to drain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from cortex_workers.schemas.lease import WorkerInfo
from cortex_workers.store import clock, workers
from tests.contract.rows import Rows

ANN, BOB, CALLER = "host:1:aaaaaaaa", "host:2:bbbbbbbb", "host:3:cccccccc"


@pytest.fixture
def rows(database_url: str) -> Iterator[Rows]:
    made = Rows(database_url)
    yield made
    clock.shift(timedelta(0))
    made.close()


@pytest.fixture
def do(rows: Rows) -> Callable[..., Any]:
    """Call a function of the store in a transaction of its own."""

    def call(function: Callable[..., Any], *args: Any, **more: Any) -> Any:
        return rows.database.run(lambda unit: function(unit, *args, **more))

    return call


def register(do: Callable[..., Any], worker_id: str, **more: Any) -> None:
    do(workers.register, worker_id, **{"version": "1.2", "reader_version": 1, "slots": 10, **more})


def later(seconds: float) -> None:
    clock.shift(timedelta(seconds=seconds))


def test_a_registered_worker_is_live_until_it_missed_three_of_its_own_heartbeats(do: Any) -> None:
    register(do, ANN, heartbeat_every_s=20)
    register(do, BOB, heartbeat_every_s=2)
    later(5.5)
    assert do(workers.live_count, "main") == 2
    later(6.5)
    assert do(workers.live_count, "main") == 1
    later(59)
    assert do(workers.live_count, "main") == 1
    later(61)
    assert do(workers.live_count, "main") == 0
    assert [worker.alive for worker in do(workers.list_all)] == [False, False]
    do(workers.heartbeat, BOB, 0, 0)
    assert do(workers.live_count, "main") == 1


def test_a_row_tells_what_was_registered(do: Any) -> None:
    register(do, ANN, agents={"d2", "d1"}, own_agents={"d2"}, queues=["cw.resume"], pool="gpu")
    found = do(workers.get, ANN)
    assert isinstance(found, WorkerInfo)
    assert (found.version, found.slots, found.slots_used, found.pool) == ("1.2", 10, 0, "gpu")
    assert (found.agents, found.queues, found.alive) == (("d1", "d2"), ("cw.resume",), True)
    assert do(workers.get, BOB) is None


def test_a_heartbeat_writes_what_is_used_and_never_takes_a_rank_back(do: Any) -> None:
    register(do, ANN)
    do(workers.heartbeat, ANN, 3, 70)
    do(workers.heartbeat, ANN, 4, 60)
    assert do(workers.get, ANN).slots_used == 4
    assert (
        do(
            lambda unit: unit.scalar(
                workers.workers.select().with_only_columns(workers.workers.c.last_start_rank)
            )
        )
        == 70
    )


def test_a_heartbeat_of_a_worker_without_a_row_says_so(do: Any) -> None:
    assert do(workers.heartbeat, ANN, 0, 0) is None


def test_an_ended_worker_counts_for_nothing_and_its_row_stays(do: Any) -> None:
    register(do, ANN, agents=["d1"])
    assert do(workers.end, ANN, "drained")
    assert not do(workers.end, ANN, "watchdog")
    assert (do(workers.live_count, "main"), do(workers.free_slots, "main")) == (0, 0)
    assert do(workers.served_digests, "main") == set()
    assert do(workers.list_all) == []
    (found,) = do(workers.list_all, include_ended=True)
    assert (found.ended_as, found.alive) == ("drained", False)
    assert found.ended_at is not None


def test_a_worker_that_registers_again_is_live_again(do: Any) -> None:
    register(do, ANN)
    do(workers.mark_draining, ANN)
    do(workers.end, ANN, "drained")
    register(do, ANN, slots=3)
    found = do(workers.get, ANN)
    assert (found.alive, found.ended_as, found.draining_at, found.slots) == (True, None, None, 3)


def test_free_slots_are_those_of_live_workers_of_the_pool_that_do_not_drain(do: Any) -> None:
    register(do, ANN, slots=10)
    register(do, BOB, slots=20)
    register(do, CALLER, slots=40, pool="gpu")
    do(workers.heartbeat, ANN, 4, 0)
    do(workers.heartbeat, CALLER, 99, 0)
    assert do(workers.free_slots, "main") == 26
    assert do(workers.free_slots, "gpu") == 0
    assert do(workers.free_slots, "other") == 0
    do(workers.mark_draining, ANN)
    assert do(workers.free_slots, "main") == 20
    do(workers.request_drain, BOB, "cli:ann")
    assert do(workers.free_slots, "main") == 0


def test_a_process_that_only_serves_its_caller_counts_for_nobody_else(do: Any) -> None:
    register(do, CALLER, slots=0, agents=["d1"], own_agents=["d1"])
    assert (do(workers.live_count, "main"), do(workers.free_slots, "main")) == (0, 0)
    assert do(workers.served_digests, "main") == set()
    assert do(workers.get, CALLER).alive


def test_what_the_live_workers_of_a_pool_serve(do: Any) -> None:
    register(do, ANN, agents=["d1", "d2"], own_agents=["d2"])
    register(do, BOB, agents=["d2", "d3"], own_agents=["d3"])
    register(do, CALLER, agents=["d9"], pool="gpu")
    assert do(workers.served_digests, "main") == {"d1", "d2", "d3"}
    assert do(workers.own_digests) == {"d2", "d3"}
    do(workers.set_served, ANN, {"d4"})
    assert do(workers.served_digests, "main") == {"d2", "d3", "d4"}
    assert do(workers.served_digests, "gpu") == {"d9"}
    later(61)
    do(workers.heartbeat, BOB, 0, 0)
    assert do(workers.served_digests, "main") == {"d2", "d3"}


def test_a_drain_request_is_read_back_by_the_heartbeat_and_the_first_one_stands(do: Any) -> None:
    register(do, ANN)
    assert do(workers.heartbeat, ANN, 0, 0).drain_requested_at is None
    assert do(workers.request_drain, ANN, "cli:ann", "deploy") == [ANN]
    first = do(workers.heartbeat, ANN, 0, 0)
    assert (first.drain_requested_by, first.drain_reason, first.pause_sessions) == (
        "cli:ann",
        "deploy",
        False,
    )
    do(workers.request_drain, ANN, "cli:bob", "other", pause_sessions=True)
    second = do(workers.heartbeat, ANN, 0, 0)
    assert second.drain_requested_at == first.drain_requested_at
    assert (second.drain_requested_by, second.drain_reason, second.pause_sessions) == (
        "cli:ann",
        "deploy",
        True,
    )


def test_all_live_workers_can_be_asked_to_drain(do: Any) -> None:
    register(do, ANN)
    register(do, BOB)
    register(do, CALLER)
    do(workers.end, BOB, "drained")
    assert do(workers.request_drain, None, "cli:ann") == [ANN, CALLER]
    assert do(workers.request_drain, BOB, "cli:ann") == []
    assert do(workers.request_drain, "host:9:ffffffff", "cli:ann") == []


def test_the_time_a_drain_began_is_kept(do: Any) -> None:
    register(do, ANN)
    do(workers.mark_draining, ANN)
    began = do(workers.get, ANN).draining_at
    do(workers.mark_draining, ANN)
    assert do(workers.get, ANN).draining_at == began


def test_a_silent_worker_is_noted_as_ended_and_takes_that_back_when_it_speaks(do: Any) -> None:
    register(do, ANN)
    register(do, BOB)
    later(301)
    do(workers.heartbeat, BOB, 0, 0)
    assert do(workers.end_silent, 300) == [ANN]
    assert do(workers.end_silent, 300) == []
    assert (do(workers.get, ANN).ended_as, do(workers.get, BOB).ended_as) == ("silent", None)
    assert do(workers.heartbeat, ANN, 0, 0).ended_as is None
    assert do(workers.live_count, "main") == 2


def test_a_silent_worker_with_slow_heartbeats_has_its_own_patience(do: Any) -> None:
    register(do, ANN, heartbeat_every_s=200)
    later(500)
    assert do(workers.end_silent, 300) == []
    later(601)
    assert do(workers.end_silent, 300) == [ANN]


def test_a_worker_that_ended_by_itself_does_not_come_back_by_a_late_heartbeat(do: Any) -> None:
    register(do, ANN)
    do(workers.end, ANN, "drained")
    assert do(workers.heartbeat, ANN, 0, 0).ended_as == "drained"
    assert do(workers.live_count, "main") == 0

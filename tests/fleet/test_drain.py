"""SIGTERM: what can be handed off is, what cannot is handed off by the watchdog, and nothing new is begun.

Bug cases C51, C53, C54.
"""

import pytest

from cortex_workers.operate import drain
from tests.fleet.bench import SWEEP_S, TTL_S, Bench, call, now, say
from tests.waiting import wait_until

LONG = [call("note", text=str(number)) for number in range(18)]


@pytest.mark.invariant("I8")
def test_runs_are_handed_off_at_their_next_boundary(bench: Bench) -> None:
    first = bench.worker(slots=10)  # two of them are kept for runs that have begun
    with bench.gate():
        turns = [call("wait_at", gate="gate"), *LONG, call("charge", amount=1), say()]
        runs = [bench.enqueue(*turns) for _ in range(8)]
        bench.entered(count=8)
        first.kill("SIGTERM")
        wait_until(lambda: first.events("worker.draining"), "the drain to begin")
    assert first.wait() == 0
    assert not first.events("worker.watchdog")
    assert {bench.row(run)["state"] for run in runs} == {"reclaimable"}
    (row,) = bench.rows("SELECT ended_as FROM workers WHERE id = %s", first.worker_id)
    assert row["ended_as"] == "stopped"

    bench.worker(slots=10)
    rows = bench.completed(runs)
    assert {row["reclaim_total"] for row in rows} == {0}
    assert bench.did() == {"charge": 8}


@pytest.mark.invariant("I8")
def test_what_ignores_the_drain_is_handed_off_at_the_deadline(bench: Bench) -> None:
    first = bench.worker(slots=10, CORTEX_DRAIN_S="2")
    with bench.gate("safe"), bench.gate("unsafe"):
        waiting = [bench.enqueue(call("wait_at", gate="safe"), say()) for _ in range(3)]
        thinking = [bench.enqueue(say("at last", stall_s=30)) for _ in range(3)]
        paying = bench.enqueue(call("pay_and_wait", amount=1, gate="unsafe"), say())
        bench.entered("safe", 3)
        bench.entered("unsafe")
        wait_until(lambda: len(bench.held_by(first)) == 7, "all to run")
        assert first.stop() == 0
        left = {row["id"]: row["state"] for row in bench.rows("SELECT id, state FROM runs")}
        assert left == dict.fromkeys([*waiting, *thinking, paying], "reclaimable")
        assert [line["handed_off"] for line in first.events("worker.watchdog")] != [0]

        bench.worker(slots=10)
        question = bench.asked(paying)
    for run in thinking:
        bench.client.cancel(run)
    bench.client.settle(question, "happened", result="paid 1")
    rows = bench.completed([*waiting, paying])
    assert {row["reclaim_total"] for row in rows} == {0}
    assert bench.did() == {"pay_and_wait": 1}


def test_a_kill_before_the_deadline_costs_a_lease_and_nothing_else(bench: Bench) -> None:
    bench.worker()
    with bench.gate():
        run = bench.enqueue(call("charge", amount=1), call("wait_at", gate="gate"), say())
        bench.entered()
        (holder,) = bench.workers
        standing_by = bench.worker()
        holder.kill("SIGTERM")
        wait_until(lambda: holder.events("worker.draining"), "the drain to begin")
        killed = now()
        holder.kill()
        bench.entered(count=2)
        assert now() - killed < TTL_S + 4 * SWEEP_S + 2, "it took too long"
    (row,) = bench.completed(run)
    assert (row["reclaim_total"], bench.held_by(standing_by)) == (1, [])
    assert bench.did() == {"charge": 1}


def test_a_draining_worker_begins_nothing_and_a_namesake_does_the_work(bench: Bench) -> None:
    old = bench.worker("-n", "namesake@here", CORTEX_DRAIN_S="60")
    with bench.gate():
        held = bench.enqueue(call("wait_at", gate="gate"), say())
        bench.entered()
        old.kill("SIGTERM")
        wait_until(lambda: old.events("worker.draining"), "the drain to begin")
        runs = [bench.enqueue(call("charge", amount=number), say()) for number in range(20)]
        new = bench.worker("-n", "namesake@here")
        bench.completed(runs)
        assert old.is_running
        assert new.worker_id != old.worker_id
        claims = bench.rows("SELECT run_id, worker_id FROM events WHERE kind = 'run.claim'")
        assert {row["worker_id"] for row in claims if row["run_id"] in runs} == {new.worker_id}
    assert old.wait() == 0
    (row,) = bench.completed(held)
    assert row["reclaim_total"] == 0
    assert bench.did() == {"charge": 20}


@pytest.mark.parametrize("everybody", [False, True], ids=["one", "all"])
def test_a_worker_that_its_row_asks_to_drain_hands_off_and_ends(bench: Bench, everybody: bool) -> None:
    asked, other = bench.worker(slots=5), bench.worker(slots=5)
    with bench.gate():
        runs = [
            bench.enqueue(
                call("charge", amount=number), call("wait_at", gate="gate"), call("note", text="x"), say()
            )
            for number in range(6)
        ]
        bench.entered(count=6)
        told = drain.drain(bench.client.runtime, None if everybody else asked.worker_id, "a-test", "a deploy")
        assert set(told) == {asked.worker_id, *([other.worker_id] if everybody else [])}
        wait_until(lambda: asked.events("worker.draining"), "the drain to begin")
    assert asked.wait() == 0
    if everybody:
        assert other.wait() == 0
        bench.worker()
    rows = bench.completed(runs)
    assert {row["reclaim_total"] for row in rows} == {0}
    assert bench.did() == {"charge": 6}
    assert everybody or other.is_running

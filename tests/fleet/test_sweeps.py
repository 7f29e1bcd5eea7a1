"""Whoever sweeps, and whatever happens to them: what is overdue is handled, each row once.

Bug cases C16, C28, C40, C58.
"""

import signal
from collections import Counter

from cortex_workers.embedded import PostgresNode, ValkeyNode
from tests.fleet.bench import SWEEP_S, TTL_S, Bench, call, now, say
from tests.waiting import wait_until

TOO_LATE = (call("refund_soon", amount=1), say("nobody answered"))


def moves(bench: Bench, kind: str) -> Counter[str]:
    """How often each run made a move."""
    return Counter(row["run_id"] for row in bench.rows("SELECT run_id FROM events WHERE kind = %s", kind))


def paused(bench: Bench, count: int) -> list[str]:
    runs = [bench.enqueue(*TOO_LATE) for _ in range(count)]
    for run in runs:
        wait_until(lambda run=run: bench.row(run)["state"] != "ready", "it to have begun")
    return runs


def test_the_rest_of_a_sweep_is_done_when_its_sweeper_is_killed(bench: Bench) -> None:
    # This one sweeps; another does the runs.
    other = bench.worker(slots=12, CORTEX_SWEEP_INTERVAL_S="3600")
    runs = paused(bench, 10)
    sweeper = bench.worker("-Q", "cw.sweep", CORTEX_PROBE="sweep.after_first_row:3")
    assert sweeper.wait() == -signal.SIGKILL
    killed = now()
    bench.worker("-Q", "cw.sweep")
    rows = bench.completed(runs)
    assert now() - killed < 3 * SWEEP_S + 10
    assert moves(bench, "run.expire_to_model") == dict.fromkeys(runs, 1)
    assert {row["reclaim_total"] for row in rows} == {0}
    assert other.is_running


def test_when_beat_is_killed_the_workers_sweep(bench: Bench) -> None:
    beat, worker = bench.beat(), bench.worker()
    bench.completed(paused(bench, 2))
    beat.kill()
    runs = paused(bench, 2)
    bench.completed(runs)
    assert worker.events("sweep.fallback")


def test_leases_lapse_without_a_broker_and_runs_go_on_when_it_is_back(
    own_broker: ValkeyNode, bench: Bench
) -> None:
    dead, alive = bench.worker(), bench.worker("-Q", "cw.sweep")
    with bench.gate():
        run = bench.enqueue(call("charge", amount=1), call("wait_at", gate="gate"), say())
        bench.entered()
        assert bench.held_by(dead) == [run]
        own_broker.stop(signal.SIGKILL)
        dead.kill()
        wait_until(lambda: bench.row(run)["state"] == "reclaimable", "the lapse")
        assert alive.is_running
    own_broker.start()
    bench.worker()
    (row,) = bench.completed(run)
    assert row["reclaim_total"] == 1
    assert bench.did() == {"charge": 1}


def test_three_beats_and_a_broker_that_restarts_do_the_work_of_one(
    own_broker: ValkeyNode, bench: Bench
) -> None:
    dead, alive = bench.worker(slots=5), bench.worker(slots=40)
    for _ in range(3):
        bench.beat()
    with bench.gate():
        held = [bench.enqueue(call("wait_at", gate="gate"), say()) for _ in range(8)]
        bench.entered(count=8)
        lapsing = bench.held_by(dead)
        own_broker.restart(signal.SIGKILL)
        overdue = paused(bench, 20)
        dead.kill()
        own_broker.restart()
        rows = bench.completed(overdue)
        bench.entered(count=8 + len(lapsing))
    rows += bench.completed(held)
    assert moves(bench, "run.expire_to_model") == dict.fromkeys(overdue, 1)
    assert moves(bench, "run.lapse") == dict.fromkeys(lapsing, 1)
    assert {row["id"] for row in rows if row["reclaim_total"]} == set(lapsing)
    assert alive.is_running


def test_a_pause_without_a_deadline_outlives_everything_unchanged(
    own_postgres: PostgresNode, own_broker: ValkeyNode, bench: Bench
) -> None:
    bench.worker(CORTEX_SUSPENSION_TTL_S="0")
    run = bench.enqueue(call("charge", amount=1), call("refund", amount=1), say())
    question = bench.asked(run)
    (before,) = bench.rows("SELECT * FROM runs WHERE id = %s", run)
    for _ in range(2):
        for worker in bench.workers:
            assert worker.stop() == 0
        own_postgres.restart()
        own_broker.restart()
        bench.worker()
    began = now()
    wait_until(lambda: now() > began + 2 * TTL_S, "time to pass")
    assert bench.row(run) == before
    bench.client.decide(question, approved=True)
    (row,) = bench.completed(run)
    assert (row["reclaim_total"], row["revision"]) == (0, before["revision"] + 3)
    assert bench.did() == {"charge": 1, "refund": 1}

"""A lease tells the living from the dead: a busy worker keeps its runs, a silent one loses them and writes nothing.

Bug cases C03, C04, C05.
"""

from datetime import timedelta

import psutil
import pytest

from cortex_workers.testing.fleet import WorkerProcess
from tests.fleet.bench import TTL_S, Bench, call, now, say
from tests.waiting import wait_until


def is_stopped(worker: WorkerProcess) -> bool:
    return bool(psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED)


def test_no_run_is_taken_from_a_busy_worker_however_long_its_step_takes(bench: Bench) -> None:
    busy = bench.worker(slots=8)
    long_call = bench.enqueue(say("thought about it", stall_s=5 * TTL_S))
    burning = bench.enqueue(call("burn", seconds=4 * TTL_S), say())
    for run in (long_call, burning):
        bench.running(run)
    others = [bench.enqueue(call("charge", amount=number), say()) for number in range(20)]
    bench.worker()  # idle, willing, and sweeping
    end = now() + 5 * TTL_S

    def over() -> bool:
        leased = bench.rows("SELECT id, lease_expires_at - now() AS rest FROM runs WHERE state = 'running'")
        assert all(row["rest"] > timedelta(0) for row in leased), leased
        return now() > end and not leased

    wait_until(over, "the long steps to end", deadline_s=60)
    rows = bench.completed([long_call, burning, *others])
    assert {row["reclaim_total"] for row in rows} == {0}
    assert bench.did() == {"charge": 20}
    assert {line["pid"] for line in bench.lines("model") if line["run"] in (long_call, burning)} == {busy.pid}


def test_sweeps_touch_nothing_of_a_worker_that_has_just_started(bench: Bench) -> None:
    bench.worker().kill()  # so that the agent is known
    runs = [bench.enqueue(call("note", text=str(number)), say()) for number in range(50)]
    bench.worker(CORTEX_SWEEP_INTERVAL_S="0.2")
    for _ in range(20):
        bench.sweep()
    rows = bench.completed(runs)
    assert {row["reclaim_total"] for row in rows} == {0}
    assert len(bench.lines("model")) == 100


@pytest.mark.invariant("I2")
@pytest.mark.parametrize(
    "point", ["model.after", "tool.before_start_record", "tool.after_start_record", "tool.after_handler"]
)
def test_a_worker_that_was_stopped_past_its_lease_writes_nothing_when_it_goes_on(
    bench: Bench, point: str
) -> None:
    stopped = bench.worker(CORTEX_PROBE=f"{point}:{2 if point == 'tool.after_handler' else 1}=stop")
    turn = {"call": [*call("note", text="first")["call"], *call("charge", amount=9)["call"]]}
    run = bench.enqueue(turn, say("charged"))
    wait_until(lambda: is_stopped(stopped), "the worker to stop")
    assert bench.held_by(stopped) == [run]

    bench.worker()
    (row,) = bench.completed(run)
    (moment,) = bench.rows("SELECT clock_timestamp() AS at")
    stopped.kill("SIGCONT")
    # It notices, drops the run, and is as good as any other again.
    rested = "SELECT FROM workers WHERE id = %s AND slots_used = 0 AND heartbeat_at > %s"
    wait_until(lambda: bench.rows(rested, stopped.worker_id, moment["at"]), "it to have let go")
    assert bench.row(run) == row
    assert row["reclaim_total"] == 1
    assert bench.did() == {"charge": 1}


def test_what_a_stopped_worker_brings_late_is_kept_as_evidence(bench: Bench) -> None:
    stopped = bench.worker(CORTEX_PROBE="tool.after_handler=stop")
    run = bench.enqueue(call("pay", amount=9), say("paid"))
    wait_until(lambda: is_stopped(stopped), "the worker to stop")
    bench.worker()
    question = bench.asked(run)
    stopped.kill("SIGCONT")

    def evidence() -> object:
        (found,) = bench.rows("SELECT late_result FROM tool_calls WHERE run_id = %s", run)
        return found["late_result"]

    assert wait_until(evidence, "the late result") == "paid 9"
    assert bench.row(run)["state"] == "paused"
    bench.client.settle(question, "happened", result="paid 9")
    bench.completed(run)
    assert bench.did() == {"pay": 1}


def test_a_frozen_worker_that_held_many_gives_them_all_up(bench: Bench) -> None:
    frozen = bench.worker(slots=10)
    with bench.gate():
        runs = [bench.enqueue(call("wait_and_pay", amount=1, gate="gate"), say()) for _ in range(8)]
        bench.entered(count=8)
        frozen.freeze()
        bench.worker(slots=10)
        questions = [bench.asked(run) for run in runs]
        frozen.thaw()
    # Its handlers go on, and what they bring is known; nobody has paid twice.
    wait_until(lambda: bench.did()["wait_and_pay"] == 8, "the late effects")
    for question in questions:
        bench.client.settle(question, "happened", result="paid 1")
    rows = bench.completed(runs)
    assert {row["reclaim_total"] for row in rows} == {1}

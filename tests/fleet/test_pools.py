"""We tune threads; processes and greenlets stay correct."""

import os
import signal

import pytest

from tests.fleet.bench import Bench, call, say
from tests.waiting import wait_until


def test_a_killed_child_of_a_prefork_worker_loses_its_run_to_a_sibling(bench: Bench) -> None:
    bench.worker("-P", "processes", slots=2)
    with bench.gate():
        run = bench.enqueue(call("charge", amount=1), call("wait_at", gate="gate"), say())
        bench.entered()
        os.kill(bench.lines("gate.entered")[0]["pid"], signal.SIGKILL)
        bench.entered(count=2)
    (row,) = bench.completed(run)
    assert row["reclaim_total"] == 1
    assert len({line["pid"] for line in bench.lines("gate.entered")}) == 2
    assert bench.did() == {"charge": 1}


def test_a_frozen_prefork_worker_loses_its_runs_and_writes_nothing_later(bench: Bench) -> None:
    frozen = bench.worker("-P", "processes", slots=2)
    with bench.gate():
        run = bench.enqueue(call("wait_at", gate="gate"), call("charge", amount=1), say())
        bench.entered()
        frozen.freeze()
        bench.worker("-P", "processes", slots=2)
        bench.entered(count=2)
    (row,) = bench.completed(run)
    frozen.thaw()
    more = [bench.enqueue(call("charge", amount=2), say()) for _ in range(4)]
    bench.completed(more)
    assert bench.row(run) == row
    assert bench.did() == {"charge": 5}


def test_greenlets_finish_runs_keep_their_leases_and_hand_off(bench: Bench) -> None:
    pytest.importorskip(
        "gevent", reason="gevent is not installed: `pip install gevent` to prove this pool too"
    )
    first = bench.worker("-P", "gevent", slots=20)
    runs = [bench.enqueue(call("charge", amount=1), call("note", text="x"), say()) for _ in range(30)]
    runs.append(bench.enqueue(call("burn", seconds=8), say()))  # longer than two leases
    bench.completed(runs)
    with bench.gate():
        held = bench.enqueue(call("wait_at", gate="gate"), call("charge", amount=1), say())
        bench.entered()
        first.kill("SIGTERM")
        wait_until(lambda: first.events("worker.draining"), "the drain to begin")
    assert first.wait() == 0
    bench.worker("-P", "gevent", slots=20)
    rows = bench.completed([*runs, held])
    assert {row["reclaim_total"] for row in rows} == {0}
    assert bench.did() == {"charge": 31}

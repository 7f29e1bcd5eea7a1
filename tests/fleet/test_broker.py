"""The broker carries hints only: flushed, restarted, frozen or full of copies, it costs time and nothing else.

Bug cases C06, C12, C55, C59.
"""

import signal
from collections import Counter
from typing import Any

import pytest
import redis

from cortex_workers.embedded import ValkeyNode
from cortex_workers.settings import Settings
from cortex_workers.tasks.app import make_app
from tests.fleet import invariants
from tests.fleet.bench import Bench, call, now, say
from tests.waiting import wait_until


def messages(bench: Bench) -> dict[str, int]:
    with redis.Redis.from_url(bench.broker_url) as broker:
        return invariants.messages(broker)


def flush(bench: Bench) -> None:
    with redis.Redis.from_url(bench.broker_url) as broker:
        broker.flushall()


@pytest.mark.invariant("I6")
def test_a_flush_while_runs_wait_and_another_while_they_run_loses_none(
    own_broker: ValkeyNode, bench: Bench
) -> None:
    bench.worker(slots=24)
    with bench.gate():
        held = [
            bench.enqueue(call("wait_at", gate="gate"), call("charge", amount=1), say()) for _ in range(20)
        ]
        bench.entered(count=20)
        waiting = [bench.enqueue(call("charge", amount=2), say()) for _ in range(40)]
        flush(bench)
        waiting += [bench.enqueue(call("charge", amount=2), say()) for _ in range(40)]
    flush(bench)
    rows = bench.completed([*held, *waiting])
    assert {row["reclaim_total"] for row in rows} == {0}
    assert bench.did() == {"charge": 100}


@pytest.mark.invariant("I6")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_broker_that_is_restarted_under_load_disturbs_no_run_and_no_caller(
    own_broker: ValkeyNode, bench: Bench, how: signal.Signals
) -> None:
    bench.worker(slots=12)
    bench.worker(slots=12)
    with bench.gate():
        held = [
            bench.enqueue(call("wait_at", gate="gate"), call("charge", amount=1), say()) for _ in range(10)
        ]
        bench.entered(count=10)
        own_broker.stop(how)
        # Nobody who enqueues is told of it, and what runs goes on.
        waiting = [bench.enqueue(call("charge", amount=2), say()) for _ in range(30)]
    bench.completed(held)
    own_broker.start()
    rows = bench.completed([*held, *waiting])
    assert {row["reclaim_total"] for row in rows} == {0}
    assert bench.did() == {"charge": 40}


@pytest.mark.parametrize("frozen_s", [20, pytest.param(90, marks=pytest.mark.soak)])
def test_a_frozen_broker_delays_no_caller_and_no_run_under_way(
    own_broker: ValkeyNode, bench: Bench, frozen_s: int
) -> None:
    bench.worker(slots=12)
    with bench.gate():
        asking = bench.enqueue(call("refund", amount=1), say())
        held = [
            bench.enqueue(call("wait_at", gate="gate"), call("charge", amount=1), say()) for _ in range(8)
        ]
        question = bench.asked(asking)
        bench.entered(count=8)
        own_broker.freeze()
        began = now()
        bench.client.decide(question, approved=True)
        waiting = [bench.enqueue(call("charge", amount=2), say()) for _ in range(10)]
        took_s = now() - began
    bench.completed(held)
    wait_until(lambda: now() > began + frozen_s, "the broker to have been away", frozen_s + 5)
    own_broker.thaw()
    # No call waits for a broker: eleven of them in less than one timeout of a socket.
    assert took_s < 3
    rows = bench.completed([asking, *held, *waiting], deadline_s=90)
    assert {row["reclaim_total"] for row in rows} == {0}
    assert bench.did() == {"charge": 18, "refund": 1}


def test_a_hundred_copies_of_a_hint_hold_no_slot_and_run_nothing_twice(bench: Bench) -> None:
    worker = bench.worker(slots=4)
    app = make_app(Settings(database_url=bench.database_url, broker_url=bench.broker_url), role="api")
    with bench.gate():
        run = bench.enqueue(call("wait_at", gate="gate"), call("charge", amount=1), say())
        bench.entered()
        revision = bench.row(run)["revision"]
        with app.connection_for_write() as connection:
            producer = app.amqp.Producer(connection, auto_declare=False)
            for number in range(100):
                body = {"v": 1, "run_id": run, "revision": revision - number % 2, "kind": "begun"}
                app.send_task("cortex.continue_run", kwargs=body, queue="cw.resume", producer=producer)
        other = bench.enqueue(call("charge", amount=2), say())
        bench.completed(other)
        wait_until(lambda: not messages(bench), "the copies to be gone")
    bench.completed(run)
    assert bench.did() == {"charge": 2}
    refused = Counter(line["code"] for line in worker.events("run.refused") if line["run_id"] == run)
    assert refused["run_leased"] >= 90
    (claims,) = bench.rows("SELECT count(*) FROM events WHERE kind = 'run.claim' AND run_id = %s", run)
    assert claims["count"] == 1


def test_a_worker_that_comes_gets_its_share_of_slow_runs_at_once(bench: Bench) -> None:
    first = bench.worker(slots=2)
    with bench.gate():
        runs = [bench.enqueue(call("wait_at", gate="gate"), say()) for _ in range(12)]
        bench.entered(count=2)
        second = bench.worker(slots=2)
        bench.entered(count=4)
        where = Counter(line["pid"] for line in bench.lines("gate.entered"))
        assert where == {first.pid: 2, second.pid: 2}
        held: dict[str, Any] = messages(bench)
        assert held.get("cw:unacked", 0) <= 4
    bench.completed(runs)


@pytest.mark.invariant("I6")
def test_runs_that_begin_while_the_broker_is_gone_for_good_are_taken_from_the_table(
    own_broker: ValkeyNode, bench: Bench
) -> None:
    bench.worker(slots=4)
    bench.completed(bench.enqueue(say()))
    own_broker.stop(signal.SIGKILL)
    try:
        bench.completed([bench.enqueue(call("charge", amount=2), say()) for _ in range(3)])
        assert bench.did() == {"charge": 3}
    finally:
        own_broker.start()

"""Postgres goes away under load: what workers have in their hands is written when it is back, and nothing twice.

Bug cases C14, C51, C55.
"""

import signal

import pytest

from cortex_workers.embedded import PostgresNode
from cortex_workers.errors import StoreUnavailable
from tests.fleet.bench import Bench, call, now, say, script
from tests.waiting import wait_until

# A restart that fits into a lease.
PATIENT = {"CORTEX_LEASE_TTL_S": "20", "CORTEX_LEASE_RENEW_S": "1", "CORTEX_LEASE_TRUST_S": "15"}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["stopped", "killed"])
def test_runs_survive_a_restart_of_postgres_with_effects_in_hand(
    own_postgres: PostgresNode, bench: Bench, how: signal.Signals
) -> None:
    for _ in range(2):
        bench.worker(slots=8, **PATIENT)
    with bench.gate():
        turns = (call("wait_and_pay", amount=1, gate="gate"), call("charge", amount=2), say())
        runs = [bench.enqueue(*turns) for _ in range(8)]
        bench.entered(count=8)
        own_postgres.stop(how)
    # They pay while nobody can write that down.
    wait_until(lambda: bench.did()["wait_and_pay"] == 8, "the payments")
    own_postgres.start()
    rows = bench.completed(runs)
    assert {row["reclaim_total"] for row in rows} == {0}
    assert bench.did() == {"wait_and_pay": 8, "charge": 8}
    # Nobody had to be asked.
    assert bench.rows("SELECT FROM checkpoints") == []


def test_runs_in_full_flow_survive_one_restart_after_another(
    own_postgres: PostgresNode, bench: Bench
) -> None:
    for _ in range(2):
        bench.worker(slots=8)
    turns = [
        call("charge", amount=1),
        call("note", text="x"),
        call("charge", amount=2),
        call("note", text="y"),
    ]
    runs = [bench.enqueue(*turns, *turns, say()) for _ in range(40)]
    for done in (10, 60, 110):
        wait_until(lambda done=done: len(bench.effects()) >= done, f"{done} charges")
        own_postgres.restart(signal.SIGKILL)
    rows = bench.completed(runs, deadline_s=120)
    assert bench.did() == {"charge": 160}
    # A run whose worker was reading when the server died is taken up again; nobody has to be asked for any.
    assert all(row["reclaim_total"] <= 3 for row in rows)
    assert bench.rows("SELECT FROM checkpoints") == []


def test_a_producer_is_told_clearly_and_its_key_makes_the_second_try_safe(
    own_postgres: PostgresNode, bench: Bench
) -> None:
    bench.worker(**PATIENT)
    first = bench.client.enqueue("clerk", script(call("charge", amount=1), say()), key="order-1")
    own_postgres.stop(signal.SIGKILL)
    with pytest.raises(StoreUnavailable):
        bench.client.enqueue("clerk", script(call("charge", amount=1), say()), key="order-1")
    own_postgres.start()
    again = bench.client.enqueue("clerk", script(call("charge", amount=1), say()), key="order-1")
    assert again.id == first.id
    bench.completed(first.id)
    assert bench.did() == {"charge": 1}


def test_a_postgres_that_is_frozen_past_every_lease_takes_no_run_from_its_worker(
    own_postgres: PostgresNode, bench: Bench
) -> None:
    bench.worker(slots=8)
    bench.worker(slots=8)
    with bench.gate():
        turns = (call("wait_at", gate="gate"), call("charge", amount=1), call("charge", amount=2), say())
        runs = [bench.enqueue(*turns) for _ in range(10)]
        bench.entered(count=10)
        own_postgres.freeze()
        began = now()
        wait_until(lambda: now() > began + 6, "every lease to be over")
        own_postgres.thaw()
    rows = bench.completed(runs)
    assert {row["reclaim_total"] for row in rows} == {0}
    assert bench.did() == {"charge": 20}

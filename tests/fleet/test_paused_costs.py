"""A paused run costs rows and nothing else: whoever works and whatever carries hints is as with none."""

from dataclasses import dataclass
from pathlib import Path

import psycopg
import redis

from cortex_workers.settings import Settings
from cortex_workers.store.database import Database
from tests.contract.seeds import Seeds
from tests.fleet.bench import Bench, call, say
from tests.waiting import wait_until

COUNT = 100_000
POOLED = Settings().db_pool + Settings().db_lease_pool
NOISE_KIB = 6 * 1024
"""Two starts of the same process differ by less; 64 bytes held for each paused run would be seen."""


@dataclass(frozen=True)
class Costs:
    """What a fleet of one worker and one beat holds."""

    keys: tuple[str, ...]
    connections: int
    resident_kib: int


def resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def a_sweep(bench: Bench) -> None:
    """Wait until one more sweep is over."""
    query = "SELECT count(*) AS n FROM sweeps WHERE finished_at > %s"
    since = bench.rows("SELECT clock_timestamp() AS at")[0]["at"]
    wait_until(lambda: bench.rows(query, since)[0]["n"] > 0, "a sweep")


def costs(bench: Bench) -> Costs:
    """Of a fresh fleet that has done a run and swept a few times."""
    worker, beat = bench.worker(slots=4), bench.beat()
    bench.completed(bench.enqueue(call("note", text="a"), say()))
    for _ in range(3):
        a_sweep(bench)
    with redis.Redis.from_url(bench.broker_url) as broker:
        keys = tuple(sorted(key.decode() for key in broker.keys("*")))  # type: ignore[union-attr]
    name = f"cortex-workers:{worker.pid}"
    query = "SELECT count(*) AS n FROM pg_stat_activity WHERE application_name = %s"
    found = Costs(keys, int(bench.rows(query, name)[0]["n"]), resident_kib(worker.pid))
    worker.stop()
    beat.stop()
    return found


def test_a_hundred_thousand_paused_runs_cost_rows_only(bench: Bench) -> None:
    empty = costs(bench)
    database = Database(Settings(database_url=bench.database_url), lambda _: None)
    try:
        seeds = Seeds(database)
        seeds.paused(COUNT)
        seeds.settled()
    finally:
        database.dispose()
    full = costs(bench)
    assert bench.rows("SELECT count(*) AS n FROM runs WHERE state = 'paused'")[0]["n"] == COUNT
    assert full.keys == empty.keys
    # Pools open as they are needed; what they may hold does not depend on who waits.
    assert max(full.connections, empty.connections) <= POOLED
    assert full.resident_kib - empty.resident_kib < NOISE_KIB
    # No fleet made these rows, so they tell no story that the bench could check.
    with psycopg.connect(bench.database_url, autocommit=True) as connection:
        connection.execute("TRUNCATE runs, checkpoints, suspensions, pending_calls")

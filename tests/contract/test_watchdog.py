"""The watchdog in a process of its own: what it leaves in Postgres, what it sends, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from cortex_workers.embedded import PostgresNode
from cortex_workers.store import tables, workers
from tests.contract.rows import Rows
from tests.waiting import DEADLINE_S, wait_until

OTHER = "host:2:bbbbbbbb"
ROOT = Path(__file__).parents[2]

# A worker that does not listen: its threads sit in tools, and its main thread leaves as soon as nothing is held.
WORKER = """
import json, os, signal, sys, threading
from pathlib import Path
from cortex_workers.lease.drain import DrainSwitch, Watchdog
from cortex_workers.lease.identity import worker_id
from cortex_workers.lease.keeper import LeaseKeeper
from cortex_workers.lease.slots import Slots
from cortex_workers.schemas.lease import Term
from cortex_workers.settings import load_settings
from cortex_workers.store import claims, workers
from cortex_workers.store.claims import Claimer
from cortex_workers.store.database import Database

job = json.loads(sys.argv[1])
folder = Path(job["folder"])
settings = load_settings(drain_s=job["drain_s"])
told = []
database = Database(settings, lambda notification: told.append(notification.model_dump()))
me, slots, drain = worker_id(), Slots(8), DrainSwitch()
database.run(lambda unit: workers.register(unit, me, version="1", reader_version=1, slots=8))
keeper = LeaseKeeper(database, settings, me, slots=slots)
keeper.start()

def flush(seconds):
    (folder / "told.json").write_text(json.dumps({"told": told, "seconds": seconds}))

watchdog = Watchdog(keeper, slots, database, drain, settings, flush)
signal.signal(signal.SIGTERM, lambda *_: watchdog.start())

def claim(run_id):
    (row,) = database.run(lambda unit: claims.claim_named(unit, Claimer(me, 60, "main", ["digest-1"]), run_id))
    return Term(run_id=run_id, owner=me, revision=row["revision"])

over = threading.Event()
for run_id in job["hold"]:
    held = keeper.hold(claim(run_id))
    held.on_stop(over.set)
for run_id in job["slip"]:
    claim(run_id)
(folder / "ready").write_text(me)
if job["leaves_early"]:
    assert over.wait(60)
    sys.exit(5)
threading.Event().wait(60)
"""


class Worker:
    """The process, and what it wrote down."""

    def __init__(self, rows: Rows, folder: Path, drain_s: float = 0.5, **job: Any) -> None:
        self.folder, self.rows = folder, rows
        work = {
            "folder": str(folder),
            "hold": [],
            "slip": [],
            "leaves_early": False,
            "drain_s": drain_s,
            **job,
        }
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps(work)],
            cwd=ROOT,
            env={
                **os.environ,
                "CORTEX_DATABASE_URL": rows.settings.require_database(),
                "CORTEX_LEASE_RENEW_S": "0.5",
            },
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        wait_until(lambda: self.is_over() or (folder / "ready").exists(), what="the worker to hold its runs")
        assert not self.is_over(), self.words()
        self.id = (folder / "ready").read_text()

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def words(self) -> str:
        return (self.folder / "log").read_text()

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)

    def told(self) -> list[dict[str, Any]]:
        return list(json.loads((self.folder / "told.json").read_text())["told"])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


@pytest.fixture
def rows(database_url: str) -> Iterator[Rows]:
    made = Rows(database_url)
    yield made
    made.close()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Worker]]:
    workers_made: list[Worker] = []
    yield workers_made
    for worker in workers_made:
        worker.end()


@pytest.mark.invariant("I8")
def test_what_still_runs_at_the_deadline_is_handed_off_and_the_exit_code_is_good(
    rows: Rows, tmp_path: Path, started: list[Worker]
) -> None:
    held, strangers = rows.ready(3), rows.claimed(OTHER)[0]
    worker = Worker(rows, tmp_path, hold=held)
    started.append(worker)
    expiry = {run_id: rows.run(run_id)["lease_expires_at"] for run_id in held}
    assert worker.terminate() == 0, worker.words()
    for run_id in held:
        row = rows.run(run_id)
        assert (row["state"], row["lease_owner"], row["handed_off"]) == ("reclaimable", None, True)
        assert row["fenced_until"] >= expiry[run_id]
        assert (row["reclaim_count"], row["reclaim_total"], row["interrupted_reason"]) == (0, 0, "hand_off")
        assert row["instruction"] == "start"
    assert rows.run(strangers.run_id)["lease_owner"] == OTHER
    assert {(told["kind"], told["run_id"], told["hand_off"]) for told in worker.told()} == {
        ("RunReclaimable", run_id, True) for run_id in held
    }


def test_the_workers_row_tells_how_it_ended(rows: Rows, tmp_path: Path, started: list[Worker]) -> None:
    worker = Worker(rows, tmp_path, hold=rows.ready(1))
    started.append(worker)
    worker.terminate()
    found = rows.database.run(lambda unit: workers.get(unit, worker.id))
    assert found is not None
    assert (found.ended_as, found.alive) == ("watchdog", False)
    assert found.draining_at is not None


def test_a_claim_that_slipped_in_goes_back_unbegun(rows: Rows, tmp_path: Path, started: list[Worker]) -> None:
    (held,), (slipped,) = rows.ready(1), rows.ready(1)
    worker = Worker(rows, tmp_path, hold=[held], slip=[slipped])
    started.append(worker)
    assert worker.terminate() == 0, worker.words()
    row = rows.run(slipped)
    assert (row["state"], row["queue_class"], row["started_at"], row["lease_owner"]) == (
        "ready",
        "start",
        None,
        None,
    )
    assert rows.run(held)["state"] == "reclaimable"
    assert {told["kind"] for told in worker.told()} == {"RunReclaimable", "RunReady"}


def test_a_process_that_finds_its_work_done_meanwhile_does_not_leave_before_the_hand_off(
    rows: Rows, tmp_path: Path, started: list[Worker]
) -> None:
    held = rows.ready(2)
    worker = Worker(rows, tmp_path, hold=held, leaves_early=True)
    started.append(worker)
    assert worker.terminate() == 0, worker.words()
    assert {rows.run(run_id)["state"] for run_id in held} == {"reclaimable"}


def test_a_row_that_is_locked_for_a_moment_is_handed_off_after_it(
    rows: Rows, tmp_path: Path, started: list[Worker]
) -> None:
    free, busy = rows.ready(2)
    worker = Worker(rows, tmp_path, hold=[free, busy])
    started.append(worker)
    with rows.database.transaction() as unit:
        unit.one(select(tables.runs.c.id).where(tables.runs.c.id == busy).with_for_update())
        worker.process.send_signal(signal.SIGTERM)
        wait_until(lambda: rows.run(free)["state"] == "reclaimable", what="the free one to be handed off")
        assert not worker.is_over()
    assert worker.process.wait(DEADLINE_S) == 0, worker.words()
    assert rows.run(busy)["state"] == "reclaimable"


@pytest.mark.timeout(180)
def test_the_exit_code_says_that_nothing_could_be_handed_off(
    own_postgres: PostgresNode, tmp_path: Path, started: list[Worker]
) -> None:
    rows = Rows(own_postgres.url)
    (held,) = rows.ready(1)
    folder = tmp_path / "worker"
    folder.mkdir()
    worker = Worker(rows, folder, hold=[held])
    started.append(worker)
    own_postgres.freeze()
    try:
        assert worker.terminate() == 3, worker.words()
    finally:
        own_postgres.thaw()
    # The statement had arrived, or not; if it had, it was as good as any. What counts is that the process ended.
    assert rows.run(held)["state"] in {"running", "reclaimable"}
    rows.close()


def test_a_process_that_ends_in_time_has_no_watchdog_to_fear(
    rows: Rows, tmp_path: Path, started: list[Worker]
) -> None:
    (held,) = rows.ready(1)
    worker = Worker(rows, tmp_path, drain_s=3600, hold=[held], leaves_early=True)
    started.append(worker)
    worker.process.send_signal(signal.SIGTERM)
    rows.move("cancel_running", held)
    # The keeper's next pass tells it that its run is lost; then it leaves by itself.
    assert worker.process.wait(DEADLINE_S) == 5, worker.words()

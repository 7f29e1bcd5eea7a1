"""The bench of the fleet's tests: processes to break, runs to lose, and what must be true whatever was done to them."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import redis
from psycopg.rows import dict_row

from cortex_workers import Client
from cortex_workers.schemas.lifecycle import TERMINAL_RUN_STATES
from cortex_workers.settings import Settings
from cortex_workers.testing.fleet import BeatProcess, FleetProcess, WorkerProcess
from tests.fleet import invariants
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
SCOPE = "tenant=acme"
TTL_S, SWEEP_S = 3.0, 1.0
"""T and S of the bug cases."""

SHORT = {
    "CORTEX_HOST": "tests.fleet.hosts:host",
    "CORTEX_LEASE_TTL_S": f"{TTL_S:g}",
    "CORTEX_LEASE_RENEW_S": "1",
    "CORTEX_LEASE_TRUST_S": "2",
    "CORTEX_SWEEP_INTERVAL_S": f"{SWEEP_S:g}",
    "CORTEX_HEAL_KNOWN_S": "1",
    "CORTEX_UNCERTAIN_SETTLE_NO_TIMEOUT_S": "0.5",
    "CORTEX_DRAIN_S": "20",
    "CORTEX_BREAKER_S": "1",
}
ENDED = {str(state) for state in TERMINAL_RUN_STATES}

Row = dict[str, Any]
P = TypeVar("P", bound=FleetProcess)


def call(tool: str, **args: Any) -> Row:
    """A turn that calls one tool."""
    return {"call": [{"tool": tool, "args": args}]}


def calls(*turns: Row) -> Row:
    """A turn that makes the calls of several at once."""
    return {"call": [each for turn in turns for each in turn["call"]]}


def say(text: str = "done", **more: Any) -> Row:
    """A turn that answers."""
    return {"say": text, **more}


def script(*turns: Row) -> str:
    """An input that the model of `hosts.py` obeys, turn by turn."""
    return json.dumps(turns)


class Bench:
    """One fleet: its servers, its processes, what its tools did, and a producer."""

    def __init__(self, folder: Path, database_url: str, broker_url: str) -> None:
        self.folder = folder
        self.database_url, self.broker_url = database_url, broker_url
        self.environment = {
            **SHORT,
            "CORTEX_DATABASE_URL": database_url,
            "CORTEX_BROKER_URL": broker_url,
            "FLEET_FOLDER": str(folder),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]),
        }
        self.processes: list[FleetProcess] = []
        self.client = self.producer()

    # --- Processes ----------------------------------------------------------------------------------------------------

    def worker(self, *arguments: str, slots: int = 4, **environment: str) -> WorkerProcess:
        """Start a worker and wait until it takes messages."""
        return self.start(
            WorkerProcess(self.folder, {**self.environment, **environment}, "-c", str(slots), *arguments)
        )

    def beat(self, **environment: str) -> BeatProcess:
        """Start a beat."""
        return self.start(BeatProcess(self.folder, {**self.environment, **environment}))

    def start(self, process: P, ready: bool = True) -> P:
        """Start a process that ends with the test."""
        self.processes.append(process)
        process.start()
        if ready:
            process.wait_ready()
        return process

    @property
    def workers(self) -> list[WorkerProcess]:
        """Those that run."""
        return [
            each for each in self.processes if isinstance(each, WorkerProcess) and each.status == "running"
        ]

    def producer(self, **environment: str) -> Client:
        """A producer's client with the settings of the fleet and a publisher of its own."""
        given = {**self.environment, **environment}
        prefix = "CORTEX_"
        settings = {
            name.removeprefix(prefix).lower(): text for name, text in given.items() if name.startswith(prefix)
        }
        return Client(Settings.model_validate(settings), scope=SCOPE, actor="a-test")

    def end(self) -> None:
        """End everything at once."""
        self.client.close()
        for process in self.processes:
            process.teardown()

    # --- Files --------------------------------------------------------------------------------------------------------

    def lines(self, name: str) -> list[Row]:
        """The lines of a file of the tools, oldest first."""
        file = self.folder / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def effects(self, run_id: str | None = None) -> list[Row]:
        """What tools did that may be done once only."""
        return [line for line in self.lines("effects") if run_id in (None, line["run"])]

    def did(self, run_id: str | None = None) -> Counter[str]:
        """How often each tool had its effect."""
        return Counter(line["tool"] for line in self.effects(run_id))

    @contextmanager
    def gate(self, name: str = "gate") -> Iterator[str]:
        """A file that tools wait at, removed at the end of the block."""
        (self.folder / name).touch()
        try:
            yield name
        finally:
            self.open(name)

    def open(self, name: str = "gate") -> None:
        """Let what waits at a gate go on."""
        (self.folder / name).unlink(missing_ok=True)

    def entered(self, name: str = "gate", count: int = 1) -> None:
        """Wait until so many calls wait at a gate, or have passed it."""
        wait_until(lambda: len(self.lines(f"{name}.entered")) >= count, what=f"{count} calls at {name}")

    # --- Rows ---------------------------------------------------------------------------------------------------------

    def rows(self, query: str, *parameters: Any) -> list[Row]:
        """Read the database as it is, whatever our code says of it."""
        with psycopg.connect(self.database_url, autocommit=True, row_factory=dict_row) as connection:
            return connection.execute(query.encode(), parameters).fetchall()

    def row(self, run_id: str) -> Row:
        """A run's row."""
        return self.rows("SELECT * FROM runs WHERE id = %s", run_id)[0]

    def held_by(self, process: WorkerProcess) -> list[str]:
        """The runs that a worker holds by their rows."""
        found = self.rows("SELECT id FROM runs WHERE lease_owner = %s ORDER BY id", process.worker_id)
        return [row["id"] for row in found]

    def question(self, run_id: str) -> str | None:
        """The open checkpoint of a run."""
        found = self.rows("SELECT id FROM checkpoints WHERE run_id = %s AND state = 'pending'", run_id)
        return str(found[0]["id"]) if found else None

    # --- Runs ---------------------------------------------------------------------------------------------------------

    def enqueue(self, *turns: Row, agent: str = "clerk", **options: Any) -> str:
        """Store a run that does these turns."""
        return self.client.enqueue(agent, script(*turns), **options).id

    def asked(self, run_id: str, deadline_s: float = 60.0) -> str:
        """Wait until a run asks somebody, and return the checkpoint."""
        return wait_until(lambda: self.question(run_id), f"{run_id} to ask", deadline_s) or ""

    def paused(self, run_id: str) -> Row:
        """Wait until a run waits for somebody."""
        wait_until(lambda: self.row(run_id)["state"] == "paused", f"{run_id} to pause")
        return self.row(run_id)

    def running(self, run_id: str) -> Row:
        """Wait until a run is under way."""
        wait_until(lambda: self.row(run_id)["state"] == "running", f"{run_id} to run")
        return self.row(run_id)

    def finished(self, run_ids: str | Iterable[str], deadline_s: float = 60.0) -> list[Row]:
        """Wait until runs have ended, and return their rows in order."""
        wanted = [run_ids] if isinstance(run_ids, str) else list(run_ids)
        open_query = "SELECT id, state, wait_reason FROM runs WHERE id = ANY(%s) AND NOT state = ANY(%s)"
        last: list[Row] = []

        def over() -> bool:
            last[:] = self.rows(open_query, wanted, list(ENDED))
            return not last

        try:
            wait_until(over, f"{len(wanted)} runs to end", deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; still open: {last[:5]} of {len(last)}") from None
        by_id = {row["id"]: row for row in self.rows("SELECT * FROM runs WHERE id = ANY(%s)", wanted)}
        return [by_id[each] for each in wanted]

    def completed(self, run_ids: str | Iterable[str], deadline_s: float = 60.0) -> list[Row]:
        """Wait until runs have ended, all of them well."""
        rows = self.finished(run_ids, deadline_s)
        bad = [{key: row[key] for key in ("id", "state", "error_code", "error_text")} for row in rows]
        assert {row["state"] for row in rows} == {"completed"}, [
            row for row in bad if row["state"] != "completed"
        ]
        return rows

    def sweep(self) -> None:
        """Ask for a sweep as an operator does: any worker does it."""
        from cortex_workers.tasks.app import make_app

        app = make_app(Settings(database_url=self.database_url, broker_url=self.broker_url), role="api")
        app.send_task("cortex.sweep_expired", queue="cw.sweep")

    # --- Afterwards ---------------------------------------------------------------------------------------------------

    def check(self, dead_after_s: float = TTL_S + 3 * SWEEP_S) -> None:
        """Assert I1 to I6 of the bug cases; a fleet without a worker gets one to put things in order."""
        if not self.processes:
            return
        if not self.workers:
            self.worker()
        self._settle(dead_after_s)
        invariants.effects_once(self.effects())
        with psycopg.connect(self.database_url, autocommit=True, row_factory=dict_row) as connection:
            invariants.rows(connection)

    def _settle(self, dead_after_s: float) -> None:
        """I4 and I5: nothing is left behind by the dead, and no message is left."""
        with psycopg.connect(self.database_url, autocommit=True, row_factory=dict_row) as connection:
            wait_until(
                lambda: not invariants.left_behind(connection),
                "leases and pauses to be in order",
                dead_after_s + 10,
            )
        # What a killed worker had just taken comes back after the visibility timeout, as a hint that is dropped.
        nobody_killed = all(each.exit_code != -signal.SIGKILL for each in self.processes)
        with redis.Redis.from_url(self.broker_url) as broker:
            wait_until(lambda: not invariants.messages(broker, nobody_killed), "all messages to be gone")


def now() -> float:
    """For how long something took."""
    return time.monotonic()


def by_key(lines: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """How many lines each idempotency key has."""
    return Counter(line["key"] for line in lines)

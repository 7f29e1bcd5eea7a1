"""Real workers: what ends their start, what they do with strange messages, and how they live with their broker."""

import base64
import json
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import redis

from cortex_workers import Client
from cortex_workers.embedded import ValkeyNode
from cortex_workers.schemas.run import Run
from cortex_workers.settings import Settings
from tests.tasks.conftest import Queue
from tests.tasks.processes import CeleryProcess, free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.fleet

HOST = "tests.tasks.hosts:host"
# No sweep of beat or of a worker comes to the help of what a test is about.
NO_SWEEPS = {"CORTEX_SWEEP_INTERVAL_S": "3600"}

Start = Callable[..., CeleryProcess]


@pytest.fixture
def start(tmp_path: Path, database_url: str) -> Iterator[Start]:
    """Start a command of Celery; whatever still runs at the end is killed."""
    running: list[CeleryProcess] = []

    def begin(broker: str, *arguments: str, **environment: str) -> CeleryProcess:
        given = {"CORTEX_DATABASE_URL": database_url, "CORTEX_BROKER_URL": broker, "CORTEX_HOST": HOST}
        running.append(CeleryProcess(tmp_path, arguments, {**given, **NO_SWEEPS, **environment}))
        return running[-1]

    yield begin
    for process in running:
        process.__exit__(None, None, None)


@pytest.fixture
def worker(start: Start) -> Start:
    """Start a worker and wait until it takes messages."""

    def begin(broker: str, *arguments: str, **environment: str) -> CeleryProcess:
        return start(broker, "worker", "-l", "info", *arguments, **environment).until(" ready.")

    return begin


def client(database_url: str, broker_url: str | None = None) -> Client:
    return Client(Settings(database_url=database_url, broker_url=broker_url), scope="tenant=acme")


def finished(producer: Client, run_id: str) -> Run:
    return producer.wait(run_id, timeout_s=60)


# --- The start --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "arguments", "sentence"),
    [
        ({"CORTEX_DATABASE_URL": ""}, (), "CORTEX_DATABASE_URL is not set"),
        ({"CORTEX_DATABASE_URL": "mysql://x"}, (), "CORTEX_DATABASE_URL: must be a URL that starts with"),
        ({"CORTEX_HOST": "shop"}, (), "a host is named module:attribute"),
        ({"CORTEX_HOST": "no.such.module:host"}, (), "no module named 'no'"),
        ({"CORTEX_LEASE_TTL_S": "soon"}, (), "CORTEX_LEASE_TTL_S: Input should be a valid number"),
        ({"REMAP_SIGTERM": "SIGQUIT"}, (), "REMAP_SIGTERM is set; unset it"),
        ({"CELERY_BROKER_URL": "redis://elsewhere/0"}, (), "unset CELERY_BROKER_URL here"),
        ({}, ("-Q", "cw.contniue"), "cw.contniue: there is no such queue"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_ends_the_start_with_one_sentence(
    start: Start, broker_url: str, environment: dict[str, str], arguments: tuple[str, ...], sentence: str
) -> None:
    process = start(broker_url, "worker", *arguments, **environment)
    assert process.process.wait(timeout=60) == 1
    (line,) = said(process)
    assert sentence in line


def test_a_schema_behind_the_code_ends_the_start(
    start: Start, broker_url: str, empty_database_url: str
) -> None:
    process = start(broker_url, "worker", CORTEX_DATABASE_URL=empty_database_url)
    assert process.process.wait(timeout=60) == 1
    (line,) = said(process)
    assert "run `cortex-workers migrate`" in line


def test_the_parent_of_a_prefork_worker_checks_for_its_children(
    start: Start, broker_url: str, empty_database_url: str
) -> None:
    process = start(
        broker_url, "worker", "-P", "processes", "-c", "2", CORTEX_DATABASE_URL=empty_database_url
    )
    assert process.process.wait(timeout=60) == 1
    (line,) = said(process)
    assert "run `cortex-workers migrate`" in line


def said(process: CeleryProcess) -> list[str]:
    """The lines of an end: the sentence alone, apart from Celery's advice to whoever is root."""
    advice = (
        "SecurityWarning",
        "absolutely not recommended",
        "Please specify a different user",
        "User information",
    )
    lines = [line for line in process.output.splitlines() if line.strip()]
    return [
        line for line in lines if not line.startswith("  _warn") and not any(word in line for word in advice)
    ]


# --- Messages ---------------------------------------------------------------------------------------------------------


def message(task: str, kwargs: dict[str, Any], **changes: Any) -> str:
    """A task message as it lies on Redis, from a producer that is not ours."""
    body = base64.b64encode(json.dumps([[], kwargs, {}]).encode()).decode()
    return json.dumps(
        {
            "body": body,
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": {"lang": "py", "task": task, "id": f"stranger-{task}", "retries": 0},
            "properties": {
                "correlation_id": "stranger",
                "delivery_mode": 2,
                "delivery_info": {"exchange": "", "routing_key": "cw.resume"},
                "priority": 0,
                "body_encoding": "base64",
                "delivery_tag": uuid.uuid4().hex,
            },
            **changes,
        }
    )


STRANGE = {
    "unknown task": message("cortex.of_the_future", {}),
    "newer version": message("cortex.continue_run", {"v": 99, "run_id": "arun_1"}),
    "malformed": message("cortex.continue_run", {"run_id": 5}),
    "not json": message("cortex.continue_run", {}, body=base64.b64encode(b"\x80not json").decode()),
    "pickle": message("cortex.continue_run", {}, **{"content-type": "application/x-python-serialize"}),
    "no task": json.dumps({**json.loads(message("x", {})), "headers": {}}),
}


def test_strange_messages_are_refused_once_and_good_ones_work(
    worker: Start, database_url: str, broker_url: str
) -> None:
    there = redis.Redis.from_url(broker_url)
    with client(database_url, broker_url) as producer:
        process = worker(broker_url)
        runs = []
        for raw in STRANGE.values():
            there.lpush("cw:cw.resume", raw)
            runs.append(producer.enqueue("echo", "good"))
        extra = message("cortex.continue_run", {"run_id": runs[-1].id, "tenant": "acme", "kind": "begun"})
        there.lpush("cw:cw.resume", extra, message("cortex.continue_run", {}))
        assert [finished(producer, run.id).state for run in runs] == ["completed"] * len(runs)
    queue = Queue(broker_url, "cw.resume")
    wait_until(lambda: len(queue) == 0 and not there.exists("cw:unacked"), what="the queue to be empty")
    for what in ("newer_version", "invalid_message", "cortex.of_the_future", "Refusing to deserialize"):
        process.until(what)
    assert process.end() == 0


# --- The broker -------------------------------------------------------------------------------------------------------


@pytest.mark.invariant("I6")
def test_after_a_reconnect_a_worker_looks_into_the_table(
    worker: Start, database_url: str, own_broker: ValkeyNode
) -> None:
    with client(database_url) as producer:
        process = worker(own_broker.url)
        own_broker.stop(signal.SIGKILL)
        process.until("Trying again in")
        # Nobody is told of these: their hints were lost with the broker.
        runs = [producer.enqueue("echo", f"run {number}") for number in range(3)]
        own_broker.start()
        assert [finished(producer, run.id).state for run in runs] == ["completed"] * 3


def test_a_worker_stays_alive_and_ready_for_the_platform_while_its_broker_is_away(
    worker: Start, own_broker: ValkeyNode, tmp_path: Path
) -> None:
    live, ready = tmp_path / "live", tmp_path / "ready"
    process = worker(own_broker.url, CORTEX_LIVE_FILE=str(live), CORTEX_READY_FILE=str(ready))
    wait_until(ready.exists, what="the ready file")
    own_broker.stop(signal.SIGKILL)
    process.until("Trying again in")
    live.unlink()
    wait_until(live.exists, what="the live file to be touched between two tries")
    own_broker.start()
    assert process.end() == 0
    assert not ready.exists()


def test_a_frozen_broker_delays_no_run(
    worker: Start, database_url: str, own_broker: ValkeyNode, tmp_path: Path
) -> None:
    files = [tmp_path / f"file{number}" for number in range(3)]
    for file in files:
        file.touch()
    with client(database_url) as producer:
        process = worker(own_broker.url)
        with client(database_url, own_broker.url) as telling:
            runs = [telling.enqueue("echo", f"wait {file}") for file in files]
            wait_until(lambda: entered(files) == 3, what="three runs to be at work")
        own_broker.freeze()
        try:
            began = time.monotonic()
            for file in files:
                file.unlink()
            assert [finished(producer, run.id).state for run in runs] == ["completed"] * 3
            assert time.monotonic() - began < 5, "a call to a frozen broker takes longer"
        finally:
            own_broker.thaw()
        more = [producer.enqueue("echo", f"more {number}") for number in range(2)]
        redis.Redis.from_url(own_broker.url).lpush("cw:cw.resume", message("cortex.continue_run", {}))
        assert [finished(producer, run.id).state for run in more] == ["completed"] * 2
        assert process.end() == 0


def test_the_live_file_is_touched_by_the_loop(worker: Start, broker_url: str, tmp_path: Path) -> None:
    live = tmp_path / "live"
    process = worker(broker_url, CORTEX_LIVE_FILE=str(live))
    live.unlink()
    wait_until(live.exists, what="the live file to be touched again")
    process.process.send_signal(signal.SIGSTOP)
    live.unlink()
    process.process.send_signal(signal.SIGCONT)
    wait_until(live.exists, what="the live file to be touched after the process went on")


def test_workers_on_one_machine_have_names_of_their_own(worker: Start, broker_url: str, start: Start) -> None:
    worker(broker_url)
    worker(broker_url)
    status = start(broker_url, "inspect", "ping", "--json", "-t", "5")
    assert status.process.wait(timeout=60) == 0
    answered = json.loads(status.output[status.output.index("{") :])
    assert len(answered) == 2
    assert {name.partition("-")[0] for name in answered} == {"worker"}


def test_a_worker_holds_no_messages_that_it_has_no_slot_for(
    worker: Start, start: Start, database_url: str, broker_url: str, tmp_path: Path
) -> None:
    there, files = redis.Redis.from_url(broker_url), [tmp_path / f"file{number}" for number in range(2)]
    for file in files:
        file.touch()
    with client(database_url, broker_url) as producer:
        process = worker(broker_url, "-c", "2")
        runs = [producer.enqueue("echo", f"wait {file}") for file in files]
        wait_until(lambda: entered(files) == 2, what="both slots to be taken")
        for _ in range(20):
            there.lpush("cw:cw.resume", message("cortex.continue_run", {}))
        # Its answers show that the loop has turned meanwhile.
        for _ in range(2):
            assert start(broker_url, "inspect", "reserved", "-t", "5").process.wait(timeout=60) == 0
        assert there.llen("cw:cw.resume") >= 19, "one may have been on its way when the last slot was taken"
        for file in files:
            file.unlink()
        assert [finished(producer, run.id).state for run in runs] == ["completed"] * 2
        wait_until(lambda: there.llen("cw:cw.resume") == 0, what="the hints that need nothing to be dropped")
        assert process.end() == 0


def entered(files: list[Path]) -> int:
    return sum(file.with_suffix(".entered").exists() for file in files)


# --- Sweeps -----------------------------------------------------------------------------------------------------------


def swept(database_url: str) -> dict[str, str]:
    """Every pass that was finished, and by which worker."""
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(
            "SELECT name, worker_id FROM sweeps WHERE finished_at IS NOT NULL"
        ).fetchall()
    return dict(rows)


def test_an_operator_triggers_a_sweep_with_celery_itself(
    worker: Start, start: Start, database_url: str, broker_url: str
) -> None:
    worker(broker_url)
    for arguments in ([], ["--kwargs", '{"passes": ["lapses"]}']):
        call = start(broker_url, "call", "cortex.sweep_expired", *arguments)
        assert call.process.wait(timeout=60) == 0
        assert len(call.output.strip()) == 36, call.output
    wait_until(lambda: "expiries" in swept(database_url), what="the sweep")


def test_beat_triggers_sweeps(worker: Start, start: Start, database_url: str, broker_url: str) -> None:
    worker(broker_url)
    beat = start(broker_url, "beat", CORTEX_SWEEP_INTERVAL_S="0.5")
    wait_until(lambda: "hints" in swept(database_url), what="a sweep")
    assert beat.end() == 0


def test_without_beat_and_without_broker_a_worker_sweeps_by_itself(
    worker: Start, database_url: str, own_broker: ValkeyNode
) -> None:
    process = worker(own_broker.url, CORTEX_SWEEP_INTERVAL_S="0.3")
    own_broker.stop(signal.SIGKILL)
    process.until('"event": "sweep.fallback"')
    wait_until(lambda: "hints" in swept(database_url), what="a sweep")


def test_five_thousand_sweeps_at_once_delay_nobody(worker: Start, database_url: str, broker_url: str) -> None:
    there = redis.Redis.from_url(broker_url)
    with client(database_url, broker_url) as producer:
        worker(broker_url)
        with there.pipeline(transaction=False) as pipe:
            for _ in range(5000):
                pipe.lpush("cw:cw.sweep", message("cortex.sweep_expired", {}))
            pipe.execute()
        run = producer.enqueue("echo", "meanwhile")
        assert finished(producer, run.id).state == "completed"
        assert there.llen("cw:cw.sweep") > 0, "the run waited for every sweep"
        wait_until(lambda: there.llen("cw:cw.sweep") == 0, what="the sweeps to be no-ops")


# --- The end ----------------------------------------------------------------------------------------------------------


def test_sigterm_hands_off_what_runs_and_the_exit_code_is_zero(
    worker: Start, database_url: str, broker_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    with client(database_url, broker_url) as producer:
        first = worker(broker_url, CORTEX_DRAIN_S="1")
        run = producer.enqueue("echo", f"wait {file}")
        wait_until(file.with_suffix(".entered").exists, what="the tool to be entered")
        assert first.end() == 0
        assert producer.get(run.id).state == "reclaimable"
        file.unlink()
        second = worker(broker_url)
        assert finished(producer, run.id).state == "completed"
        assert second.end() == 0


def test_a_worker_that_is_asked_to_drain_by_its_row_ends(
    worker: Start, database_url: str, broker_url: str
) -> None:
    process = worker(
        broker_url, CORTEX_LEASE_RENEW_S="0.2", CORTEX_LEASE_TRUST_S="5", CORTEX_LEASE_TTL_S="10"
    )
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("UPDATE workers SET drain_requested_at = now(), drain_requested_by = 'a test'")
    assert process.process.wait(timeout=60) == 0


@pytest.mark.parametrize("pool", ["threads", "processes", "solo"])
def test_every_pool_finishes_runs_and_ends_well(
    worker: Start, database_url: str, broker_url: str, pool: str
) -> None:
    with client(database_url, broker_url) as producer:
        process = worker(broker_url, "-P", pool, "-c", "2")
        wait_until(lambda: registered(database_url), what="a worker's row")
        runs = [producer.enqueue("echo", f"run {number}") for number in range(6)]
        assert [finished(producer, run.id).state for run in runs] == ["completed"] * 6
        assert process.end() == 0
    with psycopg.connect(database_url) as connection:
        rows = connection.execute("SELECT slots, ended_at IS NOT NULL FROM workers").fetchall()
    assert sorted(rows) == {"threads": [(2, True)], "processes": [(1, True)] * 2, "solo": [(2, True)]}[pool]


def registered(database_url: str) -> bool:
    with psycopg.connect(database_url) as connection:
        return connection.execute("SELECT FROM workers").fetchone() is not None


def test_a_prefork_worker_hands_off_on_sigterm(
    worker: Start, database_url: str, broker_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    with client(database_url, broker_url) as producer:
        process = worker(broker_url, "-P", "processes", "-c", "2", CORTEX_DRAIN_S="1")
        wait_until(lambda: registered(database_url), what="a worker's row")
        run = producer.enqueue("echo", f"wait {file}")
        wait_until(file.with_suffix(".entered").exists, what="the tool to be entered")
        process.end()
        assert producer.get(run.id).state == "reclaimable"


def test_a_worker_serves_its_metrics_and_a_taken_port_ends_the_start(
    worker: Start, start: Start, broker_url: str
) -> None:
    port = str(free_port())
    worker(broker_url, CORTEX_METRICS_PORT=port)
    page = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    assert "cw_slots_used" in page
    second = start(broker_url, "worker", CORTEX_METRICS_PORT=port)
    assert second.process.wait(timeout=60) == 1
    (line,) = [line for line in said(second) if line.startswith("cortex-workers:")]
    assert f"CORTEX_METRICS_PORT {port} cannot be opened" in line

"""The task for admitted answers: which hint is sent, what it names, and that it takes exactly that answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cortex_workers import Client
from cortex_workers.schemas.ids import RUN, SUSPENSION, new_id
from cortex_workers.schemas.notifications import ResumeAdmitted
from cortex_workers.settings import Settings, load_settings
from cortex_workers.tasks.messages import ResumeMessage
from cortex_workers.tasks.routes import RESUME, TASK_QUEUES, route
from tests.engine.outside import TWO, A, B, paused, result
from tests.engine.world import SCOPE, World, looking_at
from tests.tasks.conftest import Queue
from tests.tasks.processes import CeleryProcess


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    with looking_at(database_url) as onlooker:
        made = World(onlooker)
        try:
            yield made
        finally:
            made.close()


def test_an_admission_goes_to_its_own_task_on_the_queue_of_what_has_begun() -> None:
    found = route(ResumeAdmitted(run_id="arun_1", revision=3, suspension_id="sus_1"))
    assert found is not None
    way, _ = found
    assert (way.task, way.queue, way.kind) == (RESUME, "resume", "begun")
    assert TASK_QUEUES[RESUME] == "resume"


@pytest.fixture
def producer(world: World, broker_url: str, queue_prefix: str) -> Iterator[Client]:
    """A client that tells the fleet."""
    settings = world.settings(broker_url=broker_url, queue_prefix=queue_prefix)
    assert isinstance(settings, Settings)
    with Client(settings, scope=SCOPE, actor="machine") as client:
        yield client


@pytest.mark.parametrize("door", ["whole", "one"])
def test_an_answer_sends_one_hint_that_names_run_and_pause_and_nothing_of_the_answer(
    world: World,
    producer: Client,
    broker_url: str,
    queue_prefix: str,
    queue_of: Callable[[str, str], Queue],
    door: str,
) -> None:
    _client, worker, run_id = paused(world, TWO)
    if door == "whole":
        producer.provide_results(run_id, [result(A, "secret-1"), result(B, "secret-2")])
    else:
        producer.provide_result(run_id, result(B, "secret-2"))
        producer.provide_result(run_id, result(A, "secret-1"))
    producer.provide_result(run_id, result(A, "secret-1"))
    producer.close()
    queue = queue_of(broker_url, f"{queue_prefix}.resume")
    run = world.run(run_id)
    (body,) = queue.bodies()
    fields = {name: body[name] for name in ("run_id", "suspension_id", "revision")}
    assert fields == {
        "run_id": run_id,
        "suspension_id": run["suspension_id"],
        "revision": run["revision"],
    }
    (raw,) = queue.raw()
    assert RESUME.encode() in raw
    assert b"secret" not in raw
    assert worker.work(run_id)["state"] == "completed"


@pytest.mark.parametrize(
    "change",
    [{"suspension_id": None}, {"suspension_id": ""}, {"suspension_id": "s" * 65}, {"revision": "soon"}],
    ids=str,
)
def test_a_message_that_names_no_answer_is_malformed(change: dict[str, Any]) -> None:
    given = {"run_id": new_id(RUN), "suspension_id": new_id(SUSPENSION), **change}
    with pytest.raises(ValidationError):
        ResumeMessage.model_validate(given)


def test_a_field_of_a_newer_release_is_ignored() -> None:
    given = {"run_id": new_id(RUN), "suspension_id": new_id(SUSPENSION), "hurry": True}
    assert "hurry" not in ResumeMessage.model_validate(given).body()


@pytest.mark.fleet
def test_a_worker_goes_on_with_the_answer_when_its_hint_arrives(
    tmp_path: Path, database_url: str, broker_url: str, queue_prefix: str
) -> None:
    """No sweep comes to help: only the hint of the admission can."""
    environment = {
        "CORTEX_DATABASE_URL": database_url,
        "CORTEX_BROKER_URL": broker_url,
        "CORTEX_QUEUE_PREFIX": queue_prefix,
        "CORTEX_HOST": "tests.tasks.outside_host:host",
        "CORTEX_SWEEP_INTERVAL_S": "3600",
    }
    settings = load_settings(database_url=database_url, broker_url=broker_url, queue_prefix=queue_prefix)
    with CeleryProcess(tmp_path, ["worker", "-l", "info"], environment) as worker:
        worker.until(" ready.")
        with Client(settings, scope=SCOPE) as client:
            run_id = client.enqueue("buyer", "desk").id
            admitted = client.provide_results(run_id, [result(A, "12 EUR")], patience_s=60)
            assert admitted.fresh
            done = client.wait(run_id, timeout_s=60)
    assert (done.state, done.output) == ("completed", "It costs 12 EUR")

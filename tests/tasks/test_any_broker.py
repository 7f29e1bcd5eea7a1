"""The way of a hint on whatever broker the tests are given: sent, counted, taken, worked off."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import kombu
import pytest

from cortex_workers import Client
from cortex_workers.schemas.notifications import RunReady
from cortex_workers.settings import Settings
from cortex_workers.tasks.depth import BrokerDepth
from cortex_workers.tasks.publish import CeleryPublisher
from cortex_workers.tasks.routes import QUEUES
from tests.tasks.processes import CeleryProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.matrix


@pytest.fixture
def settings(broker_url: str, queue_prefix: str) -> Iterator[Settings]:
    """Queues of this test's own, deleted afterwards: RabbitMQ would keep them."""
    found = Settings(broker_url=broker_url, queue_prefix=queue_prefix)
    yield found
    if found.require_broker().startswith("amqp"):
        with kombu.Connection(broker_url) as connection:
            for kind in QUEUES:
                connection.default_channel.queue_delete(found.queue_for(kind))
            connection.default_channel.exchange_delete(queue_prefix)


def test_hints_are_counted_where_they_wait(settings: Settings, ready: Callable[..., RunReady]) -> None:
    depth, publish = BrokerDepth(settings), CeleryPublisher(settings)
    assert depth.depth(settings.queue_for("continue")) == 0
    for _ in range(3):
        publish(ready())
    publish(ready(why="answer"))
    assert publish.flush()
    publish.close()
    wait_until(lambda: depth.depth(settings.queue_for("continue")) == 3, what="three messages")
    assert depth.depth(settings.queue_for("resume")) == 1
    depth.close()


@pytest.mark.fleet
def test_a_worker_takes_hints_and_sweeps_and_leaves_nothing(
    settings: Settings, database_url: str, tmp_path: Path
) -> None:
    environment = {
        "CORTEX_DATABASE_URL": database_url,
        "CORTEX_BROKER_URL": settings.require_broker(),
        "CORTEX_QUEUE_PREFIX": settings.queue_prefix,
        "CORTEX_HOST": "tests.tasks.hosts:host",
        "CORTEX_SWEEP_INTERVAL_S": "3600",
    }
    producer = Client(
        settings.model_copy(update={"database_url": Settings(database_url=database_url).database_url})
    )
    depth = BrokerDepth(settings)
    with CeleryProcess(tmp_path, ["worker", "-l", "info"], environment) as worker, producer:
        worker.until(" ready.")
        runs = [producer.enqueue("echo", f"run {number}", scope="tenant=acme") for number in range(5)]
        for run in runs:
            assert producer.wait(run.id, timeout_s=60, scope="tenant=acme").state == "completed"
        with CeleryProcess(tmp_path, ["call", "cortex.sweep_expired"], environment) as call:
            assert call.process.wait(timeout=60) == 0
        worker.until("Task cortex.sweep_expired")
        wait_until(
            lambda: not any(depth.depth(settings.queue_for(kind)) for kind in QUEUES), what="empty queues"
        )
        assert worker.end(signal.SIGTERM) == 0
    depth.close()

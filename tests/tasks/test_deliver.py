"""The task for deliveries: which hint is sent, that it carries an id only, and that hints alone get a question answered."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cortex_workers import Client
from cortex_workers.schemas.ids import DELIVERY, new_id
from cortex_workers.schemas.notifications import DeliveryDue
from cortex_workers.settings import load_settings
from cortex_workers.tasks.messages import DeliverMessage
from cortex_workers.tasks.routes import DELIVER_A2A, TASK_QUEUES, route
from tests.engine.talking import ANSWERS, Talk
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


def test_a_delivery_goes_to_its_own_task_on_its_own_queue() -> None:
    found = route(DeliveryDue(delivery_id=new_id(DELIVERY)))
    assert found is not None
    assert (found[0].task, found[0].queue) == (DELIVER_A2A, "a2a")
    assert TASK_QUEUES[DELIVER_A2A] == "a2a"


def test_a_message_sends_one_hint_that_names_its_delivery_and_nothing_of_its_words(
    world: World, broker_url: str, queue_prefix: str, queue_of: Callable[[str, str], Queue]
) -> None:
    talk = Talk(world, {"pricing": ANSWERS})
    settings = world.settings(broker_url=broker_url, queue_prefix=queue_prefix)
    with Client(settings, scope=SCOPE, actor="ann") as client:
        client.send("pricing", "a secret fact")
        client.send("pricing", "a secret task", performative="request")
    queue = queue_of(broker_url, f"{queue_prefix}.a2a")
    (row,) = talk.queued()
    assert queue.bodies() == [{"v": 1, "delivery_id": row["id"]}]
    (raw,) = queue.raw()
    assert len(raw) < 1536
    assert b"secret" not in raw
    assert b"pricing" not in raw


@pytest.mark.parametrize("change", [{"delivery_id": None}, {"delivery_id": ""}, {"delivery_id": "d" * 65}])
def test_a_hint_that_names_no_delivery_is_malformed(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DeliverMessage.model_validate(change)


@pytest.mark.fleet
def test_hints_alone_bring_a_question_to_its_answer(
    tmp_path: Path, database_url: str, broker_url: str, queue_prefix: str
) -> None:
    """No sweep comes to help: each step is announced by the one before it."""
    environment = {
        "CORTEX_DATABASE_URL": database_url,
        "CORTEX_BROKER_URL": broker_url,
        "CORTEX_QUEUE_PREFIX": queue_prefix,
        "CORTEX_HOST": "tests.fleet.talkers:host",
        "CORTEX_SWEEP_INTERVAL_S": "3600",
        "FLEET_FOLDER": str(tmp_path),
    }
    asked = {"tool": "agent_ask", "args": {"to": "first", "content": json.dumps([{"say": "12 EUR"}])}}
    settings = load_settings(database_url=database_url, broker_url=broker_url, queue_prefix=queue_prefix)
    with CeleryProcess(tmp_path, ["worker", "-l", "info"], environment) as worker:
        worker.until(" ready.")
        with Client(settings, scope=SCOPE) as client:
            run_id = client.enqueue("planner", json.dumps([{"call": [asked]}, {"say": "{last_result}"}])).id
            done = client.wait(run_id, timeout_s=60)
    assert done.state == "completed"
    assert json.loads(done.output or "")["replies"][0]["content"] == "12 EUR"

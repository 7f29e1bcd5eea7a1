"""A host whose agents talk, and what carries their messages in a test: each delivery when the test says so."""

from __future__ import annotations

import json
from typing import Any

from cortex_workers import Client, Host
from cortex_workers.a2a import deliver
from cortex_workers.llm.scripted import ScriptedModel
from cortex_workers.schemas.notifications import DeliveryDue
from cortex_workers.store import tables
from cortex_workers.store.transitions import Row
from tests.engine.world import Worker, World, call, say, turn

deliveries, asks, answers, messages = (
    tables.a2a_deliveries,
    tables.a2a_asks,
    tables.a2a_answers,
    tables.a2a_messages,
)


def ask(to: Any, content: str = "How much?", **more: Any) -> dict[str, Any]:
    """A call of `agent_ask`."""
    return call("agent_ask", to=to, content=content, **more)


def send(to: Any, content: str = "Hello.", **more: Any) -> dict[str, Any]:
    """A call of `agent_send`."""
    return call("agent_send", to=to, content=content, **more)


def inbox(**more: Any) -> dict[str, Any]:
    """A call of `agent_inbox`."""
    return call("agent_inbox", **more)


class Talk:
    """Agents by name, each with its script; one worker and one client."""

    def __init__(self, world: World, agents: dict[str, Any], **host: Any) -> None:
        self.world = world
        world.host = Host(messaging=True, **host)
        world._tools(world.host)
        self.models: dict[str, ScriptedModel] = {}
        for name, script in agents.items():
            options = dict(script) if isinstance(script, dict) and "script" in script else {"script": script}
            self.models[name] = ScriptedModel(options.pop("script"))
            world.host.agent(
                name,
                model=self.models[name],
                instructions="Help.",
                **{"tools": ["find", "ship", "pay"], **options},
            )
        self.worker: Worker = world.worker()
        self.client: Client = world.client()

    def begin(self, agent: str, text: str = "Go", **more: Any) -> str:
        """Enqueue a run and let it work until it waits or has ended."""
        run_id = str(self.client.enqueue(agent, text, **more).id)
        self.worker.finish(run_id)
        return run_id

    def deliver(self, delivery_id: str, worker: Worker | None = None) -> str:
        return deliver.deliver((worker or self.worker).rt, delivery_id)

    def queued(self) -> list[Row]:
        """Deliveries that wait to be carried, oldest first."""
        return self.world.rows(deliveries, deliveries.c.state == "queued", order=deliveries.c.id)

    def due(self) -> list[Row]:
        """Deliveries whose run has ended."""
        return self.world.rows(
            deliveries,
            deliveries.c.state == "running",
            deliveries.c.settle_due_at.is_not(None),
            order=deliveries.c.id,
        )

    def carry(self) -> list[str]:
        """Start the run of everything that is queued; returns the runs."""
        waiting = self.queued()
        for row in waiting:
            self.deliver(row["id"])
        found = [self.delivery(row["id"])["run_id"] for row in waiting]
        return [run_id for run_id in found if run_id is not None]

    def settle(self) -> None:
        """Store the replies of everything that has ended."""
        for row in self.due():
            self.deliver(row["id"])

    def all_quiet(self, most: int = 50) -> None:
        """Carry, work and settle until nothing moves any more."""
        for _ in range(most):
            moved = bool(self.carry()) | bool(self.due())
            self.settle()
            for row in self.ready():
                self.worker.finish(row["id"])
                moved = True
            if not moved:
                return
        raise AssertionError("it never becomes quiet")

    def ready(self) -> list[Row]:
        runs = tables.runs
        return self.world.rows(
            runs, runs.c.state.in_(["ready", "reclaimable"]), runs.c.wait_reason.is_(None), order=runs.c.id
        )

    def delivery(self, delivery_id: str) -> Row:
        (row,) = self.world.rows(deliveries, deliveries.c.id == delivery_id)
        return row

    def only_delivery(self) -> Row:
        (row,) = self.world.rows(deliveries)
        return row

    def asked(self, run_id: str) -> list[Row]:
        return self.world.rows(asks, asks.c.asker_run_id == run_id, order=asks.c.call_id)

    def result(self, run_id: str, index: int = -1) -> dict[str, Any]:
        """What the model of a run read as the result of a call of its."""
        found = [item for item in self.world.messages(run_id) if item.role == "tool"]
        value: dict[str, Any] = json.loads(found[index].content)
        return value

    def said(self) -> list[Row]:
        """Every message, in the order of their conversations."""
        return self.world.rows(messages, order=messages.c.created_at)

    def heard(self, kind: str) -> list[Any]:
        """What was told of messages, by kind."""
        return [item for item in self.world.told if item.kind == kind]

    def told(self) -> list[DeliveryDue]:
        return [item for item in self.world.told if isinstance(item, DeliveryDue)]


ANSWERS = [say("12 EUR")]
ASKS = [turn(ask("pricing")), say("It is {last_result}")]

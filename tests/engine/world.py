"""One database, one host, and as many workers and clients of this process as a test wants."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, select, text

from cortex_workers import Client, Host, ToolContext, probes, wiring
from cortex_workers.engine import expire, slot
from cortex_workers.engine.ahead import Claimed
from cortex_workers.engine.continue_run import execute
from cortex_workers.engine.runtime import Runtime
from cortex_workers.lease import identity
from cortex_workers.llm.scripted import ScriptedModel
from cortex_workers.schemas.checkpoint import Checkpoint
from cortex_workers.schemas.llm import Message, ModelRequest
from cortex_workers.schemas.notifications import Notification
from cortex_workers.settings import Settings, load_settings
from cortex_workers.store import clock, runs, suspensions, tables, transcript, waits
from cortex_workers.store.database import Database
from cortex_workers.store.transitions import Row

SCOPE = "tenant=acme"
TTL_S = 60.0


class Crash(BaseException):
    """A worker dies here: nothing that it would have written is written."""


@dataclass(frozen=True)
class Effect:
    """One execution of a tool of the shop, as the world outside sees it."""

    tool: str
    key: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Onlooker:
    """A database, and the connections through which tests look at it."""

    url: str
    database: Database


@contextmanager
def looking_at(url: str) -> Iterator[Onlooker]:
    """Look at a database for as long as a block lasts."""
    database = Database(load_settings(database_url=url), lambda _: None)
    try:
        yield Onlooker(url, database)
    finally:
        database.dispose()


class World:
    """The shop's tools and agent, and whoever works for it. Everything is real but the model."""

    def __init__(self, onlooker: Onlooker) -> None:
        self.onlooker = onlooker
        self.database = onlooker.database
        self.host = Host()
        self.effects: list[Effect] = []
        self.told: list[Notification] = []
        self.model: ScriptedModel = ScriptedModel([{"say": "Hello."}])
        self._closers: list[Callable[[], Any]] = []
        self._shift = timedelta(0)

    def close(self) -> None:
        probes.disarm()
        clock.shift(timedelta(0))
        for close in reversed(self._closers):
            close()

    # --- Who takes part ------------------------------------------------------------------------------------------

    def settings(self, **values: Any) -> Settings:
        return load_settings(
            database_url=self.onlooker.url, **{"table_claim_s": 0.0, "lease_ttl_s": TTL_S, **values}
        )

    def act(self, tool: str, ctx: ToolContext, **arguments: Any) -> str:
        """What every tool of a test does: leave a trace."""
        self.effects.append(Effect(tool, ctx.idempotency_key, arguments))
        return f"{tool} done"

    def shop(self, script: Any, *, host: Host | None = None, **options: Any) -> None:
        """Give the host the tools of a shop and the agent `support`, whose model follows the script."""
        host = host if host is not None else self.host
        self._tools(host)
        tools = options.pop("tools", None) or sorted(host.tools)
        self.model = ScriptedModel(script)
        host.agent("support", model=self.model, instructions="Help.", tools=tools, **options)

    def _tools(self, host: Host) -> None:
        @host.tool(retry_safe=True, effects="none")
        def find(order: str, ctx: ToolContext) -> dict[str, str]:
            """Find an order."""
            self.act("find", ctx, order=order)
            return {"order": order}

        @host.tool
        def ship(order: str, ctx: ToolContext) -> str:
            """Ship an order."""
            return self.act("ship", ctx, order=order)

        @host.tool(needs_approval=True)
        def pay(amount: int, ctx: ToolContext, currency: str = "EUR") -> str:
            """Pay somebody."""
            return self.act("pay", ctx, amount=amount, currency=currency)

    def worker(self, host: Host | None = None, **settings: Any) -> Worker:
        """One more worker process, as far as rows can tell: it has a name of its own."""
        identity._ids.pop(os.getpid(), None)
        rt = wiring.build(self.settings(**settings), host=host if host is not None else self.host)
        rt.hooks.subscribe(self.told.append)
        rt.start()
        self._closers.append(lambda: self._stop(rt))
        return Worker(self, rt)

    def _stop(self, rt: Runtime) -> None:
        if rt.ahead is not None:
            rt.ahead.give_back_all()
        # The thread that waits for a drain ends with it.
        rt.drain.set()
        rt.stop()

    def client(
        self, *, host: Host | None = None, settings: Mapping[str, Any] | None = None, **options: Any
    ) -> Client:
        identity._ids.pop(os.getpid(), None)
        made = Client(
            self.settings(**(settings or {})), host=host, **{"scope": SCOPE, "actor": "ops", **options}
        )
        made.runtime.hooks.subscribe(self.told.append)
        self._closers.append(made.close)
        return made

    def later(self, seconds: float) -> None:
        """Let so much time pass on the database's clock, as this process sees it."""
        self._shift += timedelta(seconds=seconds)
        clock.shift(self._shift)

    # --- What is stored ------------------------------------------------------------------------------------------

    def run(self, run_id: str) -> Row:
        with self.database.read() as unit:
            row = runs.get(unit, run_id)
        assert row is not None
        return row

    def rows(self, table: Any, *conditions: Any, order: Any = None) -> list[Row]:
        statement = select(table).where(*conditions)
        with self.database.read() as unit:
            found = unit.execute(statement.order_by(order) if order is not None else statement)
            return [dict(row) for row in found.mappings()]

    def sql(self, statement: str, **values: Any) -> int:
        """Do to the rows what no code of ours does."""
        with self.database.transaction() as unit:
            return int(unit.execute(text(statement), values).rowcount)

    def calls(self, run_id: str) -> list[Row]:
        with self.database.read() as unit:
            return transcript.load_calls(unit, run_id)

    def call(self, run_id: str) -> Row:
        (row,) = self.calls(run_id)
        return row

    def messages(self, run_id: str) -> list[Message]:
        with self.database.read() as unit:
            return [item.message for item in transcript.load_messages(unit, run_id)]

    def steps(self, run_id: str) -> list[Row]:
        with self.database.read() as unit:
            return transcript.load_steps(unit, run_id)

    def events(self, run_id: str) -> list[Row]:
        return self.rows(tables.events, tables.events.c.run_id == run_id, order=tables.events.c.run_seq)

    def pauses(self, run_id: str) -> list[Row]:
        return self.rows(
            tables.suspensions, tables.suspensions.c.run_id == run_id, order=tables.suspensions.c.created_at
        )

    def pending(self, suspension_id: str) -> list[Row]:
        with self.database.read() as unit:
            return suspensions.pending(unit, suspension_id)

    def snapshot(self) -> dict[str, list[Row]]:
        """Every row of every table but the workers' (their heartbeat goes on by itself)."""
        return {
            table.name: sorted(self.rows(table), key=repr)
            for table in tables.metadata.sorted_tables
            if table.name != "workers"
        }

    def notified(self, run_id: str) -> list[str]:
        """The kinds of what was told of a run, in order."""
        return [item.kind for item in self.told if getattr(item, "run_id", None) == run_id]

    def wake(self) -> None:
        """What the sweep does for runs that waited for a time which has come."""
        self.database.run(lambda unit: waits.end_later(unit, 100))


class Worker:
    """A worker process without Celery: it takes the runs it is told to take."""

    def __init__(self, world: World, rt: Runtime) -> None:
        self.world = world
        self.rt = rt

    @property
    def name(self) -> str:
        return self.rt.worker_id

    def claim(self, run_id: str) -> Claimed:
        claimed = slot.claim_named(self.rt, run_id)
        assert claimed is not None, f"{run_id} could not be claimed: {dict(self.world.run(run_id))}"
        return claimed

    def go_on(self, claimed: Claimed) -> Row:
        execute(self.rt, claimed.row, claimed.held)
        return self.world.run(claimed.row["id"])

    def work(self, run_id: str) -> Row:
        """Claim a run and work on it for one term; returns its row as it is then."""
        return self.go_on(self.claim(run_id))

    def finish(self, run_id: str) -> Row:
        """Work on a run, term after term, until it waits for somebody or has ended."""
        row = self.work(run_id)
        while row["state"] in ("ready", "reclaimable") and row["wait_reason"] is None:
            row = self.work(run_id)
        return row

    def die_at(self, probe: str, run_id: str, nth: int = 1) -> None:
        """Work on a run and die on the way; its lease is still there."""
        with dying_at(probe, nth):
            self.work(run_id)

    def lapse(self, run_id: str) -> Row:
        """Let the lease of a run's worker run out, and take the run from it."""
        self.world.later(TTL_S + 1)
        assert expire.lapse(self.rt, run_id)
        return self.world.run(run_id)

    def lose_at(self, probe: str, run_id: str, nth: int = 1) -> Row:
        """Die on the way and lose the run by that; it may be reclaimed then."""
        self.die_at(probe, run_id, nth)
        return self.lapse(run_id)


@contextmanager
def commits(rt: Runtime) -> Iterator[list[str]]:
    """One entry for each commit of a process meanwhile, those of its keeper (which come by themselves) left out."""
    made: list[str] = []

    def note(_connection: Any) -> None:
        made.append("commit")

    event.listen(rt.database.engine, "commit", note)
    try:
        yield made
    finally:
        event.remove(rt.database.engine, "commit", note)


@contextmanager
def dying_at(probe: str, nth: int = 1) -> Iterator[None]:
    """The next worker of this process that passes the probe dies there."""

    def die() -> None:
        raise Crash(probe)

    with at(probe, die, nth), pytest.raises(Crash):
        yield


@contextmanager
def at(probe: str, action: Callable[[], None], nth: int = 1) -> Iterator[None]:
    """Do something when somebody passes a probe."""
    reached: list[str] = []

    def act() -> None:
        reached.append(probe)
        action()

    probes.arm(probe, act, nth)
    try:
        yield
    finally:
        probes.disarm()
    assert reached == [probe], f"nobody passed {probe} {nth} times"


# --- Scripts ---------------------------------------------------------------------------------------------------------


def call(tool: str, **args: Any) -> dict[str, Any]:
    """One call of a turn."""
    return {"tool": tool, "args": args}


def turn(*calls: dict[str, Any]) -> dict[str, Any]:
    """A turn that asks for these calls."""
    return {"call": list(calls)}


def say(content: str = "Done: {last_result}") -> dict[str, Any]:
    """A turn that answers."""
    return {"say": content}


def contents(request: ModelRequest, role: str | None = None) -> list[str]:
    """What a request shows the model, message by message."""
    return [item.content for item in request.messages if role is None or item.role == role]


def error_of(message: Message) -> str:
    """The error text that a model reads in a result."""
    assert message.role == "tool" and message.is_error, message
    return str(json.loads(message.content)["error"])


def results(messages: Sequence[Message]) -> list[str]:
    """The results in a conversation, in order."""
    return [item.content for item in messages if item.role == "tool"]


def only(checkpoints: Sequence[Checkpoint]) -> Checkpoint:
    """The one thing that is asked."""
    (found,) = checkpoints
    return found

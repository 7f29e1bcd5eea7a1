"""Tools that run outside, and runs that wait for their results."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from cortex_workers import Client, Host
from cortex_workers.schemas.admission import ToolResult
from cortex_workers.store import suspensions, tables
from cortex_workers.store.transitions import Row
from tests.engine.world import Worker, World, call, say, turn

A, B, C = "call_0_0", "call_0_1", "call_0_2"
ONE = [turn(call("quote", item="desk")), say("Done.")]
TWO = [turn(call("quote", item="desk"), call("quote", item="chair")), say("Done.")]
THREE = [
    turn(call("quote", item="desk"), call("quote", item="chair"), call("quote", item="lamp")),
    say("Done."),
]


def quote(item: str) -> str:  # type: ignore[empty-body]
    """Ask a supplier for a quote."""


def scan(page: int) -> str:  # type: ignore[empty-body]
    """Scan a page."""


def tools(host: Host, ttl: timedelta | None = None, **options: Any) -> None:
    """Give the host two tools that run outside; `quote` has the options."""
    host.external_tool(quote, ttl=ttl, **options)
    host.external_tool(scan)


def paused(
    world: World,
    script: Any = None,
    tool: Mapping[str, Any] | None = None,
    session: str | None = None,
    **options: Any,
) -> tuple[Client, Worker, str]:
    """A run that waits for results: a client, the worker that paused it, the run."""
    tools(world.host, **(tool or {}))
    world.shop(script or ONE, **options)
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Ask around", session=session).id
    assert worker.work(run_id)["state"] == "paused"
    return client, worker, run_id


def result(call_id: str, content: Any = "12 EUR") -> ToolResult:
    """What the outside says a call returned."""
    return ToolResult(tool_call_id=call_id, content=content)


def error(call_id: str, text: str) -> ToolResult:
    """What the outside says went wrong."""
    return ToolResult(tool_call_id=call_id, error=text)


def admissions_of(world: World, run_id: str) -> list[Row]:
    """The answers that are retained of a run, in the order of its pauses."""
    table = tables.resume_admissions
    return world.rows(table, table.c.run_id == run_id, order=table.c.suspension_id)


def kept_answers(world: World, run_id: str) -> list[bytes]:
    """Answers one by one that wait for the last."""
    suspension_id = world.run(run_id)["suspension_id"]
    return world.database.run(lambda unit: suspensions.kept_answers(unit, suspension_id))

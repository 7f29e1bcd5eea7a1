"""What happened, from the two places that know: the rows in Postgres and the world's file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from cortex_workers.cli.demo.fleet import Fleet
from cortex_workers.cli.demo.world import World
from cortex_workers.client import Client
from cortex_workers.store import events


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that happened; ``worker`` is its short name."""

    event: str
    at: datetime
    run_id: str | None = None
    worker: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class Feed:
    """Each fact once, in the order of their times as far as one look can tell."""

    def __init__(self, client: Client, world: World, fleet: Fleet) -> None:
        self._client = client
        self._world = world
        self._fleet = fleet
        self._seen: set[str] = set()
        self._offset = 0

    def look(self) -> list[Fact]:
        """What happened since the last look."""
        return sorted([*self._rows(), *self._lines()], key=lambda fact: fact.at)

    def _rows(self) -> list[Fact]:
        with self._client.runtime.database.read() as unit:
            # All of them each time: a few hundred rows, and none is missed that was committed out of order.
            found = events.of_scope(unit, str(self._client.settings.scope))
        fresh = [row for row in found if row["id"] not in self._seen]
        self._seen.update(row["id"] for row in fresh)
        return [self._fact(row) for row in fresh]

    def _fact(self, row: Mapping[str, Any]) -> Fact:
        facts = {"revision": row["revision"], **(row["data"] or {})}
        if row["actor"]:
            facts["actor"] = row["actor"]
        if "owner" in facts:
            facts["owner"] = self._fleet.name_of(facts["owner"])
        facts |= self._content(row["kind"], row["run_id"], facts)
        return Fact(row["kind"], row["at"], row["run_id"], self._fleet.name_of(row["worker_id"]), facts)

    def _content(self, kind: str, run_id: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        """What an event, which is free of content, stands for."""
        if kind == "run.pause":
            asked = self._client.checkpoints(run_id=run_id)[0]
            call = asked.pending[0]
            arguments = json.loads(call.arguments)
            return {"checkpoint_id": asked.id, "tool": call.tool, "arguments": arguments}
        if kind == "run.decide":
            decision = self._client.checkpoint(facts["checkpoint_id"]).decision
            return {"decided_by": decision.decided_by, "reason": decision.reason} if decision else {}
        if kind in ("run.complete", "run.fail"):
            run = self._client.get(run_id)
            return {"output": run.output, "error": run.error_text}
        return {}

    def _lines(self) -> list[Fact]:
        lines, self._offset = self._world.lines(self._offset)
        return [
            Fact(line.kind, line.at, line.run_id, self._writer(line.pid), {"pid": line.pid, **line.facts})
            for line in lines
        ]

    def _writer(self, pid: int) -> str | None:
        worker = self._fleet.by_pid(pid)
        return worker.name if worker is not None else None

"""Runs of which nobody can prove how far they came, and guards that a test speaks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from cortex_workers import Client, ToolContext
from cortex_workers.operate.closer import ResumeCloser
from cortex_workers.schemas.admission import ResumeClosure, ResumeClosureRequest, ToolResult
from cortex_workers.store import admissions, tables
from tests.engine.world import SCOPE, TTL_S, Worker, World, call, say, turn

PACK_THEN_SHIP = [turn(call("pack", order="17")), turn(call("ship", order="17")), say("Done.")]


@dataclass
class Guards:
    """A host's fence and authorizer that say what the test wants and remember what they were asked."""

    refuses: Exception | None = None
    asked: list[ResumeClosureRequest] = field(default_factory=list)
    fenced: list[ResumeClosureRequest] = field(default_factory=list)
    around: Callable[[Callable[[ResumeClosureRequest], None], ResumeClosureRequest], None] | None = None

    def authorize_resume_closure(self, request: ResumeClosureRequest) -> None:
        self.asked.append(request)
        if self.refuses is not None:
            raise self.refuses

    def with_resume_closure(
        self, request: ResumeClosureRequest, close: Callable[[ResumeClosureRequest], None]
    ) -> None:
        self.fenced.append(request)
        if self.around is not None:
            self.around(close, request)
        else:
            close(request)


class Scene:
    """A run whose external call was answered, and workers that come and go."""

    def __init__(self, world: World) -> None:
        self.world = world

        @world.host.external_tool
        def pack(order: str, ctx: ToolContext) -> str:
            """Pack an order."""
            raise NotImplementedError  # it runs outside

        world.shop(PACK_THEN_SHIP)
        world.worker()  # holds nothing; it has told what agents there are
        self.client: Client = world.client()
        self.guards = Guards()
        self.workers: list[Worker] = []

    @property
    def rt(self) -> Any:
        return self.client.runtime

    def worker(self) -> Worker:
        self.workers.append(self.world.worker())
        return self.workers[-1]

    def answered(self, session: str | None = None) -> str:
        """A run that is ready with an admitted answer; nobody began with it."""
        run_id = self.client.enqueue("support", "Go", session=session).id
        assert self.worker().work(run_id)["state"] == "paused"
        (asked,) = self.world.pending(self.world.run(run_id)["suspension_id"])
        self.client.provide_results(run_id, [ToolResult(tool_call_id=asked["call_id"], content="packed")])
        return run_id

    def reclaimable(self) -> str:
        """Its worker died right after it began with the answer."""
        run_id = self.answered()
        assert self.worker().lose_at("model.before", run_id)["state"] == "reclaimable"
        return run_id

    def uncertain(self, session: str | None = None) -> str:
        """It asks what became of a call that it made after the answer."""
        run_id = self.answered(session)
        self.worker().lose_at("tool.after_handler", run_id)
        assert self.worker().work(run_id)["state"] == "paused"
        return run_id

    def lapsed(self) -> str:
        """It runs, on paper: its lease is over and nobody has noticed."""
        run_id = self.answered()
        self.worker().die_at("model.before", run_id)
        self.world.later(TTL_S + 1)
        return run_id

    def request(self, run_id: str, **changes: Any) -> ResumeClosureRequest:
        """What a host asks after it has looked at the run."""
        with self.rt.database.read() as unit:
            row = admissions.latest(unit, run_id)
            assert row is not None
            start = admissions.receipt(unit, run_id, row["suspension_id"], "start")
            now = admissions.database_time(unit)
        admission = admissions.to_admission(row)
        values: dict[str, Any] = {
            "scope": SCOPE,
            "version": admission.request.version,
            "admission_digest": admission.digest(),
            "start_digest": admissions.to_start(row, start).digest() if start is not None else "0" * 64,
            "run_revision": self.world.run(run_id)["revision"],
            "actor": "ops@example.com",
            "issuer": "hypervisor",
            "issuer_revision": "7",
            "proof_ref": "case 4711",
            "proof_digest": "a" * 64,
            "observed_at": now,
            "expires_at": now + timedelta(minutes=5),
        }
        return ResumeClosureRequest(**{**values, **changes})

    def close(self, request: ResumeClosureRequest, **options: Any) -> ResumeClosure:
        return ResumeCloser(self.rt, self.guards, self.guards, **options).close(request)

    def receipts(self, run_id: str) -> list[str]:
        rows = self.world.rows(tables.resume_receipts, tables.resume_receipts.c.run_id == run_id)
        return sorted(row["kind"] for row in rows)

    def refused(
        self, error: type[Exception], request: ResumeClosureRequest, match: str | None = None
    ) -> None:
        """Nothing at all is written by a refusal."""
        before = self.world.snapshot()
        with pytest.raises(error, match=match):
            self.close(request)
        assert self.world.snapshot() == before

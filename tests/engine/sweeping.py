"""A process that sweeps, its clock in the test's hand, and runs for it to find."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import event, text

from cortex_workers import wiring
from cortex_workers.engine.runtime import Runtime
from cortex_workers.schemas.agent import AgentDefinition
from cortex_workers.schemas.notifications import Notification
from cortex_workers.schemas.outcomes import Swept
from cortex_workers.settings import load_settings
from cortex_workers.store import workers
from cortex_workers.store.transitions import Row
from cortex_workers.sweep import frame
from cortex_workers.testing import factory
from cortex_workers.testing.clock import StoppedClock, stopped_clock


@dataclass
class KnownDepth:
    """How many hints wait, as a broker would tell; None while it does not."""

    waiting: dict[str, int | None] = field(default_factory=dict)

    def depth(self, queue: str) -> int | None:
        return self.waiting.get(queue, 0)


class Sweeper:
    """One process: its runtime, what it told everybody (``told``), and the hints it repeated (``hinted``)."""

    def __init__(self, url: str, clock: StoppedClock, **settings: Any) -> None:
        self.clock = clock
        self.rt: Runtime = wiring.build(load_settings(database_url=url, **settings), role="client")
        self.told: list[Notification] = []
        self.hinted: list[Notification] = []
        self.rt.hooks.subscribe(self.told.append)
        self.rt.nudge = self.hinted.append
        self.depth = KnownDepth()
        self.rt.depth = self.depth
        self.database = self.rt.database

    def close(self) -> None:
        self.rt.database.dispose()

    def sweep(self, *passes: str) -> Swept:
        """Sweep as beat does, one interval after the last time."""
        self.clock.advance(self.rt.settings.sweep_interval_s)
        return self.again(*passes)

    def again(self, *passes: str) -> Swept:
        """Sweep at this very moment."""
        return frame.sweep(self.rt, list(passes) or None)

    def now(self, row: Row) -> Row:
        return factory.now(self.database, row["id"])

    def execute(self, statement: str, **values: Any) -> Any:
        """Write what no use case of this release writes."""
        with self.database.transaction() as unit:
            return unit.execute(text(statement), values)

    def counts(self, name: str) -> Any:
        """The row of a pass."""
        with self.database.read() as unit:
            return unit.one(text(f"select * from sweeps where name = '{name}'"))

    def events(self, row: Row) -> list[str]:
        """The kinds of a run's events, in order."""
        with self.database.read() as unit:
            found = unit.all(text(f"select kind from events where run_id = '{row['id']}' order by run_seq"))
        return [each.kind for each in found]

    def a_worker(
        self,
        worker_id: str = "worker-1",
        agent: AgentDefinition = factory.AGENT,
        slots: int = 10,
        pool: str = "main",
        heartbeat_every_s: float = 1_000_000.0,
    ) -> None:
        """A worker that serves an agent and has it in its own code; it stays alive, or needs a heartbeat so often."""
        digest = [agent.digest()]
        self.database.run(
            lambda unit: workers.register(
                unit,
                worker_id,
                version="1",
                reader_version=1,
                slots=slots,
                pool=pool,
                agents=digest,
                own_agents=digest,
                heartbeat_every_s=heartbeat_every_s,
            )
        )


@contextmanager
def sweepers(url: str, count: int = 1, **settings: Any) -> Iterator[list[Sweeper]]:
    """Processes that sweep one database, under one clock that stands still until it is moved."""
    with stopped_clock() as clock:
        made = [Sweeper(url, clock, **settings) for _ in range(count)]
        try:
            yield made
        finally:
            for each in made:
                each.close()


@contextmanager
def counted_statements(sweeper: Sweeper) -> Iterator[list[str]]:
    """The statements that a process sends."""
    sent: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        sent.append(statement)

    engine = sweeper.database.engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(engine, "before_cursor_execute", note)

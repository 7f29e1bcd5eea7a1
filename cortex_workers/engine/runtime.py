"""What every use case gets as its first argument: the concrete parts of this process, wired once.

Source: decision S2.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from cortex_workers.engine.ahead import Ahead
from cortex_workers.engine.bus import Bus
from cortex_workers.errors import NoHost
from cortex_workers.host import Host
from cortex_workers.lease.drain import DrainSwitch
from cortex_workers.lease.keeper import LeaseKeeper
from cortex_workers.lease.loops import Loops, ThreadRunner
from cortex_workers.lease.slots import Slots
from cortex_workers.notify.hooks import Hooks
from cortex_workers.ports import HintDepth, ModelClient, TokenSink
from cortex_workers.schemas.agent import AgentDefinition
from cortex_workers.schemas.notifications import Notification
from cortex_workers.settings import Settings
from cortex_workers.store import agents as agent_store
from cortex_workers.store.claims import Claimer
from cortex_workers.store.database import Database


class Versions:
    """Definitions by digest, kept for the life of the process: a version never changes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[str, AgentDefinition] = {}
        self._lock = threading.Lock()

    def add(self, definition: AgentDefinition) -> str:
        """Keep one that this process declared itself."""
        digest = definition.digest()
        with self._lock:
            self._known[digest] = definition
        return digest

    def get(self, digest: str) -> AgentDefinition | None:
        """The definition, from memory or the database."""
        found = self._known.get(digest)
        if found is None:
            with self._database.read() as unit:
                found = agent_store.definition(unit, digest)
            if found is not None:
                with self._lock:
                    self._known[digest] = found
        return found


class Served:
    """The versions this process can run: its agents, with every tool of the same class and effects (ruling 53)."""

    def __init__(self, host: Host | None) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._looked_at: set[str] = set()
        self.digests: tuple[str, ...] = ()

    def look_at(self, digest: str, definition: AgentDefinition) -> bool:
        """Decide whether a version is served, and remember it."""
        with self._lock:
            self._looked_at.add(digest)
            serves = self._serves(definition)
            if serves and digest not in self.digests:
                self.digests = (*self.digests, digest)
            return serves

    @property
    def known(self) -> set[str]:
        """Every version looked at so far."""
        with self._lock:
            return set(self._looked_at)

    def missing_tools(self, definition: AgentDefinition) -> list[str]:
        """What keeps this process from serving a version: the agent's name, or tools missing or of another kind."""
        if self._host is None or definition.name not in self._host.definitions():
            return [f"agent {definition.name}"]
        found = []
        for spec in definition.tools:
            mine = self._host.tools.get(spec.name)
            if mine is None or (mine.spec.tool_class, mine.spec.effects) != (spec.tool_class, spec.effects):
                found.append(f"tool {spec.name}")
        return found

    def _serves(self, definition: AgentDefinition) -> bool:
        return not self.missing_tools(definition)


@dataclass(slots=True)
class Runtime:
    """The parts of one process. ``start`` and ``stop`` belong to wiring; use cases only read."""

    settings: Settings
    database: Database
    hooks: Hooks
    host: Host | None
    worker_id: str
    keeper: LeaseKeeper
    slots: Slots
    drain: DrainSwitch
    loops: Loops
    threads: ThreadRunner
    versions: Versions
    served: Served
    resolve_model: Callable[[str], ModelClient]
    starter: Callable[[Runtime, Iterable[str]], None]
    stopper: Callable[[Runtime], None]
    flush: Callable[[float], Any] = field(default=lambda _seconds: None)
    depth: HintDepth | None = None
    nudge: Callable[[Notification], None] | None = None
    ahead: Ahead | None = None
    bus: Bus | None = None
    registered: bool = False
    tokens: TokenSink | None = None
    closers: list[Callable[[], Any]] = field(default_factory=list)

    def start(self, queues: Iterable[str] = ()) -> None:
        """Begin to hold runs (`wiring.start`)."""
        self.starter(self, queues)

    def stop(self) -> None:
        """End this process's part (`wiring.stop`)."""
        self.stopper(self)

    def require_host(self) -> Host:
        """The host of this process.

        Raises: NoHost.
        """
        if self.host is None:
            raise NoHost()
        return self.host

    @property
    def claimer(self) -> Claimer:
        """Who this process is when it claims."""
        return Claimer(self.worker_id, self.settings.lease_ttl_s, self.settings.pool, self.served.digests)

"""The parts of this worker process: built once, after any fork, and never shared across one.

Source: ruling 32; house.md 3.3 (`tasks/base.py`, `tasks/signals.py`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cortex_workers.errors import Stopping
from cortex_workers.lease.drain import DrainSwitch, Watchdog
from cortex_workers.settings import Settings
from cortex_workers.tasks import health
from cortex_workers.tasks.depth import BrokerDepth
from cortex_workers.tasks.publish import attach
from cortex_workers.tasks.routes import takes_runs
from cortex_workers.tasks.standby import Standby, Starvation
from cortex_workers.tasks.tokens import TokenPusher

if TYPE_CHECKING:
    from cortex_workers.engine.runtime import Runtime

SWITCH = DrainSwitch()
"""Made at import and so before any fork: the children of a prefork worker see what its parent was told."""
SIGNALLED = DrainSwitch()
"""Celery itself was told to stop; without this, whoever drains for another reason has to tell it."""

_main_pid = os.getpid()
_held: dict[int, WorkerProcess] = {}


class WorkerProcess:
    """A runtime with its publisher, watchdog and standby."""

    def __init__(self, settings: Settings, queues: Sequence[str], consumes: bool) -> None:
        from cortex_workers import wiring

        self.rt = wiring.build(settings, role="worker", drain=SWITCH)
        attach(self.rt)
        self.rt.tokens = tokens = TokenPusher(settings)
        self.rt.closers.append(tokens.close)
        self.depth = BrokerDepth(settings)
        self.rt.depth = self.depth
        self.watchdog = Watchdog(
            self.rt.keeper, self.rt.slots, self.rt.database, self.rt.drain, settings, self._flush
        )
        self._queues = tuple(queues)
        self.standby = Standby(
            self.rt, self._starvation() if consumes else None, takes_runs=takes_runs(queues)
        )

    def start(self) -> None:
        """Take part in the fleet."""
        self.rt.start(self._queues)
        self.standby.start()
        # For a child of a prefork worker, which gets no signal, and for a drain that somebody asked for by a row.
        SWITCH.on_drain(self.watchdog.start)
        SWITCH.on_drain(_tell_celery)

    def stop(self) -> None:
        """Leave the fleet in good order."""
        self.standby.stop()
        self.standby.join_claims()
        self.rt.stop()
        # Last: whatever hangs above still ends at the deadline.
        self.watchdog.stand_down()
        self.depth.close()

    def _flush(self, timeout_s: float) -> None:
        self.rt.flush(timeout_s)

    def _starvation(self) -> Starvation:
        from celery.worker import state

        return Starvation(
            self.depth,
            self._queues,
            free=lambda: self.rt.slots.free,
            received=lambda: state.all_total_count[0],
        )


def begin(settings: Settings, queues: Sequence[str] = (), *, consumes: bool = False) -> WorkerProcess:
    """Build and start the parts of this process; a second call gives the same.

    ``consumes`` tells that messages arrive in this very process, as they do not in a child of a prefork worker.
    Raises: Misconfiguration, StoreUnavailable.
    """
    found = here()
    if found is None:
        found = WorkerProcess(settings, queues, consumes)
        found.start()
        _held[os.getpid()] = found
    return found


def here() -> WorkerProcess | None:
    """The parts of this process; None in one that has none, as a child of the one that has."""
    return _held.get(os.getpid())


def end() -> None:
    """Stop the parts of this process; a second call does nothing."""
    found = _held.pop(os.getpid(), None)
    if found is not None:
        found.stop()


def drain() -> None:
    """Begin to drain; safe inside a signal handler."""
    SIGNALLED.set()
    SWITCH.set()
    found = here()
    if found is not None:
        found.watchdog.start()


def runtime() -> Runtime:
    """The runtime that the tasks of this process work with.

    Raises: Stopping when there is none: this process does not run tasks yet, or does not any more.
    """
    found = here()
    if found is None:
        raise Stopping("this process has no runtime: it has not started, or it has stopped")
    return found.rt


def _tell_celery() -> None:
    """Let Celery stop taking messages, if it was not the one who told us."""
    health.clear_ready()
    if not SIGNALLED.is_set():
        os.kill(_main_pid, signal.SIGTERM)

"""What every worker process watches beside its work: new versions, whether anybody sweeps, whether messages arrive.

Source: decision R5; celery.md 8 (starvation), 19 (beat or broker silent).
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cortex_workers import telemetry
from cortex_workers.errors import CortexError
from cortex_workers.ports import HintDepth

if TYPE_CHECKING:
    from cortex_workers.engine.runtime import Runtime

SILENT_INTERVALS = 3
STARVING_S = 120.0
MOST_CLAIMS = 50


class Standby:
    """One thread per process; it sweeps when the last sweep in Postgres is older than three intervals.

    It also takes runs that have waited for as long: then their hints get nowhere, and free slots claim by themselves.
    """

    def __init__(self, rt: Runtime, starvation: Starvation | None = None, takes_runs: bool = False) -> None:
        self._rt = rt
        self._takes_runs = takes_runs
        self._claims: list[threading.Thread] = []
        self._starvation = starvation
        self._interval_s = rt.settings.sweep_interval_s
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._began = time.monotonic()

    def start(self) -> None:
        """Begin to watch."""
        self._thread = threading.Thread(target=self._watch, name="standby", daemon=True)
        self._thread.start()

    def stop(self, wait_s: float = 1.0) -> None:
        """End the thread; a sweep under way ends with its row."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(wait_s)

    def join_claims(self) -> None:
        """Wait for the runs that were taken here, as a pool waits for its own; the watchdog's deadline bounds it."""
        for thread in self._claims:
            thread.join(self._rt.settings.drain_s)

    def _watch(self) -> None:
        # Jittered, so that the processes of a fleet that started together do not all look at once.
        while not self._stopped.wait(self._interval_s * random.uniform(0.5, 1.0)):
            if self._rt.drain.is_set():
                return
            try:
                self.look()
            except CortexError as error:
                telemetry.event("sweep.row_failed", level="warning", sweep="standby", code=error.code)
            except Exception as error:  # noqa: BLE001  the thread's own edge: it must outlive one bad look
                telemetry.event(
                    "sweep.row_failed", level="error", sweep="standby", error=type(error).__name__
                )

    def look(self) -> None:
        """Look once: serve what is new, sweep if nobody does, and drain if this worker starves."""
        from cortex_workers.sweep import frame

        if self._starvation is not None:
            self._starvation.look()
        frame.look_around(self._rt)
        if self._is_silent():
            telemetry.event("sweep.fallback", level="warning")
            frame.sweep(self._rt, by="fallback")
        if self._takes_runs:
            self._take_waiting()

    def _take_waiting(self) -> None:
        """Claim for free slots what has waited too long: the broker is gone, or loses what it gets (decision R5)."""
        from cortex_workers.store import claims
        from cortex_workers.tasks.continue_run import claim_from_table

        free = min(self._rt.slots.free, MOST_CLAIMS)
        if free <= 0:
            return
        with self._rt.database.read() as unit:
            waiting = claims.count_waiting(unit, self._rt.claimer, SILENT_INTERVALS * self._interval_s, free)
        self._claims = [thread for thread in self._claims if thread.is_alive()]
        for _ in range(waiting):
            thread = threading.Thread(target=claim_from_table, name="table-claim", daemon=True)
            thread.start()
            self._claims.append(thread)

    def _is_silent(self) -> bool:
        from cortex_workers.sweep import frame

        age = frame.last_sweep_age_s(self._rt)
        # A fleet that never swept has only just been made: beat gets its chance first.
        silent_for = time.monotonic() - self._began if age is None else age
        return silent_for > SILENT_INTERVALS * self._interval_s


class Starvation:
    """Tells when messages wait, slots are free, and still nothing arrives for two minutes: then this worker drains.

    An unknown hang of the consumer becomes a restart by the platform; the rows are healed meanwhile.
    """

    def __init__(
        self,
        depth: HintDepth,
        queues: Sequence[str],
        free: Callable[[], int],
        received: Callable[[], int],
        patience_s: float = STARVING_S,
        drain: Callable[[], None] | None = None,
    ) -> None:
        self._depth, self._queues = depth, tuple(queues)
        self._free, self._received = free, received
        self._patience_s = patience_s
        self._drain = drain or ask_to_stop
        self._since = time.monotonic()
        self._count = received()

    def look(self) -> None:
        """Look once; the broker being away, an empty queue, a message or a full house start the clock anew."""
        count = self._received()
        if count != self._count or self._free() <= 0 or not self._is_waiting():
            self._since, self._count = time.monotonic(), count
        elif time.monotonic() - self._since > self._patience_s:
            telemetry.event("worker.starving", level="error", patience_s=self._patience_s)
            self._since = time.monotonic()
            self._drain()

    def _is_waiting(self) -> bool:
        return any(self._depth.depth(queue) for queue in self._queues)


def ask_to_stop() -> None:
    """Ask this worker for its ordinary end, as the platform does."""
    os.kill(os.getpid(), signal.SIGTERM)

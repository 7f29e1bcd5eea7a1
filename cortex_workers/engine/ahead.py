"""Runs this process claimed ahead of need, while runs are short: renewed, taken by any slot, given back in a second.

Source: ruling 18 (at most 32 held ahead; handed back on drain or when not begun within 1 s).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cortex_workers import telemetry
from cortex_workers.lease.keeper import Held
from cortex_workers.lease.threads import start_real
from cortex_workers.store.transitions import Row

MOST = 32
BEGIN_WITHIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Claimed:
    """A claimed row and its hold."""

    row: Row
    held: Held


class Ahead:
    """A small shelf of claimed runs. ``give_back`` is called, outside the lock, for what nobody began in time."""

    def __init__(self, give_back: Callable[[Claimed], None]) -> None:
        self._give_back = give_back
        self._shelf: deque[tuple[float, Claimed]] = deque()
        self._changed = threading.Condition()
        self._watching = False

    @property
    def room(self) -> int:
        """How many more may be claimed ahead."""
        return max(0, MOST - len(self._shelf))

    def put(self, items: list[Claimed]) -> None:
        """Keep runs for the next free slots."""
        if not items:
            return
        with self._changed:
            self._shelf.extend((time.monotonic(), item) for item in items)
            if not self._watching:
                self._watching = True
                start_real("claimed-ahead", self._watch)
            self._changed.notify()

    def take(self) -> Claimed | None:
        """The run that waits longest, or None."""
        with self._changed:
            return self._shelf.popleft()[1] if self._shelf else None

    def give_back_all(self) -> None:
        """Give everything back now (drain)."""
        while (item := self.take()) is not None:
            self._return(item)

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not self._shelf:
                    self._changed.wait()
                due = self._shelf[0][0] + BEGIN_WITHIN_S
                left = due - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                item = self._shelf.popleft()[1]
            self._return(item)

    def _return(self, item: Claimed) -> None:
        """Give one back; where that fails it is left to its lease, and the others are looked after all the same."""
        try:
            self._give_back(item)
        except Exception as error:  # the watcher's own edge: it must outlive an outage of Postgres
            telemetry.event("run.broken", "warning", run_id=item.held.term.run_id, error=type(error).__name__)
        finally:
            item.held.release()

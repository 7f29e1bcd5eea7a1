"""What waits to be sent by a thread of its own: bounded, oldest dropped.

Putting never waits for sending: the lock is held for moments only.
Source: ruling 21.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from cortex_workers import telemetry
from cortex_workers.lease.threads import is_patched

T = TypeVar("T")
_WAIT_S = 0.5
"""Under gevent a wake-up from a thread of the operating system may not reach a greenlet; it looks again this often."""


class Outbox(Generic[T]):
    """Things to send, in order of arrival; when it is full the oldest goes, counted under ``why``."""

    def __init__(self, limit: int, why: str) -> None:
        self.pid = os.getpid()
        self.given_up = False
        """Whether somebody waited long enough for the rest to be sent."""
        self._limit = limit
        self._why = why
        self._items: deque[T] = deque()
        self._taken = 0
        self._changed = threading.Condition()
        self._closed = False

    def put(self, item: T) -> None:
        """Add one, dropping the oldest when there is no room."""
        with self._changed:
            if len(self._items) >= self._limit:
                self._items.popleft()
                telemetry.PUBLISH_DROPPED.labels(self._why).inc()
            self._items.append(item)
            self._changed.notify_all()

    def take(self, most: int) -> list[T]:
        """Wait for things and take some; an empty list means closed and empty. `done` or `give_back` follows."""
        with self._changed:
            while not self._items and not self._closed:
                self._changed.wait(_WAIT_S if is_patched() else None)
            batch = [self._items.popleft() for _ in range(min(most, len(self._items)))]
            self._taken = len(batch)
            return batch

    def done(self) -> None:
        """What was taken is settled."""
        with self._changed:
            self._taken = 0
            self._changed.notify_all()

    def give_back(self, items: Sequence[T]) -> None:
        """Put unsent ones back to the front, as far as there is room."""
        with self._changed:
            room = max(0, self._limit - len(self._items))
            kept = items[-room:] if room else []
            if len(kept) < len(items):
                telemetry.PUBLISH_DROPPED.labels(self._why).inc(len(items) - len(kept))
            self._items.extendleft(reversed(kept))
            self._taken = 0
            self._changed.notify_all()

    def rest(self, seconds: float) -> None:
        """Wait, unless it is closed meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, timeout=seconds)

    def drained(self, timeout_s: float) -> bool:
        """Wait until nothing is left and nothing is under way; False when that took too long."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._items and not self._taken, timeout=max(0.0, deadline - time.monotonic())
            )

    def close(self) -> None:
        """Take no waiter into sleep any more; what is inside can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether the sender should end once it is empty."""
        return self._closed

    def __len__(self) -> int:
        return len(self._items)

"""After-commit subscribers: told in order, isolated from each other, never able to undo.

Source: house.md 3.5, principle 14.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from cortex_workers import telemetry
from cortex_workers.schemas.notifications import Notification

Subscriber = Callable[[Notification], None]


class Hooks:
    """Who is told of committed facts. A subscriber that raises is logged and counted."""

    def __init__(self) -> None:
        self._subscribers: list[tuple[tuple[str, ...], Subscriber]] = []
        self._lock = threading.Lock()

    def subscribe(self, subscriber: Subscriber, *kinds: str) -> None:
        """Tell a subscriber of every notification, or of the kinds it names."""
        with self._lock:
            self._subscribers = [*self._subscribers, (kinds, subscriber)]

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Tell it no more."""
        with self._lock:
            self._subscribers = [item for item in self._subscribers if item[1] is not subscriber]

    def publish(self, notification: Notification) -> None:
        """Tell everybody; errors of one subscriber reach neither the others nor the caller."""
        for kinds, subscriber in self._subscribers:
            if kinds and notification.kind not in kinds:
                continue
            try:
                subscriber(notification)
            except Exception as error:  # an edge: foreign code must not change an outcome
                telemetry.HOOK_FAILURES.labels(notification.kind).inc()
                telemetry.event("hook.failed", "error", kind=notification.kind, error=type(error).__name__)

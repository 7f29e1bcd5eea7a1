"""A subscriber that remembers what a process was told."""

from __future__ import annotations

import threading
from typing import Any

from cortex_workers.schemas.notifications import Notification


class Recorder:
    """Subscribe it to a runtime's hooks: ``client.runtime.hooks.subscribe(recorder)``."""

    def __init__(self) -> None:
        self._told: list[Notification] = []
        self._changed = threading.Condition()

    def __call__(self, notification: Notification) -> None:
        """Remember one."""
        with self._changed:
            self._told.append(notification)
            self._changed.notify_all()

    @property
    def told(self) -> list[Notification]:
        """Everything so far, in order."""
        with self._changed:
            return list(self._told)

    def of(self, kind: str, **fields: Any) -> list[Notification]:
        """Those of a kind whose fields have these values: ``recorder.of("RunReady", why="answer")``."""
        return [
            item
            for item in self.told
            if item.kind == kind and all(getattr(item, name) == value for name, value in fields.items())
        ]

    def wait_for(
        self, kind: str, count: int = 1, timeout_s: float = 30.0, **fields: Any
    ) -> list[Notification]:
        """Wait until there are ``count`` of them.

        Raises: AssertionError when they do not come in time.
        """
        with self._changed:
            there = self._changed.wait_for(lambda: len(self.of(kind, **fields)) >= count, timeout_s)
        if not there:
            raise AssertionError(f"no {count} × {kind} {fields} within {timeout_s:g} s, but {self.told}")
        return self.of(kind, **fields)

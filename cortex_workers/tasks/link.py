"""One broker connection of an *api* kind: opened on use, dropped at its first failure, then left alone for a while.

Source: ruling 21; celery.md 9.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

from cortex_workers.errors import Unavailable
from cortex_workers.settings import Settings

T = TypeVar("T")
QUICK_S = 1.0
"""A failure that comes sooner is a lost connection, worth a second try on a fresh one; later, the broker is frozen."""


class BrokerAway(Unavailable):
    """The broker is not available."""

    code = "broker_unavailable"


class Link:
    """A connection for one thread at a time. A forked child makes its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._app: Any = None
        self._connection: Any = None
        self._producer: Any = None
        self._pid = os.getpid()
        self._rest_until = 0.0

    @property
    def resting_s(self) -> float:
        """How long this link still leaves the broker alone; 0 when it may be used."""
        return max(0.0, self._rest_until - time.monotonic())

    @property
    def app(self) -> Any:
        """The Celery app of this link; making it is what costs, so it is made on first use."""
        if self._app is None:
            from cortex_workers.tasks.app import make_app

            self._app = make_app(self._settings, role="api")
        return self._app

    def use(self, work: Callable[[Any], T]) -> T:
        """Do something with the connection; when it turns out lost at once, once more on a fresh one.

        Raises: BrokerAway, at once while the broker is left alone.
        """
        if self.resting_s:
            raise BrokerAway("the broker failed a moment ago and is left alone")
        for last in (False, True):
            began = time.monotonic()
            try:
                return work(self._open())
            except Exception as error:  # noqa: BLE001  each transport has its own kinds; all mean the same
                self.close()
                if last or time.monotonic() - began > QUICK_S:
                    self._rest_until = time.monotonic() + self._settings.breaker_s
                    raise BrokerAway(type(error).__name__) from error
        raise AssertionError("unreachable")

    def producer(self, connection: Any) -> Any:
        """A producer on this connection, the same one until it is dropped."""
        if self._producer is None:
            self._producer = self.app.amqp.Producer(connection, auto_declare=False)
        return self._producer

    def close(self) -> None:
        """Drop the connection; the next use opens another."""
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None and self._pid == os.getpid():
            with contextlib.suppress(Exception):  # it may be broken in any way; it is given up either way
                connection.release()

    def _open(self) -> Any:
        if self._pid != os.getpid():
            self._connection, self._producer, self._pid = None, None, os.getpid()
        if self._connection is None:
            self._connection = self.app.connection_for_write()
        return self._connection

"""What every part of the client stands on: its process, its scope, its life."""

from __future__ import annotations

import getpass
import math
import os
import threading
import weakref
from contextlib import suppress
from types import TracebackType
from typing import Self

from cortex_workers import wiring
from cortex_workers.engine.runtime import Runtime
from cortex_workers.engine.validate import checked_label, checked_scope
from cortex_workers.errors import (
    InvalidArgument,
    NoScope,
)
from cortex_workers.host import Host
from cortex_workers.ports import PrincipalCodec
from cortex_workers.settings import Settings, load_settings
from cortex_workers.store import migrate

MAX_LIMIT = 1000


class ClientBase:
    """The life of a client, and what its verbs share."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        scope: str | None = None,
        actor: str | None = None,
        host: Host | None = None,
        codec: PrincipalCodec | None = None,
        hints: bool = True,
    ) -> None:
        self.settings = settings or load_settings()
        self.settings.require_database()
        self._scope = scope or self.settings.scope
        self._actor = actor or self.settings.actor or f"client:{_user()}"
        checked_label("the actor", self._actor)
        self._codec = codec or (host.codec if host is not None else None)
        self._rt = wiring.build(self.settings, host=host, role="client")
        self._lock = threading.Lock()
        self._started = False
        self._checked = False
        if hints and self.settings.broker_url is not None:
            from cortex_workers.tasks.publish import attach

            attach(self._rt)
        self._close = weakref.finalize(self, _close, self._rt)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Send the hints still waiting (2 s at most) and close every connection."""
        self._close()

    @property
    def runtime(self) -> Runtime:
        """The parts of this process, for floors above."""
        return self._rt

    def _start(self) -> None:
        self._rt.require_host()
        with self._lock:
            if not self._started:
                self._rt.start()
                self._started = True

    def _check_schema(self) -> None:
        """A producer finds out at its first write that the schema is behind, with what to do about it."""
        if not self._checked:
            migrate.require_current(self.settings.require_database())
            self._checked = True

    def _need_scope(self, scope: str | None) -> str:
        chosen = scope if scope is not None else self._scope
        if not chosen:
            raise NoScope()
        return checked_scope(chosen).text

    def _any_scope(self, scope: str | None) -> str:
        return self._need_scope(scope)


def _close(rt: Runtime) -> None:
    with suppress(Exception):  # closing must not raise into whoever is leaving already
        rt.stop()


def checked_limit(limit: int) -> int:
    """A page's size.

    Raises: InvalidArgument.
    """
    if not isinstance(limit, int) or not 1 <= limit <= MAX_LIMIT:
        raise InvalidArgument(f"limit is 1 to {MAX_LIMIT}")
    return limit


def checked_seconds(what: str, value: object) -> float:
    """A time to wait, as a number.

    Raises: InvalidArgument.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer that no float can hold
            seconds = float(value)
            if not math.isnan(seconds):
                return seconds
    raise InvalidArgument(f"{what} is a number of seconds")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid()) if hasattr(os, "getuid") else "unknown"

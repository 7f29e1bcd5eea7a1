"""Tokens of streamed model calls: a capped Redis stream per run, for eyes only.

Pushing never blocks and never raises: a thread sends what a bounded queue holds, and what does not fit is left out, which
a reader tells by the index that is skipped. A broker that is no Redis has no token stream; rows tell everything that lasts.
Source: issue "Every kind of pause", Streaming; celery.md 14 (nothing here carries arguments or results of tools).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cortex_workers import telemetry
from cortex_workers.ports import Token
from cortex_workers.settings import Settings

CAP = 2000
"""So many tokens of a run are kept (about: Redis trims in blocks), for so long after the last one:"""
KEEP_S = 600
MOST_CHARS = 16_384
"""A piece that is longer is not sent: the broker's memory is for messages."""
QUEUE = 10_000
_BATCH = 200
_PAGE = 1000
_REST_S = 5.0
_TIMEOUT_S = 1.0
"""For one word of the broker; a reader shows rows meanwhile, a pusher holds nobody up."""


def key_of(settings: Settings, run_id: str) -> str:
    """Where a run's tokens are."""
    return f"{settings.queue_prefix}:tokens:{run_id}"


def connect(settings: Settings, tries: int = 1) -> redis.Redis | None:
    """A connection of our own with short timeouts; None where the broker is no Redis.

    A second try is for a connection that was found dead: who waits for an answer in vain does not wait twice.
    """
    url = settings.broker_url.get_secret_value() if settings.broker_url is not None else ""
    if not url.startswith(("redis://", "rediss://")):
        return None
    return redis.Redis.from_url(
        url,
        socket_timeout=_TIMEOUT_S,
        socket_connect_timeout=_TIMEOUT_S,
        decode_responses=True,
        retry=Retry(NoBackoff(), tries - 1, supported_errors=(redis.ConnectionError,)),
    )


class TokenPusher:
    """The worker's end; one per process, and a forked child gets a queue and a sender of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._pid: int | None = None
        self._closed = threading.Event()
        self._begin()

    def push(self, token: Token) -> None:
        """Remember a token to send; the oldest goes when the queue is full."""
        if self._client is None or len(token.text) > MOST_CHARS or self._closed.is_set():
            return
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    self._begin()
                    self._pid = os.getpid()
                    threading.Thread(target=self._send_all, name="token-pusher", daemon=True).start()
        self._queue.append(token)
        self._wake.set()

    def close(self) -> None:
        """Take no more and let the sender end; what is still queued is not waited for."""
        self._closed.set()
        self._wake.set()

    @property
    def waiting(self) -> int:
        """How many tokens are still to be sent."""
        return len(self._queue)

    def _begin(self) -> None:
        """What a process has for itself; a parent's connection and queue are not its child's."""
        self._client = connect(self._settings)
        self._queue: deque[Token] = deque(maxlen=QUEUE)
        self._wake = threading.Event()

    def _send_all(self) -> None:
        while not self._closed.is_set():
            self._wake.wait()
            self._wake.clear()
            while self._queue and not self._closed.is_set():
                batch = self._take()
                try:
                    self._send(batch)
                except Exception as error:  # noqa: BLE001  the thread's own edge: without it nothing is ever sent again
                    telemetry.event("tokens.failed", "debug", waiting=len(batch), error=type(error).__name__)
                    self._closed.wait(_REST_S)
        if self._client is not None:
            self._client.close()

    def _take(self) -> list[Token]:
        """The next tokens, oldest first; others may be pushed, and fall out, meanwhile."""
        batch: list[Token] = []
        while len(batch) < _BATCH:
            try:
                batch.append(self._queue.popleft())
            except IndexError:
                break
        return batch

    def _send(self, batch: list[Token]) -> None:
        assert self._client is not None
        pipe = self._client.pipeline(transaction=False)
        for token in batch:
            fields: Any = {"s": token.step, "i": token.index, "t": token.text}
            pipe.xadd(key_of(self._settings, token.run_id), fields, maxlen=CAP, approximate=True)
        for run_id in {token.run_id for token in batch}:
            pipe.expire(key_of(self._settings, run_id), KEEP_S)
        pipe.execute()


class TokenReader:
    """A client's end. While the broker is away it says that there is nothing, and asks again a little later."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client = connect(settings, tries=2)
        self._rests_until = 0.0

    def read(self, run_id: str, place: str | None) -> tuple[list[Token], str | None]:
        """Tokens after a place, and the next place; nothing while the broker is away."""
        if self._client is None or time.monotonic() < self._rests_until:
            return [], place
        try:
            key = key_of(self._settings, run_id)
            found: Any = self._client.xrange(key, min=f"({place}" if place else "-", count=_PAGE)
        except redis.RedisError:
            self._rests_until = time.monotonic() + _REST_S
            return [], place
        tokens = [Token(run_id, int(row["s"]), int(row["i"]), row["t"]) for _, row in found]
        return tokens, found[-1][0] if found else place

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()

"""Tokens of streamed model calls: a capped Redis stream per run, for eyes only.

Pushing never blocks and never raises: a thread sends what a bounded queue holds. A broker that is no Redis has no
token stream; rows tell everything that lasts.
Source: issue "Every kind of pause", Streaming; celery.md 14 (nothing here carries arguments or results of tools).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Any

import redis

from cortex_workers import telemetry
from cortex_workers.ports import Token
from cortex_workers.settings import Settings

CAP = 2000
KEEP_S = 3600
_QUEUE = 10_000
_BATCH = 200
_REST_S = 5.0


def key_of(settings: Settings, run_id: str) -> str:
    """Where a run's tokens are."""
    return f"{settings.queue_prefix}:tokens:{run_id}"


def connect(settings: Settings) -> redis.Redis | None:
    """A connection of our own with short timeouts; None where the broker is no Redis."""
    url = settings.broker_url.get_secret_value() if settings.broker_url is not None else ""
    if not url.startswith(("redis://", "rediss://")):
        return None
    return redis.Redis.from_url(url, socket_timeout=3, socket_connect_timeout=2, decode_responses=True)


class TokenPusher:
    """The worker's end."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client = connect(settings)
        self._queue: deque[Token] = deque(maxlen=_QUEUE)
        self._wake = threading.Event()
        self._pid: int | None = None

    def push(self, token: Token) -> None:
        """Remember a token to send; the oldest goes when the queue is full."""
        if self._client is None:
            return
        self._queue.append(token)
        if self._pid != os.getpid():
            self._pid = os.getpid()
            threading.Thread(target=self._send_all, name="token-pusher", daemon=True).start()
        self._wake.set()

    def _send_all(self) -> None:
        rest = threading.Event()
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._queue:
                try:
                    self._send([self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))])
                except redis.RedisError as error:
                    telemetry.event("hint.failed", "debug", waiting=len(self._queue), error=type(error).__name__)
                    rest.wait(_REST_S)

    def _send(self, batch: list[Token]) -> None:
        assert self._client is not None
        pipe = self._client.pipeline(transaction=False)
        for token in batch:
            key = key_of(self._settings, token.run_id)
            fields: Any = {"s": token.step, "i": token.index, "t": token.text}
            pipe.xadd(key, fields, maxlen=CAP, approximate=True)
        for run_id in {token.run_id for token in batch}:
            pipe.expire(key_of(self._settings, run_id), KEEP_S)
        pipe.execute()


class TokenReader:
    """The client's end."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client = connect(settings)

    def read(self, run_id: str, place: str | None) -> tuple[list[Token], str | None]:
        """Tokens after a place, and the next place; nothing while the broker is away."""
        if self._client is None:
            return [], place
        key = key_of(self._settings, run_id)
        try:
            found: Any = self._client.xrange(key, min=f"({place}" if place else "-", count=1000)
        except redis.RedisError:
            return [], place
        tokens = [Token(run_id, int(row["s"]), int(row["i"]), row["t"]) for _, row in found]
        return tokens, found[-1][0] if found else place

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()

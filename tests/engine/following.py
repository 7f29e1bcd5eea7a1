"""A shop with somebody who follows its runs, and tokens that a test keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from cortex_workers import Client
from cortex_workers.engine import streaming
from cortex_workers.errors import WaitTimeout
from cortex_workers.ports import Token
from cortex_workers.schemas.stream import StreamEvent, StreamKind
from tests.engine.world import SCOPE, Worker, World, call, say, turn

PAY = [turn(call("find", order="17")), turn(call("pay", amount=5)), say("Paid.")]


class Kept:
    """Tokens that a test keeps, sink and source in one; ``lost`` decides which never arrive."""

    def __init__(self, lost: Callable[[Token], bool] = lambda _: False) -> None:
        self._lost = lost
        self._tokens: list[Token] = []
        self.reads = 0
        self.closed = False

    def push(self, token: Token) -> None:
        if not self._lost(token):
            self._tokens.append(token)

    def read(self, run_id: str, place: str | None) -> tuple[Sequence[Token], str | None]:
        self.reads += 1
        begin = int(place or 0)
        items = [item for item in self._tokens[begin:] if item.run_id == run_id]
        return items, str(len(self._tokens))

    def close(self) -> None:
        self.closed = True


class Scene:
    """A shop, a client, and whoever works."""

    def __init__(self, world: World) -> None:
        self.world = world

    def shop(self, script: Any, **options: Any) -> None:
        self.world.shop(script, **options)
        self.worker: Worker = self.world.worker()
        self.client: Client = self.world.client()

    def enqueue(self, **options: Any) -> str:
        return str(self.client.enqueue("support", "Go", **options).id)

    def follow(self, run_id: str, **options: Any) -> Iterator[StreamEvent]:
        return streaming.follow(self.client.runtime, run_id, SCOPE, **{"timeout_s": 30.0, **options})

    def told(self, run_id: str, **options: Any) -> list[StreamEvent]:
        return list(self.follow(run_id, **options))

    def so_far(self, run_id: str, **options: Any) -> list[StreamEvent]:
        """What a stream gives before it begins to wait."""
        found: list[StreamEvent] = []
        with pytest.raises(WaitTimeout):
            for event in self.follow(run_id, **{**options, "timeout_s": 0.0}):
                found.append(event)
        return found


def kinds(events: Sequence[StreamEvent]) -> list[str]:
    return [str(event.kind) for event in events]


def text(events: Sequence[StreamEvent]) -> str:
    return "".join(event.data["content"] for event in events if event.kind is StreamKind.TOKEN)

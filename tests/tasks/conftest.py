"""What the tests of the Celery floor share."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import redis

from cortex_workers.schemas.ids import RUN, new_id
from cortex_workers.schemas.notifications import RunReady, Why
from cortex_workers.settings import Settings

Broker = Callable[..., Settings]


@pytest.fixture
def revisions() -> Callable[[], int]:
    """Numbers that go up."""
    return itertools.count(1).__next__


@pytest.fixture
def ready(revisions: Callable[[], int]) -> Callable[..., RunReady]:
    """A run that just became ready."""

    def make(why: Why = "start", pool: str = "main") -> RunReady:
        return RunReady(run_id=new_id(RUN), revision=revisions(), why=why, pool=pool)

    return make


class Queue:
    """A queue of the broker, looked at from outside."""

    def __init__(self, url: str, name: str) -> None:
        self.client = redis.Redis.from_url(url)
        self.key = f"{name.split('.')[0]}:{name}"

    def raw(self) -> list[bytes]:
        """The messages as they lie there, oldest first."""
        found: Any = self.client.lrange(self.key, 0, -1)
        return list(reversed(found))

    def __len__(self) -> int:
        return len(self.raw())

    def bodies(self) -> list[dict[str, Any]]:
        """The keyword arguments of each message."""
        return [body(raw) for raw in self.raw()]


def body(raw: bytes) -> dict[str, Any]:
    """The keyword arguments of a message."""
    import base64

    _, kwargs, _ = json.loads(base64.b64decode(json.loads(raw)["body"]))
    return dict(kwargs)


@pytest.fixture
def queue_of() -> Callable[[str, str], Queue]:
    """Look at a queue: address of the broker, name."""
    return Queue

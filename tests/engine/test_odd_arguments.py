"""What callers get wrong is a refusal in words, whatever they send, and writes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from cortex_workers.errors import InvalidArgument, WaitTimeout
from tests.engine.outside import paused
from tests.engine.world import World


@pytest.mark.parametrize("after", [None, "x", True, 1.5, -2, 2**63, 2**70], ids=repr)
def test_a_cursor_is_one_that_an_event_may_have(world: World, after: Any) -> None:
    client, _worker, run_id = paused(world)
    with pytest.raises(InvalidArgument, match="after is the cursor"):
        client.stream(run_id, after=after)
    with pytest.raises(InvalidArgument, match="after is the cursor"):
        client.astream(run_id, after=after)


def test_the_last_cursor_there_can_be_is_read_and_shows_nothing(world: World) -> None:
    client, _worker, run_id = paused(world)
    with pytest.raises(WaitTimeout):
        list(client.stream(run_id, after=2**63 - 1, timeout_s=0))


@pytest.mark.parametrize("seconds", ["x", True, float("nan"), 10**400], ids=lambda value: repr(value)[:8])
def test_a_timeout_is_a_number_of_seconds(world: World, seconds: Any) -> None:
    client, _worker, run_id = paused(world)
    with pytest.raises(InvalidArgument, match="timeout_s is a number"):
        client.stream(run_id, timeout_s=seconds)

"""Waiting for something to happen, instead of for time to pass."""

import time
from collections.abc import Callable
from typing import TypeVar

DEADLINE_S = 60.0
"""The one deadline of all tests: only a failing test ever uses it up, so it is long enough for a busy machine."""

_INTERVAL_S = 0.01

T = TypeVar("T")


def wait_until(predicate: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Ask until the answer is true and return it; fail with `what` was waited for."""
    deadline = time.monotonic() + deadline_s
    while not (answer := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(
                f"after {deadline_s:g} s still waiting for {what}; the last answer was {answer!r}"
            )
        time.sleep(_INTERVAL_S)
    return answer

"""What one call came to, handed from the thread or loop that runs it to the thread that waits, or left behind.

Source: ruling 8 (late results).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, Generic, TypeVar

from cortex_workers.lease.threads import is_patched

T = TypeVar("T")
_GREENLET_LOOKS_S = 0.5
Late = Callable[[Any], None]
"""Gets what a call returned, or the exception it raised, after nobody waited for it any more."""


def wait_for(future: Future[T], timeout_s: float | None) -> T:
    """The result of a future.

    Raises: TimeoutError, CancelledError, and what the future holds.
    """
    if not is_patched():
        return future.result(timeout_s)
    # A greenlet must not wait for another thread alone: its hub sees nothing coming, and calls that the end.
    end = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while (left := end - time.monotonic()) > _GREENLET_LOOKS_S:
        try:
            return future.result(_GREENLET_LOOKS_S)
        except TimeoutError:
            continue
    return future.result(max(0.0, left))


class Overdue(Exception):
    """The call was not over in time, and is abandoned."""


class GivenUp(Exception):
    """Somebody else abandoned the call."""


class Outcome(Generic[T]):
    """Settled once, by the runner; taken or abandoned, by the waiter; never both."""

    def __init__(self) -> None:
        self._future: Future[tuple[T | None, BaseException | None]] = Future()

    def take(self, timeout_s: float | None) -> T:
        """Wait for it.

        Raises: what the call raised, Overdue past the timeout, GivenUp when it was abandoned meanwhile.
        """
        try:
            value, error = wait_for(self._future, timeout_s)
        except CancelledError:
            raise GivenUp() from None
        except TimeoutError:
            if self.abandon():
                raise Overdue() from None
            # It came in between the two lines above.
            value, error = self._future.result()
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # a call that may return None says so in T

    def abandon(self) -> bool:
        """Stop waiting for it, whoever waits; False when it is there already."""
        return self._future.cancel()

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._future.cancelled()

    def settle(self, value: T | None, error: BaseException | None) -> bool:
        """Say what the call came to; False when nobody waits any more."""
        if not self._future.set_running_or_notify_cancel():
            return False
        self._future.set_result((value, error))
        return True

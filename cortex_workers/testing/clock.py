"""The database clock as a test wants it: stopped, and moved by hand.

::

    with stopped_clock() as clock:
        clock.advance(hours=3)

Only times that the store compares or writes through `store/clock.py` are meant, in this process alone; the process
must not run anything else meanwhile that needs the true time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from cortex_workers.store import clock

__all__ = ["StoppedClock", "stopped_clock"]


class StoppedClock:
    """An instant that every statement of this process takes for now."""

    def __init__(self, at: datetime) -> None:
        self.at = at
        clock.pin(at)

    def advance(self, seconds: float = 0.0, **more: float) -> datetime:
        """Move on by so many seconds (or ``minutes=``, ``hours=``, ``days=``) and return the new instant."""
        return self.set(self.at + timedelta(seconds=seconds, **more))

    def set(self, at: datetime) -> datetime:
        """Move to an instant, also a former one, and return it."""
        self.at = at
        clock.pin(at)
        return at


@contextmanager
def stopped_clock(at: datetime | None = None) -> Iterator[StoppedClock]:
    """Stop the clock now, or at an instant, and let it go on afterwards."""
    try:
        yield StoppedClock(at or datetime.now(UTC))
    finally:
        clock.pin(None)

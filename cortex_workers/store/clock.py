"""Database time as SQL; the only source of time in a statement.

``now()`` is the start of the statement and may be compared with an index; ``wall()`` is the instant it is evaluated,
for a guard that may have waited for a lock. A test may shift both, or stop them (`testing/clock.py`).
Source: decision R18, celery.md 27.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, DateTime, Float, Interval, cast, func, literal

_shift: timedelta = timedelta(0)
_pinned: datetime | None = None


def shift(by: timedelta) -> None:
    """Move this process's idea of the database clock; for tests only."""
    global _shift
    _shift = by


def pin(at: datetime | None) -> None:
    """Stop this process's idea of the database clock at an instant, or (None) let it go on; for tests only."""
    global _pinned
    _pinned = at


def now() -> ColumnElement[Any]:
    """The start of the statement."""
    return _as_told(func.statement_timestamp(type_=DateTime(timezone=True)))


def wall() -> ColumnElement[Any]:
    """The instant of evaluation, after any wait for a lock."""
    return _as_told(func.clock_timestamp(type_=DateTime(timezone=True)))


def _as_told(clock: ColumnElement[Any]) -> ColumnElement[Any]:
    if _pinned is not None:
        return literal(_pinned, DateTime(timezone=True))
    return clock + literal(_shift, Interval) if _shift else clock


def after(seconds: float | None) -> ColumnElement[Any]:
    """The instant so many seconds from the start of the statement."""
    return now() + literal(timedelta(seconds=seconds or 0.0), Interval)


def millis(value: ColumnElement[Any]) -> ColumnElement[Any]:
    """A time as milliseconds of the epoch: the rank of begun runs."""
    return cast(func.extract("epoch", value) * 1000, Float)

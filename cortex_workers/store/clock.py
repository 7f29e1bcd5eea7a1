"""Database time as SQL; the only source of time in a statement.

``now()`` is the start of the statement and may be compared with an index; ``wall()`` is the instant it is evaluated,
for a guard that may have waited for a lock. A test may shift both.
Source: decision R18, celery.md 27.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, DateTime, Float, Interval, cast, func, literal

_shift: timedelta = timedelta(0)


def shift(by: timedelta) -> None:
    """Move this process's idea of the database clock; for tests only."""
    global _shift
    _shift = by


def now() -> ColumnElement[Any]:
    """The start of the statement."""
    base: ColumnElement[Any] = func.statement_timestamp(type_=DateTime(timezone=True))
    return base + literal(_shift, Interval) if _shift else base


def wall() -> ColumnElement[Any]:
    """The instant of evaluation, after any wait for a lock."""
    base: ColumnElement[Any] = func.clock_timestamp(type_=DateTime(timezone=True))
    return base + literal(_shift, Interval) if _shift else base


def after(seconds: float | None) -> ColumnElement[Any]:
    """The instant so many seconds from the start of the statement."""
    return now() + literal(timedelta(seconds=seconds or 0.0), Interval)


def millis(value: ColumnElement[Any]) -> ColumnElement[Any]:
    """A time as milliseconds of the epoch: the rank of begun runs."""
    return cast(func.extract("epoch", value) * 1000, Float)

"""Rows whose hint may be lost: which to hint at again, and which to announce again.

*Healing* repeats a hint, quickly, and only as many as there are slots for. *Re-notifying* repeats the announcement that
hosts hear too, at most once per run and interval, whoever sweeps.
Source: runs.md 9.2, 9.3; rulings 16, 22.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, Float, Interval, case, func, literal, select, tuple_, update

from cortex_workers.schemas.notifications import Notification
from cortex_workers.store import announcing, clock, tables
from cortex_workers.store.claims import claimable
from cortex_workers.store.unit import Unit

runs = tables.runs
Key = tuple[int, str]
_STEADY = 4
"""From here on the pause between two hints of one row is 300 s and grows no more."""
_LONGEST_S = 300.0


def pools_across_scopes(unit: Unit) -> list[str]:
    """The pools in which runs wait that may be claimed. Index: runs_claim, one descent per pool."""
    waiting = (runs.c.state.in_(["ready", "reclaimable"]), runs.c.wait_reason.is_(None))
    found = select(func.min(runs.c.pool).label("pool")).where(*waiting).cte("found", recursive=True)
    following = select(func.min(runs.c.pool)).where(*waiting, runs.c.pool > found.c.pool).scalar_subquery()
    found = found.union_all(select(following).where(found.c.pool.is_not(None)))
    return [str(row[0]) for row in unit.all(select(found.c.pool).where(found.c.pool.is_not(None)))]


def unheard_across_scopes(
    unit: Unit, pool: str, queue_class: str, older_s: float, limit: int
) -> list[Notification]:
    """The best claimable runs of a queue that waited for so long since they were told or allowed. Index: runs_claim."""
    since = func.greatest(_told_at(), runs.c.not_before)
    found = (
        select(runs)
        .where(*_of(pool, queue_class), since <= clock.now() - literal(timedelta(seconds=older_s), Interval))
        .order_by(runs.c.rank, runs.c.id)
        .limit(limit)
    )
    return [announcing.waiting(dict(row), renotified=True) for row in unit.execute(found).mappings()]


def count_unheard_across_scopes(
    unit: Unit, pool: str, queue_class: str, older_s: float, limit: int
) -> list[Notification]:
    """The same where nobody knows how many hints wait: one row ever more rarely, counted on the row.

    The pauses between its hints are ``older_s`` · 1, 2, 4, 8, then 300 s.
    """
    waited = func.extract("epoch", clock.now() - func.greatest(_told_at(), runs.c.not_before))
    chosen = (
        select(runs.c.id)
        .where(*_of(pool, queue_class), waited >= _due_after(older_s))
        .order_by(runs.c.rank, runs.c.id)
        .limit(limit)
        .with_for_update(key_share=True, skip_locked=True)
        .cte("chosen")
    )
    counted = (
        update(runs)
        .where(runs.c.id == chosen.c.id)
        .values(notified_count=runs.c.notified_count + 1)
        .returning(*runs.c)
    )
    return [announcing.waiting(dict(row), renotified=True) for row in unit.execute(counted).mappings()]


def renotify(
    unit: Unit, pool: str, queue_class: str, older_s: float, after: Key | None, limit: int
) -> list[Key]:
    """Announce a page of claimable runs again whose last announcement is so old; returns their places in the queue.

    Writes: ``notified_at``, in the statement that finds the rows, so that it happens once per row and interval.
    """
    conditions = [
        *_of(pool, queue_class),
        _told_at() <= clock.now() - literal(timedelta(seconds=older_s), Interval),
    ]
    if after is not None:
        conditions.append(tuple_(runs.c.rank, runs.c.id) > tuple_(literal(after[0]), literal(after[1])))
    chosen = (
        select(runs.c.id)
        .where(*conditions)
        .order_by(runs.c.rank, runs.c.id)
        .limit(limit)
        .with_for_update(key_share=True, skip_locked=True)
        .cte("chosen")
    )
    told = update(runs).where(runs.c.id == chosen.c.id).values(notified_at=clock.wall()).returning(*runs.c)
    rows = sorted((dict(row) for row in unit.execute(told).mappings()), key=_place)
    for row in rows:
        unit.announce(announcing.waiting(row, renotified=True))
    return [_place(row) for row in rows]


def _of(pool: str, queue_class: str) -> Sequence[ColumnElement[bool]]:
    return claimable(), runs.c.pool == pool, runs.c.queue_class == queue_class


def _told_at() -> ColumnElement[Any]:
    return func.coalesce(runs.c.notified_at, runs.c.state_since)


def _due_after(older_s: float) -> ColumnElement[Any]:
    """Age at which the next hint is due: the sum of the pauses so far. Whole again with each announcement."""
    count = runs.c.notified_count
    growing = older_s * (func.power(literal(2.0, Float), count + 1) - 1)
    steady = older_s * (2.0**_STEADY - 1) + _LONGEST_S * (count - _STEADY + 1)
    return case((count < _STEADY, growing), else_=steady)


def _place(row: Any) -> Key:
    return int(row["rank"]), str(row["id"])

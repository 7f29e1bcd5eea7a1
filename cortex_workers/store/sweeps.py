"""The `sweeps` rows: which pass ran when, who has it now, and how far it came.

A pass belongs to whoever's update of its row matched; nobody waits for it and nothing is locked between statements, so
a holder that died costs a few intervals and no more.
Source: ruling 25; bug cases C16, C40, C41.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, DateTime, and_, cast, func, literal, null, or_, select, update
from sqlalchemy.dialects.postgresql import insert

from cortex_workers.errors import StoreUnavailable
from cortex_workers.store import clock, tables
from cortex_workers.store.unit import Unit

sweeps = tables.sweeps
_OF_ONE_ROW = ("55P03", "40P01", "40001", "57014")
"""A lock that did not come in time, a deadlock, a lost race, a statement that took too long."""


@dataclass(frozen=True, slots=True)
class Look:
    """One pass as its row tells it: seconds since its last start (None: free since ever), and whether it has ended."""

    name: str
    started_s: float | None
    finished: bool

    def is_due(self, every_s: float, patience_s: float) -> bool:
        """Whether it may be taken: the last one is old enough, or its holder was silent for too long."""
        if self.started_s is None:
            return True
        return self.started_s >= (every_s if self.finished else max(every_s, patience_s))


@dataclass(frozen=True, slots=True)
class Taken:
    """A pass that is ours until it is finished, given back, or its holder has been silent for too long.

    ``gap_s`` is how long ago it had been started before; None the first time.
    """

    name: str
    started_at: datetime
    gap_s: float | None
    cursor: Mapping[str, Any] = field(default_factory=dict)


def look(unit: Unit, names: Iterable[str]) -> dict[str, Look]:
    """What the rows say of these passes, in one statement; a pass that never ran gets its row."""
    wanted = list(names)
    found = _look(unit, wanted)
    missing = [name for name in wanted if name not in found]
    if missing:
        unit.execute(insert(sweeps).values([{"name": name} for name in missing]).on_conflict_do_nothing())
        found = _look(unit, wanted)
    return found


def _look(unit: Unit, names: list[str]) -> dict[str, Look]:
    rows = unit.all(
        select(sweeps.c.name, _age(sweeps.c.started_at).label("age"), _finished().label("finished")).where(
            sweeps.c.name.in_(names)
        )
    )
    return {row.name: Look(row.name, _float(row.age), bool(row.finished)) for row in rows}


def take(unit: Unit, name: str, worker_id: str, every_s: float, patience_s: float) -> Taken | None:
    """Make a pass ours by one conditional update; None when somebody else has it, or had it just now."""
    age = _age(sweeps.c.started_at)
    free = or_(
        sweeps.c.started_at.is_(None),
        and_(_finished(), age >= every_s),
        age >= max(every_s, patience_s),
    )
    mine = (
        select(sweeps.c.name, age.label("gap"), sweeps.c.cursor.label("came_to"))
        .where(sweeps.c.name == name, free)
        .with_for_update(skip_locked=True)
        .cte("mine")
    )
    taken = unit.one(
        update(sweeps)
        .where(sweeps.c.name == mine.c.name)
        .values(started_at=clock.wall(), worker_id=worker_id)
        .returning(sweeps.c.started_at, mine.c.gap, mine.c.came_to)
    )
    if taken is None:
        return None
    return Taken(name, taken.started_at, _float(taken.gap), _read(taken.came_to))


def finish(
    unit: Unit, taken: Taken, worker_id: str, cursor: Mapping[str, Any], counts: Mapping[str, int]
) -> None:
    """Note the end of a pass, how far it came (empty: through), and its rows: ``due``, ``done``, ``skipped``."""
    unit.execute(
        update(sweeps)
        .where(*_held(taken, worker_id))
        .values(finished_at=clock.wall(), cursor=_written(cursor), **counts)
    )


def give_back(unit: Unit, taken: Taken, worker_id: str, cursor: Mapping[str, Any]) -> None:
    """Let a pass go as if it had not begun, for anybody to take; ``cursor`` tells them what to know."""
    unit.execute(
        update(sweeps).where(*_held(taken, worker_id)).values(started_at=null(), cursor=_written(cursor))
    )


def oldest_age_s(unit: Unit, names: Iterable[str]) -> float | None:
    """How long ago the one of these passes ended that ended longest ago; None when none ever began.

    A pass that began and never ended counts from its beginning.
    """
    last = func.min(func.coalesce(sweeps.c.finished_at, sweeps.c.started_at))
    return _float(unit.scalar(select(_age(last)).where(sweeps.c.name.in_(list(names)))))


def all_rows(unit: Unit) -> list[Mapping[str, Any]]:
    """Every pass with its age in seconds, for people."""
    statement = select(
        sweeps, _age(sweeps.c.finished_at).label("finished_s"), _age(sweeps.c.started_at).label("started_s")
    ).order_by(sweeps.c.name)
    return [dict(row) for row in unit.execute(statement).mappings()]


def is_about_one_row(error: StoreUnavailable) -> bool:
    """Whether an error tells of a row that is locked or slow, rather than of a database that is gone."""
    return getattr(getattr(error.__cause__, "orig", None), "sqlstate", None) in _OF_ONE_ROW


def _held(taken: Taken, worker_id: str) -> list[ColumnElement[bool]]:
    return [
        sweeps.c.name == taken.name,
        sweeps.c.worker_id == worker_id,
        sweeps.c.started_at == literal(taken.started_at, DateTime(timezone=True)),
    ]


def _finished() -> ColumnElement[bool]:
    ended: ColumnElement[bool] = func.coalesce(sweeps.c.finished_at >= sweeps.c.started_at, False)
    return ended


def _age(column: ColumnElement[Any]) -> ColumnElement[Any]:
    return func.extract("epoch", clock.now() - cast(column, DateTime(timezone=True)))


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def _read(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _written(cursor: Mapping[str, Any]) -> str | None:
    return json.dumps(dict(cursor), sort_keys=True) if cursor else None

"""Runs: stored, read, listed. Their states move in `transitions.py`, their turns in `turns.py`.

Source: rulings 23, 55, 57.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Select, func, literal, select, tuple_
from sqlalchemy.dialects.postgresql import insert

from cortex_workers.schemas.base import read_row
from cortex_workers.schemas.run import Run
from cortex_workers.store import clock, tables, transitions
from cortex_workers.store.scopes import first_within
from cortex_workers.store.transitions import Move, Row
from cortex_workers.store.unit import Unit

runs, specs, workers, tenants = tables.runs, tables.run_specs, tables.workers, tables.tenants


def give_ranks(unit: Unit, counts: Mapping[str, int]) -> dict[str, int]:
    """Give starts their place between the tenants; returns the last rank per key (ruling 23).

    Writes: `tenants`, keys ascending.
    """
    floor = int(unit.scalar(_rank_floor()) or 0)
    last: dict[str, int] = {}
    for key in sorted(counts):
        made = (
            insert(tenants)
            .values(key=key, last_rank=floor + counts[key])
            .on_conflict_do_update(
                index_elements=[tenants.c.key],
                set_={"last_rank": func.greatest(tenants.c.last_rank, literal(floor)) + counts[key]},
            )
            .returning(tenants.c.last_rank)
        )
        last[key] = int(unit.scalar(made))
    return last


def _rank_floor() -> Select[Any]:
    claimed = (
        select(func.max(workers.c.last_start_rank)).where(workers.c.ended_at.is_(None)).scalar_subquery()
    )
    greatest = select(func.max(tenants.c.last_rank)).scalar_subquery()
    return select(func.coalesce(claimed, greatest, 0))


def insert_runs(
    unit: Unit, rows: Sequence[Mapping[str, Any]], spec_rows: Sequence[Mapping[str, Any]], move: Move
) -> list[Row]:
    """Store new runs with their wide part; a taken id is missing from what comes back (and nothing of it is stored)."""
    made = transitions.create(unit, "enqueue", rows, move)
    fresh = {row["id"] for row in made}
    kept = [spec for spec in spec_rows if spec["run_id"] in fresh]
    if kept:
        unit.connection.execute(insert(specs), kept)
    return made


def get(unit: Unit, run_id: str) -> Row | None:
    """One run's row, whatever its scope."""
    found = unit.execute(select(runs).where(runs.c.id == run_id)).mappings().first()
    return dict(found) if found is not None else None


def lease_is_over(unit: Unit, run_id: str) -> bool:
    """Whether a run is held under a lease that has run out; judged on the database clock."""
    over = (runs.c.state == "running") & (runs.c.lease_expires_at <= clock.wall())
    return bool(unit.scalar(select(over).where(runs.c.id == run_id)))


def get_scoped(unit: Unit, run_id: str, scope: str | None) -> Row | None:
    """One run's row, when the scope covers it."""
    row = get(unit, run_id)
    if row is None or (scope is not None and not _covers(scope, row["scope"])):
        return None
    return row


def _covers(scope: str, other: str) -> bool:
    return other == scope or other.startswith(scope + "/")


def lock(unit: Unit, run_id: str) -> Row | None:
    """One run's row, locked to the end of the transaction."""
    found = (
        unit.execute(select(runs).where(runs.c.id == run_id).with_for_update(key_share=True))
        .mappings()
        .first()
    )
    return dict(found) if found is not None else None


def requests(unit: Unit, run_ids: Iterable[str]) -> dict[str, Row]:
    """What earlier requests under these ids were: scope, state, digest of the request."""
    statement = (
        select(
            runs.c.id, runs.c.scope, runs.c.state, runs.c.session_id, runs.c.revision, specs.c.request_digest
        )
        .join(specs, specs.c.run_id == runs.c.id)
        .where(runs.c.id.in_(list(run_ids)))
    )
    return {row["id"]: dict(row) for row in unit.execute(statement).mappings()}


def spec(unit: Unit, run_id: str) -> Row | None:
    """The wide, immutable part of a run."""
    found = unit.execute(select(specs).where(specs.c.run_id == run_id)).mappings().first()
    return dict(found) if found is not None else None


def page(
    unit: Unit,
    scope: str,
    *,
    state: str | None = None,
    agent: str | None = None,
    session_id: str | None = None,
    before: str | None = None,
    limit: int = 50,
) -> list[Row]:
    """The newest runs of a scope (and below), in pages: ``before`` is the id of the last row seen."""
    statement = select(runs)
    if state is not None:
        statement = statement.where(runs.c.state == state)
    if agent is not None:
        statement = statement.where(runs.c.agent == agent)
    if session_id is not None:
        statement = statement.where(runs.c.session_id == session_id)
    if before is not None:
        seen = select(runs.c.created_at).where(runs.c.id == before).scalar_subquery()
        statement = statement.where(tuple_(runs.c.created_at, runs.c.id) < tuple_(seen, literal(before)))
    return list(
        first_within(unit, statement, runs, scope, lambda c: (c.created_at.desc(), c.id.desc()), limit)
    )


def to_run(row: Row) -> Run:
    """The public type of a row."""
    return read_row(Run, {**row, "usage": row["usage"] or {}, "leased_time_s": row["leased_time"]})

"""Worker rows: who is there, what it serves, how full it is, and whether it was asked to drain.

A worker is *live* when it has not ended and was heard of within three of its own heartbeat intervals. A process that
only serves its own caller has no slots: it is live, and counts for nobody else's runs.
Source: tables.md (workers); rulings 16, 23, 51, 53.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Interval, Text, and_, case, func, literal, null, select, update
from sqlalchemy.dialects.postgresql import insert

from cortex_workers.schemas.lease import WorkerInfo
from cortex_workers.store import clock, tables
from cortex_workers.store.unit import Unit

workers = tables.workers
MISSED_HEARTBEATS = 3
SILENT = "silent"
"""``ended_as`` of a worker that nobody heard of any more; its next heartbeat takes that back."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a worker reads of its own row while it writes to it."""

    drain_requested_at: datetime | None
    drain_requested_by: str | None
    drain_reason: str | None
    pause_sessions: bool
    ended_as: str | None


def register(
    unit: Unit,
    worker_id: str,
    *,
    version: str,
    reader_version: int,
    slots: int,
    pool: str = "main",
    agents: Collection[str] = (),
    own_agents: Collection[str] = (),
    queues: Sequence[str] = (),
    heartbeat_every_s: float = 20.0,
) -> None:
    """Store a worker process as started now; a second time, its row starts anew.

    ``agents`` are the digests it can run, ``own_agents`` those that its own code declares.
    """
    values = {
        "version": version,
        "reader_version": reader_version,
        "slots": slots,
        "pool": pool,
        "agents": sorted(agents),
        "own_agents": sorted(own_agents),
        "queues": list(queues),
        "heartbeat_every_s": heartbeat_every_s,
        "started_at": clock.wall(),
        "heartbeat_at": clock.wall(),
    }
    unset = dict.fromkeys(("draining_at", "ended_at", "ended_as"))
    unit.execute(
        insert(workers)
        .values(id=worker_id, **values)
        .on_conflict_do_update(index_elements=[workers.c.id], set_={**values, **unset})
    )


def heartbeat(unit: Unit, worker_id: str, slots_used: int, last_start_rank: int) -> Heartbeat | None:
    """Say that a worker is there and how full it is, and read what is asked of it; None when it has no row."""
    silent = workers.c.ended_as == SILENT
    beat = (
        update(workers)
        .where(workers.c.id == worker_id)
        .values(
            heartbeat_at=clock.wall(),
            slots_used=slots_used,
            last_start_rank=func.greatest(workers.c.last_start_rank, last_start_rank),
            ended_at=case((silent, null()), else_=workers.c.ended_at),
            ended_as=case((silent, null()), else_=workers.c.ended_as),
        )
        .returning(
            workers.c.drain_requested_at,
            workers.c.drain_requested_by,
            workers.c.drain_reason,
            workers.c.pause_sessions,
            workers.c.ended_as,
        )
    )
    row = unit.execute(beat).mappings().first()
    return Heartbeat(**row) if row is not None else None


def mark_draining(unit: Unit, worker_id: str) -> None:
    """Note since when a worker takes no new work."""
    unit.execute(
        update(workers)
        .where(workers.c.id == worker_id, workers.c.draining_at.is_(None))
        .values(draining_at=clock.wall())
    )


def end(unit: Unit, worker_id: str, ended_as: str) -> bool:
    """Note that a worker has ended; its row outlives the runs it held. False when it was noted before."""
    ended = unit.one(
        update(workers)
        .where(workers.c.id == worker_id, workers.c.ended_at.is_(None))
        .values(ended_at=clock.wall(), ended_as=ended_as, slots_used=0)
        .returning(workers.c.id)
    )
    return ended is not None


def end_silent(unit: Unit, silent_for_s: float, limit: int = 100) -> list[str]:
    """Note as ended what nobody heard of for so long (and for its own three heartbeats); returns the ids."""
    gone = (
        select(workers.c.id)
        .where(
            workers.c.ended_at.is_(None),
            workers.c.heartbeat_at <= clock.now() - literal(timedelta(seconds=silent_for_s), Interval),
            ~_heard_of(),
        )
        .order_by(workers.c.heartbeat_at)
        .limit(limit)
        .with_for_update(key_share=True, skip_locked=True)
        .cte("gone")
    )
    ended = (
        update(workers)
        .where(workers.c.id == gone.c.id)
        .values(ended_at=clock.wall(), ended_as=SILENT)
        .returning(workers.c.id)
    )
    return [str(row[0]) for row in unit.all(ended)]


def request_drain(
    unit: Unit, worker_id: str | None, by: str, reason: str | None = None, pause_sessions: bool = False
) -> list[str]:
    """Ask one worker, or (None) all live ones, to drain; they read it with their next heartbeat.

    The first request stands; one to pause sessions may be added to it. Returns the ids of the workers asked.
    """
    who = live() if worker_id is None else and_(workers.c.id == worker_id, workers.c.ended_at.is_(None))
    first = workers.c.drain_requested_at.is_(None)
    asked = (
        update(workers)
        .where(who)
        .values(
            drain_requested_at=func.coalesce(workers.c.drain_requested_at, clock.wall()),
            drain_requested_by=case((first, literal(by)), else_=workers.c.drain_requested_by),
            drain_reason=case((first, literal(reason, Text)), else_=workers.c.drain_reason),
            pause_sessions=workers.c.pause_sessions | literal(pause_sessions),
        )
        .returning(workers.c.id)
    )
    return sorted(str(row[0]) for row in unit.all(asked))


def set_served(unit: Unit, worker_id: str, digests: Collection[str]) -> None:
    """Replace the digests that a worker can run."""
    unit.execute(update(workers).where(workers.c.id == worker_id).values(agents=sorted(digests)))


def get(unit: Unit, worker_id: str) -> WorkerInfo | None:
    """One worker, ended or not."""
    row = unit.execute(_with_life().where(workers.c.id == worker_id)).mappings().first()
    return _info(row) if row is not None else None


def list_all(unit: Unit, include_ended: bool = False) -> list[WorkerInfo]:
    """The workers, the youngest first; without the ended ones unless asked."""
    statement = _with_life().order_by(workers.c.started_at.desc(), workers.c.id)
    if not include_ended:
        statement = statement.where(workers.c.ended_at.is_(None))
    return [_info(row) for row in unit.execute(statement).mappings()]


def live_count(unit: Unit, pool: str) -> int:
    """How many live processes take hints of a pool."""
    return int(unit.scalar(select(func.count()).where(_serves(pool))) or 0)


def free_slots(unit: Unit, pool: str) -> int:
    """How many more runs the live workers of a pool could take, without those that drain."""
    free = func.greatest(workers.c.slots - workers.c.slots_used, 0)
    stays = and_(workers.c.draining_at.is_(None), workers.c.drain_requested_at.is_(None))
    return int(unit.scalar(select(func.coalesce(func.sum(free), 0)).where(_serves(pool), stays)) or 0)


def served_digests(unit: Unit, pool: str) -> set[str]:
    """The agent versions that some live worker of a pool can run."""
    return {
        str(row[0]) for row in unit.all(select(func.unnest(workers.c.agents)).where(_serves(pool)).distinct())
    }


def own_digests(unit: Unit) -> set[str]:
    """The agent versions that some live worker declares in its own code."""
    return {
        str(row[0]) for row in unit.all(select(func.unnest(workers.c.own_agents)).where(live()).distinct())
    }


def live() -> ColumnElement[bool]:
    """Whether a worker is there, as a condition on its row."""
    return and_(workers.c.ended_at.is_(None), _heard_of())


def _heard_of() -> ColumnElement[bool]:
    seconds = workers.c.heartbeat_every_s * MISSED_HEARTBEATS
    patience = func.make_interval(0, 0, 0, 0, 0, 0, seconds, type_=Interval)
    return workers.c.heartbeat_at > clock.now() - patience


def _serves(pool: str) -> ColumnElement[bool]:
    return and_(live(), workers.c.slots > 0, workers.c.pool == pool)


def _with_life() -> Any:
    return select(workers, live().label("alive"))


def _info(row: Mapping[str, Any]) -> WorkerInfo:
    return WorkerInfo.model_validate(dict(row))

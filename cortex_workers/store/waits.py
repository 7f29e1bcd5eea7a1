"""Waits that end by themselves: a time that comes, a worker that appears, a fence that passes.

Runs of an unshared session go a page in one statement, since nothing but their own row is at stake; a shared session
goes by its lock and `turns.recompute`. What may be claimed by this is announced.
Source: rulings 15, 16, 30, 35, 36, 53.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import CTE, Interval, Select, and_, case, func, literal, null, or_, select, update

from cortex_workers.store import announcing, clock, sessions, tables, turns
from cortex_workers.store.claims import claimable
from cortex_workers.store.unit import Unit
from cortex_workers.store.workers import live

runs, agents, workers = tables.runs, tables.agents, tables.workers
_WAITING = ("ready", "reclaimable")


def end_later(unit: Unit, limit: int) -> int:
    """Let unshared runs be claimed whose wait for a time is over. Index: runs_later."""
    over = (
        select(runs.c.id)
        .where(
            runs.c.wait_reason == "later",
            runs.c.not_before <= clock.now(),
            ~runs.c.shared,
            runs.c.state.in_(_WAITING),
            runs.c.hold_reason.is_(None),
        )
        .order_by(runs.c.not_before, runs.c.id)
        .limit(limit)
        .with_for_update(key_share=True, skip_locked=True)
        .cte("over")
    )
    return _announce(
        unit, _change(over, {"wait_reason": null(), "notified_at": clock.wall()}), renotified=False
    )


def end_fences(unit: Unit, limit: int) -> int:
    """Forget the fence of cancelled, unshared runs that has passed: no session waits for them. Index: runs_fenced."""
    over = (
        select(runs.c.id)
        .where(runs.c.state == "cancelled", runs.c.fenced_until <= clock.now(), ~runs.c.shared)
        .order_by(runs.c.fenced_until, runs.c.id)
        .limit(limit)
        .with_for_update(key_share=True, skip_locked=True)
        .cte("over")
    )
    return len(
        unit.all(update(runs).where(runs.c.id == over.c.id).values(fenced_until=None).returning(runs.c.id))
    )


def mark_unserved(unit: Unit, older_s: float, limit: int) -> int:
    """Mark what could be claimed for so long but no live worker of its pool serves; returns how many rows changed.

    A run whose agent has moved to another pool goes there, and is announced where that pool serves it (ruling 16).
    Needs no session lock: only a row that has the turn is touched, and a recomputation keeps or replaces the mark.
    """
    here, home = _served("here"), _served("home")
    since = clock.now() - literal(timedelta(seconds=older_s), Interval)
    unserved = (
        select(
            runs.c.id, func.coalesce(agents.c.pool, runs.c.pool).label("pool"), home.c.digest.label("at_home")
        )
        .select_from(
            runs.outerjoin(agents, agents.c.name == runs.c.agent)
            .outerjoin(here, and_(here.c.pool == runs.c.pool, here.c.digest == runs.c.agent_digest))
            .outerjoin(home, and_(home.c.pool == agents.c.pool, home.c.digest == runs.c.agent_digest))
        )
        .where(claimable(), runs.c.state_since <= since, here.c.digest.is_(None))
        .limit(limit)
        .with_for_update(key_share=True, skip_locked=True, of=runs)
        .cte("unserved")
    )
    served_now = unserved.c.at_home.is_not(None)
    values = {
        "pool": unserved.c.pool,
        "wait_reason": case((served_now, null()), else_=literal("no_worker")),
        "notified_at": case((served_now, clock.wall()), else_=runs.c.notified_at),
    }
    return _announce(unit, _change(unserved, values))


def end_unserved(unit: Unit, limit: int) -> int:
    """Let unshared runs be claimed that a live worker serves again, in their pool or in their agent's."""
    served = _served_again().where(~runs.c.shared, runs.c.hold_reason.is_(None)).limit(limit)
    again = served.with_for_update(key_share=True, skip_locked=True, of=runs).cte("again")
    values = {"pool": again.c.pool, "wait_reason": null(), "notified_at": clock.wall()}
    return _announce(unit, _change(again, values))


def sessions_served_again_across_scopes(unit: Unit, after: str | None, limit: int) -> list[str]:
    """Shared sessions with a run that waited for a worker and has one now."""
    found = _served_again().where(runs.c.shared).cte("again")
    statement = select(runs.c.session_id).distinct().join(found, found.c.id == runs.c.id)
    if after is not None:
        statement = statement.where(runs.c.session_id > after)
    return [row.session_id for row in unit.all(statement.order_by(runs.c.session_id).limit(limit))]


def end_unserved_in(unit: Unit, session_id: str, later_s: float) -> int:
    """The same for the runs of one shared session, under its lock; whose turn it is decides what may be claimed."""
    sessions.lock(unit, session_id)
    again = _served_again().where(runs.c.session_id == session_id, runs.c.shared).cte("again")
    # As "turn" they are left to the recomputation, which clears and announces what has it.
    changed = unit.all(_change(again, {"pool": again.c.pool, "wait_reason": "turn"}))
    turns.recompute(unit, session_id, later_s)
    return len(changed)


def _served(name: str) -> CTE:
    """Pool and digest of every version that a live worker of a pool runs."""
    return (
        select(workers.c.pool, func.unnest(workers.c.agents).label("digest"))
        .where(live(), workers.c.slots > 0)
        .distinct()
        .cte(name)
    )


def _served_again() -> Select[Any]:
    """Runs marked `no_worker` that somebody serves, with the pool that does; the one they are in goes first."""
    here, home = _served("here"), _served("home")
    return (
        select(
            runs.c.id,
            case((here.c.digest.is_not(None), runs.c.pool), else_=agents.c.pool).label("pool"),
        )
        .select_from(
            runs.outerjoin(agents, agents.c.name == runs.c.agent)
            .outerjoin(here, and_(here.c.pool == runs.c.pool, here.c.digest == runs.c.agent_digest))
            .outerjoin(home, and_(home.c.pool == agents.c.pool, home.c.digest == runs.c.agent_digest))
        )
        .where(
            runs.c.wait_reason == "no_worker",
            runs.c.state.in_(_WAITING),
            or_(here.c.digest.is_not(None), home.c.digest.is_not(None)),
        )
    )


def _change(chosen: CTE, values: dict[str, Any]) -> Any:
    return update(runs).where(runs.c.id == chosen.c.id).values(values).returning(*runs.c)


def _announce(unit: Unit, change: Any, renotified: bool = True) -> int:
    rows = [dict(row) for row in unit.execute(change).mappings()]
    for row in rows:
        if row["wait_reason"] is None:
            unit.announce(announcing.waiting(row, renotified))
    return len(rows)

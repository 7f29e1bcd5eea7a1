"""What the sweep looks for among messages, across all scopes.

Source: rulings 24, 25; messaging.md i.4.
"""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import and_, func, literal, select, union_all, update

from cortex_workers.store import clock, tables
from cortex_workers.store.due import After, Due, after_key
from cortex_workers.store.unit import Unit

deliveries, asks, suspensions, runs = tables.a2a_deliveries, tables.a2a_asks, tables.suspensions, tables.runs


def deliveries_across_scopes(unit: Unit, after: After, limit: int) -> list[Due]:
    """Deliveries for which something is to be done now, the longest due first.

    Index: a2a_deliveries_due, a2a_deliveries_settle, a2a_deliveries_lapsed.
    """
    now = clock.now()
    arms = [
        (deliveries.c.next_attempt_at, deliveries.c.state.in_(["queued", "awaiting_remote"])),
        (
            deliveries.c.settle_due_at,
            and_(deliveries.c.state == "running", deliveries.c.settle_due_at.is_not(None)),
        ),
        (deliveries.c.lease_expires_at, deliveries.c.state == "delivering"),
    ]
    parts = []
    for at, waits in arms:
        arm = select(deliveries.c.id, at.label("at")).where(
            waits, at <= now, deliveries.c.partition.is_(None)
        )
        arm = after_key(arm, (at, deliveries.c.id), after)
        parts.append(select(arm.order_by(at, deliveries.c.id).limit(limit).subquery()))
    found = union_all(*parts).subquery()
    statement = select(found).order_by(found.c.at, found.c.id).limit(limit)
    return [Due(row.id, row.at) for row in unit.all(statement)]


def asks_across_scopes(unit: Unit, after: After, limit: int) -> list[Due]:
    """Open questions whose deadline has passed, the earliest first, as token and scope in one text.

    Index: a2a_asks_due.
    """
    statement = select(
        (asks.c.reply_with + literal("\n") + asks.c.scope).label("id"),
        asks.c.deadline.label("at"),
        asks.c.reply_with,
    ).where(asks.c.state == "open", asks.c.deadline <= clock.now())
    statement = after_key(statement, (asks.c.deadline, asks.c.reply_with), after)
    rows = unit.all(statement.order_by(asks.c.deadline, asks.c.reply_with).limit(limit))
    return [Due(row.id, row.at) for row in rows]


def left_behind_across_scopes(unit: Unit, older_s: float, limit: int) -> list[str]:
    """Open questions whose run waits for them no more, as above: repaired rows, a hand that was not ours."""
    waits = and_(runs.c.state == "paused", runs.c.suspension_id == asks.c.suspension_id)
    statement = (
        select((asks.c.reply_with + literal("\n") + asks.c.scope).label("id"))
        .join(runs, runs.c.id == asks.c.asker_run_id)
        .where(
            asks.c.state == "open",
            ~waits,
            asks.c.created_at <= clock.now() - timedelta(seconds=older_s),
        )
        .order_by(asks.c.deadline, asks.c.reply_with)
        .limit(limit)
    )
    return [row.id for row in unit.all(statement)]


def answered_pauses_across_scopes(unit: Unit, limit: int) -> list[str]:
    """Pauses of runs that wait for agents though each of their questions is closed: repaired rows, again.

    Index: suspensions_live.
    """
    still = select(asks.c.reply_with).where(
        asks.c.asker_run_id == suspensions.c.run_id,
        asks.c.suspension_id == suspensions.c.id,
        asks.c.state == "open",
    )
    statement = (
        select(suspensions.c.id)
        .join(runs, and_(runs.c.id == suspensions.c.run_id, runs.c.suspension_id == suspensions.c.id))
        .where(
            suspensions.c.ended_at.is_(None),
            suspensions.c.reason == "agent_reply",
            runs.c.state == "paused",
            ~still.exists(),
        )
        .order_by(suspensions.c.id)
        .limit(limit)
    )
    return [row.id for row in unit.all(statement)]


def claim_announcement(unit: Unit, delivery_id: str, older_s: float) -> bool:
    """Whether a delivery is to be announced again; whoever gets True announces it."""
    said = update(deliveries).where(
        deliveries.c.id == delivery_id,
        func.coalesce(deliveries.c.notified_at, deliveries.c.created_at)
        <= clock.now() - timedelta(seconds=older_s),
    )
    return bool(unit.execute(said.values(notified_at=clock.wall())).rowcount)

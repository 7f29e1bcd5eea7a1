"""Inboxes: informative messages that have arrived, read once.

Source: messaging.md a.6, c.8; ruling 66.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, select, union, update

from cortex_workers.schemas.a2a import Address, InboxItem
from cortex_workers.store import clock, tables
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit

deliveries, messages, runs = tables.a2a_deliveries, tables.a2a_messages, tables.runs


def page(
    unit: Unit,
    scope: str,
    owner: Address,
    *,
    unread_only: bool = True,
    conversation_id: str | None = None,
    session_id: str | None = None,
    after: str | None = None,
    limit: int = 20,
) -> list[Row]:
    """What has arrived for somebody in exactly this scope, oldest first.

    ``session_id``: only conversations in which a run of that session sent or received (ruling 66).
    Index: a2a_deliveries_unread, a2a_deliveries_mail.
    """
    where: list[ColumnElement[bool]] = [
        deliveries.c.scope == scope,
        deliveries.c.receiver_agent == owner.agent,
        deliveries.c.receiver_node == owner.node,
        deliveries.c.state == "delivered",
        deliveries.c.kind == "informative",
    ]
    if unread_only:
        where.append(deliveries.c.read_at.is_(None))
    if conversation_id is not None:
        where.append(deliveries.c.conversation_id == conversation_id)
    if after is not None:
        where.append(deliveries.c.id > after)
    if session_id is not None:
        where.append(deliveries.c.conversation_id.in_(_of_session(session_id)))
    statement = (
        select(
            deliveries.c.id.label("delivery_id"),
            deliveries.c.message_id,
            deliveries.c.conversation_id,
            deliveries.c.accepted_at,
            messages.c.sender,
            messages.c.performative,
            messages.c.content,
        )
        .join(messages, messages.c.id == deliveries.c.message_id)
        .where(*where)
        .order_by(deliveries.c.id)
        .limit(limit)
    )
    return [dict(row) for row in unit.execute(statement).mappings()]


def _of_session(session_id: str) -> ColumnElement[str]:
    sent = (
        select(messages.c.conversation_id)
        .join(runs, runs.c.id == messages.c.origin_run_id)
        .where(runs.c.session_id == session_id)
    )
    received = (
        select(deliveries.c.conversation_id)
        .join(runs, runs.c.id == deliveries.c.run_id)
        .where(runs.c.session_id == session_id)
    )
    return union(sent, received)  # type: ignore[return-value]


def mark_read(unit: Unit, delivery_ids: Sequence[str], call: str | None = None) -> None:
    """Note that somebody has read these; what another one read first stays his."""
    if delivery_ids:
        unit.execute(
            update(deliveries)
            .where(deliveries.c.id.in_(list(delivery_ids)), deliveries.c.read_at.is_(None))
            .values(read_at=clock.wall(), read_by_call=call)
        )


def to_item(row: Row) -> InboxItem:
    """The public type of a row."""
    received = row["accepted_at"].isoformat() if row["accepted_at"] is not None else None
    names = ("delivery_id", "message_id", "conversation_id", "sender", "performative", "content")
    return InboxItem(received_at=received, **{name: row[name] for name in names})

"""Messages between agents: appended, never changed.

Source: messaging.md a.2; rulings 57, 65.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import func, literal, select
from sqlalchemy.dialects.postgresql import insert

from cortex_workers.schemas.a2a import Envelope
from cortex_workers.store import tables
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit

messages, deliveries, runs = tables.a2a_messages, tables.a2a_deliveries, tables.runs
_LONGEST_CHAIN = 64


def add(unit: Unit, row: Mapping[str, Any]) -> Row | None:
    """Store a message; None when this very send, or the reply to this delivery, is there already."""
    made = unit.execute(
        insert(messages).values(**row).on_conflict_do_nothing().returning(*messages.c)
    ).mappings()
    found = made.first()
    return dict(found) if found is not None else None


def get(unit: Unit, message_id: str) -> Row | None:
    """One message, whatever its scope."""
    found = unit.execute(select(messages).where(messages.c.id == message_id)).mappings().first()
    return dict(found) if found is not None else None


def by_key(unit: Unit, scope: str, key: str) -> Row | None:
    """The message that was sent under a caller's key. Index: a2a_messages_dedupe."""
    found = (
        unit.execute(select(messages).where(messages.c.scope == scope, messages.c.dedupe_key == key))
        .mappings()
        .first()
    )
    return dict(found) if found is not None else None


def of_conversation(unit: Unit, conversation_id: str, *, after: int = 0, limit: int = 100) -> list[Row]:
    """A conversation's messages, oldest first, after a hop. Index: a2a_messages_hop."""
    statement = (
        select(messages)
        .where(messages.c.conversation_id == conversation_id, messages.c.hop > after)
        .order_by(messages.c.hop)
        .limit(limit)
    )
    return [dict(row) for row in unit.execute(statement).mappings()]


def has_spoken(unit: Unit, conversation_id: str, sender: str) -> bool:
    """Whether an address has sent anything in a conversation; then it may be answered there (ruling 66)."""
    said = select(messages.c.id).where(
        messages.c.conversation_id == conversation_id, messages.c.sender == sender
    )
    return unit.one(said.limit(1)) is not None


def sent_by(unit: Unit, run_id: str) -> int:
    """How many messages a run has sent. Index: a2a_messages_origin."""
    statement = select(func.count()).select_from(messages).where(messages.c.origin_run_id == run_id)
    return int(unit.scalar(statement) or 0)


def chain(unit: Unit, run_id: str) -> list[tuple[str, str]]:
    """Who asked whom so that this run came to be, the nearest first: pairs of sender and receiver."""
    steps = (
        select(
            runs.c.id.label("run_id"),
            messages.c.sender,
            deliveries.c.receiver_agent.label("receiver"),
            messages.c.origin_run_id.label("parent"),
            literal(1).label("depth"),
        )
        .join(deliveries, deliveries.c.id == runs.c.origin_delivery_id)
        .join(messages, messages.c.id == deliveries.c.message_id)
    )
    first = steps.where(runs.c.id == run_id).cte("chain", recursive=True)
    above = (
        select(
            runs.c.id,
            messages.c.sender,
            deliveries.c.receiver_agent,
            messages.c.origin_run_id,
            first.c.depth + 1,
        )
        .join(deliveries, deliveries.c.id == runs.c.origin_delivery_id)
        .join(messages, messages.c.id == deliveries.c.message_id)
        .join(first, first.c.parent == runs.c.id)
        .where(first.c.depth < _LONGEST_CHAIN)
    )
    whole = first.union_all(above)
    rows = unit.all(select(whole.c.sender, whole.c.receiver).order_by(whole.c.depth))
    return [(str(row.sender), str(row.receiver)) for row in rows]


def to_envelope(row: Row) -> Envelope:
    """The public type of a row."""
    return Envelope.model_validate({name: row[name] for name in Envelope.model_fields})

"""Conversations between agents: begun, counted, closed. Each message takes one hop of its conversation.

Lock order: a conversation after sessions and tenants, before any run (ruling 68).
Source: messaging.md a.4, d.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select, true, update
from sqlalchemy.dialects.postgresql import insert

from cortex_workers.schemas.a2a import Conversation
from cortex_workers.store import tables
from cortex_workers.store.scopes import first_within
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit

conversations = tables.a2a_conversations


def begin(unit: Unit, row: Mapping[str, Any]) -> Row:
    """Begin a conversation and hold its row; one that a peer's thread is paired with already is found instead."""
    made = (
        unit.execute(insert(conversations).values(**row).on_conflict_do_nothing().returning(*conversations.c))
        .mappings()
        .first()
    )
    if made is not None:
        return dict(made)
    found = of_peer(unit, str(row["scope"]), str(row["peer_node"]), str(row["peer_context"]))
    assert found is not None
    held = lock(unit, found["id"])
    assert held is not None
    return held


def of_peer(unit: Unit, scope: str, node: str, context: str) -> Row | None:
    """The conversation that a peer's thread is paired with. Index: a2a_conversations_peer."""
    found = (
        unit.execute(
            select(conversations).where(
                conversations.c.scope == scope,
                conversations.c.peer_node == node,
                conversations.c.peer_context == context,
            )
        )
        .mappings()
        .first()
    )
    return dict(found) if found is not None else None


def get(unit: Unit, conversation_id: str, scope: str) -> Row | None:
    """One conversation, when the scope covers it."""
    found = (
        unit.execute(select(conversations).where(conversations.c.id == conversation_id)).mappings().first()
    )
    if found is None or not (found["scope"] == scope or found["scope"].startswith(scope + "/")):
        return None
    return dict(found)


def lock(unit: Unit, conversation_id: str) -> Row | None:
    """A conversation's row, held to the end of the transaction."""
    found = (
        unit.execute(
            select(conversations).where(conversations.c.id == conversation_id).with_for_update(key_share=True)
        )
        .mappings()
        .first()
    )
    return dict(found) if found is not None else None


def take_hop(unit: Unit, held: Row, speakers: Sequence[str], *, exempt: bool = False) -> int | None:
    """Count one message under the conversation's lock and give its number; None when it takes no more.

    ``exempt``: an answer that somebody waits for is never refused by the ceiling (ruling 65).
    """
    participants = list(dict.fromkeys([*held["participants"], *speakers]))
    room = true() if exempt else conversations.c.hops_used < conversations.c.hop_ceiling
    hop = unit.scalar(
        update(conversations)
        .where(conversations.c.id == held["id"], conversations.c.status == "open", room)
        .values(hops_used=conversations.c.hops_used + 1, participants=participants)
        .returning(conversations.c.hops_used)
    )
    return int(hop) if hop is not None else None


def close(unit: Unit, conversation_id: str) -> bool:
    """Close a conversation; False when it was closed before."""
    closed = unit.execute(
        update(conversations)
        .where(conversations.c.id == conversation_id, conversations.c.status == "open")
        .values(status="closed")
    )
    return bool(closed.rowcount)


def page(
    unit: Unit, scope: str, *, status: str | None = None, before: str | None = None, limit: int = 50
) -> list[dict[str, Any]]:
    """The newest conversations of a scope and below; ``before`` is the id of the last one seen."""
    statement = select(conversations)
    if status is not None:
        statement = statement.where(conversations.c.status == status)
    if before is not None:
        statement = statement.where(conversations.c.id < before)
    return first_within(unit, statement, conversations, scope, lambda c: (c.id.desc(),), limit)


def to_conversation(row: Row) -> Conversation:
    """The public type of a row."""
    return Conversation.model_validate({name: row[name] for name in Conversation.model_fields})

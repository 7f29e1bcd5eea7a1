"""Questions that agents wait on, and the answers that have come.

Lock order: a question last but the events, after deliveries (ruling 68).
Source: messaging.md a.7, c.5; rulings 62, 63.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert

from cortex_workers.schemas.a2a import Address, Reply
from cortex_workers.store import clock, tables, transitions
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit

asks, answers, messages = tables.a2a_asks, tables.a2a_answers, tables.a2a_messages


def add(unit: Unit, rows: Sequence[Mapping[str, Any]]) -> None:
    """Store open questions.

    Raises: IntegrityError when a call asks twice.
    """
    transitions.create_in(unit, "ask", "ask", rows)


def get(unit: Unit, scope: str, reply_with: str) -> Row | None:
    """The question that a token belongs to, in its exact scope."""
    found = unit.execute(select(asks).where(*_this(scope, reply_with))).mappings().first()
    return dict(found) if found is not None else None


def lock(unit: Unit, scope: str, reply_with: str) -> Row | None:
    """A question's row, held to the end of the transaction; ``overdue`` is judged on the database clock."""
    statement = select(asks, (asks.c.deadline <= clock.wall()).label("overdue")).where(
        *_this(scope, reply_with)
    )
    found = unit.execute(statement.with_for_update(key_share=True)).mappings().first()
    return dict(found) if found is not None else None


def of_run(unit: Unit, run_id: str, call_id: str | None = None, *, open_only: bool = True) -> list[Row]:
    """What a run asked, one call of it or all. Index: a2a_asks_call."""
    statement = select(asks).where(asks.c.asker_run_id == run_id).order_by(asks.c.call_id)
    if call_id is not None:
        statement = statement.where(asks.c.call_id == call_id)
    if open_only:
        statement = statement.where(asks.c.state == "open")
    return [dict(row) for row in unit.execute(statement).mappings()]


def open_in(unit: Unit, conversation_id: str) -> list[Row]:
    """The open questions of a conversation. Index: a2a_asks_conversation."""
    statement = select(asks).where(asks.c.conversation_id == conversation_id, asks.c.state == "open")
    return [dict(row) for row in unit.execute(statement.order_by(asks.c.reply_with)).mappings()]


def seal(unit: Unit, ask: Row, how: str) -> bool:
    """Close a question to answers: ``answered``, ``timeout``, ``cancelled``; False when it was closed before."""
    values = {"sealed_at": clock.wall(), "seal_kind": how, "revision": asks.c.revision + 1}
    where = _this(ask["scope"], ask["reply_with"])
    return bool(transitions.apply_in(unit, "ask", how, where, values))


def retire(unit: Unit, run_id: str) -> list[Row]:
    """Close what a run asked, because it does not wait any more. Index: a2a_asks_call."""
    values = {"sealed_at": clock.wall(), "seal_kind": "retired", "revision": asks.c.revision + 1}
    return transitions.apply_in(unit, "ask", "retired", [asks.c.asker_run_id == run_id], values)


def add_answer(
    unit: Unit, ask: Row, responder: Address, message_id: str, on_behalf_by: str | None = None
) -> int | None:
    """Keep an answer under the question's lock; returns how many there are then, None when this one answered before."""
    mine = [answers.c.scope == ask["scope"], answers.c.reply_with == ask["reply_with"]]
    count = int(unit.scalar(select(func.count()).select_from(answers).where(*mine)) or 0)
    made = unit.execute(
        insert(answers)
        .values(
            scope=ask["scope"],
            reply_with=ask["reply_with"],
            responder_agent=responder.agent,
            responder_node=responder.node,
            message_id=message_id,
            ordinal=count + 1,
            on_behalf_by=on_behalf_by,
        )
        .on_conflict_do_nothing()
        .returning(answers.c.ordinal)
    ).first()
    return count + 1 if made is not None else None


def responders(unit: Unit, ask: Row) -> set[Address]:
    """Who has answered, or was answered for."""
    statement = select(answers.c.responder_agent, answers.c.responder_node).where(
        answers.c.scope == ask["scope"], answers.c.reply_with == ask["reply_with"]
    )
    return {Address(row.responder_agent, row.responder_node) for row in unit.all(statement)}


def replies(unit: Unit, ask: Row) -> list[Reply]:
    """The answers to a question, in the order in which they came."""
    statement = (
        select(messages.c.performative, messages.c.sender, messages.c.content, messages.c.conversation_id)
        .join(answers, answers.c.message_id == messages.c.id)
        .where(answers.c.scope == ask["scope"], answers.c.reply_with == ask["reply_with"])
        .order_by(answers.c.ordinal)
    )
    return [Reply.model_validate(dict(row)) for row in unit.execute(statement).mappings()]


def _this(scope: str, reply_with: str) -> list[Any]:
    return [asks.c.scope == scope, asks.c.reply_with == reply_with]

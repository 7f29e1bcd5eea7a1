"""The durable facts of a run after a cursor, in their one order.

Source: ruling 58: order of ordinals = order of commits.
"""

from __future__ import annotations

from sqlalchemy import select

from cortex_workers.store import tables
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit

events, steps, messages = tables.events, tables.steps, tables.messages
PAGE = 500


def facts(unit: Unit, run_id: str, after: int) -> list[Row]:
    """Events, steps and assistant messages with ordinals above ``after``, oldest first; ``source`` tells which."""
    found = [
        *_events(unit, run_id, after),
        *_steps(unit, run_id, after),
        *_messages(unit, run_id, after),
    ]
    return sorted(found, key=lambda row: row["seq"])


def _events(unit: Unit, run_id: str, after: int) -> list[Row]:
    statement = (
        select(
            events.c.run_seq.label("seq"), events.c.kind, events.c.revision, events.c.data, events.c.worker_id
        )
        .where(events.c.run_id == run_id, events.c.run_seq > after)
        .order_by(events.c.run_seq)
        .limit(PAGE)
    )
    return [{"source": "event", **row} for row in unit.execute(statement).mappings()]


def _steps(unit: Unit, run_id: str, after: int) -> list[Row]:
    statement = (
        select(steps.c.seq, steps.c.id, steps.c.step_index, steps.c.model)
        .where(steps.c.run_id == run_id, steps.c.seq > after)
        .order_by(steps.c.seq)
        .limit(PAGE)
    )
    return [{"source": "step", **row} for row in unit.execute(statement).mappings()]


def _messages(unit: Unit, run_id: str, after: int) -> list[Row]:
    statement = (
        select(messages.c.seq, messages.c.step_index, messages.c.tool_calls)
        .where(
            messages.c.run_id == run_id,
            messages.c.seq > after,
            messages.c.role == "assistant",
            messages.c.tool_calls.is_not(None),
        )
        .order_by(messages.c.seq)
        .limit(PAGE)
    )
    return [{"source": "message", **row} for row in unit.execute(statement).mappings()]

"""The durable facts of a run after a cursor, in their one order.

Source: ruling 58: order of ordinals = order of commits.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Integer, Select, Text, cast, func, literal, null, select, union_all

from cortex_workers.store import tables
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit

events, steps, messages = tables.events, tables.steps, tables.messages
PAGE = 500
BARELY_BEGUN = ("run.enqueue", "run.claim", "run.hand_back", "run.hand_back_reclaimable")


def facts(unit: Unit, run_id: str, after: int) -> list[Row]:
    """Events, steps and assistant messages with calls, above an ordinal and oldest first; ``source`` tells which.

    One statement, so one snapshot: what is committed meanwhile has a higher ordinal than all that is seen. A full page
    (``PAGE``) means that there may be more.
    """
    page = union_all(
        *(
            part.subquery().select()
            for part in (_events(run_id, after), _steps(run_id, after), _messages(run_id, after))
        )
    ).subquery()
    statement = select(page).order_by(page.c.seq).limit(PAGE)
    return [dict(row) for row in unit.execute(statement).mappings()]


def _events(run_id: str, after: int) -> Select[Any]:
    return (
        _fact("event", events.c.run_seq, kind=events.c.kind, revision=events.c.revision)
        .where(events.c.run_id == run_id, events.c.run_seq > after)
        .order_by(events.c.run_seq)
        .limit(PAGE)
    )


def _steps(run_id: str, after: int) -> Select[Any]:
    """Steps, each with the length of what the model said in it: its message follows it by one ordinal."""
    said = (messages.c.run_id == steps.c.run_id) & (messages.c.seq == steps.c.seq + 1)
    return (
        _fact(
            "step",
            steps.c.seq,
            id=steps.c.id,
            index=steps.c.step_index,
            chars=func.length(messages.c.content),
        )
        .select_from(steps.outerjoin(messages, said))
        .where(steps.c.run_id == run_id, steps.c.seq > after)
        .order_by(steps.c.seq)
        .limit(PAGE)
    )


def _messages(run_id: str, after: int) -> Select[Any]:
    return (
        _fact("message", messages.c.seq, index=messages.c.step_index, tool_calls=messages.c.tool_calls)
        .where(
            messages.c.run_id == run_id,
            messages.c.seq > after,
            messages.c.role == "assistant",
            messages.c.tool_calls.is_not(None),
        )
        .order_by(messages.c.seq)
        .limit(PAGE)
    )


_COLUMNS: dict[str, Any] = {
    "kind": Text,
    "revision": BigInteger,
    "id": Text,
    "index": Integer,
    "chars": Integer,
    "tool_calls": Text,
}


def _fact(source: str, seq: Any, **columns: Any) -> Select[Any]:
    """One shape for all three, with null for what a fact has not."""
    named = [cast(columns.get(name, null()), kind).label(name) for name, kind in _COLUMNS.items()]
    return select(literal(source).label("source"), seq.label("seq"), *named)


def last_step(unit: Unit, run_id: str, upto: int) -> int:
    """The newest step of a run at an ordinal; -1 when it had none."""
    found = unit.scalar(
        select(func.max(steps.c.step_index)).where(steps.c.run_id == run_id, steps.c.seq <= upto)
    )
    return int(found) if found is not None else -1


def was_begun(unit: Unit, run_id: str, before: int) -> bool:
    """Whether anything but claims that were given back had happened to a run before an ordinal."""
    other = select(literal(1)).where(
        events.c.run_id == run_id, events.c.run_seq < before, events.c.kind.not_in(BARELY_BEGUN)
    )
    saved = select(literal(1)).where(steps.c.run_id == run_id, steps.c.seq < before)
    return unit.scalar(other.limit(1)) is not None or unit.scalar(saved.limit(1)) is not None

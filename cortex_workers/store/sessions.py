"""Sessions: found, created, locked; their counters and their floor.

Lock order: a session before any of its runs (ruling 68).
Source: decisions C1 to C4; rulings 35, 38.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert

from cortex_workers.schemas.ids import SESSION, new_id
from cortex_workers.store import clock, tables
from cortex_workers.store.scopes import first_within
from cortex_workers.store.unit import Unit

sessions, runs = tables.sessions, tables.runs
Row = Mapping[str, Any]


def create_own(unit: Unit, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert sessions that each belong to one run (its first turn)."""
    if rows:
        unit.connection.execute(insert(sessions), [{**row, "turn_seq": 1} for row in rows])


def find_key(unit: Unit, scope: str, agent: str, key: str) -> Row | None:
    """The session under a caller's key, if it was made; an aborted default one does not count."""
    live = (sessions.c.key != "default") | sessions.c.aborted_at.is_(None)
    newest = (
        select(sessions)
        .where(sessions.c.scope == scope, sessions.c.agent == agent, sessions.c.key == key, live)
        .order_by(sessions.c.id.desc())
        .limit(1)
    )
    row = unit.execute(newest).mappings().first()
    return dict(row) if row is not None else None


def find_or_create_key(unit: Unit, scope: str, agent: str, key: str) -> str:
    """The id of the session under a caller's key, made on first use."""
    found = find_key(unit, scope, agent, key)
    if found is None:
        unit.execute(
            insert(sessions)
            .values(id=new_id(SESSION), scope=scope, agent=agent, key=key)
            .on_conflict_do_nothing()
        )
        found = find_key(unit, scope, agent, key)
    assert found is not None
    return str(found["id"])


def lock(unit: Unit, session_id: str) -> Row | None:
    """Take a session's row; the next statement sees what this one waited for."""
    row = (
        unit.execute(select(sessions).where(sessions.c.id == session_id).with_for_update(key_share=True))
        .mappings()
        .first()
    )
    return dict(row) if row is not None else None


def get(unit: Unit, session_id: str) -> Row | None:
    """One session, unlocked."""
    row = unit.execute(select(sessions).where(sessions.c.id == session_id)).mappings().first()
    return dict(row) if row is not None else None


def take_turn_seqs(unit: Unit, session_id: str, count: int) -> int:
    """Give out places in the order of turns; returns the last one."""
    return int(
        unit.scalar(
            update(sessions)
            .where(sessions.c.id == session_id)
            .values(turn_seq=sessions.c.turn_seq + count, last_event_at=clock.wall())
            .returning(sessions.c.turn_seq)
        )
    )


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a session's order of completion, and what its session looked like before it was taken."""

    seq: int
    messages: int
    last_event_at: datetime


def end_turn(unit: Unit, session_id: str, messages: int = 0) -> Place:
    """Take the session's row and its next place in the order of completion."""
    before = (
        select(sessions.c.id, sessions.c.last_event_at)
        .where(sessions.c.id == session_id)
        .with_for_update(key_share=True)
        .cte("before")
    )
    taken = (
        update(sessions)
        .where(sessions.c.id == before.c.id)
        .values(
            completion_seq=sessions.c.completion_seq + 1,
            message_count=sessions.c.message_count + messages,
            last_event_at=clock.wall(),
        )
        .returning(sessions.c.completion_seq, before.c.last_event_at)
    )
    row = unit.execute(taken).one()
    return Place(int(row.completion_seq), messages, row.last_event_at)


def give_back(unit: Unit, session_id: str, place: Place) -> None:
    """Undo ``end_turn`` under its lock, because the run was moved by somebody else and has not ended here."""
    unit.execute(
        update(sessions)
        .where(sessions.c.id == session_id)
        .values(
            completion_seq=sessions.c.completion_seq - 1,
            message_count=sessions.c.message_count - place.messages,
            last_event_at=place.last_event_at,
        )
    )


def touch(unit: Unit, session_id: str) -> None:
    """Take the session's row and note that something happened in it."""
    unit.execute(update(sessions).where(sessions.c.id == session_id).values(last_event_at=clock.wall()))


def share(unit: Unit, session_id: str, serial: bool) -> None:
    """Mark the live runs of a session as shared, waiting for their rows (ruling 35)."""
    unit.execute(
        update(runs)
        .where(
            runs.c.session_id == session_id,
            runs.c.completed_at.is_(None),
            ~runs.c.shared,
        )
        .values(shared=True, serial=serial)
    )


def has_runs(unit: Unit, session_id: str) -> bool:
    """Whether any run ever belonged to it."""
    return bool(
        unit.scalar(
            select(func.count()).select_from(
                select(runs.c.id).where(runs.c.session_id == session_id).limit(1).subquery()
            )
        )
    )


def clear(unit: Unit, session_id: str, actor: str) -> int:
    """Move the floor of the conversation to now; nothing is deleted. Returns the number of messages hidden."""
    row = lock(unit, session_id)
    if row is None:
        return 0
    hidden = int(row["message_count"])
    unit.execute(
        update(sessions)
        .where(sessions.c.id == session_id)
        .values(history_floor=sessions.c.completion_seq, message_count=0, last_event_at=clock.wall())
    )
    note(unit, row, "session.clear", actor, {"messages": hidden})
    return hidden


def note(unit: Unit, session: Row, kind: str, actor: str, data: Mapping[str, Any] | None = None) -> None:
    """Write a control fact of a session, in the transaction that makes it true."""
    unit.execute(
        insert(tables.events).values(
            scope=session["scope"], session_id=session["id"], kind=kind, actor=actor, data=dict(data or {})
        )
    )


def get_scoped(unit: Unit, session_id: str, scope: str) -> Row | None:
    """One session, when the scope covers it."""
    row = get(unit, session_id)
    covered = row is not None and (row["scope"] == scope or row["scope"].startswith(scope + "/"))
    return row if covered else None


def page(unit: Unit, scope: str, *, before: str | None = None, limit: int = 50) -> list[dict[str, Any]]:
    """The sessions of a scope and below, most recently active first; ``before`` is the id of the last one seen."""
    statement = select(sessions)
    if before is not None:
        seen = select(sessions.c.last_event_at).where(sessions.c.id == before).scalar_subquery()
        statement = statement.where(
            (sessions.c.last_event_at < seen)
            | ((sessions.c.last_event_at == seen) & (sessions.c.id > before))
        )
    return first_within(unit, statement, sessions, scope, lambda c: (c.last_event_at.desc(), c.id), limit)

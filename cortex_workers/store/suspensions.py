"""Pauses and their pending calls: written with the pause, read by every door, ended and never deleted.

Source: rulings 44, 47; runs.md 2.8, 2.9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, insert, select, update

from cortex_workers.schemas.suspension import PendingCall, Suspension
from cortex_workers.store import admissions, clock, tables, transcript
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit

suspensions, pending_calls, tool_calls = tables.suspensions, tables.pending_calls, tables.tool_calls


def add(
    unit: Unit,
    row: Mapping[str, Any],
    ttl_s: float | None,
    pending: Sequence[Mapping[str, Any]],
    poll_s: float | None = None,
    not_after: datetime | None = None,
) -> Row:
    """Write a pause with its calls; the deadline is computed by the database, once, and never ``not_after``.

    Raises: IntegrityError when the run has a live pause already.
    """
    expires: Any = clock.wall() + timedelta(seconds=ttl_s) if ttl_s is not None else None
    if not_after is not None:
        expires = func.least(expires, not_after) if expires is not None else not_after
    poll = clock.wall() + timedelta(seconds=poll_s) if poll_s is not None else None
    made = (
        unit.execute(
            insert(suspensions).values(**row, expires_at=expires, next_poll_at=poll).returning(*suspensions.c)
        )
        .mappings()
        .one()
    )
    if pending:
        unit.connection.execute(insert(pending_calls), [dict(item) for item in pending])
    return dict(made)


def get(unit: Unit, suspension_id: str) -> Row | None:
    """One pause's row, with ``overdue`` judged on the database clock."""
    statement = select(suspensions, (suspensions.c.expires_at <= clock.wall()).label("overdue")).where(
        suspensions.c.id == suspension_id
    )
    found = unit.execute(statement).mappings().first()
    return dict(found) if found is not None else None


def at_revision(unit: Unit, run_id: str, revision: int) -> Row | None:
    """The pause that a run entered with that revision."""
    found = (
        unit.execute(
            select(suspensions).where(suspensions.c.run_id == run_id, suspensions.c.run_revision == revision)
        )
        .mappings()
        .first()
    )
    return dict(found) if found is not None else None


def pending(unit: Unit, suspension_id: str) -> list[Row]:
    """The calls of a pause in the model's order, each with its tool and the model's arguments.

    Answers that are kept may be large and are not among it (``kept_answers``), their digests are.
    """
    statement = (
        select(
            *[column for column in pending_calls.c if column is not pending_calls.c.answer],
            tool_calls.c.tool,
            tool_calls.c.step_index,
            tool_calls.c.message_seq,
            tool_calls.c.attempt,
            tool_calls.c.state,
            tool_calls.c.late_result,
            tool_calls.c.executed_args,
            tool_calls.c.amended_by,
        )
        .join(
            tool_calls,
            (tool_calls.c.run_id == pending_calls.c.run_id)
            & (tool_calls.c.call_id == pending_calls.c.call_id),
        )
        .where(pending_calls.c.suspension_id == suspension_id)
        .order_by(pending_calls.c.ordinal)
    )
    rows: list[Row] = [dict(row) for row in unit.execute(statement).mappings()]
    if not rows:
        return []
    arguments = transcript.arguments_of(unit, rows[0]["run_id"], rows)
    return [
        {**row, "arguments": arguments.get(row["call_id"], "{}"), "asked_for": row["call_id"] in arguments}
        for row in rows
    ]


def answer_all(unit: Unit, suspension_id: str, by: str, door: str) -> None:
    """Note that every call of a pause was answered through one door."""
    unit.execute(
        update(pending_calls)
        .where(pending_calls.c.suspension_id == suspension_id, pending_calls.c.answered_at.is_(None))
        .values(answered_at=clock.wall(), answered_by=by, door=door)
    )


def of_calls(unit: Unit, run_id: str, call_ids: Sequence[str]) -> str | None:
    """The newest pause in which one of these calls waits or waited for somebody outside."""
    found = unit.scalar(
        select(pending_calls.c.suspension_id)
        .where(
            pending_calls.c.run_id == run_id,
            pending_calls.c.call_id.in_(list(call_ids)),
            pending_calls.c.kind == "external",
        )
        .order_by(pending_calls.c.suspension_id.desc())
        .limit(1)
    )
    return str(found) if found is not None else None


def keep_answer(unit: Unit, suspension_id: str, call_id: str, data: bytes, by: str) -> None:
    """Keep the answer to one call until the last one is in."""
    unit.execute(
        update(pending_calls)
        .where(pending_calls.c.suspension_id == suspension_id, pending_calls.c.call_id == call_id)
        .values(
            answer=data,
            answer_digest=admissions.input_digest(data),
            answered_at=clock.wall(),
            answered_by=by,
            door="provide_result",
        )
    )


def kept_answers(unit: Unit, suspension_id: str) -> list[bytes]:
    """The answers that are kept until the last one is in, in the model's order."""
    statement = (
        select(pending_calls.c.answer)
        .where(pending_calls.c.suspension_id == suspension_id, pending_calls.c.answer.is_not(None))
        .order_by(pending_calls.c.ordinal)
    )
    return [bytes(row.answer) for row in unit.all(statement)]


def empty_answers(unit: Unit, suspension_id: str) -> None:
    """Drop kept answers once the admission holds them: bytes have one home at any time (ruling 43)."""
    unit.execute(
        update(pending_calls).where(pending_calls.c.suspension_id == suspension_id).values(answer=None)
    )


def to_pending(row: Row) -> PendingCall:
    """The public type of a pending call."""
    return PendingCall(
        call_id=row["call_id"],
        tool=row["tool"],
        arguments=row["arguments"],
        runs_with=row["payload"] if isinstance(row["payload"], dict) else None,
        late_result=row["late_result"],
        kind=row["kind"],
        ordinal=row["ordinal"],
    )


def unreadable(row: Row) -> list[str]:
    """What somebody broke of a pending call; it is shown empty."""
    found = [] if row["asked_for"] else [f"arguments of {row['call_id']}"]
    if not isinstance(row["payload"], dict | None):
        found.append(f"what {row['call_id']} runs with")
    return found


def to_suspension(row: Row, calls: Sequence[Row]) -> Suspension:
    """The public type of a pause."""
    values = {name: row[name] for name in Suspension.model_fields if name in row}
    return Suspension.model_validate({**values, "pending": tuple(to_pending(call) for call in calls)})

"""The admission ledger: exact answers retained against exact pauses, and the receipts of what became of them.

Source: seed suspension; rulings 41 to 43; runs.md 2.15.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import CTE, DateTime, and_, delete, func, literal, or_, select
from sqlalchemy.dialects.postgresql import insert

from cortex_workers.schemas.admission import (
    ClaimVersion,
    ResumeAdmission,
    ResumeAdmissionRequest,
    ResumeClosure,
    ResumeClosureRequest,
    ResumeExpiry,
    ResumeStart,
)
from cortex_workers.store import clock, tables
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit

admissions, receipts, pending_calls, suspensions = (
    tables.resume_admissions,
    tables.resume_receipts,
    tables.pending_calls,
    tables.suspensions,
)


def input_digest(data: bytes) -> str:
    """SHA-256 over the exact retained bytes."""
    return hashlib.sha256(data).hexdigest()


def add(unit: Unit, row: Mapping[str, Any]) -> Row:
    """Retain an answer, in the transaction that leaves its pause.

    Raises: IntegrityError when the pause has one already.
    """
    return dict(unit.execute(insert(admissions).values(**row).returning(*admissions.c)).mappings().one())


def get(unit: Unit, run_id: str, suspension_id: str) -> Row | None:
    """The answer retained for one pause."""
    found = (
        unit.execute(
            select(admissions).where(
                admissions.c.run_id == run_id, admissions.c.suspension_id == suspension_id
            )
        )
        .mappings()
        .first()
    )
    return dict(found) if found is not None else None


def latest(unit: Unit, run_id: str) -> Row | None:
    """The newest answer of a run, by its pause."""
    found = (
        unit.execute(
            select(admissions)
            .where(admissions.c.run_id == run_id)
            .order_by(admissions.c.suspension_id.desc())
            .limit(1)
        )
        .mappings()
        .first()
    )
    return dict(found) if found is not None else None


def page(unit: Unit, scope: str, run_id: str, after: str | None, limit: int) -> list[Row]:
    """The answers of one run in its exact scope, in order of their pauses after the exclusive cursor."""
    statement = select(admissions).where(admissions.c.scope == scope, admissions.c.run_id == run_id)
    if after is not None:
        statement = statement.where(admissions.c.suspension_id > after)
    statement = statement.order_by(admissions.c.suspension_id).limit(limit)
    return [dict(row) for row in unit.execute(statement).mappings()]


def receipt(unit: Unit, run_id: str, suspension_id: str, kind: str) -> Row | None:
    """One receipt of an admission: its start, expiry or closure."""
    found = (
        unit.execute(
            select(receipts).where(
                receipts.c.run_id == run_id,
                receipts.c.suspension_id == suspension_id,
                receipts.c.kind == kind,
            )
        )
        .mappings()
        .first()
    )
    return dict(found) if found is not None else None


def add_receipt(unit: Unit, row: Mapping[str, Any]) -> bool:
    """Write a receipt once; False when one that excludes it is there."""
    made = unit.execute(
        insert(receipts).values(**row).on_conflict_do_nothing().returning(receipts.c.run_id)
    ).first()
    return made is not None


def starts_of(moved: CTE) -> CTE:
    """The start receipts of the admissions that a claim takes up; part of the claim's own statement (ruling 41)."""
    chosen = (
        select(
            moved.c.id,
            moved.c.suspension_id,
            literal("start"),
            admissions.c.request_digest,
            moved.c.revision,
        )
        .join(
            admissions,
            (admissions.c.run_id == moved.c.id) & (admissions.c.suspension_id == moved.c.suspension_id),
        )
        .where(moved.c.instruction == "answer")
    )
    return (
        insert(receipts)
        .from_select(["run_id", "suspension_id", "kind", "digest", "run_revision"], chosen)
        .on_conflict_do_nothing()
        .returning(receipts.c.run_id)
        .cte("started")
    )


def add_closure(unit: Unit, request: ResumeClosureRequest, moved: Row) -> ResumeClosure | None:
    """Write the receipt of a run that was closed in this transaction; None when the answer has one already."""
    row = {
        "run_id": request.version.run_id,
        "suspension_id": request.version.suspension_id,
        "kind": "closure",
        "digest": request.digest(),
        "document": request.model_dump(mode="json"),
        "run_revision": moved["revision"],
        "event_id": event_of(unit, moved),
        "at": clock.wall(),
    }
    written = insert(receipts).values(**row).on_conflict_do_nothing().returning(*receipts.c)
    made = unit.execute(written).mappings().first()
    return to_closure(dict(made), fresh=True) if made is not None else None


def event_of(unit: Unit, moved: Row) -> str:
    """The id of the event that a transition wrote with the row that it gave back."""
    events = tables.events
    this = (events.c.run_id == moved["id"], events.c.run_seq == int(moved["next_seq"]) - 1)
    return str(unit.scalar(select(events.c.id).where(*this)))


def standing(unit: Unit, run_id: str, observed_at: datetime, expires_at: datetime) -> Row:
    """On the database clock, now: whether a proof counts (``observed``, ``expired``), and ``lease_over``.

    The lease is that of the present holder, or what is left of the one that was taken from the last.
    """
    runs, now = tables.runs, clock.wall()
    ends = func.coalesce(runs.c.lease_expires_at, runs.c.fenced_until)
    statement = select(
        (literal(observed_at, DateTime(timezone=True)) <= now).label("observed"),
        (literal(expires_at, DateTime(timezone=True)) <= now).label("expired"),
        or_(ends.is_(None), ends <= now).label("lease_over"),
        ends.label("lease_ends"),
    ).where(runs.c.id == run_id)
    return dict(unit.execute(statement).mappings().one())


def database_time(unit: Unit) -> datetime:
    """What time it is for the database."""
    found: datetime = unit.scalar(select(clock.wall()))
    return found


def holders(unit: Unit, run_id: str) -> list[str]:
    """Every worker process that ever held a run, by its claims."""
    events = tables.events
    statement = (
        select(events.c.worker_id)
        .where(events.c.run_id == run_id, events.c.kind == "run.claim", events.c.worker_id.is_not(None))
        .distinct()
        .order_by(events.c.worker_id)
    )
    return [str(row.worker_id) for row in unit.all(statement)]


def undo_start(unit: Unit, run_id: str, suspension_id: str, revision: int) -> None:
    """Take back the start receipt that a claim wrote, in the hand-back that dispatched nothing."""
    unit.execute(
        delete(receipts).where(
            receipts.c.run_id == run_id,
            receipts.c.suspension_id == suspension_id,
            receipts.c.kind == "start",
            receipts.c.run_revision == revision,
        )
    )


def answers(unit: Unit, run_id: str, call_ids: Sequence[str]) -> dict[str, Row]:
    """What came in, or did not come in time, for calls that waited for somebody outside; by call id.

    ``outcome`` is answered (with ``content`` or ``error``) or expired (with ``note``).
    """
    statement = (
        select(
            pending_calls.c.call_id,
            pending_calls.c.answer,
            suspensions.c.ended_as,
            suspensions.c.expires_at,
            admissions.c.input,
        )
        .join(suspensions, suspensions.c.id == pending_calls.c.suspension_id)
        .outerjoin(
            admissions,
            (admissions.c.run_id == pending_calls.c.run_id)
            & (admissions.c.suspension_id == pending_calls.c.suspension_id),
        )
        .where(
            pending_calls.c.run_id == run_id,
            pending_calls.c.call_id.in_(list(call_ids)),
            pending_calls.c.kind.in_(["external", "ask"]),
        )
        .order_by(pending_calls.c.suspension_id)
    )
    found: dict[str, Row] = {}
    for row in unit.execute(statement).mappings():
        answer = _answer(dict(row))
        if answer is not None:
            found[row["call_id"]] = answer
    return found


def _answer(row: Row) -> Row | None:
    if row["input"] is not None:
        for item in json.loads(bytes(row["input"]))["tool_results"]:
            if item["tool_call_id"] == row["call_id"]:
                return {"outcome": "answered", "content": item.get("content"), "error": item.get("error")}
    if row["ended_as"] == "expired" and row["answer"] is not None:
        # It came in time; only the others of its pause did not.
        kept = json.loads(bytes(row["answer"]))
        return {"outcome": "answered", "content": kept.get("content"), "error": kept.get("error")}
    if row["ended_as"] == "expired":
        return {
            "outcome": "expired",
            "note": f"nobody answered before {row['expires_at']:%Y-%m-%d %H:%M:%S} UTC",
        }
    return None


def unstarted(unit: Unit, run_id: str, suspension_id: str) -> bool:
    """Whether an admitted answer waits for its first start."""
    return bool(
        unit.scalar(
            select(func.count())
            .select_from(admissions)
            .where(
                admissions.c.run_id == run_id,
                admissions.c.suspension_id == suspension_id,
                ~select(receipts.c.run_id)
                .where(receipts.c.run_id == run_id, receipts.c.suspension_id == suspension_id)
                .exists(),
            )
        )
    )


def discover(unit: Unit, scope: str, after: str | None, limit: int) -> list[str]:
    """Runs of an exact scope with retained agent-reply pauses, or running with an admitted answer."""
    runs = tables.runs
    waits = (
        select(suspensions.c.run_id)
        .where(
            suspensions.c.run_id == runs.c.id,
            suspensions.c.reason == "agent_reply",
            suspensions.c.ended_at.is_(None),
        )
        .exists()
    )
    admitted = select(admissions.c.run_id).where(admissions.c.run_id == runs.c.id).exists()
    statement = select(runs.c.id).where(
        runs.c.scope == scope,
        or_(waits, and_(runs.c.state.in_(["ready", "running", "reclaimable"]), admitted)),
    )
    if after is not None:
        statement = statement.where(runs.c.id > after)
    return [row.id for row in unit.all(statement.order_by(runs.c.id).limit(limit))]


def to_admission(row: Row, fresh: bool = False) -> ResumeAdmission:
    """The public type of a retained answer."""
    version = ClaimVersion(
        run_id=row["run_id"], suspension_id=row["suspension_id"], run_revision=row["run_revision"]
    )
    return ResumeAdmission(
        request=ResumeAdmissionRequest(scope=row["scope"], version=version, input=bytes(row["input"])),
        request_digest=row["request_digest"],
        suspension_digest=row["suspension_digest"],
        claimed_revision=row["claimed_revision"],
        admitted_at=row["admitted_at"],
        admitted_by=row["admitted_by"],
        door=row["door"],
        fresh=fresh,
    )


def to_start(admission: Row, row: Row, fresh: bool = False) -> ResumeStart:
    """The public type of a start receipt."""
    return ResumeStart(
        version=to_admission(admission).request.version,
        scope=admission["scope"],
        request_digest=row["digest"],
        started_at=row["at"],
        fresh=fresh,
    )


def to_expiry(admission: Row, row: Row, fresh: bool = False) -> ResumeExpiry:
    """The public type of an expiry receipt."""
    return ResumeExpiry(
        version=to_admission(admission).request.version,
        scope=admission["scope"],
        request_digest=row["digest"],
        event_id=row["event_id"],
        run_revision=row["run_revision"],
        expired_at=row["at"],
        fresh=fresh,
    )


def to_closure(row: Row, fresh: bool = False) -> ResumeClosure:
    """The public type of a closure receipt."""
    return ResumeClosure(
        request=ResumeClosureRequest.model_validate(row["document"]),
        request_digest=row["digest"],
        event_id=row["event_id"],
        run_revision=row["run_revision"],
        closed_at=row["at"],
        fresh=fresh,
    )

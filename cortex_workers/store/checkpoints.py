"""Checkpoints and adjudications: the question, the first decision, one verdict per call.

Readers get `Checkpoint`, which has no place for the decider's principal.
Source: rulings 44, 46, 48; runs.md 2.12, 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import func, insert, select, update

from cortex_workers.schemas.checkpoint import Checkpoint
from cortex_workers.schemas.notifications import CheckpointCreated, CheckpointResolved
from cortex_workers.store import clock, suspensions, tables, transitions
from cortex_workers.store.scopes import first_within, within
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit

checkpoints, adjudications, runs = tables.checkpoints, tables.adjudications, tables.runs


def open_(unit: Unit, row: Mapping[str, Any], run_revision: int) -> None:
    """Write a pending checkpoint and announce it after the commit."""
    transitions.create_in(unit, "checkpoint", "open", [row])
    unit.announce(CheckpointCreated(run_id=row["run_id"], revision=run_revision, checkpoint_id=row["id"]))


def get(unit: Unit, checkpoint_id: str, scope: str | None = None) -> Row | None:
    """One checkpoint's row, when the scope covers it."""
    statement = select(checkpoints).where(checkpoints.c.id == checkpoint_id)
    if scope is not None:
        statement = statement.where(within(checkpoints.c.scope, scope))
    found = unit.execute(statement).mappings().first()
    return dict(found) if found is not None else None


def of_pause(unit: Unit, suspension_id: str) -> Row | None:
    """The checkpoint of a pause, where it has one."""
    found = (
        unit.execute(select(checkpoints).where(checkpoints.c.suspension_id == suspension_id))
        .mappings()
        .first()
    )
    return dict(found) if found is not None else None


def close(
    unit: Unit, name: str, where: Sequence[Any], values: Mapping[str, Any], run_revision: int | None = None
) -> list[Row]:
    """Close pending checkpoints by one row of their machine (decided, settled, expired, cancelled, superseded).

    ``run_revision`` is what the notification carries; without it none is sent.
    """
    closed = transitions.apply_in(
        unit, "checkpoint", name, where, {"closed_as": name, "decided_at": clock.wall(), **values}
    )
    if run_revision is not None:
        for row in closed:
            unit.announce(
                CheckpointResolved(
                    run_id=row["run_id"], revision=run_revision, checkpoint_id=row["id"], closed_as=name
                )
            )
    return closed


def hold_of_run(unit: Unit, run_id: str) -> None:
    """Hold what is still asked about a run to the end of the transaction. Index: checkpoints_run."""
    unit.execute(
        select(checkpoints.c.id)
        .where(checkpoints.c.run_id == run_id, checkpoints.c.state == "pending")
        .with_for_update(key_share=True)
    )


def close_of_run(unit: Unit, run_id: str, name: str, revision: int, reason: str) -> list[Row]:
    """Close what a run still asks, because the run was cancelled or expired; never a host's own checkpoint."""
    decision = {"approved": False, "decided_by": "cortex", "reason": reason}
    where = (checkpoints.c.run_id == run_id, checkpoints.c.suspension_id.is_not(None))
    return close(unit, name, where, {"decision": decision}, revision)


def adjudicate(unit: Unit, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one verdict per call."""
    items = [dict(row) for row in rows]
    if items:
        unit.connection.execute(insert(adjudications), items)


def verdicts(unit: Unit, run_id: str, call_ids: Sequence[str]) -> dict[str, Row]:
    """The newest verdict on each call, with the checkpoint's decision and the arguments the decider saw."""
    asked = tables.pending_calls
    statement = (
        select(adjudications, checkpoints.c.decision, checkpoints.c.closed_as, asked.c.payload)
        .join(checkpoints, checkpoints.c.id == adjudications.c.checkpoint_id)
        .outerjoin(
            asked,
            (asked.c.suspension_id == adjudications.c.suspension_id)
            & (asked.c.call_id == adjudications.c.call_id),
        )
        .where(adjudications.c.run_id == run_id, adjudications.c.call_id.in_(list(call_ids)))
        .order_by(adjudications.c.seq)
    )
    return {row["call_id"]: dict(row) for row in unit.execute(statement).mappings()}


def rounds(unit: Unit, run_id: str, call_ids: Sequence[str]) -> dict[str, int]:
    """How often each call was adjudicated already."""
    statement = (
        select(adjudications.c.call_id, func.max(adjudications.c.attempt).label("most"))
        .where(adjudications.c.run_id == run_id, adjudications.c.call_id.in_(list(call_ids)))
        .group_by(adjudications.c.call_id)
    )
    return {row.call_id: int(row.most) for row in unit.all(statement)}


def dispose(unit: Unit, run_id: str, call_id: str, disposition: str, refusal: str | None = None) -> None:
    """Note what became of a verdict when its call was dispatched (ruling 48)."""
    unit.execute(
        update(adjudications)
        .where(
            adjudications.c.run_id == run_id,
            adjudications.c.call_id == call_id,
            adjudications.c.disposition.is_(None),
        )
        .values(disposition=disposition, refusal=refusal)
    )


def page(
    unit: Unit,
    scope: str,
    *,
    pending_only: bool = True,
    run_id: str | None = None,
    after: str | None = None,
    limit: int = 50,
) -> list[Row]:
    """The checkpoints of a scope and below, oldest first; ``after`` is the id of the last one seen."""
    statement = select(checkpoints)
    if pending_only:
        statement = statement.where(checkpoints.c.state == "pending")
    if run_id is not None:
        statement = statement.where(checkpoints.c.run_id == run_id)
    if after is not None:
        statement = statement.where(checkpoints.c.id > after)
    return list(first_within(unit, statement, checkpoints, scope, lambda c: (c.id,), limit))


def count_pending(unit: Unit, scope: str, run_id: str | None = None) -> int:
    """How many questions of a scope and below wait for a decision."""
    statement = select(func.count()).where(
        checkpoints.c.state == "pending", within(checkpoints.c.scope, scope)
    )
    if run_id is not None:
        statement = statement.where(checkpoints.c.run_id == run_id)
    return int(unit.scalar(statement) or 0)


def to_checkpoint(unit: Unit, row: Row) -> Checkpoint:
    """The public type of a row, its pause's deadline and calls included, its decider's principal left out."""
    calls: list[Row] = []
    expires = None
    if row["suspension_id"] is not None:
        calls = suspensions.pending(unit, row["suspension_id"])
        pause = suspensions.get(unit, row["suspension_id"])
        expires = pause["expires_at"] if pause is not None else None
    values = {name: row[name] for name in Checkpoint.model_fields if name in row}
    pending = tuple(suspensions.to_pending(call) for call in calls)
    return Checkpoint.model_validate({**values, "expires_at": expires, "pending": pending})

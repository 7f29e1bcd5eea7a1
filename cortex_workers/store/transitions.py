"""The only statements that write a state column, for every machine, built from `schemas/lifecycle.py`.

Each run transition is one statement: the fenced update, its event, and the new row returned. Zero rows is an answer:
somebody else moved it.
Source: house.md 3.4; rulings 20, 29, 30, 58.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    FromClause,
    Interval,
    Select,
    and_,
    case,
    cast,
    exists,
    func,
    insert,
    literal,
    null,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.dialects.postgresql import insert as pg_insert

from cortex_workers.schemas.lease import Term
from cortex_workers.schemas.lifecycle import (
    CLAIMABLE_RUN_STATES,
    Announce,
    Fence,
    LeaseEffect,
    RunState,
    Transition,
    transition,
)
from cortex_workers.store import announcing, clock, tables
from cortex_workers.store.unit import Unit

runs = tables.runs
Row = Mapping[str, Any]
_SOON = timedelta(seconds=0.5)
"""A run that may not be claimed before that is announced by the sweep, when it may."""
LAPSE_PAUSES_S = (0.0, 30.0, 120.0)
"""Pause after the first, second and every further lapse (ruling 29)."""


@dataclass(frozen=True, slots=True)
class Guard:
    """The values a fence compares with; which of them are needed, the transition's fence says."""

    term: Term | None = None
    revision: int | None = None
    suspension_id: str | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """What one application of a transition carries besides its row of the table.

    ``seqs`` ordinals are reserved for what the caller inserts; the first of them is ``base(row)``.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    seqs: int = 0
    actor: str | None = None
    worker_id: str | None = None
    data: Mapping[str, Any] | None = None
    only_unshared: bool = False
    lease_ttl_s: float | None = None
    owner: str | None = None
    session_messages: int = 0


def create(unit: Unit, name: str, rows: Sequence[Mapping[str, Any]], move: Move) -> list[Row]:
    """Insert runs by their creating transition; a row whose id is taken is missing from what comes back."""
    row = transition("run", name)
    now = clock.wall()
    usual = {"state_since": now, "not_before": now}
    fixed = {"state": row.target, "instruction": row.instruction, "next_seq": move.seqs + 1}
    made = (
        pg_insert(runs)
        .values([{**usual, **values, **fixed} for values in rows])
        .on_conflict_do_nothing(index_elements=[runs.c.id])
        .returning(*runs.c)
        .cte("moved")
    )
    found: list[Row] = [dict(item) for item in unit.execute(_with_event(made, row, move)).mappings()]
    for after in found:
        _tell(unit, row, None, after)
    return found


def apply(unit: Unit, name: str, run_id: str, guard: Guard, move: Move = Move()) -> Row | None:
    """Move one run by the row of that name; None when no row matched (nothing was written)."""
    row = transition("run", name)
    conditions = [runs.c.id == run_id, runs.c.state.in_(row.sources), *_fence(row.fence, guard)]
    if move.only_unshared:
        conditions.append(~runs.c.shared)
    moved = update(runs).where(*conditions).values(_sets(row, move)).returning(*runs.c).cte("moved")
    after = _run(unit, moved, row, move)
    if after is None:
        return None
    if row.ends_pause_as is not None:
        end_suspension(unit, after["suspension_id"], row.ends_pause_as)
    _tell(unit, row, row.sources[0], after)
    return after


def apply_selected(
    unit: Unit,
    name: str,
    chosen: FromClause,
    move: Move,
    extra: Sequence[Any] = (),
    also: Callable[[CTE], CTE] | None = None,
) -> list[Row]:
    """Move every run that a locking selection (columns ``id``, ``before``) names, in one statement.

    Returns the new rows with ``before`` and the ``extra`` columns. Used by claims and the watchdog. ``also`` adds what
    the same statement writes besides.
    """
    row = transition("run", name)
    moved = (
        update(runs)
        .where(runs.c.id == chosen.c.id, runs.c.state.in_(row.sources))
        .values(_sets(row, move))
        .returning(*runs.c, chosen.c.before, *extra)
        .cte("moved")
    )
    statement = _with_event(moved, row, move)
    result = unit.execute(statement.add_cte(also(moved)) if also is not None else statement)
    rows: list[Row] = [dict(item) for item in result.mappings()]
    for after in rows:
        _tell(unit, row, str(after["before"]), after)
    return rows


def base(row: Row, seqs: int) -> int:
    """The first of the ordinals a move reserved; the event of the move follows them."""
    return int(row["next_seq"]) - seqs - 1


def end_suspension(unit: Unit, suspension_id: str | None, ended_as: str) -> None:
    """End a pause: it is never deleted (ruling 44)."""
    if suspension_id is None:
        return
    unit.execute(
        update(tables.suspensions)
        .where(tables.suspensions.c.id == suspension_id, tables.suspensions.c.ended_at.is_(None))
        .values(ended_at=clock.wall(), ended_as=ended_as)
    )


def _run(unit: Unit, moved: Any, row: Transition, move: Move) -> Row | None:
    result = unit.execute(_with_event(moved, row, move)).mappings().first()
    return dict(result) if result is not None else None


def _with_event(moved: Any, row: Transition, move: Move) -> Select[Any]:
    """The moved rows, and their event in the same statement."""
    columns = ["scope", "session_id", "run_id", "run_seq", "kind", "actor", "worker_id", "revision", "data"]
    event = (
        insert(tables.events)
        .from_select(
            columns,
            select(
                moved.c.scope,
                moved.c.session_id,
                moved.c.id,
                moved.c.next_seq - 1,
                literal(f"run.{row.name}"),
                literal(move.actor) if move.actor else null(),
                literal(move.worker_id) if move.worker_id else null(),
                moved.c.revision,
                cast(literal(dict(move.data), JSONB), JSONB) if move.data else null(),
            ),
        )
        .cte("noted")
    )
    return select(moved).add_cte(event)


def _sets(row: Transition, move: Move) -> dict[str, Any]:
    now = clock.wall()
    sets: dict[str, Any] = {
        "state": row.target,
        "state_since": now,
        "revision": runs.c.revision + 1,
        "next_seq": runs.c.next_seq + move.seqs + 1,
        "wait_reason": None,
    }
    sets.update(_lease_sets(row, move, now))
    if row.begins:
        sets["queue_class"] = "begun"
    if row.instruction is not None:
        sets["instruction"] = row.instruction
    if row.target in CLAIMABLE_RUN_STATES:
        sets.update(_waiting_sets(row, now))
    if row.good_end:
        sets.update(reclaim_count=0, stop_requested_at=None, stop_requested_reason=None)
    if row.ends:
        sets["completed_at"] = now
    sets.update(move.values)
    return sets


def _lease_sets(row: Transition, move: Move, now: ColumnElement[Any]) -> dict[str, Any]:
    if row.lease is LeaseEffect.TAKE:
        return {
            "lease_owner": move.owner,
            "lease_expires_at": now + literal(timedelta(seconds=move.lease_ttl_s or 0), Interval),
            "claimed_at": now,
            "started_at": func.coalesce(runs.c.started_at, now),
        }
    if row.lease is LeaseEffect.NONE:
        return {}
    held = func.extract("epoch", func.least(now, runs.c.lease_expires_at) - runs.c.claimed_at)
    sets: dict[str, Any] = {
        "lease_owner": None,
        "lease_expires_at": None,
        "leased_time": runs.c.leased_time + func.greatest(held, 0),
    }
    if row.lease is LeaseEffect.FENCE:
        sets["fenced_until"] = runs.c.lease_expires_at
    return sets


def _waiting_sets(row: Transition, now: ColumnElement[Any]) -> dict[str, Any]:
    """A run that waits for a worker again: its place in the queue, and the clock of its hints."""
    millis = cast(clock.millis(now), BigInteger)
    begun = row.begins or row.instruction is not None
    sets: dict[str, Any] = {
        "rank": millis if begun else case((runs.c.queue_class == "begun", millis), else_=runs.c.rank),
        "not_before": now,
        "notified_at": now,
        "notified_count": 0,
    }
    if row.target == RunState.RECLAIMABLE:
        sets["handed_off"] = row.why == "hand_off"
    if row.why in ("hand_off", "lapse"):
        sets["interrupted_at"] = now
        sets["interrupted_reason"] = row.why
    if row.counts_reclaim:
        pause = case(
            (runs.c.reclaim_count == 0, timedelta(seconds=LAPSE_PAUSES_S[0])),
            (runs.c.reclaim_count == 1, timedelta(seconds=LAPSE_PAUSES_S[1])),
            else_=timedelta(seconds=LAPSE_PAUSES_S[2]),
        )
        later = case((runs.c.reclaim_count == 0, null()), else_=literal("later"))
        sets.update(
            reclaim_count=runs.c.reclaim_count + 1,
            reclaim_total=runs.c.reclaim_total + 1,
            not_before=now + cast(pause, Interval),
            wait_reason=later,
        )
    return sets


def _fence(fence: Fence, guard: Guard) -> list[ColumnElement[bool]]:
    if fence in (Fence.OWNER, Fence.TERM):
        assert guard.term is not None
        conditions = [runs.c.lease_owner == guard.term.owner, runs.c.revision == guard.term.revision]
        if fence is Fence.OWNER:
            conditions.append(runs.c.lease_expires_at > clock.wall())
        return conditions
    if fence is Fence.LAPSED:
        return [runs.c.lease_owner.is_not(None), runs.c.lease_expires_at <= clock.wall()]
    if fence is Fence.OVERDUE_START:
        return [runs.c.queue_class == "start", runs.c.start_by <= clock.wall()]
    if fence in (Fence.LIVE_PAUSE, Fence.THIS_PAUSE, Fence.OVERDUE_PAUSE):
        assert guard.suspension_id is not None
        conditions = [runs.c.suspension_id == guard.suspension_id, _pause(fence, guard.suspension_id)]
        return [*conditions, runs.c.revision == guard.revision] if guard.revision is not None else conditions
    return [runs.c.revision == guard.revision] if guard.revision is not None else []


def _pause(fence: Fence, suspension_id: str) -> ColumnElement[bool]:
    pause = tables.suspensions
    conditions: list[ColumnElement[bool]] = [pause.c.id == suspension_id, pause.c.ended_at.is_(None)]
    if fence is Fence.LIVE_PAUSE:
        conditions.append(pause.c.expires_at.is_(None) | (pause.c.expires_at > clock.wall()))
    if fence is Fence.OVERDUE_PAUSE:
        conditions.append(pause.c.expires_at <= clock.wall())
    return exists().where(and_(*conditions))


def _tell(unit: Unit, row: Transition, before: str | None, after: Row) -> None:
    unit.on_transition(row, before, after)
    for kind in row.announces:
        if kind in (Announce.RUN_READY, Announce.RUN_RECLAIMABLE):
            if after["wait_reason"] is None and after["not_before"] - after["state_since"] < _SOON:
                unit.announce(announcing.waiting(after))
        elif kind is Announce.RESUME_ADMITTED:
            if after["wait_reason"] is None:
                unit.announce(announcing.admitted(after))
        elif kind not in (Announce.CHECKPOINT_CREATED, Announce.CHECKPOINT_RESOLVED):
            unit.announce(announcing.ended(after))


# --- The other machines ------------------------------------------------------------------------------------------


def create_in(unit: Unit, machine: str, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows of another machine by its creating transition.

    Raises: IntegrityError when one exists already.
    """
    row = transition(machine, name)
    if rows:
        table = tables.metadata.tables[_TABLE[machine]]
        unit.execute(insert(table).values([{**values, "state": row.target} for values in rows]))


def apply_in(
    unit: Unit, machine: str, name: str, conditions: Sequence[ColumnElement[bool]], values: Mapping[str, Any]
) -> list[Row]:
    """Move the rows of another machine that match, and return them; an empty list is an answer."""
    row = transition(machine, name)
    table = tables.metadata.tables[_TABLE[machine]]
    moved = unit.execute(
        update(table)
        .where(table.c.state.in_(row.sources), *conditions)
        .values(state=row.target, **values)
        .returning(*table.c)
    )
    return [dict(item) for item in moved.mappings()]


_TABLE = {
    "checkpoint": "checkpoints",
    "tool_call": "tool_calls",
    "delivery": "a2a_deliveries",
    "ask": "a2a_asks",
}

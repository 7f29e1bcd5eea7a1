"""Whose turn it is in a session, and moving a run with everything its session needs.

``wait_reason`` of a shared session's runs is computed here and nowhere else, under the session's lock; what it clears
it announces. A run of an unshared session takes the short way: its own row only.
Source: rulings 35, 36, 68.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from sqlalchemy import Interval, and_, case, func, literal, null, select, update

from cortex_workers.schemas.lifecycle import transition
from cortex_workers.store import admissions, announcing, clock, sessions, tables, transitions
from cortex_workers.store.transitions import Guard, Move, Row
from cortex_workers.store.unit import Unit

runs = tables.runs
_WAITING = ("ready", "reclaimable")
_HAND_BACKS = ("hand_back", "hand_back_reclaimable")


def move(unit: Unit, name: str, run: Mapping[str, Any], guard: Guard, what: Move) -> Row | None:
    """Apply one transition to a run, its session's turn included; None when somebody else moved it first.

    ``run`` needs ``id``, ``session_id`` and ``shared`` as last read. A hand-back also takes back the start receipt
    that its claim wrote (ruling 41).
    Writes: the run, its event, the session's completion order when the run ends, and the waits of a shared session.
    """
    moved = _move(unit, name, run, guard, what)
    if (
        moved is not None
        and guard.term is not None
        and name in _HAND_BACKS
        and moved["suspension_id"] is not None
    ):
        admissions.undo_start(unit, moved["id"], moved["suspension_id"], guard.term.revision)
    return moved


def _move(unit: Unit, name: str, run: Mapping[str, Any], guard: Guard, what: Move) -> Row | None:
    row, place = transition("run", name), None
    if row.ends:
        place = sessions.end_turn(unit, run["session_id"], what.session_messages)
        what = replace(what, values={**what.values, "completion_seq": place.seq})
    elif not run["shared"]:
        moved = transitions.apply(unit, name, run["id"], guard, replace(what, only_unshared=True))
        if moved is not None or not _became_shared(unit, run["id"]):
            return moved
    if not row.ends:
        sessions.lock(unit, run["session_id"])
    if row.target in _WAITING:
        # Nobody may claim it before its turn is computed below.
        what = replace(what, values={**what.values, "wait_reason": "turn"})
    moved = transitions.apply(unit, name, run["id"], guard, what)
    if moved is None and place is not None:
        sessions.give_back(unit, run["session_id"], place)
    if moved is None or not moved["shared"]:
        return moved
    recompute(unit, run["session_id"], admitted=moved["id"] if name in ("admit", "reply") else None)
    return _reread(unit, moved)


def _became_shared(unit: Unit, run_id: str) -> bool:
    return bool(unit.scalar(select(runs.c.shared).where(runs.c.id == run_id)))


def _reread(unit: Unit, moved: Row) -> Row:
    reason = unit.scalar(select(runs.c.wait_reason).where(runs.c.id == moved["id"]))
    return {**moved, "wait_reason": reason}


def recompute(unit: Unit, session_id: str, later_s: float = 10.0, admitted: str | None = None) -> int:
    """Set and clear the waits of a session's runs, under its lock; announces what it clears.

    The first that applies: hold, gate, turn, no_worker (kept), later. ``admitted`` is a run whose answer was retained
    in this transaction: it is told of as that.
    Returns the number of runs that may be claimed now and could not before.
    """
    session = sessions.lock(unit, session_id)
    if session is None:
        return 0
    holder = _turn_holder(unit, session_id)
    reason = _reason(session["gated_at"] is not None, holder, later_s)
    changed = (
        unit.execute(
            update(runs)
            .where(
                runs.c.session_id == session_id,
                runs.c.state.in_(_WAITING),
                runs.c.shared,
                runs.c.wait_reason.is_distinct_from(reason),
            )
            .values(
                wait_reason=reason,
                notified_at=case((reason.is_(None), clock.wall()), else_=runs.c.notified_at),
            )
            .returning(*runs.c)
        )
        .mappings()
        .all()
    )
    cleared = [dict(row) for row in changed if row["wait_reason"] is None]
    for row in cleared:
        told = announcing.admitted if row["id"] == admitted else announcing.waiting
        unit.announce(told(row))
    return len(cleared)


def recompute_many(unit: Unit, session_ids: Iterable[str]) -> None:
    """Recompute several sessions, in the one lock order."""
    for session_id in sorted(set(session_ids)):
        recompute(unit, session_id)


def _reason(gated: bool, holder: str | None, later_s: float) -> Any:
    later = runs.c.not_before > clock.now() + literal(timedelta(seconds=later_s), Interval)
    return case(
        (runs.c.hold_reason.is_not(None), literal("hold")),
        (literal(gated), literal("gate")),
        (and_(runs.c.serial, runs.c.id != (holder or "")), literal("turn")),
        (runs.c.wait_reason == "no_worker", literal("no_worker")),
        (later, literal("later")),
        else_=null(),
    )


def _turn_holder(unit: Unit, session_id: str) -> str | None:
    """Who has the turn: what runs (or was cut off and may still act), else the first begun, else the first start."""
    mine = (runs.c.session_id == session_id, runs.c.serial)
    fenced = and_(
        runs.c.state == "cancelled", runs.c.fenced_until.is_not(None), runs.c.fenced_until > clock.now()
    )
    for busy in (runs.c.state == "running", fenced):
        found = unit.scalar(select(runs.c.id).where(*mine, busy).limit(1))
        if found is not None:
            return str(found)
    next_up = unit.scalar(
        select(runs.c.id)
        .where(
            runs.c.session_id == session_id,
            runs.c.state.in_(_WAITING),
            runs.c.serial,
            runs.c.hold_reason.is_(None),
        )
        .order_by(runs.c.queue_class, runs.c.session_seq)
        .limit(1)
    )
    return str(next_up) if next_up is not None else None


def waiting_in(unit: Unit, session_id: str) -> int:
    """How many runs of a session wait."""
    return int(
        unit.scalar(select(func.count()).where(runs.c.session_id == session_id, runs.c.state.in_(_WAITING)))
        or 0
    )


def delay(seconds: float, sweep_s: float) -> dict[str, Any]:
    """What makes a run wait: a short wait stays in the index of claims, a long one is looked after by the sweep."""
    return {
        "not_before": clock.wall() + literal(timedelta(seconds=seconds), Interval),
        "wait_reason": "later" if seconds > sweep_s else None,
    }


def let_go(unit: Unit, run_id: str, revision: int) -> None:
    """A holder whose run was cancelled says that it has stopped, so that the session's turn is free (ruling 30)."""
    mine = (
        runs.c.id == run_id,
        runs.c.state == "cancelled",
        runs.c.revision == revision + 1,
        runs.c.fenced_until.is_not(None),
    )
    found = unit.one(select(runs.c.session_id, runs.c.shared).where(*mine))
    if found is None:
        return
    if found.shared:
        sessions.lock(unit, found.session_id)
    unit.execute(update(runs).where(*mine).values(fenced_until=None))
    if found.shared:
        recompute(unit, found.session_id)


def hurry(unit: Unit, run: Mapping[str, Any], actor: str | None) -> bool:
    """End a ready run's wait for a time, because somebody said so; False when it does not wait for one."""
    session = sessions.lock(unit, run["session_id"])
    moved = (
        unit.execute(
            update(runs)
            .where(runs.c.id == run["id"], runs.c.state == "ready", runs.c.not_before > clock.wall())
            .values(
                not_before=clock.wall(),
                wait_reason=case((runs.c.wait_reason == "later", null()), else_=runs.c.wait_reason),
            )
            .returning(*runs.c)
        )
        .mappings()
        .first()
    )
    if moved is None or session is None:
        return False
    sessions.note(unit, session, "run.hurry", actor or "unknown", {"run_id": run["id"]})
    if moved["shared"]:
        recompute(unit, run["session_id"])
    elif moved["wait_reason"] is None:
        unit.announce(announcing.waiting(dict(moved)))
    return True

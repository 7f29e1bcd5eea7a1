"""Renewing, checking and giving up the leases of one worker, however many, in one statement each.

None of these waits for a row that somebody else has locked: one locked row must not cost the others their lease.
Source: rulings 26, 27, 31, 68; runs.md 5.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import BigInteger, Interval, Text, case, column, func, literal, null, or_, select, update
from sqlalchemy.dialects.postgresql import ARRAY, distinct_on

from cortex_workers.schemas.lease import Term
from cortex_workers.schemas.lifecycle import CLAIMABLE_RUN_STATES, RUN, QueueClass, RunState, WaitReason
from cortex_workers.store import announcing, clock, tables, transitions, turns
from cortex_workers.store.transitions import Guard, Move, Row
from cortex_workers.store.unit import Unit

runs, sessions, events = tables.runs, tables.sessions, tables.events
_FORMER_STATE = {f"run.{row.name}": row.target for row in RUN if row.target in CLAIMABLE_RUN_STATES}
"""What a run was before its claim, by the event that had made it so."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """A confirmed renewal. ``stop_requested_reason`` is set when somebody wants the run given back."""

    run_id: str
    revision: int
    expires_at: datetime
    stop_requested_reason: str | None


@dataclass(frozen=True, slots=True)
class Holding:
    """Who holds a run, as the second read of an unconfirmed lease finds it."""

    run_id: str
    owner: str | None
    revision: int
    state: str

    def confirms(self, term: Term) -> bool:
        """Whether the run is still held under that very term."""
        return self.state == RunState.RUNNING and (self.owner, self.revision) == (term.owner, term.revision)


def renew(unit: Unit, owner: str, terms: Sequence[Term], ttl_s: float) -> dict[str, Renewed]:
    """Extend the leases of many terms at once, and read what is asked of their runs.

    A term that does not come back is unconfirmed, not lost: its row may only be locked (see ``reread``). A lease that
    is over and that nobody took is renewed like any other. The revision stays.
    Writes: ``lease_expires_at``.
    Fence: owner, revision, running.
    """
    mine = _held_under(terms, owner).cte("mine")
    ttl = literal(timedelta(seconds=ttl_s), Interval)
    renewed = (
        update(runs)
        .where(runs.c.id == mine.c.id)
        .values(lease_expires_at=clock.wall() + ttl)
        .returning(
            runs.c.id.label("run_id"),
            runs.c.revision,
            runs.c.lease_expires_at.label("expires_at"),
            runs.c.stop_requested_reason,
        )
    )
    return {row["run_id"]: Renewed(**row) for row in unit.execute(renewed).mappings()}


def reread(unit: Unit, run_ids: Collection[str]) -> dict[str, Holding]:
    """Who holds these runs now, locked or not. Only this makes an unconfirmed lease lost; a missing row is one too."""
    wanted = runs.c.id == func.any(literal(list(run_ids), ARRAY(Text)))
    holding = select(
        runs.c.id.label("run_id"), runs.c.lease_owner.label("owner"), runs.c.revision, runs.c.state
    ).where(wanted)
    return {row["run_id"]: Holding(**row) for row in unit.execute(holding).mappings()}


def hand_off_all(unit: Unit, owner: str, terms: Sequence[Term], worker_id: str) -> list[Row]:
    """Give up all these terms for another worker to go on with, in one statement; returns the rows that moved.

    A row that is locked, or whose shared session is, does not move: look again (``reread``) and repeat.
    Writes: the runs, their events, the turns of their shared sessions. Announces RunReclaimable.
    Fence: owner, revision, running; the lease over or not.
    Source: ruling 31; the session before its runs, as ruling 68 orders.
    """
    locked = _lock_shared_sessions(unit, [term.run_id for term in terms])
    in_reach = or_(~runs.c.shared, runs.c.session_id == func.any(literal(locked, ARRAY(Text))))
    chosen = _held_under(terms, owner).where(in_reach).cte("chosen")
    # The turn of a shared session is given below, and told there.
    waits = case((runs.c.shared, literal(str(WaitReason.TURN))), else_=null())
    move = Move(worker_id=worker_id, values={"wait_reason": waits})
    moved = transitions.apply_selected(unit, "watchdog", chosen, move)
    turns.recompute_many(unit, {row["session_id"] for row in moved if row["shared"]})
    return moved


def hand_back_strays(unit: Unit, owner: str, known: Collection[Term], worker_id: str) -> list[Row]:
    """Put back what this owner claimed without beginning it: its former state and instruction, nothing counted.

    Announces each run, since no sweep may be near. ``known`` are the terms that are dealt with otherwise.
    Source: ruling 31 (a claim that slipped in).
    """
    others = {(term.run_id, term.revision) for term in known}
    found = (
        unit.execute(select(runs).where(runs.c.lease_owner == owner).order_by(runs.c.session_id))
        .mappings()
        .all()
    )
    strays = [dict(row) for row in found if (row["id"], row["revision"]) not in others]
    former = _former_states(unit, [row["id"] for row in strays])
    moved = [_hand_back(unit, row, former.get(row["id"], str(RunState.READY)), worker_id) for row in strays]
    return [row for row in moved if row is not None]


def _hand_back(unit: Unit, run: Row, former: str, worker_id: str) -> Row | None:
    unbegun = run["queue_class"] == QueueClass.START
    values: dict[str, Any] = (
        {"started_at": None, "history_upto": None, "history_floor": None} if unbegun else {}
    )
    term = Term(run_id=run["id"], owner=run["lease_owner"], revision=run["revision"])
    name = "hand_back_reclaimable" if former == RunState.RECLAIMABLE else "hand_back"
    what = Move(values=values, worker_id=worker_id, data={"reason": "drain"})
    moved = turns.move(unit, name, run, Guard(term=term), what)
    if moved is not None and moved["wait_reason"] is None and not moved["shared"]:
        unit.announce(announcing.waiting(moved))
    return moved


def _held_under(terms: Sequence[Term], owner: str) -> Any:
    """Lock the rows that are still held under these terms; columns ``id`` and ``before``."""
    wanted = (
        func.unnest(
            literal([term.run_id for term in terms], ARRAY(Text)),
            literal([term.revision for term in terms], ARRAY(BigInteger)),
        )
        .table_valued(column("id", Text), column("revision", BigInteger), name="wanted")
        .render_derived()
    )
    return (
        select(runs.c.id, runs.c.state.label("before"))
        .select_from(wanted.join(runs, runs.c.id == wanted.c.id))
        .where(
            runs.c.lease_owner == owner,
            runs.c.revision == wanted.c.revision,
            runs.c.state == str(RunState.RUNNING),
        )
        .with_for_update(key_share=True, skip_locked=True, of=runs)
    )


def _lock_shared_sessions(unit: Unit, run_ids: Sequence[str]) -> list[str]:
    """Take the sessions that these runs share with others, in ascending order, passing over locked ones."""
    wanted = select(runs.c.session_id).where(
        runs.c.id == func.any(literal(list(run_ids), ARRAY(Text))), runs.c.shared
    )
    taken = (
        select(sessions.c.id)
        .where(sessions.c.id.in_(wanted))
        .order_by(sessions.c.id)
        .with_for_update(key_share=True, skip_locked=True)
    )
    return [str(row[0]) for row in unit.all(taken)]


def _former_states(unit: Unit, run_ids: Sequence[str]) -> dict[str, str]:
    """The state that each run was claimed from, told by its newest event before the claim."""
    newest = (
        select(events.c.run_id, events.c.kind)
        .where(
            events.c.run_id == func.any(literal(list(run_ids), ARRAY(Text))),
            events.c.kind.in_(list(_FORMER_STATE)),
        )
        .order_by(events.c.run_id, events.c.run_seq.desc())
        .ext(distinct_on(events.c.run_id))
    )
    return {row["run_id"]: _FORMER_STATE[row["kind"]] for row in unit.execute(newest).mappings()}

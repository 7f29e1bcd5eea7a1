"""Claims: what may be claimed, said once, and the statement that takes it together with all the loop needs.

A claim never waits: it takes run rows and, for a run of a shared session, the session's row, both skipping what is
locked; gate and turn are checked again under that lock.
Source: rulings 14, 15, 18, 19, 36, 38, 68.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, Interval, Select, and_, exists, func, literal, or_, select
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.exc import IntegrityError
from sqlalchemy.types import Text

from cortex_workers.schemas.lifecycle import CLAIMABLE_RUN_STATES
from cortex_workers.store import admissions, clock, tables, transitions
from cortex_workers.store.transitions import Move, Row
from cortex_workers.store.unit import Unit

runs, sessions, specs = tables.runs, tables.sessions, tables.run_specs
READER_VERSION = 1
"""The newest stored document this code can read; a row that needs a newer one is left untouched."""


class TurnTaken(Exception):
    """Another run of the session was claimed in the same instant; the transaction is over, nothing was taken."""


@dataclass(frozen=True, slots=True)
class Claimer:
    """Who claims, for how long, and what it serves."""

    owner: str
    ttl_s: float
    pool: str
    digests: Sequence[str]


def claimable() -> ColumnElement[bool]:
    """What may be claimed now, by anybody who serves it; everything that counts or looks for work uses this."""
    return and_(
        runs.c.state.in_([str(state) for state in sorted(CLAIMABLE_RUN_STATES)]),
        runs.c.wait_reason.is_(None),
        runs.c.not_before <= clock.now(),
        runs.c.min_reader <= READER_VERSION,
        # What nobody began in time is cancelled by the next sweep, and begun by nobody until then.
        or_(runs.c.start_by.is_(None), runs.c.queue_class != "start", runs.c.start_by > clock.now()),
    )


def served(digests: Sequence[str]) -> ColumnElement[bool]:
    """The agent versions a claimer can run."""
    return runs.c.agent_digest == func.any(literal(list(digests), ARRAY(Text)))


def begun_waits(unit: Unit, claimer: Claimer) -> bool:
    """Whether a begun run could be claimed now."""
    one = select(literal(1)).where(
        claimable(), runs.c.pool == claimer.pool, runs.c.queue_class == "begun", served(claimer.digests)
    )
    return unit.scalar(one.limit(1)) is not None


def count_waiting(unit: Unit, claimer: Claimer, longer_than_s: float, most: int) -> int:
    """How many runs this claimer could take have waited longer than so many seconds, up to ``most``."""
    since = func.greatest(runs.c.state_since, runs.c.not_before)
    found = (
        select(literal(1).label("one"))
        .where(
            claimable(),
            runs.c.pool == claimer.pool,
            served(claimer.digests),
            since <= clock.now() - literal(timedelta(seconds=longer_than_s), Interval),
        )
        .limit(most)
        .subquery()
    )
    return int(unit.scalar(select(func.count()).select_from(found)) or 0)


def best_waiting(unit: Unit, claimer: Claimer) -> Row | None:
    """The run that would be claimed next, unlocked; None when nothing waits."""
    found = (
        unit.execute(
            select(runs)
            .where(claimable(), runs.c.pool == claimer.pool, served(claimer.digests))
            .order_by(runs.c.queue_class, runs.c.rank)
            .limit(1)
        )
        .mappings()
        .first()
    )
    return dict(found) if found is not None else None


def claim_named(
    unit: Unit, claimer: Claimer, run_id: str, *, suspension_id: str | None = None, any_pool: bool = True
) -> list[Row]:
    """Claim one run by its id; empty when it is not claimable, not served, or its row or session is locked."""
    conditions = [runs.c.id == run_id, claimable(), served(claimer.digests)]
    if suspension_id is not None:
        conditions += [runs.c.suspension_id == suspension_id, runs.c.instruction == "answer"]
    if not any_pool:
        conditions.append(runs.c.pool == claimer.pool)
    return _claim(unit, claimer, _candidates(conditions, limit=1), limit=1)


def claim_next(unit: Unit, claimer: Claimer, *, starts: bool, batch: int = 1) -> list[Row]:
    """Claim the best claimable runs of the pool: begun ones first in, first out, then starts by rank.

    ``batch`` above one takes unshared runs only. A candidate whose session is locked is passed over.
    """
    conditions = [claimable(), runs.c.pool == claimer.pool, served(claimer.digests)]
    if not starts:
        conditions.append(runs.c.queue_class == "begun")
    if batch > 1:
        found = _claim(unit, claimer, _candidates([*conditions, ~runs.c.shared], batch), batch)
        if found:
            return found
    found = _claim(unit, claimer, _candidates(conditions, 1), 1)
    return found or _claim(unit, claimer, _candidates(conditions, 8), 1)


def _candidates(conditions: Sequence[ColumnElement[bool]], limit: int) -> Any:
    return (
        select(
            runs.c.id,
            runs.c.state,
            runs.c.shared,
            runs.c.serial,
            runs.c.session_id,
            runs.c.queue_class,
            runs.c.rank,
        )
        .where(*conditions)
        .order_by(runs.c.queue_class, runs.c.rank)
        .limit(limit)
        .with_for_update(key_share=True, skip_locked=True, of=runs)
        .cte("candidate")
    )


def _chosen(candidate: Any, limit: int) -> Any:
    """The candidates that hold their session's turn, with what the loop needs of session and spec."""
    session = (
        select(sessions.c.id, sessions.c.gated_at, sessions.c.completion_seq, sessions.c.history_floor)
        .where(sessions.c.id.in_(select(candidate.c.session_id).where(candidate.c.shared)))
        .with_for_update(key_share=True, skip_locked=True)
        .cte("session")
    )
    other = runs.alias("other")
    taken = exists().where(
        other.c.session_id == candidate.c.session_id, other.c.state == "running", other.c.serial
    )
    turn = and_(session.c.id.is_not(None), session.c.gated_at.is_(None), or_(~candidate.c.serial, ~taken))
    statement: Select[Any] = (
        select(
            candidate.c.id,
            candidate.c.state.label("before"),
            session.c.completion_seq.label("session_completed"),
            session.c.history_floor.label("session_floor"),
            specs.c.input,
            specs.c.overrides,
            specs.c.principal,
            specs.c.system_prompt,
            specs.c.metadata,
        )
        .select_from(
            candidate.outerjoin(session, session.c.id == candidate.c.session_id).join(
                specs, specs.c.run_id == candidate.c.id
            )
        )
        .where(or_(~candidate.c.shared, turn))
        .order_by(candidate.c.queue_class, candidate.c.rank)
        .limit(limit)
    )
    return statement.cte("chosen")


def _claim(unit: Unit, claimer: Claimer, candidate: Any, limit: int) -> list[Row]:
    chosen = _chosen(candidate, limit)
    move = Move(
        owner=claimer.owner,
        lease_ttl_s=claimer.ttl_s,
        worker_id=claimer.owner,
        values={
            "history_upto": func.coalesce(runs.c.history_upto, chosen.c.session_completed, 0),
            "history_floor": func.coalesce(runs.c.history_floor, chosen.c.session_floor, 0),
        },
    )
    extra = [chosen.c[name] for name in ("input", "overrides", "principal", "system_prompt", "metadata")]
    try:
        return transitions.apply_selected(unit, "claim", chosen, move, extra, admissions.starts_of)
    except IntegrityError as error:
        # Somebody took the turn between our snapshot and our write; the index is the judge.
        raise TurnTaken() from error

"""What is due, across all scopes: for sweeps only, and said in each name. Finding a row licenses no write to it.

Each finder reads one page in an index order, after a key, and tells for every row whether it can be handled now: one
that is locked, or that a newer version has to handle, is passed over and not waited for.
Source: rulings 25, 30, 36, 39; runs.md 9.3; bug case C19.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    CTE,
    ColumnElement,
    DateTime,
    Interval,
    Select,
    and_,
    case,
    exists,
    false,
    func,
    literal,
    null,
    or_,
    select,
    tuple_,
)

from cortex_workers.schemas.lifecycle import TERMINAL_RUN_STATES
from cortex_workers.store import clock, tables
from cortex_workers.store.claims import READER_VERSION
from cortex_workers.store.unit import Unit

runs, sessions, suspensions, checkpoints = (
    tables.runs,
    tables.sessions,
    tables.suspensions,
    tables.checkpoints,
)
_WAITING = ("ready", "reclaimable")
_TERMINAL = sorted(str(state) for state in TERMINAL_RUN_STATES)


@dataclass(frozen=True, slots=True)
class Due:
    """A row that is due since ``at``; ``free`` is false while it cannot be handled (locked, or for a newer version)."""

    id: str
    at: datetime
    free: bool = True

    @property
    def key(self) -> tuple[str, str]:
        """Where the next page begins."""
        return self.at.isoformat(), self.id


After = Sequence[str] | None
"""The key of the last row of the page before; None for the first page."""


def lapsed_across_scopes(unit: Unit, after: After, limit: int) -> list[Due]:
    """Running runs whose lease is over, the longest first. Index: runs_lapsed."""
    page = _page(
        select(runs.c.id, runs.c.lease_expires_at.label("at")).where(
            runs.c.state == "running", runs.c.lease_expires_at <= clock.now()
        ),
        (runs.c.lease_expires_at, runs.c.id),
        after,
        limit,
    )
    return _with_locks(unit, page, _lockable_runs(page))


def overdue_starts_across_scopes(unit: Unit, after: After, limit: int) -> list[Due]:
    """Runs that nobody started by the time their producer gave. Index: runs_start_by."""
    page = _page(
        select(runs.c.id, runs.c.start_by.label("at")).where(
            runs.c.state == "ready", runs.c.queue_class == "start", runs.c.start_by <= clock.now()
        ),
        (runs.c.start_by, runs.c.id),
        after,
        limit,
    )
    return _with_locks(unit, page, _lockable_runs(page))


def overdue_pauses_across_scopes(unit: Unit, after: After, limit: int) -> list[Due]:
    """Pauses past their deadline whose run still waits on them, the oldest first; never one of a gated session.

    Index: suspensions_due.
    """
    page = _page(
        select(suspensions.c.id, suspensions.c.expires_at.label("at"))
        .join(runs, and_(runs.c.id == suspensions.c.run_id, runs.c.suspension_id == suspensions.c.id))
        .join(sessions, sessions.c.id == suspensions.c.session_id)
        .where(
            suspensions.c.ended_at.is_(None),
            suspensions.c.expires_at <= clock.now(),
            runs.c.state == "paused",
            sessions.c.gated_at.is_(None),
        ),
        (suspensions.c.expires_at, suspensions.c.id),
        after,
        limit,
    )
    readable = and_(suspensions.c.schema_version <= READER_VERSION, runs.c.min_reader <= READER_VERSION)
    lockable = (
        select(suspensions.c.id)
        .join(runs, runs.c.id == suspensions.c.run_id)
        .join(sessions, sessions.c.id == suspensions.c.session_id)
        .where(suspensions.c.id.in_(select(page.c.id)), readable)
        .with_for_update(key_share=True, skip_locked=True, of=[suspensions, runs, sessions])
    )
    return _with_locks(unit, page, lockable)


def overdue_polls_across_scopes(unit: Unit, after: After, limit: int) -> list[Due]:
    """Pauses whose deferred model call is due to be asked again, the oldest first.

    Index: suspensions_poll.
    """
    page = _page(
        select(suspensions.c.id, suspensions.c.next_poll_at.label("at"))
        .join(runs, and_(runs.c.id == suspensions.c.run_id, runs.c.suspension_id == suspensions.c.id))
        .where(
            suspensions.c.ended_at.is_(None),
            suspensions.c.next_poll_at <= clock.now(),
            runs.c.state == "paused",
        ),
        (suspensions.c.next_poll_at, suspensions.c.id),
        after,
        limit,
    )
    lockable = (
        select(suspensions.c.id)
        .where(suspensions.c.id.in_(select(page.c.id)), suspensions.c.schema_version <= READER_VERSION)
        .with_for_update(key_share=True, skip_locked=True)
    )
    return _with_locks(unit, page, lockable)


def cut_off_across_scopes(unit: Unit, after: After, limit: int) -> list[tuple[Due, int]]:
    """Cancelled runs of shared sessions whose holder may not act any more, with their revision. Index: runs_fenced."""
    statement = (
        select(runs.c.id, runs.c.fenced_until.label("at"), runs.c.revision)
        .where(runs.c.state == "cancelled", runs.c.fenced_until <= clock.now(), runs.c.shared)
        .order_by(runs.c.fenced_until, runs.c.id)
        .limit(limit)
    )
    rows = unit.all(after_key(statement, (runs.c.fenced_until, runs.c.id), after))
    return [(Due(row.id, row.at), int(row.revision)) for row in rows]


def sessions_with_a_wait_over_across_scopes(unit: Unit, after: str | None, limit: int) -> list[str]:
    """Shared sessions with a run whose wait for a time is over. Index: runs_later."""
    return _sessions(
        unit,
        [runs.c.wait_reason == "later", runs.c.not_before <= clock.now(), runs.c.shared],
        after,
        limit,
    )


def sessions_without_a_turn_across_scopes(
    unit: Unit, older_s: float, after: str | None, limit: int
) -> list[str]:
    """Sessions with a run that waits for its turn for so long while nobody has the turn.

    Somebody has it: a run that runs, one that may be claimed (now or later), or a cancelled one still fenced.
    Index: runs_waiting, runs_turn.
    """
    other = runs.alias("other")
    has_the_turn = or_(
        other.c.state == "running",
        and_(
            other.c.state.in_(_WAITING),
            or_(other.c.wait_reason.is_(None), other.c.wait_reason.in_(["no_worker", "later"])),
        ),
        and_(other.c.state == "cancelled", other.c.fenced_until > clock.now()),
    )
    waiting = (
        select(runs.c.session_id, func.min(runs.c.state_since).label("oldest"))
        .where(runs.c.wait_reason == "turn")
        .group_by(runs.c.session_id)
        .subquery()
    )
    statement = (
        select(waiting.c.session_id)
        .where(
            waiting.c.oldest <= clock.now() - literal(timedelta(seconds=older_s), Interval),
            ~exists().where(other.c.session_id == waiting.c.session_id, other.c.serial, has_the_turn),
        )
        .order_by(waiting.c.session_id)
        .limit(limit)
    )
    if after is not None:
        statement = statement.where(waiting.c.session_id > after)
    return [row.session_id for row in unit.all(statement)]


@dataclass(frozen=True, slots=True)
class Asked:
    """A pending checkpoint of a pause; ``why`` tells that no decision can reach that pause any more."""

    id: str
    run_revision: int
    why: str | None


def open_questions_across_scopes(unit: Unit, after: str | None, limit: int) -> list[Asked]:
    """Pending checkpoints that a pause opened, by id; never a host's own. Index: checkpoints_open.

    One whose run is ready, running or reclaimable on this very pause is reachable: its decision may still be repeated.
    """
    why = case(
        (runs.c.id.is_(None), literal("its run is gone")),
        (runs.c.state.in_(_TERMINAL), literal("its run has ended: ") + runs.c.state),
        (
            runs.c.suspension_id.is_distinct_from(checkpoints.c.suspension_id),
            literal("its run has left this pause"),
        ),
        else_=null(),
    )
    statement = (
        select(checkpoints.c.id, func.coalesce(runs.c.revision, 0).label("revision"), why.label("why"))
        .select_from(checkpoints.outerjoin(runs, runs.c.id == checkpoints.c.run_id))
        .where(checkpoints.c.state == "pending", checkpoints.c.suspension_id.is_not(None))
        .order_by(checkpoints.c.id)
        .limit(limit)
    )
    if after is not None:
        statement = statement.where(checkpoints.c.id > after)
    return [Asked(row.id, int(row.revision), row.why) for row in unit.all(statement)]


def _sessions(unit: Unit, where: Sequence[ColumnElement[bool]], after: str | None, limit: int) -> list[str]:
    found = select(runs.c.session_id).where(*where)
    if after is not None:
        found = found.where(runs.c.session_id > after)
    # In the order of the index, and not of the sessions: else Postgres, which takes most times for past ones, walks all
    # waits or all runs. A session has few such runs, so ten times as many make a page.
    due = found.order_by(runs.c.not_before, runs.c.id).limit(10 * limit).cte("due")
    statement = select(due.c.session_id).distinct().order_by(due.c.session_id).limit(limit)
    return [row.session_id for row in unit.all(statement)]


def _page(found: Select[Any], order: tuple[Any, Any], after: After, limit: int) -> CTE:
    return after_key(found, order, after).order_by(*order).limit(limit).cte("page")


def after_key(found: Select[Any], order: tuple[Any, Any], after: After) -> Select[Any]:
    """The rows after the last one of the page before, in an order of time and id."""
    if after is None:
        return found
    at = literal(datetime.fromisoformat(after[0]), DateTime(timezone=True))
    return found.where(tuple_(*order) > tuple_(at, literal(after[1])))


def _lockable_runs(page: CTE) -> Select[Any]:
    return (
        select(runs.c.id)
        .where(runs.c.id.in_(select(page.c.id)))
        .with_for_update(key_share=True, skip_locked=True)
    )


def _with_locks(unit: Unit, page: CTE, lockable: Select[Any]) -> list[Due]:
    """A page, and which of its rows nobody holds: their locks are taken and let go by this one statement."""
    free = lockable.cte("free")
    statement = (
        select(page.c.id, page.c.at, func.coalesce(free.c.id.is_not(None), false()).label("is_free"))
        .select_from(page.outerjoin(free, free.c.id == page.c.id))
        .order_by(page.c.at, page.c.id)
    )
    return [Due(row.id, row.at, bool(row.is_free)) for row in unit.all(statement)]

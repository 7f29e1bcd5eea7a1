"""What an operator looks at: one run with all its traces, and the state of the fleet in numbers.

Read only. What counts across scopes says so in its name and returns ids and numbers, never content.
Source: rulings 8, 16, 53, 58; celery.md 23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Interval, and_, func, literal, or_, select, text, union_all

from cortex_workers.schemas.agent import AgentDefinition
from cortex_workers.schemas.lifecycle import TERMINAL_RUN_STATES
from cortex_workers.schemas.llm import Usage
from cortex_workers.schemas.suspension import SuspendReason
from cortex_workers.store import agents, clock, runs, sessions, suspensions, tables, transcript
from cortex_workers.store.claims import claimable
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit
from cortex_workers.store.workers import live

_RUN, _WORKER, _VERSION = tables.runs, tables.workers, tables.agent_versions
_WAITING = ("ready", "reclaimable")
_ASKS_NOBODY = (SuspendReason.EXTERNAL_TOOL, SuspendReason.AGENT_REPLY)


@dataclass(frozen=True, slots=True)
class Traces:
    """Everything that is stored of one run, each list in its own order, and the database's time.

    ``missing`` names what somebody deleted or broke by hand; in its place stands nothing.
    """

    now: datetime
    run: Row
    spec: Row
    events: Sequence[Row]
    steps: Sequence[Row]
    calls: Sequence[Row]
    arguments: Mapping[str, str]
    messages: Sequence[transcript.StoredMessage]
    pauses: Sequence[Row]
    questions: Sequence[Row]
    missing: tuple[str, ...]


def traces(unit: Unit, run_id: str, scope: str) -> Traces | None:
    """One run as its rows tell it; None when this scope has no such run. A handful of reads by the run's id."""
    run = runs.get_scoped(unit, run_id, scope)
    if run is None:
        return None
    calls, spec = transcript.load_calls(unit, run_id), runs.spec(unit, run_id)
    events = _of_run(
        unit, tables.events, run_id, tables.events.c.run_seq, tables.events.c.run_seq.is_not(None)
    )
    steps, pauses = transcript.load_steps(unit, run_id), _pauses(unit, run_id)
    questions = _of_run(unit, tables.checkpoints, run_id, tables.checkpoints.c.id)
    messages, unread = transcript.readable_messages(unit, run_id)
    missing = [
        *([] if spec is not None else ["input and overrides"]),
        *([] if sessions.get(unit, run["session_id"]) is not None else [f"session {run['session_id']}"]),
        *_gone_pauses(run, pauses, questions),
        *(f"message {seq}" for seq in unread),
        *_emptied(events, "data", _is_object, "event ", "run_seq"),
        *_emptied(steps, "usage", _is_usage, "step ", "step_index"),
        *_emptied(questions, "decision", _is_object, "", "id"),
        *_emptied(questions, "metadata", _is_object, "", "id"),
        *(what for pause in pauses for call in pause["pending"] for what in suspensions.unreadable(call)),
    ]
    return Traces(
        now=now(unit),
        run=run,
        spec=spec or {},
        events=events,
        steps=steps,
        calls=calls,
        arguments=transcript.arguments_of(unit, run_id, calls),
        messages=messages,
        pauses=pauses,
        questions=questions,
        missing=tuple(missing),
    )


def _gone_pauses(run: Row, pauses: Sequence[Row], questions: Sequence[Row]) -> list[str]:
    """Pauses that the run or a question of it names and that are not there, and a pause that nobody is asked about."""
    there, asked = {row["id"] for row in pauses}, {row["suspension_id"] for row in questions}
    named = {row["suspension_id"] for row in [run, *questions]} - {None}
    found = [f"suspension {name}" for name in sorted(named - there)]
    reason = next((row["reason"] for row in pauses if row["id"] == run["suspension_id"]), None)
    if run["state"] == "paused" and run["suspension_id"] not in asked and reason not in _ASKS_NOBODY:
        found.append("the question of its pause")
    return found


def _is_object(value: Any) -> bool:
    return isinstance(value, dict | None)


def _is_usage(value: Any) -> bool:
    try:
        return bool(Usage.model_validate(value))
    except ValueError:
        return False


def _emptied(rows: list[Row], column: str, good: Callable[[Any], bool], name: str, by: str) -> list[str]:
    """Put nothing where somebody put what does not belong there, and say where that was."""
    broken = [(index, row) for index, row in enumerate(rows) if not good(row[column])]
    for index, row in broken:
        rows[index] = {**row, column: None}
    return [f"{column} of {name}{row[by]}" for _, row in broken]


def _of_run(unit: Unit, table: Any, run_id: str, order: Any, *conditions: ColumnElement[bool]) -> list[Row]:
    statement = select(table).where(table.c.run_id == run_id, *conditions).order_by(order)
    return [dict(row) for row in unit.execute(statement).mappings()]


def _pauses(unit: Unit, run_id: str) -> list[Row]:
    found = _of_run(unit, tables.suspensions, run_id, tables.suspensions.c.created_at)
    return [{**row, "pending": suspensions.pending(unit, row["id"])} for row in found]


def now(unit: Unit) -> datetime:
    """The database's time."""
    at: datetime = unit.scalar(select(clock.wall()))
    return at


def turn_holder(unit: Unit, session_id: str, run_id: str) -> Row | None:
    """Another run of a session that has the turn, as far as the rows tell."""
    has_it = or_(
        _RUN.c.state == "running",
        and_(_RUN.c.state.in_(_WAITING), _RUN.c.wait_reason.is_distinct_from("turn")),
        and_(_RUN.c.state == "cancelled", _RUN.c.fenced_until > clock.now()),
    )
    statement = (
        select(_RUN)
        .where(_RUN.c.session_id == session_id, _RUN.c.id != run_id, has_it)
        .order_by(_RUN.c.state.desc(), _RUN.c.queue_class, _RUN.c.session_seq)
        .limit(1)
    )
    found = unit.execute(statement).mappings().first()
    return dict(found) if found is not None else None


@dataclass(frozen=True, slots=True)
class Room:
    """The live workers of a pool that run a version, and their free slots."""

    workers: int
    free: int


def room_for(unit: Unit, pool: str, digest: str) -> Room:
    """Who could take a run of this version in this pool."""
    free = func.coalesce(func.sum(func.greatest(_WORKER.c.slots - _WORKER.c.slots_used, 0)), 0)
    row = unit.one(
        select(func.count().label("workers"), free.label("free")).where(
            live(), _WORKER.c.slots > 0, _WORKER.c.pool == pool, literal(digest) == func.any(_WORKER.c.agents)
        )
    )
    assert row is not None
    return Room(int(row.workers), int(row.free))


def versions_brought(unit: Unit, pool: str, name: str) -> list[AgentDefinition]:
    """The versions of an agent that live workers of a pool have in their own code."""
    brought = (
        select(func.unnest(_WORKER.c.own_agents).label("digest"))
        .where(live(), _WORKER.c.slots > 0, _WORKER.c.pool == pool)
        .subquery()
    )
    statement = select(_VERSION.c.digest, _VERSION.c.definition).where(
        _VERSION.c.name == name, _VERSION.c.digest.in_(select(brought.c.digest))
    )
    return [definition for _, definition in agents.readable(unit.all(statement))]


# --- The fleet in numbers ---------------------------------------------------------------------------------------------


def server(unit: Unit) -> Row:
    """The server's version, how many connections it allows and how many there are."""
    return {
        "version": str(unit.scalar(text("show server_version"))),
        "version_num": int(unit.scalar(text("show server_version_num"))),
        "max_connections": int(unit.scalar(text("show max_connections"))),
        "connections": int(
            unit.scalar(text("select count(*) from pg_stat_activity where backend_type = 'client backend'"))
        ),
    }


def counts_across_scopes(unit: Unit) -> dict[str, int]:
    """How many live runs there are of each state, and of each reason to wait (``wait:turn`` and so on)."""
    # By the conditions of runs_turn and runs_paused, so that a long history costs nothing.
    live_ones = (_RUN.c.state.in_([*_WAITING, "running"]), _RUN.c.state == "paused")
    statement = union_all(
        *(
            select(_RUN.c.state, _RUN.c.wait_reason, func.count().label("number"))
            .where(which)
            .group_by(_RUN.c.state, _RUN.c.wait_reason)
            for which in live_ones
        )
    )
    found: dict[str, int] = {}
    for row in unit.all(statement):
        found[row.state] = found.get(row.state, 0) + int(row.number)
        if row.wait_reason is not None:
            found[f"wait:{row.wait_reason}"] = found.get(f"wait:{row.wait_reason}", 0) + int(row.number)
    return found


def oldest_ready_s_across_scopes(unit: Unit) -> float | None:
    """For how long the run has waited that could be claimed for the longest; None when there is none."""
    since = func.min(func.greatest(_RUN.c.state_since, _RUN.c.not_before))
    found = unit.scalar(select(func.extract("epoch", clock.now() - since)).where(claimable()))
    return None if found is None else float(found)


def unserved_across_scopes(unit: Unit) -> list[Row]:
    """Waiting runs by pool and version that no live worker serves: ``pool``, ``agent``, ``digest``, ``number``."""
    served = (
        select(_WORKER.c.pool, func.unnest(_WORKER.c.agents).label("digest"))
        .where(live(), _WORKER.c.slots > 0)
        .distinct()
        .subquery()
    )
    statement = (
        select(_RUN.c.pool, _RUN.c.agent, _RUN.c.agent_digest.label("digest"), func.count().label("number"))
        .select_from(
            _RUN.outerjoin(served, and_(served.c.pool == _RUN.c.pool, served.c.digest == _RUN.c.agent_digest))
        )
        .where(_RUN.c.state.in_(_WAITING), served.c.digest.is_(None))
        .group_by(_RUN.c.pool, _RUN.c.agent, _RUN.c.agent_digest)
        .order_by(_RUN.c.pool, _RUN.c.agent)
    )
    return [dict(row) for row in unit.execute(statement).mappings()]


def agents_without_worker(unit: Unit) -> list[str]:
    """Agents whose current version no live worker of their pool runs."""
    statement = select(tables.agents).order_by(tables.agents.c.name)
    return [
        row["name"]
        for row in unit.execute(statement).mappings().all()
        if room_for(unit, row["pool"], row["current_digest"]).workers == 0
    ]


def overdue_across_scopes(unit: Unit, by_s: float) -> Row:
    """What a sweep should have seen by now: leases and pauses that ended longer ago than this."""
    since = clock.now() - literal(timedelta(seconds=by_s), Interval)
    leases = select(func.count()).where(_RUN.c.state == "running", _RUN.c.lease_expires_at < since)
    pause = tables.suspensions
    pauses = (
        select(func.count())
        .select_from(pause.join(tables.sessions, tables.sessions.c.id == pause.c.session_id))
        .where(pause.c.ended_at.is_(None), pause.c.expires_at < since, tables.sessions.c.gated_at.is_(None))
    )
    return {"leases": int(unit.scalar(leases) or 0), "pauses": int(unit.scalar(pauses) or 0)}


def uncertain_across_scopes(unit: Unit, limit: int = 5) -> Row:
    """Open questions about uncertain effects (their number and the oldest), and calls left open by ended runs."""
    question, call = tables.checkpoints, tables.tool_calls
    asked = (question.c.state == "pending", question.c.kind == "uncertain_effect")
    ended = [str(state) for state in TERMINAL_RUN_STATES]
    left = (
        select(func.count())
        .select_from(call.join(_RUN, _RUN.c.id == call.c.run_id))
        .where(call.c.state == "started", call.c["class"] != "retry_safe", _RUN.c.state.in_(ended))
    )
    first = select(question.c.id).where(*asked).order_by(question.c.id).limit(limit)
    return {
        "asked": int(unit.scalar(select(func.count()).select_from(question).where(*asked)) or 0),
        "first": [row.id for row in unit.all(first)],
        "left_open": int(unit.scalar(left) or 0),
    }


def definition(unit: Unit, digest: str) -> AgentDefinition | None:
    """One frozen version of an agent; None where it is gone or cannot be read."""
    try:
        return agents.definition(unit, digest)
    except ValueError:
        return None

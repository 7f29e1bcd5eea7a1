"""Store new runs, ready for any worker: validated as a whole, idempotent by id or key, one transaction per page.

Source: runs.md 3.1, T01; decisions R1, C1; rulings 23, 35, 39, 53, 55.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from cortex_workers import telemetry
from cortex_workers.engine.runtime import Runtime
from cortex_workers.engine.validate import (
    checked_input,
    checked_label,
    checked_metadata,
    checked_overrides,
    checked_scope,
    checked_session,
)
from cortex_workers.errors import (
    AgentNotFound,
    InvalidArgument,
    InvalidId,
    RunIdReused,
    RunIdTaken,
    SessionClosed,
    SessionNotFound,
)
from cortex_workers.schemas.agent import AgentDefinition
from cortex_workers.schemas.base import digest
from cortex_workers.schemas.ids import RUN, SESSION, id_from_digest, is_id, new_id
from cortex_workers.schemas.run import Enqueued, EnqueueRun
from cortex_workers.schemas.scope import Scope
from cortex_workers.store import agents, claims, clock, runs, sessions, turns
from cortex_workers.store.agents import CurrentAgent
from cortex_workers.store.transitions import Move, Row
from cortex_workers.store.unit import Unit

PAGE = 1000


@dataclass(frozen=True, slots=True)
class _Item:
    """One request, checked: its id, the digest of its content, and where it goes."""

    request: EnqueueRun
    scope: Scope
    run_id: str
    digest: str
    origin: Mapping[str, Any] = field(default_factory=dict)


def enqueue(rt: Runtime, requests: Sequence[EnqueueRun], principal: bytes | None = None) -> list[Enqueued]:
    """Store runs and announce them; the same request again returns the first run (``fresh`` false).

    Any bad input or conflict is refused before the first write. Up to 1,000 rows a transaction.
    Raises: InvalidInput and its kinds, AgentNotFound, RunIdReused, RunIdTaken, SessionNotFound, SessionClosed.
    """
    items = [_check(rt, request) for request in requests]
    _refuse_twins(items)
    with rt.database.read() as unit:
        current = _agents(unit, {item.request.agent for item in items})
        before: dict[str, Row] = {}
        for page in _pages(items):
            before.update(runs.requests(unit, [item.run_id for item in page]))
        for item in items:
            _narrowing_known(item, current[item.request.agent].definition)
        known = {run_id: _first(item, before[run_id]) for item in items if (run_id := item.run_id) in before}
        fresh = list({item.run_id: item for item in items if item.run_id not in known}.values())
        if len(fresh) > PAGE:
            _refuse_closed_sessions(unit, fresh)
    for page in _pages(fresh):
        known.update(_store(rt, page, current, principal))
    return [known[item.run_id] for item in items]


def _pages(items: Sequence[_Item]) -> list[Sequence[_Item]]:
    return [items[start : start + PAGE] for start in range(0, len(items), PAGE)]


def enqueue_and_claim(
    rt: Runtime, request: EnqueueRun, principal: bytes | None
) -> tuple[Enqueued, list[Row]]:
    """Store a run on this process's own version of the agent and claim it in the same transaction, untold.

    No row comes back claimed when the run was there before, or its session's turn is somebody else's.
    Raises: as ``enqueue``.
    """
    item = _check(rt, request)
    definition = rt.require_host().definitions().get(request.agent)
    if definition is None:
        raise AgentNotFound(f"this host has no agent named {request.agent[:100]!r}")
    agent = CurrentAgent(definition.name, rt.versions.add(definition), definition.pool, definition)
    _narrowing_known(item, definition)

    def work(unit: Unit) -> tuple[Enqueued, list[Row]]:
        before = runs.requests(unit, [item.run_id])
        if item.run_id in before:
            return _first(item, before[item.run_id]), []
        made = store_page(unit, [item], {request.agent: agent}, principal)
        if item.run_id not in made:
            raise _Raced()
        claimed = claims.claim_named(unit, rt.claimer, item.run_id)
        unit.notifications.clear()
        return made[item.run_id], claimed

    try:
        return rt.database.run(work)
    except _Raced:
        return rt.database.run(work)


def _check(rt: Runtime, request: EnqueueRun) -> _Item:
    scope = checked_scope(request.scope)
    if request.agent is None:
        raise InvalidArgument("name the agent")
    checked_label("the agent's name", request.agent)
    checked_label("the workload", request.workload)
    checked_overrides(request.overrides)
    checked_input(request.input, rt.settings.input_bytes)
    checked_metadata(request.metadata)
    checked_session(request.session)
    content = request.model_dump(mode="json", exclude={"run_id", "key", "start_by_s", "workload"})
    return _Item(request, scope, _run_id(request, scope), digest(content))


def _run_id(request: EnqueueRun, scope: Scope) -> str:
    if request.run_id is not None and request.key is not None:
        raise InvalidArgument("give run_id or key, not both")
    if request.run_id is not None:
        if not is_id(RUN, request.run_id):
            raise InvalidId(f"a run id looks like {RUN}_01h… ({str(request.run_id)[:60]!r} does not)")
        return request.run_id
    if request.key is not None:
        checked_label("the key", request.key)
        return id_from_digest(RUN, digest([scope.text, request.agent, request.key]))
    return new_id(RUN)


def _refuse_twins(items: Sequence[_Item]) -> None:
    seen: dict[str, str] = {}
    for item in items:
        if seen.setdefault(item.run_id, item.digest) != item.digest:
            raise RunIdReused(f"the id {item.run_id} stands twice in this request with different content")


def _agents(unit: Unit, names: set[str]) -> dict[str, CurrentAgent]:
    found: dict[str, CurrentAgent] = {}
    for name in sorted(names):
        agent = agents.current(unit, name)
        if agent is None:
            known = ", ".join(agents.names(unit)[:10]) or "none yet"
            raise AgentNotFound(
                f"no worker has registered an agent named {name[:100]!r}; registered: {known}"
            )
        found[name] = agent
    return found


def _narrowing_known(item: _Item, definition: AgentDefinition) -> None:
    tools = item.request.overrides.tools if item.request.overrides is not None else None
    for name in tools or ():
        if definition.tool(name) is None:
            raise InvalidArgument(f"agent {definition.name!r} has no tool named {name[:64]!r} to narrow to")


def _first(item: _Item, row: Row) -> Enqueued:
    """The first run under this id, when it is the same request."""
    if row["scope"] != item.scope.text:
        raise RunIdTaken(f"the run id {item.run_id} is taken")
    if row["request_digest"] != item.digest:
        raise RunIdReused(
            f"the run id {item.run_id} was used before with different content; "
            "choose another id or key, or send the same content"
        )
    return Enqueued(
        id=item.run_id,
        state=row["state"],
        session_id=row["session_id"],
        revision=row["revision"],
        fresh=False,
    )


def _store(
    rt: Runtime, items: Sequence[_Item], current: dict[str, CurrentAgent], principal: bytes | None
) -> dict[str, Enqueued]:
    def work(unit: Unit) -> dict[str, Enqueued]:
        made = store_page(unit, items, current, principal)
        if len(made) < len(items):
            raise _Raced()
        return made

    try:
        stored = rt.database.run(work)
    except _Raced:
        # Somebody stored the same id in this very moment: look at what is there, then store the rest.
        with rt.database.read() as unit:
            before = runs.requests(unit, [item.run_id for item in items])
        stored = {item.run_id: _first(item, before[item.run_id]) for item in items if item.run_id in before}
        rest = [item for item in items if item.run_id not in stored]
        return {**stored, **(_store(rt, rest, current, principal) if rest else {})}
    for run_id, enqueued in stored.items():
        telemetry.event("run.enqueued", "debug", run_id=run_id, session_id=enqueued.session_id)
    return stored


class _Raced(Exception):
    """An id was taken while this transaction ran; it is rolled back."""


def store_delivered(
    unit: Unit, request: EnqueueRun, agent: CurrentAgent, principal: bytes | None, origin: Mapping[str, Any]
) -> bool:
    """Store the run that a message starts, in the caller's transaction; False when it is there already.

    ``origin`` says where it comes from. A gated session takes it, and it waits (ruling 39).
    Raises: SessionClosed for an aborted session.
    """
    assert request.run_id is not None
    if runs.requests(unit, [request.run_id]):
        return False
    content = request.model_dump(mode="json", exclude={"run_id", "key", "start_by_s", "workload"})
    item = _Item(request, Scope.parse(request.scope), request.run_id, digest(content), origin)
    return request.run_id in store_page(unit, [item], {agent.name: agent}, principal)


def store_page(
    unit: Unit, items: Sequence[_Item], current: dict[str, CurrentAgent], principal: bytes | None
) -> dict[str, Enqueued]:
    """One page in one unit: sessions, ranks, runs, specs, events. Lock order: session, tenants, run."""
    places = _sessions(unit, items, current)
    ranks = _ranks(unit, items)
    shared = {place.session_id: place.serial for place in places.values() if place.shared}
    for session_id in sorted(shared):
        sessions.share(unit, session_id, shared[session_id])
    rows, specs = [], []
    # Ascending ids, so that two who store the same ones wait for one another and not each for the other.
    for item in sorted(items, key=lambda item: item.run_id):
        agent = current[item.request.agent]
        rows.append(_row(item, agent, places[item.run_id], ranks[item.run_id]))
        specs.append(_spec(item, principal))
    made = runs.insert_runs(unit, rows, specs, Move())
    for session_id in sorted(shared):
        turns.recompute(unit, session_id)
    return {
        row["id"]: Enqueued(
            id=row["id"],
            state=row["state"],
            session_id=row["session_id"],
            revision=row["revision"],
            fresh=True,
        )
        for row in made
    }


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a run stands in its session."""

    session_id: str
    seq: int
    shared: bool
    serial: bool


def _sessions(unit: Unit, items: Sequence[_Item], current: dict[str, CurrentAgent]) -> dict[str, _Place]:
    own: list[dict[str, Any]] = []
    joined: dict[tuple[str, str, str], list[_Item]] = {}
    places: dict[str, _Place] = {}
    for item in items:
        if item.request.session is None:
            session_id = new_id(SESSION)
            own.append({"id": session_id, "scope": item.scope.text, "agent": item.request.agent})
            places[item.run_id] = _Place(session_id, 1, shared=False, serial=False)
        else:
            joined.setdefault((item.scope.text, item.request.agent, item.request.session), []).append(item)
    sessions.create_own(unit, own)
    # Keys in one order, so that two who create the same sessions wait for one another and not each for the other.
    members: dict[str, list[_Item]] = {}
    for key in sorted(joined):
        members.setdefault(_session_id(unit, joined[key][0]), []).extend(joined[key])
    for session_id in sorted(members):
        mine = members[session_id]
        places.update(_join(unit, session_id, mine, current[mine[0].request.agent].definition))
    return places


def _session_id(unit: Unit, item: _Item) -> str:
    wanted = item.request.session
    assert wanted is not None
    if not wanted.startswith(f"{SESSION}_"):
        return sessions.find_or_create_key(unit, item.scope.text, item.request.agent, wanted)
    row = sessions.get(unit, wanted)
    if row is None or row["scope"] != item.scope.text or row["agent"] != item.request.agent:
        raise SessionNotFound(f"agent {item.request.agent!r} has no session {wanted} in scope {item.scope}")
    return wanted


def _refuse_closed_sessions(unit: Unit, items: Sequence[_Item]) -> None:
    """Refuse what a later page would refuse, before the first is written; each page looks again under the lock."""
    joined = {(item.scope.text, item.request.agent, item.request.session): item for item in items}
    for item in joined.values():
        wanted = item.request.session
        if wanted is None:
            continue
        if wanted.startswith(f"{SESSION}_"):
            row = sessions.get(unit, _session_id(unit, item))
        else:
            row = sessions.find_key(unit, item.scope.text, item.request.agent, wanted)
        if row is not None:
            _refuse_closed(row)


def _refuse_closed(row: Row, gated: bool = True) -> None:
    if row["aborted_at"] is not None:
        raise SessionClosed(f"the session {row['id']} was aborted")
    if gated and row["gated_at"] is not None:
        raise SessionClosed(f"the session {row['id']} is paused by an operator")


def _join(
    unit: Unit, session_id: str, items: Sequence[_Item], definition: AgentDefinition
) -> dict[str, _Place]:
    """Join a session under its lock; from its second run on, or with a key, it is shared (ruling 35)."""
    row = sessions.lock(unit, session_id)
    assert row is not None
    _refuse_closed(row, gated=not all(item.origin for item in items))
    serial = definition.turns == "serial"
    last = sessions.take_turn_seqs(unit, session_id, len(items))
    first = last - len(items) + 1
    return {
        item.run_id: _Place(session_id, first + offset, shared=True, serial=serial)
        for offset, item in enumerate(items)
    }


def _ranks(unit: Unit, items: Sequence[_Item]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for item in items:
        counts[item.scope.first_level] = counts.get(item.scope.first_level, 0) + 1
    last = runs.give_ranks(unit, counts)
    following = {key: last[key] - counts[key] for key in counts}
    ranks = {}
    for item in items:
        following[item.scope.first_level] += 1
        ranks[item.run_id] = following[item.scope.first_level]
    return ranks


def _row(item: _Item, agent: CurrentAgent, place: _Place, rank: int) -> dict[str, Any]:
    request = item.request
    return {
        "id": item.run_id,
        "scope": item.scope.text,
        "agent": request.agent,
        "agent_digest": agent.digest,
        "workload": request.workload,
        "session_id": place.session_id,
        "session_seq": place.seq,
        "shared": place.shared,
        "serial": place.serial,
        "pool": agent.pool,
        "rank": rank,
        "notified_at": clock.wall(),
        # A run of a shared session waits until its turn is computed, in this same transaction.
        "wait_reason": "turn" if place.shared else None,
        "start_by": clock.wall() + timedelta(seconds=request.start_by_s) if request.start_by_s else None,
        **item.origin,
    }


def _spec(item: _Item, principal: bytes | None) -> dict[str, Any]:
    request = item.request
    overrides = request.overrides.model_dump(mode="json", exclude_none=True) if request.overrides else None
    return {
        "run_id": item.run_id,
        "input": request.input,
        "overrides": overrides,
        "principal": principal,
        "request_digest": item.digest,
        "metadata": request.metadata,
        "config": overrides or {},
    }

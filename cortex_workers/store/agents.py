"""Agents and their immutable versions, as workers publish them.

Source: ruling 53.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Interval, func, literal, select, update
from sqlalchemy.dialects.postgresql import distinct_on, insert

from cortex_workers import telemetry
from cortex_workers.errors import AgentNotFound
from cortex_workers.schemas.agent import AgentDefinition
from cortex_workers.store import clock, tables
from cortex_workers.store.unit import Unit

agents, versions, workers = tables.agents, tables.agent_versions, tables.workers


@dataclass(frozen=True, slots=True)
class CurrentAgent:
    """The version of an agent that new runs get."""

    name: str
    digest: str
    pool: str
    definition: AgentDefinition


def add_versions(unit: Unit, definitions: Iterable[AgentDefinition]) -> None:
    """Store versions that are not there yet; an existing one is never touched."""
    rows = [
        {"digest": item.digest(), "name": item.name, "definition": item.model_dump(mode="json")}
        for item in sorted(definitions, key=lambda item: item.name)
    ]
    if rows:
        unit.execute(insert(versions).values(rows).on_conflict_do_nothing(index_elements=[versions.c.digest]))


def publish(unit: Unit, definitions: Iterable[AgentDefinition]) -> None:
    """Make a worker's own versions known, and current where they are the newest that live workers register."""
    items = sorted(definitions, key=lambda item: item.name)
    add_versions(unit, items)
    for item in items:
        unit.execute(
            insert(agents)
            .values(name=item.name, current_digest=item.digest(), pool=item.pool)
            .on_conflict_do_nothing(index_elements=[agents.c.name])
        )
    recompute_current(unit, [item.name for item in items], {item.digest(): item.pool for item in items})


def recompute_current(
    unit: Unit, names: Iterable[str] | None = None, pools: Mapping[str, str] | None = None
) -> None:
    """Set each agent's current version: the newest first-published one among those live workers register."""
    alive = workers.c.heartbeat_at > clock.now() - 3 * workers.c.heartbeat_every_s * literal(
        timedelta(seconds=1), Interval
    )
    newest = (
        select(versions.c.name, versions.c.digest, versions.c.definition)
        .where(
            select(workers.c.id)
            .where(workers.c.ended_at.is_(None), alive, versions.c.digest == func.any(workers.c.own_agents))
            .exists()
        )
        .order_by(versions.c.name, versions.c.published_at.desc(), versions.c.digest)
        .ext(distinct_on(versions.c.name))
    )
    if names is not None:
        newest = newest.where(versions.c.name.in_(list(names)))
    for row in unit.all(newest):
        defined = row.definition if isinstance(row.definition, dict) else {}
        pool = (pools or {}).get(row.digest) or defined.get("pool") or "main"
        unit.execute(
            update(agents)
            .where(
                agents.c.name == row.name, (agents.c.current_digest != row.digest) | (agents.c.pool != pool)
            )
            .values(current_digest=row.digest, pool=pool)
        )


def current(unit: Unit, name: str) -> CurrentAgent | None:
    """The current version of a name, or None when no worker ever registered it.

    Raises: AgentNotFound when somebody broke the row of that version.
    """
    row = unit.one(
        select(agents.c.name, agents.c.current_digest, agents.c.pool, versions.c.definition)
        .join(versions, versions.c.digest == agents.c.current_digest)
        .where(agents.c.name == name)
    )
    if row is None:
        return None
    try:
        found = AgentDefinition.model_validate(row.definition)
    except ValueError:
        raise AgentNotFound(
            f"the current version of agent {name!r}, {row.current_digest}, cannot be read"
        ) from None
    return CurrentAgent(row.name, row.current_digest, row.pool, found)


def names(unit: Unit) -> list[str]:
    """Every agent name a producer may use."""
    return [row.name for row in unit.all(select(agents.c.name).order_by(agents.c.name))]


def definition(unit: Unit, digest: str) -> AgentDefinition | None:
    """The frozen definition of one version."""
    found = unit.scalar(select(versions.c.definition).where(versions.c.digest == digest))
    return AgentDefinition.model_validate(found) if found is not None else None


def all_versions(unit: Unit) -> list[tuple[str, AgentDefinition]]:
    """Every version, for a worker that works out what it serves."""
    return readable(
        unit.all(select(versions.c.digest, versions.c.definition).order_by(versions.c.published_at))
    )


def unknown_versions(unit: Unit, known: Iterable[str]) -> list[tuple[str, AgentDefinition]]:
    """Versions that a worker has not looked at yet."""
    return readable(
        unit.all(
            select(versions.c.digest, versions.c.definition).where(
                versions.c.digest.not_in(list(known) or [""])
            )
        )
    )


def readable(rows: Iterable[Any]) -> list[tuple[str, AgentDefinition]]:
    """The versions among rows of ``digest`` and ``definition`` that can be read; one broken row keeps nobody else."""
    found = []
    for row in rows:
        try:
            found.append((row.digest, AgentDefinition.model_validate(row.definition)))
        except ValueError:
            telemetry.event("agent.unreadable", "warning", digest=row.digest)
    return found

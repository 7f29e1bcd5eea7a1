"""What happened, as it was noted with each transition: read only, and free of content.

Source: ruling 58.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from cortex_workers.store import tables
from cortex_workers.store.scopes import first_within
from cortex_workers.store.unit import Unit

events = tables.events


def of_scope(unit: Unit, scope: str, *, after: str | None = None, limit: int = 1000) -> list[dict[str, Any]]:
    """The oldest events of a scope and those below it, after an id.

    Ids are given before the commit: an event may appear behind one that was read already, so who follows along
    reads a stretch twice. Index: events_scope.
    """
    statement = select(events)
    if after is not None:
        statement = statement.where(events.c.id > after)
    return first_within(unit, statement, events, scope, lambda c: (c.id,), limit)

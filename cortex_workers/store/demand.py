"""How many hints are useful: what could be claimed, bounded by the slots that could take it.

Source: ruling 16.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ScalarSelect, func, literal, select

from cortex_workers.store import tables
from cortex_workers.store.claims import claimable
from cortex_workers.store.unit import Unit
from cortex_workers.store.workers import live

runs, workers = tables.runs, tables.workers

QUEUE_OF = {"start": "continue", "begun": "resume"}


def hint_target(unit: Unit, pool: str) -> dict[str, int]:
    """For the queues ``continue`` and ``resume`` of a pool, how many hints should wait in it.

    That is the rows that could be claimed, but no more than the free slots of live workers; and never less than one
    hint per live worker (or one, while there is none yet), or the rows if they are fewer.
    Index: runs_claim; counting stops where more rows would change nothing.
    """
    useful = _useful(pool)
    columns = [_claimable_up_to(pool, kind, useful).label(queue) for kind, queue in QUEUE_OF.items()]
    row = unit.one(select(*columns))
    return {queue: int(getattr(row, queue)) for queue in QUEUE_OF.values()}


def _useful(pool: str) -> ScalarSelect[Any]:
    """The free slots of the pool's live workers, or the number of these, or one: whichever is most."""
    free = func.coalesce(func.sum(func.greatest(workers.c.slots - workers.c.slots_used, 0)), 0)
    stays = workers.c.draining_at.is_(None) & workers.c.drain_requested_at.is_(None)
    return (
        select(func.greatest(free, func.count(), 1))
        .where(live(), stays, workers.c.pool == pool, workers.c.slots > 0)
        .scalar_subquery()
    )


def _claimable_up_to(pool: str, kind: str, most: ScalarSelect[Any]) -> ScalarSelect[Any]:
    found = (
        select(literal(1).label("one"))
        .where(claimable(), runs.c.pool == pool, runs.c.queue_class == kind)
        .limit(most)
        .subquery()
    )
    return select(func.count()).select_from(found).scalar_subquery()

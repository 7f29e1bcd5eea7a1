"""Hints that may be lost are sent again: quickly where slots wait for them, slowly for everybody who listens.

Healing acts on the difference between the hints that would be useful and those that wait, so that a backlog is never
multiplied. Where nobody can tell how many wait (and on RabbitMQ, whose count leaves out what a worker holds), it goes
by a counter on the row.
Source: rulings 16, 17, 22; runs.md 9.2.
"""

from __future__ import annotations

from collections.abc import Sequence

from cortex_workers.engine.runtime import Runtime
from cortex_workers.schemas.notifications import Notification
from cortex_workers.store import hints
from cortex_workers.store.demand import QUEUE_OF, hint_target
from cortex_workers.store.unit import Unit
from cortex_workers.sweep.rows import PassRun


def sweep_hints(run: PassRun) -> None:
    """Heal each queue, then announce again what was announced too long ago."""
    with run.rt.database.read() as unit:
        pools = hints.pools_across_scopes(unit)
    for pool in pools:
        if run.over:
            return
        _heal(run, pool)
    if run.rt.settings.renotify_s > 0:
        for pool in pools:
            for queue_class in sorted(QUEUE_OF):
                _renotify(run, pool, queue_class)


def _heal(run: PassRun, pool: str) -> None:
    nudge = run.rt.nudge
    if nudge is None:
        return
    with run.rt.database.read() as unit:
        target = hint_target(unit, pool)
    for queue_class, kind in sorted(QUEUE_OF.items()):
        if target[kind] > 0:
            healed = _missing(run.rt, pool, queue_class, kind, target[kind])
            run.count(len(healed))
            for notification in healed:
                nudge(notification)


def _missing(rt: Runtime, pool: str, queue_class: str, kind: str, wanted: int) -> Sequence[Notification]:
    """What to hint at again in one queue, the first in line first."""
    settings = rt.settings
    there = rt.depth.depth(settings.queue_for(kind, pool)) if rt.depth is not None else None
    room = wanted - (there or 0)
    if room <= 0:
        return ()
    if there is None or _is_amqp(rt):
        return rt.database.run(
            lambda unit: hints.count_unheard_across_scopes(
                unit, pool, queue_class, settings.heal_unknown_s, room
            )
        )
    with rt.database.read() as unit:
        return hints.unheard_across_scopes(unit, pool, queue_class, settings.heal_known_s, room)


def _is_amqp(rt: Runtime) -> bool:
    url = rt.settings.broker_url
    return url is not None and url.get_secret_value().startswith("amqp")


def _renotify(run: PassRun, pool: str, queue_class: str) -> None:
    older_s = run.rt.settings.renotify_s
    after: hints.Key | None = None

    def work(unit: Unit) -> list[hints.Key]:
        return hints.renotify(unit, pool, queue_class, older_s, after, run.page)

    while not run.over:
        told = run.rt.database.run(work)
        run.count(len(told))
        if len(told) < run.page:
            return
        after = told[-1]

"""Messages between agents that somebody forgot: due deliveries, questions past their deadline, what was left behind.

A delivery that needs nothing but rows is done here and now, so that neither a lost hint nor a lost broker holds it up;
code that is not ours is called by a worker's task only (ruling 64).
Source: rulings 24, 25, 65; messaging.md i.4.
"""

from __future__ import annotations

from cortex_workers.a2a import deliver, overdue
from cortex_workers.a2a.start import NOTHING
from cortex_workers.engine.runtime import Runtime
from cortex_workers.schemas.notifications import DeliveryDue
from cortex_workers.store import a2a_due
from cortex_workers.sweep.rows import PassRun

EVERY_S = 300.0
ANNOUNCE_AGAIN_S = 15.0
LEFT_S = 60.0


def sweep_asks(run: PassRun) -> None:
    """Answer questions whose deadline has passed with a word the model can read."""
    run.each_due(a2a_due.asks_across_scopes, overdue.expire_ask)


def sweep_deliveries(run: PassRun) -> None:
    """Do what deliveries are due for, or announce those for which foreign code has to be called."""
    run.each_due(a2a_due.deliveries_across_scopes, _deliver)


def _deliver(rt: Runtime, delivery_id: str) -> bool:
    done = deliver.deliver(rt, delivery_id, foreign=False)
    if done != "foreign":
        return done != NOTHING
    if rt.nudge is None:
        return False
    with rt.database.read() as unit:
        mine = a2a_due.claim_announcement(unit, delivery_id, ANNOUNCE_AGAIN_S)
    if mine:
        rt.nudge(DeliveryDue(delivery_id=delivery_id, why="again", pool=rt.settings.pool))
    return mine


def sweep_replies(run: PassRun) -> None:
    """Close questions whose run waits no more, and end pauses whose every question is closed."""
    with run.rt.database.read() as unit:
        left = a2a_due.left_behind_across_scopes(unit, LEFT_S, run.page)
        answered = a2a_due.answered_pauses_across_scopes(unit, run.page)
    for key in left:
        run.row(key, lambda key=key: overdue.retire_ask(run.rt, key))  # type: ignore[misc]
    for suspension_id in answered:
        run.row(suspension_id, lambda which=suspension_id: overdue.end_pause(run.rt, which))  # type: ignore[misc]

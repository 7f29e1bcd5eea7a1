"""Whatever a delivery is due for: its run is started, its reply stored, a peer called or asked again.

A hint may come twice, late or for nothing: the row says what is to be done, and each step is one fenced transaction.
Source: messaging.md b.3, e.2 to e.4; rulings 24, 39, 64.
"""

from __future__ import annotations

from cortex_workers import probes, telemetry
from cortex_workers.a2a import carry, settle, start
from cortex_workers.a2a.settle import Ending
from cortex_workers.engine.runtime import Runtime
from cortex_workers.engine.validate import checked_id
from cortex_workers.errors import SessionClosed, Stopping
from cortex_workers.schemas.ids import DELIVERY
from cortex_workers.schemas.performatives import Performative
from cortex_workers.store import a2a_deliveries, a2a_messages, agents
from cortex_workers.store.transitions import Row


def deliver(rt: Runtime, delivery_id: str, *, foreign: bool = True) -> str:
    """Do what one delivery is due for; returns what was done, ``nothing`` when it needs nothing now.

    ``foreign`` false: code that is not ours is left to a worker's task (``foreign`` is returned), as a sweep does.
    Raises: InvalidId, Stopping while this process drains.
    """
    checked_id(DELIVERY, delivery_id)
    if rt.drain.is_set():
        raise Stopping()
    with rt.database.read() as unit:
        row = a2a_deliveries.get(unit, delivery_id)
        message = a2a_messages.get(unit, row["message_id"]) if row is not None else None
    if row is None or message is None or row["partition"] is not None:
        return start.NOTHING
    if row["state"] == "running":
        return "settled" if settle.settle(rt, row, message) else start.NOTHING
    if row["state"] == "queued" and row["kind"] == "directive" and "assignment" not in message["metadata"]:
        return _begin(rt, row, message) if row["due"] else start.NOTHING
    if not (row["due"] if row["state"] in ("queued", "awaiting_remote") else row["lapsed"]):
        return start.NOTHING
    if row["state"] not in ("queued", "awaiting_remote", "delivering"):
        return start.NOTHING
    return carry.carry(rt, row, message) if foreign else "foreign"


def _begin(rt: Runtime, row: Row, message: Row) -> str:
    """Start the receiver's run, or attach to it; a receiver that is gone answers with a failure."""
    with rt.database.read() as unit:
        agent = agents.current(unit, row["receiver_agent"])
    if agent is None:
        return _refuse(
            rt, row, message, "receiver_gone", f"there is no agent named {row['receiver_agent']} any more"
        )
    try:
        begun = rt.database.run(lambda unit: start.begin(unit, row, message, agent))
    except SessionClosed as error:
        return _refuse(
            rt, row, message, error.code, f"{row['receiver_agent']} could not answer: {error.message}"
        )
    except start.Taken:
        return start.NOTHING
    probes.reach("delivery.after_commit")
    telemetry.event("delivery.begun", delivery_id=row["id"], run_id=begun)
    return "begun"


def _refuse(rt: Runtime, row: Row, message: Row, code: str, text: str) -> str:
    ending = Ending("refuse", Performative.FAILURE, text, code=code)
    return "refused" if settle.end(rt, row, message, ending) else start.NOTHING

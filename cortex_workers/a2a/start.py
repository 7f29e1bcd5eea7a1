"""The run that a message starts: its id derived from the delivery, under the message's scope and rights.

Source: messaging.md e.1 to e.4; rulings 39, 64.
"""

from __future__ import annotations

from typing import Any

from cortex_workers import probes
from cortex_workers.a2a import words
from cortex_workers.engine.enqueue import store_delivered
from cortex_workers.schemas.ids import RUN, same_suffix
from cortex_workers.schemas.lifecycle import TERMINAL_RUN_STATES
from cortex_workers.schemas.run import EnqueueRun
from cortex_workers.store import a2a_deliveries, runs
from cortex_workers.store.agents import CurrentAgent
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit

NOTHING = "nothing"


class Taken(Exception):
    """Somebody else moved the delivery; the run that was just written is rolled back."""


def begin(unit: Unit, row: Row, message: Row, agent: CurrentAgent) -> str:
    """Store the run of a delivery and move the delivery, in one transaction (session, tenants, run, delivery).

    Raises: SessionClosed; Taken when somebody was quicker.
    """
    run_id = store_run(unit, row, message, agent)
    moved = a2a_deliveries.begin(unit, row["id"], run_id, over=_is_over(unit, run_id))
    if moved is None:
        raise Taken()
    probes.reach("delivery.before_commit")
    return run_id


def store_run(unit: Unit, row: Row, message: Row, agent: CurrentAgent) -> str:
    """The receiver's run, its id derived from the delivery's; one that is there already is attached to."""
    run_id = same_suffix(RUN, row["id"])
    request = EnqueueRun.model_construct(
        agent=agent.name,
        input=words.input_of(message),
        scope=message["scope"],
        run_id=run_id,
        key=None,
        # One session per conversation and receiver: those who talk remember, strangers share nothing.
        session=message["conversation_id"],
        overrides=None,
        metadata=None,
        workload=None,
        start_by_s=None,
    )
    origin: dict[str, Any] = {
        "origin": "delivery",
        "origin_delivery_id": row["id"],
        "chain_depth": int(message["chain_depth"]) + 1 if message["origin_run_id"] is not None else 0,
        "ask_deadline": message["reply_by"],
    }
    principal = bytes(message["principal"]) if message["principal"] is not None else None
    store_delivered(unit, request, agent, principal, origin)
    return run_id


def _is_over(unit: Unit, run_id: str) -> bool:
    run = runs.get(unit, run_id)
    return run is not None and run["state"] in TERMINAL_RUN_STATES

"""What messages have to do with a run that moves, in its own transaction (ruling 69).

A run that a message started has ended: its delivery is due for its reply. A run that asked has left its pause without
an answer: nobody waits any more.
Source: messaging.md d.4, d.5; ruling 63.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cortex_workers.schemas.lifecycle import Transition
from cortex_workers.schemas.notifications import DeliveryDue
from cortex_workers.store import a2a_asks, a2a_deliveries, checkpoints
from cortex_workers.store.unit import Unit

_WITHOUT_AN_ANSWER = ("expired", "cancelled", "aborted")


def on_transition(unit: Unit, row: Transition, _before: str | None, after: Mapping[str, Any]) -> None:
    """Follow one move of the run machine."""
    if row.ends and after["origin_delivery_id"] is not None:
        delivery_id = a2a_deliveries.run_has_ended(unit, after["id"])
        if delivery_id is not None:
            unit.announce(DeliveryDue(delivery_id=delivery_id, why="settle", pool=after["pool"]))
    if row.ends_pause_as in _WITHOUT_AN_ANSWER:
        _retire(unit, after["id"])


def _retire(unit: Unit, run_id: str) -> None:
    asked = a2a_asks.of_run(unit, run_id)
    if asked:
        checkpoints.hold_of_run(unit, run_id)  # whoever ends the run closes them afterwards
        a2a_deliveries.retire_of_messages(
            unit, [row["message_id"] for row in asked], "whoever asked waits no more"
        )
        a2a_asks.retire(unit, run_id)

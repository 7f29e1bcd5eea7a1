"""What the loop needs of messages between agents; the room above fills it in (`wiring.py`).

Source: rulings 3, 62.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cortex_workers.engine.execution import Execution, Planned
    from cortex_workers.store.unit import Unit


class AskRefused(Exception):
    """Questions that cannot be put after all, found out in the transaction of the pause: why, by call id."""

    def __init__(self, refusals: Mapping[str, str]) -> None:
        self.refusals = dict(refusals)
        super().__init__(", ".join(self.refusals))


class Moved(Exception):
    """What was read before the locks has changed: roll back and look again."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The questions of one pause: their tokens by call id, and how long the pause itself may last."""

    tokens: Mapping[str, str]
    ttl_s: float


class Bus(Protocol):
    """The three tools, as the loop sees them."""

    def look_at_ask(self, ex: Execution, planned: Planned) -> str | None:
        """Why a question cannot be put, for the model to read; None when it can."""
        ...

    def write_asks(self, unit: Unit, ex: Execution, waiting: Sequence[Planned], suspension_id: str) -> Asked:
        """Write messages, deliveries and questions, in the transaction of the pause and before its run is locked.

        Raises: AskRefused, Moved; the transaction is rolled back.
        """
        ...

    def act(self, unit: Unit, ex: Execution, planned: Planned) -> str:
        """Do what a call says, in the transaction that stores its outcome; returns the result that the model reads.

        Raises: Moved; the transaction is rolled back.
        """
        ...

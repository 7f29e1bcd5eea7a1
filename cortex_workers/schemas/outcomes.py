"""What a task returns and Flower shows: ids, codes and counts, never content."""

from __future__ import annotations

from typing import Literal

from cortex_workers.schemas.base import Model


class Continued(Model):
    """A slot worked on ``runs`` runs; ``last_state`` is where the named one was left."""

    outcome: Literal["continued"] = "continued"
    run_id: str | None
    last_state: str
    runs: int = 1


class HandedOff(Model):
    """The run goes on elsewhere."""

    outcome: Literal["handed_off"] = "handed_off"
    run_id: str
    code: str


class Refused(Model):
    """Nothing was done, and that is fine."""

    outcome: Literal["refused"] = "refused"
    run_id: str | None
    code: str


class Swept(Model):
    """One sweep: rows handled per pass, and passes skipped because another sweep has them."""

    outcome: Literal["swept"] = "swept"
    done: dict[str, int]
    skipped: int = 0


class Delivered(Model):
    """What was done for one delivery: begun, settled, answered, await_remote, retry, refused, failed, nothing."""

    outcome: Literal["delivered"] = "delivered"
    delivery_id: str
    did: str


Outcome = Delivered | Continued | HandedOff | Refused | Swept

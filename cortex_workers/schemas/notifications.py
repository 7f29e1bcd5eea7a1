"""What is told after a commit: ids only, under 512 bytes, one tagged union.

Source: house.md 3.5; rulings 12, 60.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from cortex_workers.schemas.base import Model

Why = Literal["start", "answer", "slice", "reclaim"]


class RunReady(Model):
    """A run may be claimed. ``renotified`` marks a repeat by the sweeper."""

    kind: Literal["RunReady"] = "RunReady"
    run_id: str
    revision: int
    why: Why = "start"
    pool: str = "main"
    renotified: bool = False


class RunReclaimable(Model):
    """A run lost its worker (lapse) or was handed off."""

    kind: Literal["RunReclaimable"] = "RunReclaimable"
    run_id: str
    revision: int
    hand_off: bool = False
    pool: str = "main"
    renotified: bool = False


class RunCompleted(Model):
    """A run gave its answer."""

    kind: Literal["RunCompleted"] = "RunCompleted"
    run_id: str
    revision: int


class RunFailed(Model):
    """A run failed; ``code`` is the error's."""

    kind: Literal["RunFailed"] = "RunFailed"
    run_id: str
    revision: int
    code: str = ""


class RunCancelled(Model):
    """A run was cancelled."""

    kind: Literal["RunCancelled"] = "RunCancelled"
    run_id: str
    revision: int


class CheckpointCreated(Model):
    """Somebody is asked; the run is paused already."""

    kind: Literal["CheckpointCreated"] = "CheckpointCreated"
    run_id: str
    revision: int
    checkpoint_id: str


class CheckpointResolved(Model):
    """A checkpoint left the pending list."""

    kind: Literal["CheckpointResolved"] = "CheckpointResolved"
    run_id: str
    revision: int
    checkpoint_id: str
    closed_as: str


class ResumeAdmitted(Model):
    """An answer from outside was retained; the run is ready to go on with exactly it."""

    kind: Literal["ResumeAdmitted"] = "ResumeAdmitted"
    run_id: str
    revision: int
    suspension_id: str
    pool: str = "main"


class DeliveryDue(Model):
    """Something is to be done for a delivery: carry it, or store the reply of the run that it started."""

    kind: Literal["DeliveryDue"] = "DeliveryDue"
    delivery_id: str
    why: Literal["new", "settle", "again"] = "new"
    pool: str = "main"


class MessageSent(Model):
    """A message was accepted; also when it answered a question."""

    kind: Literal["MessageSent"] = "MessageSent"
    message_id: str
    conversation_id: str
    performative: str


class MessageDelivered(Model):
    """A delivery has ended well: it is in an inbox, or its run has ended and the reply is stored."""

    kind: Literal["MessageDelivered"] = "MessageDelivered"
    delivery_id: str
    message_id: str


class MessageRefused(Model):
    """A delivery has failed; ``code`` says why, whoever asked is told."""

    kind: Literal["MessageRefused"] = "MessageRefused"
    delivery_id: str
    message_id: str
    code: str = ""


Notification = Annotated[
    RunReady
    | RunReclaimable
    | RunCompleted
    | RunFailed
    | RunCancelled
    | CheckpointCreated
    | CheckpointResolved
    | ResumeAdmitted
    | DeliveryDue
    | MessageSent
    | MessageDelivered
    | MessageRefused,
    Field(discriminator="kind"),
]

KINDS: tuple[str, ...] = tuple(kind.__name__ for kind in get_args(get_args(Notification)[0]))
"""The name of every notification."""

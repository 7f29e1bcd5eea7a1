"""The whole routing: one table from notification to task and queue. Adding a consumer is adding a row.

Queues go by readiness, not by task: what has begun never waits behind what has not.
Source: rulings 12, 13, 21; house.md 3.5.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from cortex_workers.schemas.notifications import (
    DeliveryDue,
    Notification,
    ResumeAdmitted,
    RunReady,
    RunReclaimable,
)

CONTINUE_RUN: Final = "cortex.continue_run"
RESUME: Final = "cortex.resume"
DELIVER_A2A: Final = "cortex.deliver_a2a"
SWEEP_EXPIRED: Final = "cortex.sweep_expired"

QueueKind = Literal["continue", "resume", "a2a", "sweep"]
QUEUES: Final[tuple[QueueKind, ...]] = ("continue", "resume", "a2a", "sweep")
"""Every worker consumes all four; `-Q` narrows it."""

Kind = Literal["start", "begun"]


@dataclass(frozen=True, slots=True)
class Route:
    """Where a notification goes: the task, the kind of queue, and the kind of run it is about."""

    task: str
    queue: QueueKind
    kind: Kind


_START = Route(CONTINUE_RUN, "continue", "start")
_BEGUN = Route(CONTINUE_RUN, "resume", "begun")
_ADMITTED = Route(RESUME, "resume", "begun")
_DELIVERY = Route(DELIVER_A2A, "a2a", "begun")

ROUTES: Final[dict[tuple[str, str], Route]] = {
    ("RunReady", "start"): _START,
    ("RunReady", "answer"): _BEGUN,
    ("RunReady", "slice"): _BEGUN,
    ("RunReady", "reclaim"): _BEGUN,
    ("RunReclaimable", ""): _BEGUN,
    ("ResumeAdmitted", ""): _ADMITTED,
    ("DeliveryDue", ""): _DELIVERY,
}
"""By kind of notification and, where it has one, its ``why``."""

TOLD_ONLY: Final = frozenset(
    {
        "RunCompleted",
        "RunFailed",
        "RunCancelled",
        "CheckpointCreated",
        "CheckpointResolved",
        "MessageSent",
        "MessageDelivered",
        "MessageRefused",
    }
)
"""Hooks hear of these; no task does anything about them."""

TASK_QUEUES: Final[dict[str, QueueKind]] = {
    CONTINUE_RUN: "resume",
    RESUME: "resume",
    DELIVER_A2A: "a2a",
    SWEEP_EXPIRED: "sweep",
}
"""Where a task goes that names no queue: `celery call`, beat. A continue without a route has begun."""


Fact = RunReady | RunReclaimable | ResumeAdmitted | DeliveryDue


def route(notification: Notification) -> tuple[Route, Fact] | None:
    """Where a notification goes, with the notification; None when no task acts on it."""
    if isinstance(notification, RunReady):
        return ROUTES[notification.kind, notification.why], notification
    if isinstance(notification, RunReclaimable | ResumeAdmitted | DeliveryDue):
        return ROUTES[notification.kind, ""], notification
    return None


def takes_runs(queues: Iterable[str]) -> bool:
    """Whether a worker with these queues gets hints about runs: `prefix.continue` or `prefix.resume`, of any pool."""
    return any(name.split(".")[1:2] in (["continue"], ["resume"]) for name in queues)

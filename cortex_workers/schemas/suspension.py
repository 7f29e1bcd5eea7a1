"""Pauses: why a run waits, for which calls, until when.

Source: seed suspension; runs.md 2.8 to 2.10; ruling 44 (a suspension is ended, never deleted).
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from cortex_workers.schemas.base import Document


class SuspendReason(StrEnum):
    """Who may answer: a decider, whoever runs the tool, or the bus."""

    APPROVAL = "approval"
    EXTERNAL_TOOL = "external_tool"
    AGENT_REPLY = "agent_reply"


class PendingKind(StrEnum):
    """What one pending call waits for; the answering doors see only their own kind."""

    APPROVAL = "approval"
    EXTERNAL = "external"
    ASK = "ask"
    UNCERTAIN_EFFECT = "uncertain_effect"


class PendingCall(Document):
    """One call of a paused turn: the model's own text of its arguments, and what will run if it is approved.

    ``runs_with`` has every parameter, defaults filled in and values as the tool takes them; what would run is compared
    with it again before it does. ``late_result`` is what a worker that had lost the call learned of it afterwards:
    evidence for whoever settles it.
    """

    call_id: str
    tool: str
    arguments: str
    runs_with: dict[str, Any] | None = None
    late_result: str | None = None
    kind: PendingKind
    ordinal: int


class Suspension(Document):
    """One pause of a run; ``expires_at`` absent means no deadline."""

    id: str
    run_id: str
    scope: str
    reason: SuspendReason
    step_index: int
    run_revision: int
    on_expiry: str
    expires_at: datetime | None = None
    created_at: datetime
    ended_at: datetime | None = None
    ended_as: str | None = None
    pending: tuple[PendingCall, ...] = ()

"""Checkpoints: what a person decides, and the decision.

Source: seed checkpoint; runs.md 2.12, 2.13; rulings 6, 45, 46.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import Field

from cortex_workers.schemas.base import Document, RowDocument, same_json
from cortex_workers.schemas.lifecycle import CheckpointState
from cortex_workers.schemas.suspension import PendingCall


class CheckpointKind(StrEnum):
    """What is asked."""

    TOOL_APPROVAL = "tool_approval"
    DEFERRED_MODEL_CALL = "deferred_model_call"
    UNCERTAIN_EFFECT = "uncertain_effect"
    HOST = "host"


class SettleOutcome(StrEnum):
    """What a person says of an uncertain effect."""

    HAPPENED = "happened"
    DID_NOT_HAPPEN = "did_not_happen"
    STOP = "stop"


class CallDecision(Document):
    """The outcome of one pending call within a decision.

    ``amended_arguments`` replace the whole argument object of an approved call; a rejected call ignores them.
    ``reason`` is what the model reads when the call is rejected.
    Source: seed checkpoint, CallDecision.
    """

    approved: bool
    amended_arguments: dict[str, Any] | None = None
    reason: str | None = None


class Decision(Document):
    """The first recorded decision. ``actor`` is who the host process says decided, ``decided_by`` a display name.

    ``calls`` decides each pending call on its own, by call id; ``approved`` is then derived (true when any call is).
    """

    approved: bool
    decided_by: str | None = None
    actor: str | None = None
    reason: str | None = None
    decided_at: datetime | None = None
    amended_arguments: dict[str, Any] | None = None
    calls: dict[str, CallDecision] | None = None
    outcome: SettleOutcome | None = None
    result: Any = None

    def same_content(self, other: Decision) -> bool:
        """Whether two decisions say the same, whoever sent them and when (ruling 46)."""
        fields = {"approved", "reason", "amended_arguments", "calls", "outcome", "result"}
        mine, theirs = (each.model_dump(mode="json", include=fields) for each in (self, other))
        return same_json(mine, theirs)


class Checkpoint(RowDocument):
    """One question to a person. Readers never see the decider's principal: it is not part of this type."""

    id: str
    scope: str
    run_id: str
    agent: str
    suspension_id: str | None = None
    kind: CheckpointKind
    reason: str
    step_index: int
    state: CheckpointState
    closed_as: str | None = None
    decision: Decision | None = None
    decided_at: datetime | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    created_at: datetime
    expires_at: datetime | None = None
    pending: tuple[PendingCall, ...] = ()

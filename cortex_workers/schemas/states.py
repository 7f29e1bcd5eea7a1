"""The words of the lifecycle: states, fences, what a transition carries. The transitions stand in `lifecycle.py`.

Source: runs.md 1.1, 1.2; rulings 20, 30, 36.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RunState(StrEnum):
    """Where a run is. ``created`` and ``incomplete`` are reached only by rows of later rooms."""

    CREATED = "created"
    READY = "ready"
    RUNNING = "running"
    PAUSED = "paused"
    RECLAIMABLE = "reclaimable"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INCOMPLETE = "incomplete"


class CheckpointState(StrEnum):
    """Where a checkpoint is."""

    PENDING = "pending"
    RESOLVED = "resolved"


class ToolCallState(StrEnum):
    """Where a tool call is. Terminal: completed, failed, denied, unknown."""

    PENDING = "pending"
    STARTED = "started"
    COMPLETED = "completed"
    FAILED = "failed"
    DENIED = "denied"
    UNKNOWN = "unknown"


class DeliveryState(StrEnum):
    """Where one message is on its way to one receiver. ``delivering`` only while code of others is called."""

    QUEUED = "queued"
    DELIVERING = "delivering"
    RUNNING = "running"
    AWAITING_REMOTE = "awaiting_remote"
    DELIVERED = "delivered"
    FAILED = "failed"
    RETIRED = "retired"


class AskState(StrEnum):
    """Whether a question still takes answers."""

    OPEN = "open"
    SEALED = "sealed"


TERMINAL_RUN_STATES = frozenset(
    {RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED, RunState.INCOMPLETE}
)
"""An allow-list: a state that is not here is live (runs.md 1.1)."""
CLAIMABLE_RUN_STATES = frozenset({RunState.READY, RunState.RECLAIMABLE})
TERMINAL_TOOL_CALL_STATES = frozenset(
    {ToolCallState.COMPLETED, ToolCallState.FAILED, ToolCallState.DENIED, ToolCallState.UNKNOWN}
)
TERMINAL_DELIVERY_STATES = frozenset({DeliveryState.DELIVERED, DeliveryState.RETIRED})
"""A failed delivery is over as well, until an operator sends it on its way again."""


class Instruction(StrEnum):
    """What a worker does with a run it claims; changed only by the fenced commit that consumed it (ruling 20)."""

    START = "start"
    GO_ON = "go_on"
    ANSWER = "answer"
    REPEAT_MODEL_CALL = "repeat_model_call"


class QueueClass(StrEnum):
    """Begun runs go before starts, everywhere."""

    BEGUN = "begun"
    START = "start"


class WaitReason(StrEnum):
    """Why a ready or reclaimable run may not be claimed now, in the order in which they apply (ruling 36)."""

    HOLD = "hold"
    GATE = "gate"
    TURN = "turn"
    NO_WORKER = "no_worker"
    LATER = "later"


class Fence(StrEnum):
    """What must hold in the statement that moves a row, besides its source state."""

    NEW = "the id is not taken"
    CLAIMABLE = "claimable, and the revision read where one was named"
    REVISION = "the revision read"
    OWNER = "lease owner and revision are mine, and the lease is not over"
    TERM = "lease owner and revision are mine, the lease over or not"
    LAPSED = "the lease is over"
    LIVE_PAUSE = "this very pause, before its deadline"
    THIS_PAUSE = "this very pause, whatever its deadline"
    OVERDUE_PAUSE = "this very pause, at or past its deadline"
    OVERDUE_START = "never begun, at or past start_by"
    PENDING = "the row is in its source state"
    DUE = "its time has come"


class LeaseEffect(StrEnum):
    """What a transition does to the lease. ``FENCE`` drops it and keeps its expiry in ``fenced_until`` (ruling 30)."""

    NONE = "none"
    TAKE = "take"
    DROP = "drop"
    FENCE = "fence"


class Announce(StrEnum):
    """The notification that a committed transition releases."""

    RUN_READY = "RunReady"
    RUN_RECLAIMABLE = "RunReclaimable"
    RUN_COMPLETED = "RunCompleted"
    RUN_FAILED = "RunFailed"
    RUN_CANCELLED = "RunCancelled"
    CHECKPOINT_CREATED = "CheckpointCreated"
    CHECKPOINT_RESOLVED = "CheckpointResolved"
    RESUME_ADMITTED = "ResumeAdmitted"


@dataclass(frozen=True, slots=True)
class Transition:
    """One row: how one machine moves.

    ``good_end`` resets the reclaim count (ruling 29); ``begins`` puts the run among the begun ones; ``ends_pause_as``
    ends the run's live suspension in the same transaction; ``refusal`` is the error code when no row matched.
    """

    name: str
    sources: tuple[str, ...]
    target: str
    fence: Fence
    says: str
    lease: LeaseEffect = LeaseEffect.NONE
    announces: tuple[Announce, ...] = ()
    why: str = ""
    counts_reclaim: bool = False
    good_end: bool = False
    begins: bool = False
    instruction: Instruction | None = None
    ends_pause_as: str | None = None
    refusal: str = "invalid_state"
    source: str = ""

    @property
    def ends(self) -> bool:
        """Whether a run is over after this."""
        return self.target in TERMINAL_RUN_STATES

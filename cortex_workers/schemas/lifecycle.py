"""The lifecycle, declared once: states, fences and every transition of every machine.

Code (`store/transitions.py`), SQL constraints (`migrations`), docs (`schemas/README.md`) and tests read this table;
nobody restates it. A later room adds rows and tuples here and nothing else changes.

Source: runs.md 1.3 (T-numbers in ``source``), tables.md "rows to add", rulings 20, 29, 30.
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


TERMINAL_RUN_STATES = frozenset(
    {RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED, RunState.INCOMPLETE}
)
"""An allow-list: a state that is not here is live (runs.md 1.1)."""
CLAIMABLE_RUN_STATES = frozenset({RunState.READY, RunState.RECLAIMABLE})
TERMINAL_TOOL_CALL_STATES = frozenset(
    {ToolCallState.COMPLETED, ToolCallState.FAILED, ToolCallState.DENIED, ToolCallState.UNKNOWN}
)


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


_READY, _RUNNING, _PAUSED, _RECLAIMABLE = (
    RunState.READY,
    RunState.RUNNING,
    RunState.PAUSED,
    RunState.RECLAIMABLE,
)
_LOST = "lease_lost"

RUN: tuple[Transition, ...] = (
    Transition(
        "enqueue",
        (),
        _READY,
        Fence.NEW,
        "A producer's run is stored, ready for any worker.",
        announces=(Announce.RUN_READY,),
        why="start",
        instruction=Instruction.START,
        refusal="run_id_taken",
        source="R1",
    ),
    Transition(
        "claim",
        (_READY, _RECLAIMABLE),
        _RUNNING,
        Fence.CLAIMABLE,
        "A worker takes the run, with its lease.",
        lease=LeaseEffect.TAKE,
        refusal="run_not_continuable",
        source="T17, T18",
    ),
    Transition(
        "hand_back",
        (_RUNNING,),
        _READY,
        Fence.TERM,
        "Claimed, but it cannot go on now: back to ready, nothing counted.",
        lease=LeaseEffect.DROP,
        announces=(Announce.RUN_READY,),
        refusal=_LOST,
        source="ruling 15, tables.md",
    ),
    Transition(
        "hand_back_reclaimable",
        (_RUNNING,),
        _RECLAIMABLE,
        Fence.TERM,
        "Claimed from reclaimable, but it cannot go on now: back, nothing counted.",
        lease=LeaseEffect.DROP,
        announces=(Announce.RUN_RECLAIMABLE,),
        refusal=_LOST,
        source="ruling 15, tables.md",
    ),
    Transition(
        "pause",
        (_RUNNING,),
        _PAUSED,
        Fence.OWNER,
        "The turn waits for somebody outside the run.",
        lease=LeaseEffect.DROP,
        announces=(Announce.CHECKPOINT_CREATED,),
        good_end=True,
        begins=True,
        refusal=_LOST,
        source="T05",
    ),
    Transition(
        "uncertain",
        (_RUNNING,),
        _PAUSED,
        Fence.OWNER,
        "A started call has no proven outcome: somebody is asked.",
        lease=LeaseEffect.DROP,
        announces=(Announce.CHECKPOINT_CREATED,),
        good_end=True,
        begins=True,
        refusal=_LOST,
        source="R13, ruling 5",
    ),
    Transition(
        "slice_end",
        (_RUNNING,),
        _READY,
        Fence.OWNER,
        "The slice is used up; the run goes on in another task.",
        lease=LeaseEffect.DROP,
        announces=(Announce.RUN_READY,),
        why="slice",
        good_end=True,
        begins=True,
        instruction=Instruction.GO_ON,
        refusal=_LOST,
        source="R7, ruling 20",
    ),
    Transition(
        "hand_off",
        (_RUNNING,),
        _RECLAIMABLE,
        Fence.OWNER,
        "A draining or stopped worker gives the run to another, with all it has done.",
        lease=LeaseEffect.DROP,
        announces=(Announce.RUN_RECLAIMABLE,),
        why="hand_off",
        good_end=True,
        begins=True,
        refusal=_LOST,
        source="T19",
    ),
    Transition(
        "watchdog",
        (_RUNNING,),
        _RECLAIMABLE,
        Fence.TERM,
        "The drain's deadline passed: the watchdog hands off what still runs.",
        lease=LeaseEffect.FENCE,
        announces=(Announce.RUN_RECLAIMABLE,),
        why="hand_off",
        good_end=True,
        begins=True,
        refusal=_LOST,
        source="ruling 31",
    ),
    Transition(
        "lapse",
        (_RUNNING,),
        _RECLAIMABLE,
        Fence.LAPSED,
        "The lease ran out: the worker is dead or cut off.",
        lease=LeaseEffect.FENCE,
        announces=(Announce.RUN_RECLAIMABLE,),
        why="lapse",
        counts_reclaim=True,
        begins=True,
        refusal="invalid_state",
        source="T20",
    ),
    Transition(
        "complete",
        (_RUNNING,),
        RunState.COMPLETED,
        Fence.OWNER,
        "The model gave its answer.",
        lease=LeaseEffect.DROP,
        announces=(Announce.RUN_COMPLETED,),
        refusal=_LOST,
        source="T30",
    ),
    Transition(
        "fail",
        (_RUNNING,),
        RunState.FAILED,
        Fence.OWNER,
        "The run ends with a reason.",
        lease=LeaseEffect.DROP,
        announces=(Announce.RUN_FAILED,),
        refusal=_LOST,
        source="T22-T25, T31",
    ),
    Transition(
        "decide",
        (_PAUSED,),
        _READY,
        Fence.LIVE_PAUSE,
        "A decision made the run ready.",
        announces=(Announce.CHECKPOINT_RESOLVED, Announce.RUN_READY),
        why="answer",
        instruction=Instruction.ANSWER,
        ends_pause_as="answered",
        source="T08, T09",
    ),
    Transition(
        "reject",
        (_PAUSED,),
        RunState.FAILED,
        Fence.LIVE_PAUSE,
        "A rejection ended the run.",
        announces=(Announce.CHECKPOINT_RESOLVED, Announce.RUN_FAILED),
        ends_pause_as="rejected",
        source="T10",
    ),
    Transition(
        "admit",
        (_PAUSED,),
        _READY,
        Fence.LIVE_PAUSE,
        "An answer from outside was retained against this very pause.",
        announces=(Announce.RESUME_ADMITTED,),
        why="answer",
        instruction=Instruction.ANSWER,
        ends_pause_as="answered",
        source="tables.md, ruling 41",
    ),
    Transition(
        "repeat",
        (_PAUSED,),
        _READY,
        Fence.LIVE_PAUSE,
        "A deferred model call was approved: the same call is made again.",
        announces=(Announce.CHECKPOINT_RESOLVED, Announce.RUN_READY),
        why="answer",
        instruction=Instruction.REPEAT_MODEL_CALL,
        ends_pause_as="answered",
        source="T11",
    ),
    Transition(
        "poll",
        (_PAUSED,),
        _READY,
        Fence.THIS_PAUSE,
        "A deferred model call is due to be asked again.",
        announces=(Announce.RUN_READY,),
        why="answer",
        instruction=Instruction.REPEAT_MODEL_CALL,
        ends_pause_as="answered",
        source="ruling 50, tables.md",
    ),
    Transition(
        "expire_admission",
        (_READY,),
        RunState.FAILED,
        Fence.REVISION,
        "Somebody gave up on an answer that nobody had begun to work on.",
        announces=(Announce.RUN_FAILED,),
        source="ruling 41",
    ),
    Transition(
        "settle",
        (_PAUSED,),
        _READY,
        Fence.THIS_PAUSE,
        "Somebody said what became of an uncertain call.",
        announces=(Announce.CHECKPOINT_RESOLVED, Announce.RUN_READY),
        why="answer",
        instruction=Instruction.ANSWER,
        ends_pause_as="answered",
        source="R13, ruling 6",
    ),
    Transition(
        "stop",
        (_PAUSED,),
        RunState.FAILED,
        Fence.THIS_PAUSE,
        "Somebody stopped a run with an uncertain call.",
        announces=(Announce.CHECKPOINT_RESOLVED, Announce.RUN_FAILED),
        ends_pause_as="rejected",
        source="R13, ruling 6",
    ),
    Transition(
        "expire",
        (_PAUSED,),
        RunState.FAILED,
        Fence.OVERDUE_PAUSE,
        "Nobody answered in time.",
        announces=(Announce.CHECKPOINT_RESOLVED, Announce.RUN_FAILED),
        ends_pause_as="expired",
        source="T15",
    ),
    Transition(
        "expire_to_model",
        (_PAUSED,),
        _READY,
        Fence.OVERDUE_PAUSE,
        "Nobody answered in time; the model is told so.",
        announces=(Announce.CHECKPOINT_RESOLVED, Announce.RUN_READY),
        why="answer",
        instruction=Instruction.ANSWER,
        ends_pause_as="expired",
        source="R14",
    ),
    Transition(
        "start_by",
        (_READY,),
        RunState.CANCELLED,
        Fence.OVERDUE_START,
        "It was not started in time.",
        announces=(Announce.RUN_CANCELLED,),
        source="ruling 40",
    ),
    Transition(
        "cancel_created",
        (RunState.CREATED,),
        RunState.CANCELLED,
        Fence.REVISION,
        "Cancelled before anybody started it.",
        announces=(Announce.RUN_CANCELLED,),
        source="T34",
    ),
    Transition(
        "cancel_ready",
        (_READY,),
        RunState.CANCELLED,
        Fence.REVISION,
        "Cancelled while it waited.",
        announces=(Announce.RUN_CANCELLED,),
        source="T27",
    ),
    Transition(
        "cancel_reclaimable",
        (_RECLAIMABLE,),
        RunState.CANCELLED,
        Fence.REVISION,
        "Cancelled between two workers.",
        announces=(Announce.RUN_CANCELLED,),
        source="T27",
    ),
    Transition(
        "cancel_running",
        (_RUNNING,),
        RunState.CANCELLED,
        Fence.REVISION,
        "Cancelled while a worker holds it; the fence stops the worker.",
        lease=LeaseEffect.FENCE,
        announces=(Announce.RUN_CANCELLED,),
        source="T28, R6",
    ),
    Transition(
        "cancel_paused",
        (_PAUSED,),
        RunState.CANCELLED,
        Fence.THIS_PAUSE,
        "Cancelled while it was paused.",
        announces=(Announce.RUN_CANCELLED,),
        ends_pause_as="cancelled",
        source="T16, ruling 30",
    ),
)

CHECKPOINT: tuple[Transition, ...] = (
    Transition(
        "open", (), CheckpointState.PENDING, Fence.NEW, "A pause asks somebody.", refusal="already_exists"
    ),
    Transition(
        "decided",
        (CheckpointState.PENDING,),
        CheckpointState.RESOLVED,
        Fence.PENDING,
        "The first decision is recorded.",
    ),
    Transition(
        "settled",
        (CheckpointState.PENDING,),
        CheckpointState.RESOLVED,
        Fence.PENDING,
        "An uncertain effect was settled.",
    ),
    Transition(
        "expired",
        (CheckpointState.PENDING,),
        CheckpointState.RESOLVED,
        Fence.PENDING,
        "Its pause passed the deadline.",
    ),
    Transition(
        "cancelled",
        (CheckpointState.PENDING,),
        CheckpointState.RESOLVED,
        Fence.PENDING,
        "Its run was cancelled.",
    ),
    Transition(
        "superseded",
        (CheckpointState.PENDING,),
        CheckpointState.RESOLVED,
        Fence.PENDING,
        "No decision can reach its pause any more.",
    ),
)

_CALL = ToolCallState
TOOL_CALL: tuple[Transition, ...] = (
    Transition("wait", (), _CALL.PENDING, Fence.NEW, "The call waits for somebody."),
    Transition(
        "record", (), _CALL.STARTED, Fence.NEW, "The start record of an unsafe call, before its handler."
    ),
    Transition(
        "complete_at_once", (), _CALL.COMPLETED, Fence.NEW, "A safe call and its result in one write."
    ),
    Transition("fail_at_once", (), _CALL.FAILED, Fence.NEW, "A call that failed, in one write."),
    Transition("deny_at_once", (), _CALL.DENIED, Fence.NEW, "A call that was denied, in one write."),
    Transition("start", (_CALL.PENDING,), _CALL.STARTED, Fence.PENDING, "An approved call is about to run."),
    Transition(
        "complete", (_CALL.PENDING, _CALL.STARTED), _CALL.COMPLETED, Fence.PENDING, "The result is in."
    ),
    Transition("fail", (_CALL.PENDING, _CALL.STARTED), _CALL.FAILED, Fence.PENDING, "The handler failed."),
    Transition(
        "deny", (_CALL.PENDING,), _CALL.DENIED, Fence.PENDING, "It was rejected, expired or forbidden."
    ),
    Transition(
        "take_back",
        (_CALL.STARTED,),
        _CALL.PENDING,
        Fence.TERM,
        "Its own holder never entered the handler.",
        source="ruling 4",
    ),
    Transition(
        "restart",
        (_CALL.STARTED,),
        _CALL.STARTED,
        Fence.PENDING,
        "It runs again: retry-safe, or proven not to have happened.",
    ),
    Transition(
        "write_off",
        (_CALL.STARTED,),
        _CALL.UNKNOWN,
        Fence.PENDING,
        "It is settled without knowing the outcome.",
        source="ruling 9",
    ),
)

MACHINES: dict[str, tuple[Transition, ...]] = {"run": RUN, "checkpoint": CHECKPOINT, "tool_call": TOOL_CALL}

STATES: dict[str, type[StrEnum]] = {
    "run": RunState,
    "checkpoint": CheckpointState,
    "tool_call": ToolCallState,
}


def transition(machine: str, name: str) -> Transition:
    """The row of that name.

    Raises: KeyError when there is none.
    """
    for row in MACHINES[machine]:
        if row.name == name:
            return row
    raise KeyError(f"{machine}.{name}")

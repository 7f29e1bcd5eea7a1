"""The machines of checkpoints and tool calls; a part of the table in `lifecycle.py`."""

from __future__ import annotations

from cortex_workers.schemas.states import CheckpointState, Fence, ToolCallState, Transition

_ASKED, _CLOSED = CheckpointState.PENDING, CheckpointState.RESOLVED
CHECKPOINT: tuple[Transition, ...] = (
    Transition("open", (), _ASKED, Fence.NEW, "A pause asks somebody.", refusal="already_exists"),
    Transition("decided", (_ASKED,), _CLOSED, Fence.PENDING, "The first decision is recorded."),
    Transition("settled", (_ASKED,), _CLOSED, Fence.PENDING, "An uncertain effect was settled."),
    Transition("expired", (_ASKED,), _CLOSED, Fence.PENDING, "Its pause passed the deadline."),
    Transition("cancelled", (_ASKED,), _CLOSED, Fence.PENDING, "Its run was cancelled."),
    Transition("superseded", (_ASKED,), _CLOSED, Fence.PENDING, "No decision can reach its pause any more."),
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

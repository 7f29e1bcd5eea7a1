"""The machines of deliveries and questions between agents; a part of the table in `lifecycle.py`.

Source: messaging.md b.3; rulings 62 to 64; tables.md.
"""

from __future__ import annotations

from cortex_workers.schemas.states import AskState, DeliveryState, Fence, Transition

_QUEUED, _DELIVERING, _RUNNING, _REMOTE, _DELIVERED, _FAILED = (
    DeliveryState.QUEUED,
    DeliveryState.DELIVERING,
    DeliveryState.RUNNING,
    DeliveryState.AWAITING_REMOTE,
    DeliveryState.DELIVERED,
    DeliveryState.FAILED,
)
_LOST = "invalid_state"
DELIVERY: tuple[Transition, ...] = (
    Transition("queue", (), _QUEUED, Fence.NEW, "The message waits to be carried.", refusal="already_exists"),
    Transition(
        "arrive", (), _DELIVERED, Fence.NEW, "It is in the inbox at once.", refusal="already_exists"
    ),
    Transition(
        "begin",
        (_QUEUED,),
        _RUNNING,
        Fence.DUE,
        "The run of the receiver is stored, in the same transaction.",
        source="ruling 64",
    ),
    Transition(
        "call",
        (_QUEUED,),
        _DELIVERING,
        Fence.DUE,
        "A worker is about to call code that is not ours: a transport, a hand-off handler.",
    ),
    Transition("ask_again", (_REMOTE,), _DELIVERING, Fence.DUE, "A worker is about to ask the peer again."),
    Transition(
        "take_over", (_DELIVERING,), _DELIVERING, Fence.LAPSED, "Its worker is dead; another one calls."
    ),
    Transition(
        "admit",
        (_DELIVERING,),
        _RUNNING,
        Fence.TERM,
        "The hand-off handler took the assignment; its run is stored.",
        refusal=_LOST,
    ),
    Transition(
        "await_remote",
        (_DELIVERING,),
        _REMOTE,
        Fence.TERM,
        "The peer works on it and will be asked again.",
        refusal=_LOST,
    ),
    Transition(
        "answer",
        (_DELIVERING,),
        _DELIVERED,
        Fence.TERM,
        "The peer has it, and has answered if somebody waits.",
        refusal=_LOST,
    ),
    Transition(
        "retry",
        (_DELIVERING,),
        _QUEUED,
        Fence.TERM,
        "Nothing was begun; it is tried again later.",
        refusal=_LOST,
    ),
    Transition(
        "settle",
        (_RUNNING,),
        _DELIVERED,
        Fence.PENDING,
        "The run of the receiver has ended; its reply is stored, in the same transaction.",
        source="ruling 63",
    ),
    Transition(
        "refuse",
        (_QUEUED,),
        _FAILED,
        Fence.PENDING,
        "It cannot be carried: its receiver is gone or closed.",
    ),
    Transition("fail", (_DELIVERING,), _FAILED, Fence.TERM, "The peer or the transport failed.", refusal=_LOST),
    Transition(
        "retire",
        (_QUEUED, _DELIVERING, _REMOTE),
        DeliveryState.RETIRED,
        Fence.PENDING,
        "Nobody waits for it any more: the conversation was closed, or who asked has ended.",
    ),
    Transition("redrive", (_FAILED,), _QUEUED, Fence.PENDING, "An operator sends it on its way again."),
)

_OPEN, _SEALED = AskState.OPEN, AskState.SEALED
ASK: tuple[Transition, ...] = (
    Transition("ask", (), _OPEN, Fence.NEW, "An agent waits for answers.", refusal="already_exists"),
    Transition("answered", (_OPEN,), _SEALED, Fence.PENDING, "Everybody has answered."),
    Transition("timeout", (_OPEN,), _SEALED, Fence.PENDING, "Its deadline passed."),
    Transition("cancelled", (_OPEN,), _SEALED, Fence.PENDING, "Its conversation was closed."),
    Transition("retired", (_OPEN,), _SEALED, Fence.PENDING, "The run that asked has left its pause."),
)

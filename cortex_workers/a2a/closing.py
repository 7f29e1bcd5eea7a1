"""End a conversation: what was asked in it is answered, what is on its way stays where it is.

Source: messaging.md d.3; ruling 64.
"""

from __future__ import annotations

from cortex_workers.a2a import accept, answer
from cortex_workers.a2a.accept import Origin
from cortex_workers.a2a.shape import Speech
from cortex_workers.engine.bus import Moved
from cortex_workers.engine.runtime import Runtime
from cortex_workers.errors import ConversationNotFound, InvalidArgument, UnknownReceiver
from cortex_workers.schemas.a2a import SendResult
from cortex_workers.schemas.performatives import Performative
from cortex_workers.store import (
    a2a_asks,
    a2a_conversations,
    a2a_deliveries,
    a2a_messages,
    runs,
    sessions,
    suspensions,
)
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit


def close(unit: Unit, rt: Runtime, speech: Speech, origin: Origin, participant: bool = True) -> SendResult:
    """Interpret a ``cancel``: seal its open questions, retire its deliveries, close. A second one changes nothing.

    ``participant``: the sender has to belong to the conversation. The hop ceiling does not apply.
    Raises: InvalidArgument without a conversation, ConversationNotFound, UnknownReceiver for a stranger, Moved.
    """
    if speech.conversation_id is None:
        raise InvalidArgument("cancel needs the conversation_id of the conversation to end")
    held, asked = _hold(unit, speech.conversation_id, origin)
    if participant and str(speech.sender) not in held["participants"]:
        raise UnknownReceiver(f"{speech.sender} takes no part in this conversation")
    if held["status"] != "open":
        return _as_it_was(unit, held)
    known = accept.routes(unit, rt, speech)
    message = accept.store(unit, speech, origin, held, exempt=True)
    why = (
        f"{speech.sender} ended the conversation: {speech.content}"
        if speech.content
        else (f"{speech.sender} ended the conversation")
    )
    a2a_deliveries.retire_of_conversation(unit, held["id"], why[:500])
    for ask in asked:
        current = a2a_asks.lock(unit, ask["scope"], ask["reply_with"])
        if current is not None and current["state"] == "open":
            answer.seal(unit, rt, current, "cancelled", lambda _: why)
    a2a_conversations.close(unit, held["id"])
    rows = [
        accept.delivery_row(message, receiver, "remote" if route.kind == "remote" else "control")
        for receiver, route in known.items()
    ]
    return accept.send_off(unit, message, rows, known)


def _hold(unit: Unit, conversation_id: str, origin: Origin) -> tuple[Row, list[Row]]:
    """Sessions of whoever asks in it, the conversation, their runs and the sender's own, in order."""
    before = a2a_asks.open_in(unit, conversation_id)
    askers = _askers(unit, before)
    for session_id in sorted({row["session_id"] for row in askers}):
        sessions.lock(unit, session_id)
    held = a2a_conversations.lock(unit, conversation_id)
    if held is None or not (held["scope"] == origin.scope or held["scope"].startswith(origin.scope + "/")):
        raise ConversationNotFound(f"there is no conversation {conversation_id} in this scope")
    # Questions come into being under the conversation's lock, so now there are no more of them.
    asked = a2a_asks.open_in(unit, conversation_id)
    if {row["reply_with"] for row in asked} - {row["reply_with"] for row in before}:
        raise Moved()
    mine = {origin.run_id} if origin.run_id is not None else set()
    for run_id in sorted({row["id"] for row in askers} | mine):
        runs.lock(unit, run_id)
    for ask in asked:
        if ask["suspension_id"] is not None:
            suspensions.lock(unit, ask["suspension_id"])
    return held, asked


def _askers(unit: Unit, asked: list[Row]) -> list[Row]:
    found = [runs.get(unit, row["asker_run_id"]) for row in asked if row["asker_run_id"]]
    return [row for row in found if row is not None]


def _as_it_was(unit: Unit, held: Row) -> SendResult:
    messages = a2a_messages.of_conversation(unit, held["id"], limit=1000)
    cancelled = [row for row in messages if row["performative"] == Performative.CANCEL]
    last = (cancelled or messages)[-1]
    return SendResult(message_id=last["id"], conversation_id=held["id"])

"""Answers into open questions, and the end of a question: the last one makes the asking run ready.

The locks come first, in the one order: session, conversation, run, pause, delivery, question (ruling 68).
Source: messaging.md c.5, i.5; rulings 61, 63, 67.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cortex_workers.engine import resume
from cortex_workers.engine.runtime import Runtime
from cortex_workers.host import cut_result
from cortex_workers.schemas.a2a import Address, AskReply, Reply
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

BUS = "cortex:bus"
Silence = Callable[[Address], str]


@dataclass(frozen=True, slots=True)
class Held:
    """Rows of a question, held to the end of the transaction. ``ask`` is None where nobody asked."""

    conversation: Row
    delivery: Row | None = None
    ask: Row | None = None

    @property
    def open(self) -> bool:
        """Whether the question still takes answers."""
        return self.ask is not None and self.ask["state"] == "open"


def hold(unit: Unit, conversation_id: str, ask: Row | None, delivery_id: str | None = None) -> Held:
    """Lock what an answer may touch; ``ask`` was read unlocked and is read again."""
    run = runs.get(unit, ask["asker_run_id"]) if ask is not None and ask["asker_run_id"] else None
    if run is not None:
        sessions.lock(unit, run["session_id"])
    conversation = a2a_conversations.lock(unit, conversation_id)
    assert conversation is not None
    if run is not None:
        runs.lock(unit, run["id"])
        assert ask is not None
        suspensions.lock(unit, ask["suspension_id"])
    delivery = a2a_deliveries.lock(unit, delivery_id) if delivery_id is not None else None
    held = a2a_asks.lock(unit, ask["scope"], ask["reply_with"]) if ask is not None else None
    return Held(conversation, delivery, held)


def receivers_of(unit: Unit, ask: Row) -> tuple[Row, list[Address]]:
    """The message of a question, and who was asked."""
    message = a2a_messages.get(unit, ask["message_id"])
    assert message is not None
    return message, [Address.parse(text) for text in message["receivers"]]


def may_take(unit: Unit, held: Held, responder: Address) -> bool:
    """Whether an answer of somebody who was asked is awaited: the question is open and it is his first."""
    return held.open and held.ask is not None and responder not in a2a_asks.responders(unit, held.ask)


def take(
    unit: Unit, rt: Runtime, ask: Row, responder: Address, message_id: str, on_behalf_by: str | None = None
) -> bool:
    """Keep an answer under the locks of ``hold``; the last one seals the question. True when it did."""
    count = a2a_asks.add_answer(unit, ask, responder, message_id, on_behalf_by)
    if count is None or count < ask["expected"]:
        return False
    return seal(unit, rt, ask, "answered", lambda receiver: f"{receiver} did not answer")


def seal(unit: Unit, rt: Runtime, ask: Row, how: str, why: Silence) -> bool:
    """End a question under the locks of ``hold``, with a word for everybody who is silent; its run goes on."""
    if not a2a_asks.seal(unit, ask, how):
        return False
    settle(unit, rt, ask, why)
    return True


def settle(unit: Unit, rt: Runtime, ask: Row, why: Silence) -> bool:
    """Give what became of a closed question to the run that waits for it, under the locks of ``hold``."""
    if ask["suspension_id"] is None:
        return False
    message, asked = receivers_of(unit, ask)
    replies, done = a2a_asks.replies(unit, ask), a2a_asks.responders(unit, ask)
    missing = [
        Reply(
            performative=Performative.FAILURE,
            sender=str(receiver),
            content=why(receiver),
            conversation_id=ask["conversation_id"],
        )
        for receiver in asked
        if receiver not in done
    ]
    failed = any(row["state"] == "failed" for row in a2a_deliveries.of_message(unit, message["id"]))
    limit = max(256, rt.settings.result_bytes // max(1, len(asked)))
    result = AskReply(
        replies=tuple(
            item.model_copy(update={"content": cut_result(item.content, limit)})
            for item in (*replies, *missing)
        ),
        complete=not missing and not failed,
    )
    return resume.settle_reply(
        unit, ask["asker_run_id"], ask["suspension_id"], ask["call_id"], result.model_dump(), BUS
    )

"""Take one message into its conversation: who may be reached, is there room, then message and deliveries.

Everything is refused before the first write, under the lock of the conversation.
Source: messaging.md b.1, d.1, d.2; rulings 64 to 66.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cortex_workers.a2a.shape import Speech
from cortex_workers.engine.bus import Moved
from cortex_workers.engine.runtime import Runtime
from cortex_workers.errors import (
    ConversationClosed,
    ConversationNotFound,
    HopCeiling,
    MessageQuota,
    UnknownReceiver,
    Unroutable,
)
from cortex_workers.schemas.a2a import Address, DeliveryOutcome, Endpoint, SendResult
from cortex_workers.schemas.agent import AgentDefinition
from cortex_workers.schemas.ids import CONVERSATION, DELIVERY, MESSAGE, new_id
from cortex_workers.schemas.notifications import DeliveryDue, MessageDelivered, MessageSent
from cortex_workers.schemas.performatives import ANSWERS, Performative, Routing, routing
from cortex_workers.store import a2a_conversations, a2a_deliveries, a2a_messages, agents
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit


@dataclass(frozen=True, slots=True)
class Origin:
    """Who really sends: the scope and rights of a run, or of a client."""

    scope: str
    run_id: str | None = None
    chain_depth: int = 0
    principal: bytes | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """What makes a message a question: the token of its answers, and until when they are awaited."""

    reply_with: str
    reply_by: datetime


@dataclass(frozen=True, slots=True)
class Route:
    """How somebody is reached: ``remote``, an ``agent`` of the fleet, or a ``person``, who has an inbox only."""

    kind: str
    agent: AgentDefinition | None = None
    pool: str = "main"


def routes(
    unit: Unit, rt: Runtime, speech: Speech, conversation_id: str | None = None
) -> dict[Address, Route]:
    """Find each receiver.

    Raises: Unroutable, UnknownReceiver, naming the address; one refuses all.
    """
    return {
        receiver: _route(unit, rt, receiver, conversation_id or speech.conversation_id)
        for receiver in speech.receivers
    }


def _route(unit: Unit, rt: Runtime, receiver: Address, conversation_id: str | None) -> Route:
    if not receiver.local:
        transports = rt.host.transports if rt.host is not None else ()
        if not any(transport.handles(receiver) for transport in transports):
            raise Unroutable(f"no transport carries messages to {receiver}")
        return Route("remote")
    agent = agents.current(unit, receiver.agent)
    if agent is not None:
        return Route("agent", agent.definition, agent.pool)
    if conversation_id is not None and a2a_messages.has_spoken(unit, conversation_id, str(receiver)):
        return Route("person")
    raise UnknownReceiver(f"there is no agent named {receiver.agent[:100]!r}, nor has it spoken here")


def refuse_limits(unit: Unit, rt: Runtime, origin: Origin, messages: int = 1) -> None:
    """What one run may send, and how deep agents may set one another to work.

    Raises: HopCeiling, MessageQuota.
    """
    if origin.chain_depth >= rt.settings.hop_ceiling:
        raise HopCeiling(
            f"this chain of agents is {origin.chain_depth} deep, the ceiling is {rt.settings.hop_ceiling}"
        )
    if origin.run_id is None:
        return
    sent, most = a2a_messages.sent_by(unit, origin.run_id), rt.settings.messages_per_run
    if sent + messages > most:
        raise MessageQuota(f"this run has sent {sent} messages; one run may send {most}")


def hold(unit: Unit, rt: Runtime, speech: Speech, scope: str) -> Row:
    """The message's conversation, its row held: the one that is named, a peer's, or a new one.

    Raises: ConversationNotFound.
    """
    if speech.conversation_id is not None:
        found = a2a_conversations.lock(unit, speech.conversation_id)
        if found is None or not _covers(scope, found["scope"]):
            raise ConversationNotFound(f"there is no conversation {speech.conversation_id} in this scope")
        return found
    node, context = speech.peer or (None, None)
    if node is not None and context is not None:
        paired = a2a_conversations.of_peer(unit, scope, node, context)
        if paired is not None:
            held = a2a_conversations.lock(unit, paired["id"])
            assert held is not None
            return held
    return a2a_conversations.begin(
        unit,
        {
            "id": new_id(CONVERSATION),
            "scope": scope,
            "protocol": speech.labels.get("protocol"),
            "initiator": str(speech.sender),
            "participants": [],
            "hop_ceiling": rt.settings.hop_ceiling,
            "peer_node": node,
            "peer_context": context,
        },
    )


def _covers(scope: str, other: str) -> bool:
    return other == scope or other.startswith(scope + "/")


def refuse_full(conversation: Row) -> None:
    """A conversation that takes no more.

    Raises: ConversationClosed, HopCeiling with the counts.
    """
    if conversation["status"] != "open":
        raise ConversationClosed(f"the conversation {conversation['id']} was closed")
    used, ceiling = conversation["hops_used"], conversation["hop_ceiling"]
    if used >= ceiling:
        raise HopCeiling(f"the conversation has used {used} of its {ceiling} messages")


def accept(
    unit: Unit, rt: Runtime, speech: Speech, origin: Origin, question: Question | None = None
) -> SendResult:
    """Take a message and put it on its way to each receiver.

    Raises: MessageRefused and its kinds, ConversationNotFound, before anything is written; Moved.
    """
    known = routes(unit, rt, speech)
    held = hold(unit, rt, speech, origin.scope)
    refuse_full(held)
    message = store(unit, speech, origin, held, question=question)
    rows = [_delivery(message, speech, receiver, route) for receiver, route in known.items()]
    return send_off(unit, message, rows, known)


def store(
    unit: Unit,
    speech: Speech,
    origin: Origin,
    held: Row,
    *,
    question: Question | None = None,
    exempt: bool = False,
    answers_delivery_id: str | None = None,
) -> Row:
    """Write a message into a conversation that is held; it takes one hop.

    Raises: ConversationClosed, HopCeiling, Moved when this very message is there already.
    """
    speakers = [str(speech.sender), *(str(item) for item in speech.receivers)]
    hop = a2a_conversations.take_hop(unit, held, speakers, exempt=exempt)
    if hop is None:
        refuse_full(held)
        raise HopCeiling()
    message = a2a_messages.add(
        unit,
        {
            "id": new_id(MESSAGE),
            # The conversation's own scope: whoever sees the thread sees the message.
            "scope": held["scope"],
            "conversation_id": held["id"],
            "hop": hop,
            "performative": speech.performative,
            "sender": str(speech.sender),
            "receivers": [str(item) for item in speech.receivers],
            "reply_to": list(speech.reply_to),
            "content": speech.content,
            "labels": speech.labels,
            "reply_with": question.reply_with if question is not None else None,
            "in_reply_to": speech.in_reply_to,
            "reply_by": question.reply_by if question is not None else None,
            "origin_run_id": origin.run_id,
            "chain_depth": origin.chain_depth,
            "principal": origin.principal,
            "dedupe_key": origin.key,
            "answers_delivery_id": answers_delivery_id,
            "metadata": speech.metadata,
        },
    )
    if message is None:
        raise Moved()
    unit.announce(
        MessageSent(
            message_id=message["id"],
            conversation_id=message["conversation_id"],
            performative=message["performative"],
        )
    )
    return message


def send_off(
    unit: Unit, message: Row, rows: list[dict[str, Any]], known: Mapping[Address, Route]
) -> SendResult:
    """Store the deliveries of a message and announce those that somebody has to carry."""
    a2a_deliveries.add(unit, rows)
    for row in rows:
        if row["kind"] in ("directive", "remote"):
            route = known.get(Address(row["receiver_agent"], row["receiver_node"]))
            unit.announce(
                DeliveryDue(delivery_id=row["id"], pool=route.pool if route is not None else "main")
            )
        else:
            unit.announce(MessageDelivered(delivery_id=row["id"], message_id=message["id"]))
    return SendResult(
        message_id=message["id"],
        conversation_id=message["conversation_id"],
        deliveries=tuple(
            DeliveryOutcome(
                receiver=Endpoint(agent=row["receiver_agent"], node=row["receiver_node"] or None),
                delivery_id=row["id"],
            )
            for row in rows
        ),
    )


def _delivery(message: Row, speech: Speech, receiver: Address, route: Route) -> dict[str, Any]:
    return delivery_row(message, receiver, _kind(speech, route))


def delivery_row(message: Row, receiver: Address, kind: str) -> dict[str, Any]:
    """A delivery of a message that is not stored yet."""
    return {
        "id": new_id(DELIVERY),
        "scope": message["scope"],
        "message_id": message["id"],
        "conversation_id": message["conversation_id"],
        "receiver_agent": receiver.agent,
        "receiver_node": receiver.node,
        "kind": kind,
    }


def _kind(speech: Speech, route: Route) -> str:
    if route.kind == "remote":
        return "remote"
    if speech.performative is Performative.CANCEL:
        return "control"
    # An answer that nobody waits for is mail, also one that could be asked: it starts no run.
    too_late = speech.in_reply_to is not None and speech.performative in ANSWERS
    if route.kind == "person" or too_late:
        return "informative"
    return "directive" if routing(speech.performative) is Routing.DIRECTIVE else "informative"


def again(unit: Unit, scope: str, key: str) -> SendResult | None:
    """What was sent under a key before, as it was told then."""
    message = a2a_messages.by_key(unit, scope, key)
    if message is None:
        return None
    rows = a2a_deliveries.of_message(unit, message["id"])
    return SendResult(
        message_id=message["id"],
        conversation_id=message["conversation_id"],
        deliveries=tuple(
            DeliveryOutcome(
                receiver=Endpoint(agent=row["receiver_agent"], node=row["receiver_node"] or None),
                delivery_id=row["id"],
            )
            for row in rows
        ),
    )

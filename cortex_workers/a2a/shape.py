"""A message, checked for itself: nothing is read and nothing is written.

Source: messaging.md a.2; rulings 61, 65.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cortex_workers.engine.validate import checked_id, checked_label, checked_metadata, checked_text
from cortex_workers.errors import (
    AskNeedsDirective,
    InputTooLarge,
    InvalidArgument,
    InvalidPerformative,
    NoReceivers,
    NoSender,
    SelfAddressed,
)
from cortex_workers.schemas.a2a import LABELS, MOST_RECEIVERS, Address, Outgoing
from cortex_workers.schemas.ids import CONVERSATION
from cortex_workers.schemas.performatives import Performative, Routing, routing

MOST_NAME = 200


@dataclass(frozen=True, slots=True)
class Speech:
    """A well-formed message: known performative, a sender, receivers that are each named once."""

    sender: Address
    receivers: tuple[Address, ...]
    performative: Performative
    content: str
    labels: dict[str, str] = field(default_factory=dict)
    reply_to: tuple[str, ...] = ()
    conversation_id: str | None = None
    in_reply_to: str | None = None
    peer: tuple[str, str] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


def speech(outgoing: Outgoing, limit_bytes: int) -> Speech:
    """Check one message.

    Raises: InvalidPerformative, NoSender, NoReceivers, SelfAddressed (in this order), InvalidId, InputTooLarge,
    InvalidArgument, UnstorableText.
    """
    performative = _performative(outgoing.performative)
    sender = Address.parse(outgoing.sender)
    if not sender.agent:
        raise NoSender()
    receivers = _receivers(outgoing.receivers)
    if sender in receivers:
        raise SelfAddressed(f"{sender} is among the receivers; nobody writes to himself")
    if outgoing.conversation_id is not None:
        checked_id(CONVERSATION, outgoing.conversation_id)
    for name in (sender, *receivers):
        checked_label("a name", name.agent, MOST_NAME)
        checked_label("a node", name.node or None, MOST_NAME)
    _check_content(outgoing.content, limit_bytes)
    return Speech(
        sender=sender,
        receivers=receivers,
        performative=performative,
        content=outgoing.content,
        labels=_labels(outgoing),
        reply_to=tuple(str(Address.parse(item)) for item in outgoing.reply_to),
        conversation_id=outgoing.conversation_id,
        in_reply_to=outgoing.in_reply_to,
        peer=_peer(outgoing),
        metadata=_metadata(outgoing),
    )


def refuse_no_directive(performative: Performative) -> None:
    """Only what makes the receiver act can be asked.

    Raises: AskNeedsDirective.
    """
    if routing(performative) is not Routing.DIRECTIVE:
        raise AskNeedsDirective(
            f"{performative} cannot be asked; ask with request, query-if, query-ref, cfp or propose"
        )


def _performative(text: str) -> Performative:
    try:
        return Performative(text)
    except ValueError:
        raise InvalidPerformative(
            f"there is no performative {str(text)[:40]!r}; known: {', '.join(Performative)}"
        ) from None


def _receivers(texts: Sequence[str]) -> tuple[Address, ...]:
    found = tuple(dict.fromkeys(Address.parse(text) for text in texts))
    if not found or any(not item.agent for item in found):
        raise NoReceivers("a message needs at least one receiver, each with a name")
    if len(found) > MOST_RECEIVERS:
        raise NoReceivers(f"a message has at most {MOST_RECEIVERS} receivers, this one has {len(found)}")
    return found


def _check_content(content: str, limit_bytes: int) -> None:
    checked_text("the content", content)
    size = len(content.encode())
    if size > limit_bytes:
        raise InputTooLarge(f"the content has {size} bytes, the limit is {limit_bytes}")


def _labels(outgoing: Outgoing) -> dict[str, str]:
    given = {name: getattr(outgoing, name) for name in LABELS if getattr(outgoing, name)}
    for name, text in given.items():
        checked_label(name, text)
    return given


def _peer(outgoing: Outgoing) -> tuple[str, str] | None:
    if not outgoing.peer_node or not outgoing.peer_context:
        return None
    checked_label("a peer's node", outgoing.peer_node)
    checked_label("a peer's context", outgoing.peer_context)
    return outgoing.peer_node, outgoing.peer_context


def _metadata(outgoing: Outgoing) -> dict[str, Any]:
    checked_metadata(outgoing.metadata)
    checked_metadata(outgoing.assignment)
    found = dict(outgoing.metadata or {})
    if "assignment" in found:
        raise InvalidArgument("an assignment is given as such, not in the metadata")
    return {**found, "assignment": outgoing.assignment} if outgoing.assignment is not None else found

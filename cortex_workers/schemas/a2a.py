"""Messages between agents: who speaks to whom, in which conversation, and what became of it.

Source: messaging.md (a); rulings 61 to 66.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from cortex_workers.schemas.base import Document, Model
from cortex_workers.schemas.performatives import Performative

MOST_RECEIVERS = 32
"""Fan-out of one message (ruling 65)."""
LABELS = ("language", "encoding", "ontology", "protocol")
"""Labels of a message that nobody here acts on; two of them are shown to the receiver and copied onto the reply."""
CONTRACT_NET = "fipa-contract-net"


@dataclass(frozen=True, slots=True)
class Address:
    """An agent or a person. ``node`` is empty for whoever is served by this fleet; that alone decides about routing."""

    agent: str
    node: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``name`` or ``name@node``; the last ``@`` divides, and one at the very end says: of this fleet."""
        name, found, node = text.strip().rpartition("@")
        return cls(name.strip(), node.strip()) if found else cls(node.strip())

    @property
    def local(self) -> bool:
        """Whether it is served by this fleet."""
        return not self.node

    def __str__(self) -> str:
        if self.node:
            return f"{self.agent}@{self.node}"
        return f"{self.agent}@" if "@" in self.agent else self.agent


class Outgoing(Model):
    """One message to be sent. ``in_reply_to`` and ``assignment`` come from hosts only, never from a model."""

    sender: str
    receivers: tuple[str, ...]
    performative: str = Performative.INFORM
    content: str = ""
    conversation_id: str | None = None
    reply_to: tuple[str, ...] = ()
    language: str | None = None
    encoding: str | None = None
    ontology: str | None = None
    protocol: str | None = None
    in_reply_to: str | None = None
    on_behalf_of: str | None = None
    key: str | None = None
    peer_node: str | None = None
    peer_context: str | None = None
    assignment: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


class Endpoint(Model):
    """An address as JSON shows it; ``node`` is absent for whoever is served by this fleet."""

    agent: str
    node: str | None = None


class DeliveryOutcome(Model):
    """What became of a message for one receiver when it was sent."""

    receiver: Endpoint
    status: Literal["queued", "failed"] = "queued"
    error: str | None = None
    delivery_id: str | None = None


class SendResult(Model):
    """A message that was accepted. ``deliveries`` is empty when it was taken as the answer to a question."""

    message_id: str
    conversation_id: str
    deliveries: tuple[DeliveryOutcome, ...] = ()


class Reply(Model):
    """One answer to a question, or why there is none."""

    performative: str
    sender: str
    content: str
    conversation_id: str


class AskReply(Model):
    """What the model reads as the result of ``agent_ask``, for one receiver and for many."""

    replies: tuple[Reply, ...]
    complete: bool


class InboxItem(Model):
    """A message that has arrived, as an agent or a person sees it."""

    delivery_id: str
    message_id: str
    conversation_id: str
    sender: str
    performative: str
    content: str
    received_at: str | None = None


class Envelope(Document):
    """A stored message; it never changes."""

    id: str
    scope: str
    conversation_id: str
    hop: int
    performative: str
    sender: str
    receivers: tuple[str, ...]
    reply_to: tuple[str, ...] = ()
    content: str
    labels: dict[str, str]
    reply_with: str | None = None
    in_reply_to: str | None = None
    reply_by: datetime | None = None
    origin_run_id: str | None = None
    chain_depth: int = 0
    metadata: dict[str, Any]
    created_at: datetime


class Conversation(Document):
    """A thread of messages; only an open one takes more. ``hop_ceiling`` is fixed when it begins."""

    id: str
    scope: str
    protocol: str | None = None
    initiator: str
    participants: tuple[str, ...]
    status: Literal["open", "closed"]
    hop_ceiling: int
    hops_used: int
    peer_node: str | None = None
    peer_context: str | None = None
    created_at: datetime


class Delivery(Document):
    """One message on its way to one receiver."""

    id: str
    scope: str
    message_id: str
    conversation_id: str
    receiver: str
    kind: str
    state: str
    revision: int
    attempts: int
    run_id: str | None = None
    fail_code: str | None = None
    error: str | None = None
    accepted_at: datetime | None = None
    settled_at: datetime | None = None
    read_at: datetime | None = None
    created_at: datetime


class Tender(Model):
    """A call for bids, as it stands: read from what is stored, at any time."""

    conversation_id: str
    proposals: tuple[Reply, ...]
    refusals: tuple[Reply, ...]
    complete: bool

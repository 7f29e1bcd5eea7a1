"""What a message between agents can be refused for; a part of the tree in `tree.py`.

::

    Refusal
    ├─ MessagingOff         this process has no Host(messaging=True)
    ├─ MessageRefused       InvalidPerformative · NoSender · NoReceivers · SelfAddressed · Unroutable · UnknownReceiver
    │                       · AskNeedsDirective · ConversationClosed · HopCeiling · AskLoop · MessageQuota
    ├─ NotFound             ConversationNotFound · DeliveryNotFound · AskNotFound
    └─ Conflict             AskSealed
    Unavailable             TransportBusy · TransportFailed
"""

from __future__ import annotations

from cortex_workers.errors.tree import Conflict, NotFound, Refusal, Unavailable

__all__ = [
    "AskLoop",
    "AskNeedsDirective",
    "AskNotFound",
    "AskSealed",
    "ConversationClosed",
    "ConversationNotFound",
    "DeliveryNotFound",
    "HopCeiling",
    "InvalidPerformative",
    "MessageQuota",
    "MessageRefused",
    "MessagingOff",
    "NoReceivers",
    "NoSender",
    "SelfAddressed",
    "TransportBusy",
    "TransportFailed",
    "UnknownReceiver",
    "Unroutable",
]


class MessagingOff(Refusal):
    """Messages between agents are not turned on here; they need Host(messaging=True)."""

    code = "messaging_off"


class MessageRefused(Refusal):
    """The message was refused; nothing was sent."""

    code = "message_refused"


class InvalidPerformative(MessageRefused):
    """There is no such performative."""

    code = "invalid_performative"


class NoSender(MessageRefused):
    """A message needs a sender with a name."""

    code = "no_sender"


class NoReceivers(MessageRefused):
    """A message needs at least one receiver, each with a name, and at most 32."""

    code = "no_receivers"


class SelfAddressed(MessageRefused):
    """The sender is among the receivers; nobody writes to himself."""

    code = "self_addressed"


class Unroutable(MessageRefused):
    """No transport carries messages to this address."""

    code = "unroutable"


class UnknownReceiver(MessageRefused):
    """No agent and nobody in this conversation has that name."""

    code = "unknown_receiver"


class AskNeedsDirective(MessageRefused):
    """Only what makes the receiver act can be asked: request, query-if, query-ref, cfp, propose and their kind."""

    code = "ask_needs_directive"


class ConversationClosed(MessageRefused):
    """The conversation was closed."""

    code = "conversation_closed"


class HopCeiling(MessageRefused):
    """The conversation, or the chain of agents that led here, has used up its messages."""

    code = "hop_ceiling"


class AskLoop(MessageRefused):
    """The same agents have asked one another before in this chain; it goes round in circles."""

    code = "ask_loop"


class MessageQuota(MessageRefused):
    """The run has sent all the messages that one run may send."""

    code = "message_quota"


class ConversationNotFound(NotFound):
    """No such conversation in this scope."""

    code = "conversation_not_found"


class DeliveryNotFound(NotFound):
    """No such delivery in this scope."""

    code = "delivery_not_found"


class AskNotFound(NotFound):
    """Nobody waits for this answer in this scope."""

    code = "ask_not_found"


class AskSealed(Conflict):
    """The question was answered, or its time is over; the answer comes too late."""

    code = "ask_sealed"


class TransportBusy(Unavailable):
    """The peer has surely begun nothing; it is tried again, after ``retry_in_s`` if given. A transport raises this."""

    code = "transport_busy"
    retry_in_s: float | None = None


class TransportFailed(Unavailable):
    """The peer refused or failed, or nobody knows what became of the message. A transport raises this."""

    code = "transport_failed"

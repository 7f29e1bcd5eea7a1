"""The 22 speech acts of messages between agents, and what each of them makes happen.

Source: messaging.md a.3.
"""

from __future__ import annotations

from enum import StrEnum


class Performative(StrEnum):
    """What a message does; written in lower case with hyphens."""

    REQUEST = "request"
    REQUEST_WHEN = "request-when"
    REQUEST_WHENEVER = "request-whenever"
    QUERY_IF = "query-if"
    QUERY_REF = "query-ref"
    CFP = "cfp"
    PROPOSE = "propose"
    ACCEPT_PROPOSAL = "accept-proposal"
    INFORM = "inform"
    INFORM_IF = "inform-if"
    INFORM_REF = "inform-ref"
    CONFIRM = "confirm"
    DISCONFIRM = "disconfirm"
    REFUSE = "refuse"
    FAILURE = "failure"
    NOT_UNDERSTOOD = "not-understood"
    REJECT_PROPOSAL = "reject-proposal"
    AGREE = "agree"
    SUBSCRIBE = "subscribe"
    PROXY = "proxy"
    PROPAGATE = "propagate"
    CANCEL = "cancel"


class Routing(StrEnum):
    """What becomes of a message: a run of the receiver, a place in its inbox, or an act of the bus itself."""

    DIRECTIVE = "directive"
    INFORMATIVE = "informative"
    CONTROL = "control"


_DIRECTIVES = frozenset(
    {
        Performative.REQUEST,
        Performative.REQUEST_WHEN,
        Performative.REQUEST_WHENEVER,
        Performative.QUERY_IF,
        Performative.QUERY_REF,
        Performative.CFP,
        Performative.PROPOSE,
        Performative.ACCEPT_PROPOSAL,
    }
)

ANSWERS = frozenset(
    {
        Performative.PROPOSE,
        Performative.INFORM,
        Performative.INFORM_IF,
        Performative.INFORM_REF,
        Performative.CONFIRM,
        Performative.DISCONFIRM,
        Performative.REFUSE,
        Performative.FAILURE,
        Performative.NOT_UNDERSTOOD,
        Performative.REJECT_PROPOSAL,
    }
)
"""What counts as an answer to a question; ``agree`` is a promise and does not."""


def routing(performative: Performative) -> Routing:
    """The class of a speech act."""
    if performative is Performative.CANCEL:
        return Routing.CONTROL
    return Routing.DIRECTIVE if performative in _DIRECTIVES else Routing.INFORMATIVE

"""The tools with which agents talk; every agent of a host that turns messaging on has them.

They are signatures only: the engine carries them out, in one transaction with the outcome of the call (ruling 3).
Source: messaging.md (c).
"""

from __future__ import annotations

from cortex_workers.host.tool import Tool, make_tool
from cortex_workers.schemas.agent import Effects, ToolClass

SEND, ASK, INBOX = "agent_send", "agent_ask", "agent_inbox"
MESSAGING_TOOLS = (SEND, ASK, INBOX)
MOST_ITEMS = 100


def agent_send(
    to: str | list[str],
    content: str,
    performative: str = "inform",
    conversation_id: str | None = None,
    ontology: str | None = None,
    protocol: str | None = None,
) -> str:
    """Send a message to one or more agents and carry on. Whoever is told something reads it in its inbox.

    Args:
        to: The name of an agent, or a list of names; name@node for an agent elsewhere.
        content: What to say.
        performative: What the message does, like inform, request, refuse, cancel.
        conversation_id: The conversation to go on with; without it a new one begins.
        ontology: A label for the receiver: what the words mean.
        protocol: A label for the receiver: the kind of exchange.
    """
    raise NotImplementedError


def agent_ask(
    to: str | list[str],
    content: str,
    performative: str = "request",
    conversation_id: str | None = None,
    ontology: str | None = None,
    protocol: str | None = None,
    reply_by_s: float | None = None,
) -> str:
    """Ask one or more agents and wait until all have answered or the time is over.

    Args:
        to: The name of an agent, or a list of names; name@node for an agent elsewhere.
        content: The question or the task.
        performative: What is asked for, like request, query-if, query-ref, cfp.
        conversation_id: The conversation to go on with; without it a new one begins.
        ontology: A label for the receiver: what the words mean.
        protocol: A label for the receiver: the kind of exchange.
        reply_by_s: How many seconds to wait, 30 to 604800.
    """
    raise NotImplementedError


def agent_inbox(limit: int = 20, conversation_id: str | None = None) -> str:
    """Read the messages that have arrived and were not read yet, oldest first.

    Args:
        limit: How many at most, up to 100.
        conversation_id: Only those of this conversation.
    """
    raise NotImplementedError


_KINDS: dict[str, tuple[ToolClass, Effects]] = {
    SEND: ("control", "mutating"),
    ASK: ("ask", "mutating"),
    INBOX: ("control", "none"),
}


def messaging_tools() -> dict[str, Tool]:
    """The three tools, by name."""
    found = {}
    for function in (agent_send, agent_ask, agent_inbox):
        tool = make_tool(
            function,
            None,
            retry_safe=False,
            effects="mutating",
            needs_approval=False,
            approval_ttl=None,
            timeout=None,
            on_expiry=None,
        )
        tool.set_class(*_KINDS[tool.name])
        found[tool.name] = tool
    return found

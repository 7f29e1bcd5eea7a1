"""A call for bids as it stands: who proposes, who declines. A pure read, at any time, restarts included.

Source: messaging.md a.10, j.9.
"""

from __future__ import annotations

from cortex_workers.engine.runtime import Runtime
from cortex_workers.engine.validate import checked_id
from cortex_workers.errors import AskNotFound
from cortex_workers.schemas.a2a import Tender
from cortex_workers.schemas.ids import MESSAGE
from cortex_workers.schemas.performatives import Performative
from cortex_workers.store import a2a_asks, a2a_messages

_BIDS = frozenset({Performative.PROPOSE, Performative.INFORM})
"""An agent's own run answers with inform; so that counts as its bid."""


def collect(rt: Runtime, message_id: str, scope: str) -> Tender:
    """Sort the answers to one question, the first of each bidder.

    Raises: InvalidId, AskNotFound.
    """
    checked_id(MESSAGE, message_id)
    with rt.database.read() as unit:
        message = a2a_messages.get(unit, message_id)
        asked = None
        if message is not None and message["reply_with"] is not None:
            asked = a2a_asks.get(unit, message["scope"], message["reply_with"])
        if message is None or asked is None or not _covers(scope, message["scope"]):
            raise AskNotFound(f"message {message_id} asks nothing in this scope")
        replies = a2a_asks.replies(unit, asked)
    return Tender(
        conversation_id=message["conversation_id"],
        proposals=tuple(item for item in replies if item.performative in _BIDS),
        refusals=tuple(item for item in replies if item.performative not in _BIDS),
        complete=len(replies) >= asked["expected"],
    )


def _covers(scope: str, other: str) -> bool:
    return other == scope or other.startswith(scope + "/")

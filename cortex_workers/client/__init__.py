"""The face for producers and operators: every verb is one use case, one transaction, one clear error.

In-process verbs (`run`, `resolve`, `continue_run`) need ``Client(host=…)``.
Source: decisions 4; rulings 45, 46, 54.
"""

from __future__ import annotations

from cortex_workers.client.base import MAX_LIMIT
from cortex_workers.client.conversations import Conversations
from cortex_workers.client.in_process import InProcess
from cortex_workers.client.machines import Machines
from cortex_workers.client.messages import Messages
from cortex_workers.client.watching import Watching

__all__ = ["MAX_LIMIT", "Client"]


class Client(InProcess, Machines, Messages, Conversations, Watching):
    """Talks to the rows of one fleet; hints follow in the background. Use it as a context manager, or call ``close``.

    ``scope`` is the default of every verb; ``actor`` is who decides (default: the user of this process); ``codec``
    encodes principals; ``host`` lets this process run agents itself, always under a lease.
    """

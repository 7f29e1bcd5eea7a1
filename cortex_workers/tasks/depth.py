"""How many messages wait in a queue: the port `HintDepth` on a real broker.

Source: ruling 17.
"""

from __future__ import annotations

import threading
from typing import Any

from cortex_workers.settings import Settings
from cortex_workers.tasks.link import BrokerAway, Link


def waiting(connection: Any, queue: str) -> int:
    """The messages that wait in a queue, over an open connection; a queue that does not exist has none."""
    if connection.transport.driver_type == "redis":
        # Not a passive declare: an empty list does not exist, which reads as 404 "no such queue".
        return int(connection.default_channel._size(queue))  # noqa: SLF001  the one call there is (ruling 17)
    # The broker closes the channel when there is no such queue, so it is one of its own.
    channel = connection.channel()
    try:
        return int(channel.queue_declare(queue, passive=True).message_count)
    except connection.channel_errors as error:
        if getattr(error, "reply_code", getattr(error, "code", None)) == 404:
            return 0
        raise
    finally:
        if channel.is_open:
            channel.close()


class BrokerDepth:
    """Depths for whoever asks, from any thread, over one connection of its own."""

    def __init__(self, settings: Settings) -> None:
        self._link = Link(settings)
        self._lock = threading.Lock()

    def depth(self, queue: str) -> int | None:
        """The number of waiting messages; None when the broker does not tell, or was silent a moment ago."""
        with self._lock:
            try:
                return self._link.use(lambda connection: waiting(connection, queue))
            except BrokerAway:
                return None

    def close(self) -> None:
        """Drop the connection."""
        with self._lock:
            self._link.close()

"""Celery's events, for Flower, sent by a thread of their own: a frozen broker must not stop a worker for them.

Celery sends a heartbeat from the consumer's loop and task events from the threads of runs, and waits for the broker as
long as it takes. They are for eyes only, so here they are lost instead when the broker is away.
Source: celery.md 21.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

from celery.app.events import Events
from celery.events.dispatcher import EventDispatcher

from cortex_workers.settings import load_settings
from cortex_workers.tasks.link import BrokerAway, Link
from cortex_workers.tasks.outbox import Outbox

LIMIT = 2000
BATCH = 100
FLUSH_S = 1.0

_senders: dict[int, _Sender] = {}


class FleetEvents(Events):  # type: ignore[misc]  # Celery ships no types
    """Celery's events with our dispatcher."""

    dispatcher_cls = "cortex_workers.tasks.events:FleetDispatcher"


class FleetDispatcher(EventDispatcher):  # type: ignore[misc]
    """Celery's dispatcher; what a worker sends of its own goes out in the background."""

    def _publish(self, event: Any, producer: Any, routing_key: str, **options: Any) -> None:
        if producer is None or producer is not self.producer:
            # An event that goes with a message, over the connection of that message.
            super()._publish(event, producer, routing_key, **options)
            return
        message = {
            "routing_key": routing_key,
            "exchange": self.exchange.name,
            "declare": [self.exchange],
            "serializer": self.serializer,
            "headers": self.headers,
            "delivery_mode": self.delivery_mode,
            "retry": False,
        }
        _sender().outbox.put(_Event(event, message))


@dataclass(frozen=True, slots=True)
class _Event:
    content: Any
    message: dict[str, Any]


class _Sender:
    """The thread of one process."""

    def __init__(self) -> None:
        self.outbox: Outbox[_Event] = Outbox(LIMIT, why="events")
        self._link = Link(load_settings())

    def begin(self) -> None:
        threading.Thread(target=self._send_all, name="event-sender", daemon=True).start()

    def _send_all(self) -> None:
        while batch := self.outbox.take(BATCH):
            try:
                for event in batch:
                    self._link.use(partial(self._send, event))
            except BrokerAway:
                # Those of this batch are lost, and what comes while the broker is left alone pushes out the oldest.
                self.outbox.rest(self._link.resting_s)
            self.outbox.done()

    def _send(self, event: _Event, connection: Any) -> None:
        self._link.producer(connection).publish(event.content, **event.message)


def _sender() -> _Sender:
    pid = os.getpid()
    found = _senders.get(pid)
    if found is None:
        made = _Sender()
        found = _senders.setdefault(pid, made)
        if found is made:
            made.begin()
    return found


def flush(timeout_s: float = FLUSH_S) -> None:
    """Give the last events of a worker a moment."""
    found = _senders.get(os.getpid())
    if found is not None:
        found.outbox.drained(timeout_s)

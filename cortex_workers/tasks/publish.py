"""The Celery subscriber: turns committed facts into hints, in the background, and never makes anybody wait.

A hint that is lost, doubled or dropped costs latency only: the row waits and the sweep announces it again.
Source: rulings 12, 16, 17, 21, 60; celery.md 9, 14.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  Celery needs it, and the interpreter refuses to load it while it ends
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cortex_workers import telemetry
from cortex_workers.errors import CortexError
from cortex_workers.schemas.notifications import DeliveryDue, Notification, ResumeAdmitted
from cortex_workers.settings import Settings
from cortex_workers.store.demand import hint_target
from cortex_workers.tasks.depth import waiting
from cortex_workers.tasks.link import BrokerAway, Link
from cortex_workers.tasks.messages import ContinueRunMessage, DeliverMessage, ResumeMessage
from cortex_workers.tasks.outbox import Outbox
from cortex_workers.tasks.routes import QUEUES, Fact, Kind, QueueKind, route

if TYPE_CHECKING:
    from cortex_workers.engine.runtime import Runtime

Target = Callable[[str], Mapping[str, int]]
"""By pool: how many hints are useful in each kind of queue (`store.demand.hint_target`)."""

BATCH = 200
FLUSH_S = 2.0


@dataclass(frozen=True, slots=True)
class Hint:
    """One message to be."""

    task: str
    queue: QueueKind
    kind: Kind
    pool: str
    subject: str
    body: Mapping[str, Any]


class CeleryPublisher:
    """Subscribe it to `Hooks`; one per process is enough, and a forked child gets a sender of its own."""

    def __init__(self, settings: Settings, target: Target | None = None) -> None:
        self._settings = settings
        self._target = target
        self._link = Link(settings)
        self._outboxes: dict[int, Outbox[Hint]] = {}
        _flush_at_exit(self)

    def __call__(self, notification: Notification) -> None:
        """Remember what is to be sent; returns at once."""
        found = route(notification)
        if found is None:
            return
        way, fact = found
        self._outbox().put(Hint(way.task, way.queue, way.kind, fact.pool, *_body(fact, way.kind)))

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait a little for what is still to be sent; False when some of it is not.

        At once False while the broker is left alone after a failure.
        """
        outbox = self._existing()
        if outbox is None or (not len(outbox) and outbox.drained(0)):
            return True
        return not self._link.resting_s and outbox.drained(min(timeout_s, FLUSH_S))

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Flush and end the sender."""
        self.flush(timeout_s)
        outbox = self._existing()
        if outbox is not None:
            outbox.close()

    def _existing(self) -> Outbox[Hint] | None:
        return self._outboxes.get(os.getpid())

    def _outbox(self) -> Outbox[Hint]:
        found = self._existing()
        if found is None or found.closed:
            found = self._begin(found)
        return found

    def _begin(self, closed: Outbox[Hint] | None) -> Outbox[Hint]:
        made: Outbox[Hint] = Outbox(self._settings.publish_queue, why="queue_full")
        if closed is None:
            # One step, so that of two threads that come first both get the same; what a parent left stays behind.
            found = self._outboxes.setdefault(made.pid, made)
        else:
            found = self._outboxes[made.pid] = made
        if found is made:
            threading.Thread(target=self._send_all, args=(made,), name="hint-publisher", daemon=True).start()
        return found

    def _send_all(self, outbox: Outbox[Hint]) -> None:
        while batch := outbox.take(BATCH):
            try:
                left = self._send(batch)
            except Exception as error:  # noqa: BLE001  the thread's own edge: without it nothing is ever sent again
                telemetry.event("hint.failed", level="error", waiting=len(batch), error=type(error).__name__)
                left = []
            if not left:
                outbox.done()
                continue
            outbox.give_back(left)
            if outbox.closed:
                break
            outbox.rest(self._link.resting_s)
        self._link.close()

    def _send(self, batch: Sequence[Hint]) -> list[Hint]:
        """Send what is useful of a batch, begun runs first; returns what could not be sent."""
        left = deque(sorted(batch, key=_order))
        try:
            while left:
                group = [hint for hint in left if _order(hint) == _order(left[0])]
                room = self._room(group)
                for _ in range(room):
                    self._send_one(left[0])
                    left.popleft()
                for _ in range(len(group) - room):
                    left.popleft()
                    telemetry.PUBLISH_DROPPED.labels("target_depth").inc()
        except BrokerAway as error:
            telemetry.PUBLISH_FAILURES.inc()
            telemetry.event("hint.failed", level="warning", waiting=len(left), error=error.message)
        return list(left)

    def _room(self, hints: Sequence[Hint]) -> int:
        """How many of these hints, all of one queue, are useful now.

        Asked for each batch and after its rows were committed, so the rows are among those counted: what is dropped
        finds as many hints in the queue as there are slots for them.
        """
        kind, pool = hints[0].queue, hints[0].pool
        if self._target is None:
            return len(hints)
        name = self._settings.queue_for(kind, pool)
        there = self._link.use(lambda connection: waiting(connection, name))
        if there + len(hints) <= 1:
            return len(hints)  # the target is never below one while a row waits
        try:
            wanted = self._target(pool).get(kind, there + len(hints))
        except CortexError:
            return len(hints)
        return max(0, min(len(hints), wanted - there))

    def _send_one(self, hint: Hint) -> None:
        from cortex_workers.tasks.app import queue

        options: dict[str, Any] = {
            "kwargs": dict(hint.body),
            # What Flower shows; without these Celery would copy whatever it is given, twice.
            "kwargsrepr": hint.subject,
            "argsrepr": "()",
            "queue": queue(self._settings, hint.queue, hint.pool),
            "ignore_result": True,
            # The link tries a second time by itself, on a fresh connection.
            "retry": False,
        }
        self._link.use(
            lambda connection: self._link.app.send_task(
                hint.task, producer=self._link.producer(connection), **options
            )
        )
        telemetry.PUBLISHED.labels(hint.task).inc()
        telemetry.event("hint.published", level="debug", subject=hint.subject, task=hint.task)


def _body(fact: Fact, kind: Kind) -> tuple[str, Mapping[str, Any]]:
    """What Flower shows of a hint, and its message: a delivery, a named admission, or a wake-up with a preference."""
    if isinstance(fact, DeliveryDue):
        return f"delivery_id={fact.delivery_id}", DeliverMessage(delivery_id=fact.delivery_id).body()
    shown, ids = f"run_id={fact.run_id}", {"run_id": fact.run_id, "revision": fact.revision}
    if isinstance(fact, ResumeAdmitted):
        return shown, ResumeMessage(**ids, suspension_id=fact.suspension_id).body()
    return shown, ContinueRunMessage(**ids, kind=kind).body()


def attach(rt: Runtime) -> CeleryPublisher:
    """Make a process's runtime tell the fleet: its hints go to the broker, and end with it."""

    def target(pool: str) -> Mapping[str, int]:
        with rt.database.read() as unit:
            return hint_target(unit, pool)

    publisher = CeleryPublisher(rt.settings, target)

    def flush(timeout_s: float) -> None:
        publisher.flush(timeout_s)

    rt.hooks.subscribe(publisher)
    rt.nudge = publisher
    rt.flush = flush
    rt.closers.append(publisher.close)
    return publisher


def _order(hint: Hint) -> tuple[int, str]:
    """What has begun goes first; hints of one queue stay together, in order of arrival."""
    return -QUEUES.index(hint.queue), hint.pool


def _flush_at_exit(publisher: CeleryPublisher) -> None:
    """Give what waits a last moment when the interpreter ends, without keeping the publisher alive."""
    reference = weakref.ref(publisher)

    def flush() -> None:
        alive = reference()
        if alive is not None:
            alive.flush()

    atexit.register(flush)
    weakref.finalize(publisher, atexit.unregister, flush)

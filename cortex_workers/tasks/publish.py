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
from cortex_workers.schemas.notifications import Notification, ResumeAdmitted
from cortex_workers.settings import Settings
from cortex_workers.store.demand import hint_target
from cortex_workers.tasks.depth import waiting
from cortex_workers.tasks.link import BrokerAway, Link
from cortex_workers.tasks.messages import ContinueRunMessage, ResumeMessage
from cortex_workers.tasks.outbox import Outbox
from cortex_workers.tasks.routes import QUEUES, Kind, QueueKind, route

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
    run_id: str
    revision: int
    suspension_id: str | None = None


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
        suspension_id = fact.suspension_id if isinstance(fact, ResumeAdmitted) else None
        hint = Hint(way.task, way.queue, way.kind, fact.pool, fact.run_id, fact.revision, suspension_id)
        self._outbox().put(hint)

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait a little for what is still to be sent; False when some of it is not.

        At once False while the broker is left alone after a failure.
        """
        outbox = self._existing()
        if outbox is None or (not len(outbox) and outbox.drained(0)):
            return True
        return not self._link.resting_s and outbox.drained(min(timeout_s, FLUSH_S))

    def flush_finally(self, timeout_s: float = FLUSH_S) -> bool:
        """Flush at the end, once: whoever ends later in this process does not wait for the same hints again."""
        outbox = self._existing()
        if outbox is None:
            return True
        sent = self.flush(0 if outbox.given_up else timeout_s)
        outbox.given_up = not sent
        return sent

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Flush and end the sender."""
        self.flush_finally(timeout_s)
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
        if self._existing() is outbox:
            # Otherwise somebody has begun again, and the link is theirs.
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

        body = _body(hint)
        options: dict[str, Any] = {
            "kwargs": body,
            # What Flower shows; without these Celery would copy whatever it is given, twice.
            "kwargsrepr": f"run_id={hint.run_id}",
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
        telemetry.event("hint.published", level="debug", run_id=hint.run_id, task=hint.task)


def _body(hint: Hint) -> dict[str, Any]:
    """The message of a hint: a named admission for `resume`, else a wake-up with a preference."""
    if hint.suspension_id is not None:
        return ResumeMessage(
            run_id=hint.run_id, suspension_id=hint.suspension_id, revision=hint.revision
        ).body()
    return ContinueRunMessage(run_id=hint.run_id, revision=hint.revision, kind=hint.kind).body()


def attach(rt: Runtime) -> CeleryPublisher:
    """Make a process's runtime tell the fleet: its hints go to the broker, and end with it."""

    def target(pool: str) -> Mapping[str, int]:
        with rt.database.read() as unit:
            return hint_target(unit, pool)

    publisher = CeleryPublisher(rt.settings, target)

    rt.hooks.subscribe(publisher)
    rt.nudge = publisher
    rt.flush = publisher.flush_finally
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
            alive.flush_finally()

    atexit.register(flush)
    weakref.finalize(publisher, atexit.unregister, flush)

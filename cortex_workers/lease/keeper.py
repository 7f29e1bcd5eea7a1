"""Keeps what this process holds: one thread renews all leases in one statement, and judges those it could not renew.

*Confirmed* is a run whose row came back from a renewal. *Unconfirmed* is one whose row did not: it may only be locked.
*Lost* is one that a second read, in the same pass, shows under another owner, revision or state.
Source: rulings 16, 23, 26 to 30.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cortex_workers import telemetry
from cortex_workers.lease.held import Held, now
from cortex_workers.lease.slots import Slots
from cortex_workers.lease.threads import start_real
from cortex_workers.schemas.lease import Term
from cortex_workers.settings import Settings
from cortex_workers.store import leases, workers
from cortex_workers.store.database import Database
from cortex_workers.store.unit import Unit

__all__ = ["RETRY_S", "DrainRequest", "Held", "LeaseKeeper"]

RETRY_S = 1.0
"""Pause after a pass that failed, and the least pause between two heartbeats written out of turn."""


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """Somebody asked this worker to drain."""

    by: str | None
    reason: str | None
    pause_sessions: bool


class LeaseKeeper:
    """Renews what one process holds and heartbeats its worker row; one per process, never shared across a fork."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        worker_id: str,
        *,
        slots: Slots,
        on_drain_request: Callable[[DrainRequest], None] | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.trust_s = settings.lease_trust_s
        self.lock = threading.RLock()
        self.drain_request: DrainRequest | None = None
        self._database = database
        self._ttl_s, self._renew_s = settings.lease_ttl_s, settings.lease_renew_s
        self._slots = slots
        self._on_drain_request = on_drain_request
        self._held: dict[tuple[str, int], Held] = {}
        self._verdict = threading.Condition(self.lock)
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._started = self._closed = False
        self._failing: set[str] = set()
        self._asked = self._passed = 0
        self._pass_at = self._beat_at = -math.inf
        self._beat_wanted = False
        slots.on_room(self._want_heartbeat)

    def start(self) -> None:
        """Start the thread; a second time does nothing. The first pass is made at once."""
        with self.lock:
            if self._started or self._closed:
                return
            self._started = True
        start_real("lease-keeper", self._main)

    def stop(self, wait_s: float = 5.0) -> None:
        """End the thread, waiting a little for a pass under way.

        What is still held is lost to this process, since nobody renews it any more.
        """
        self.trip()
        if self._started:
            self._ended.wait(wait_s)

    def hold(self, term: Term, age_s: float = 0.0) -> Held:
        """Take a claimed term into the set. ``age_s`` is how long ago its claim was sent.

        After ``stop`` or ``trip`` it comes back lost.
        """
        held = Held(self, term, now() - age_s)
        with self.lock:
            if self._closed:
                held.lose()
                return held
            self._held[(term.run_id, term.revision)] = held
            telemetry.HELD_RUNS.set(len(self._held))
        return held

    def forget(self, held: Held) -> None:
        """Take a term out of the set at once."""
        with self.lock:
            if self._keeps(held):
                del self._held[(held.term.run_id, held.term.revision)]
                telemetry.HELD_RUNS.set(len(self._held))

    def terms(self) -> list[Term]:
        """What is held now."""
        with self.lock:
            return [held.term for held in self._held.values()]

    def trip(self) -> list[Term]:
        """The in-process fence: all that is held is lost, all that comes later too. Returns what was held.

        The thread ends with it.
        """
        with self.lock:
            self._closed = True
            given_up = list(self._held.values())
            self._held.clear()
            telemetry.HELD_RUNS.set(0)
        for held in given_up:
            held.lose()
        self._tell()
        self._wake.set()
        return [held.term for held in given_up]

    def kick(self, wait_s: float = 0.0) -> bool:
        """Make a pass now; True when one that began after this call is over within ``wait_s`` seconds."""
        with self.lock:
            self._asked += 1
            wanted = self._asked
        self._wake.set()
        with self._verdict:
            return self._verdict.wait_for(lambda: self._passed >= wanted, wait_s)

    def await_verdict(self, timeout_s: float) -> None:
        """Wait for the end of a pass."""
        with self._verdict:
            self._verdict.wait(timeout_s)

    # --- The thread ---------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._closed:
                self._do_what_is_due()
                self._wake.wait(max(0.0, self._next_due() - time.monotonic()))
                self._wake.clear()
        finally:
            self._ended.set()

    def _do_what_is_due(self) -> None:
        moment = time.monotonic()
        if moment >= self._pass_at or self._asked > self._passed:
            self._pass()
        elif self._beat_wanted and moment >= self._beat_at + RETRY_S:
            self._heartbeat()

    def _next_due(self) -> float:
        if self._asked > self._passed:
            return -math.inf
        return min(self._pass_at, self._beat_at + RETRY_S) if self._beat_wanted else self._pass_at

    def _pass(self) -> None:
        asked, began = self._asked, time.monotonic()
        renewed = self._attempt(self._renew, "lease.unconfirmed", "lease.renewed")
        # A pass that hung (a frozen server) is followed by the next at once: its good news is old.
        self._pass_at = began + self._renew_s if renewed else time.monotonic() + RETRY_S
        self._passed = asked
        self._tell()
        if renewed:
            self._heartbeat()

    def _attempt(self, work: Callable[[], None], bad_news: str, good_news: str) -> bool:
        """Do it, whatever happens: all that this process runs hangs on there being a next time."""
        try:
            work()
        except Exception as error:  # noqa: BLE001  the frame that keeps the thread alive
            if bad_news not in self._failing:
                telemetry.event(bad_news, level="warning", held=len(self._held), error=repr(error))
            self._failing.add(bad_news)
            return False
        if bad_news in self._failing:
            telemetry.event(good_news, held=len(self._held))
        self._failing.discard(bad_news)
        return True

    def _renew(self) -> None:
        with self.lock:
            held = list(self._held.values())
        if not held:
            return
        terms = [one.term for one in held]
        sent_at = now()
        with telemetry.RENEW_SECONDS.time():
            renewed = self._database.run(
                lambda unit: leases.renew(unit, self.worker_id, terms, self._ttl_s), lease=True
            )
        silent: list[Held] = []
        for one in held:
            found = renewed.get(one.term.run_id)
            if found is not None and found.revision == one.term.revision:
                one.confirm(sent_at, found.stop_requested_reason)
            else:
                silent.append(one)
        if silent:
            self._judge(silent)

    def _judge(self, silent: Sequence[Held]) -> None:
        """The second read: what did not come back is either locked or lost."""
        run_ids = {one.term.run_id for one in silent}
        holders = self._database.run(lambda unit: leases.reread(unit, run_ids), lease=True)
        for one in silent:
            holder = holders.get(one.term.run_id)
            if holder is not None and holder.confirms(one.term):
                telemetry.event("lease.unconfirmed", level="warning", run_id=one.term.run_id, error="locked")
            elif not one.is_ending and self._keeps(one):
                telemetry.event(
                    "lease.lost", level="warning", run_id=one.term.run_id, revision=one.term.revision
                )
                self.forget(one)
                one.lose()

    def _keeps(self, held: Held) -> bool:
        return self._held.get((held.term.run_id, held.term.revision)) is held

    def _heartbeat(self) -> None:
        # Before the write: a slot that frees while it is under way wants another one.
        self._beat_wanted = False
        used, rank = self._slots.used, self._slots.last_start_rank

        def beat(unit: Unit) -> workers.Heartbeat | None:
            return workers.heartbeat(unit, self.worker_id, used, rank)

        def write() -> None:
            self._listen(self._database.run(beat, lease=True))

        written = self._attempt(write, "worker.unheard", "worker.heard")
        self._beat_at = time.monotonic()
        self._beat_wanted = self._beat_wanted or not written

    def _listen(self, read: workers.Heartbeat | None) -> None:
        if read is None or read.drain_requested_at is None or self.drain_request is not None:
            return
        self.drain_request = DrainRequest(read.drain_requested_by, read.drain_reason, read.pause_sessions)
        if self._on_drain_request is not None:
            self._on_drain_request(self.drain_request)

    def _want_heartbeat(self) -> None:
        self._beat_wanted = True
        self._wake.set()

    def _tell(self) -> None:
        with self._verdict:
            self._verdict.notify_all()

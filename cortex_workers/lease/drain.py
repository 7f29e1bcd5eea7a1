"""Ending a worker in good order: the switch that says so, and the watchdog that ends what does not listen.

Source: rulings 31, 32; celery.md 5.
"""

from __future__ import annotations

import atexit
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Collection
from typing import NoReturn

from cortex_workers import telemetry
from cortex_workers.errors import StoreUnavailable
from cortex_workers.lease.keeper import LeaseKeeper
from cortex_workers.lease.slots import Slots
from cortex_workers.lease.threads import start_real
from cortex_workers.schemas.lease import Term
from cortex_workers.settings import Settings
from cortex_workers.store import leases, workers
from cortex_workers.store.database import Database

LOOK_S = 0.1
"""How often the mirror of the switch looks at its byte."""
FLUSH_S = 2.0
HAND_OFF_S = 10.0
"""The watchdog's statement gets this long, so that a frozen Postgres cannot keep the process alive."""
EXIT_HANDED_OFF, EXIT_FAILED = 0, 3


class DrainSwitch:
    """One byte that the threads of a process and its forked children share; it goes on and never off.

    Make it before the fork. Setting and asking take no lock, so both may be done inside a signal handler.
    """

    def __init__(self) -> None:
        # Anonymous and shared: a forked child maps the same page.
        self._byte = mmap.mmap(-1, 1)
        self._mirrors: dict[int, _Mirror] = {}

    def set(self) -> None:
        """Say that this process and its children drain."""
        self._byte[0] = 1

    def is_set(self) -> bool:
        """Whether this process drains."""
        return self._byte[0] != 0

    @property
    def event(self) -> threading.Event:
        """An event of this process that follows the switch within a tenth of a second."""
        return self._mirror().event

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the switch is set; False when that took longer."""
        return self.is_set() or self.event.wait(timeout_s)

    def on_drain(self, callback: Callable[[], None]) -> None:
        """Call back once, in a thread of its own, when the switch is set, whoever sets it; in this process only."""
        self._mirror().add(callback)

    def _mirror(self) -> _Mirror:
        # Keyed by pid: a forked child has the dictionary of its parent and none of its threads.
        mirror = self._mirrors.setdefault(os.getpid(), _Mirror(self.is_set))
        mirror.start()
        return mirror


class _Mirror:
    """Follows the byte in one process, where threads can wait for it."""

    def __init__(self, is_set: Callable[[], bool]) -> None:
        self.event = threading.Event()
        self._is_set = is_set
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._started = False

    def start(self) -> None:
        with self._lock:
            if self._started:
                return
            self._started = True
        start_real("drain-mirror", self._follow)

    def add(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self.event.is_set():
                self._callbacks.append(callback)
                return
        start_real("drain-callback", callback)

    def _follow(self) -> None:
        pause = threading.Event()
        while not self._is_set():
            pause.wait(LOOK_S)
        with self._lock:
            self.event.set()
            told, self._callbacks = self._callbacks, []
        for callback in told:
            start_real("drain-callback", callback)


class Watchdog:
    """Ends this process at the deadline of its drain; what it still runs is handed off first.

    A process that ends by itself before takes the watchdog with it.
    """

    def __init__(
        self,
        keeper: LeaseKeeper,
        slots: Slots,
        database: Database,
        drain: DrainSwitch,
        settings: Settings,
        flush: Callable[[float], None],
    ) -> None:
        self._keeper, self._slots, self._database, self._drain = keeper, slots, database, drain
        self._drain_s = settings.drain_s
        self._flush = flush
        self._lock = threading.Lock()
        self._starts = itertools.count()
        self._expired = False
        self._stood_down = threading.Event()
        atexit.register(self.stand_down)

    def start(self) -> None:
        """Begin to drain, with the deadline from now; twice is harmless. Safe inside a signal handler, gevent's too."""
        self._drain.set()
        # One step, since a handler must take no lock: it may have interrupted the thread that holds it.
        if next(self._starts) == 0:
            start_real("drain-watchdog", self._watch)

    def stand_down(self) -> None:
        """Give up the deadline, at the end of a process or for one that goes on after its drain.

        Too late, it does not return: once the fence is tripped the main thread may find all its work done, and must
        not leave before the hand-off.
        """
        with self._lock:
            if not self._expired:
                self._stood_down.set()
        if self._expired:
            self._stood_down.wait(HAND_OFF_S + 4 * FLUSH_S)
        atexit.unregister(self.stand_down)

    def _expire(self) -> NoReturn:
        """The deadline passed: let nothing enter, stop all that runs here, hand it off, send the hints, leave."""
        self._slots.close()
        terms = self._keeper.trip()
        handed_off = _within(HAND_OFF_S, lambda: self._hand_off(terms))
        _within(FLUSH_S, lambda: self._tidy(terms))
        _within(2 * FLUSH_S, lambda: self._flush(FLUSH_S))
        os._exit(EXIT_HANDED_OFF if handed_off else EXIT_FAILED)

    def _watch(self) -> None:
        start_real("drain-mark", self._mark)
        self._stood_down.wait(self._drain_s)
        with self._lock:
            self._expired = not self._stood_down.is_set()
        if self._expired:
            self._expire()

    def _mark(self) -> None:
        telemetry.event("worker.draining", held=len(self._keeper.terms()), deadline_s=self._drain_s)
        self._database.run(lambda unit: workers.mark_draining(unit, self._keeper.worker_id), lease=True)

    def _hand_off(self, terms: Collection[Term]) -> None:
        left, end = list(terms), time.monotonic() + HAND_OFF_S / 2
        while left:
            left = self._hand_off_once(left)
            if left and time.monotonic() > end:
                raise StoreUnavailable("rows of held runs stayed locked")
            if left:
                time.sleep(
                    LOOK_S
                )  # the lock is another process's: its end cannot be waited for without taking it

    def _hand_off_once(self, terms: list[Term]) -> list[Term]:
        """Returns what is still ours: a worker's thread had its row locked, and may be about to let go by itself."""
        owner = self._keeper.worker_id
        moved = self._database.run(lambda unit: leases.hand_off_all(unit, owner, terms, owner), lease=True)
        telemetry.HAND_OFFS.labels("watchdog").inc(len(moved))
        gone = {row["id"] for row in moved}
        others = [term for term in terms if term.run_id not in gone]
        if not others:
            return []
        holders = self._database.run(lambda unit: leases.reread(unit, [o.run_id for o in others]), lease=True)
        return [
            term
            for term in others
            if (found := holders.get(term.run_id)) is not None and found.confirms(term)
        ]

    def _tidy(self, terms: Collection[Term]) -> None:
        """Put back what was claimed in the last moment, and close the worker's row."""
        owner = self._keeper.worker_id
        telemetry.event("worker.watchdog", level="warning", handed_off=len(terms))
        self._database.run(lambda unit: leases.hand_back_strays(unit, owner, terms, owner), lease=True)
        self._database.run(lambda unit: workers.end(unit, owner, "watchdog"), lease=True)


def _within(seconds: float, work: Callable[[], None]) -> bool:
    """Do something in a thread that nobody needs to wait for; True when it went well and in time."""
    done = threading.Event()
    went_well = False

    def attempt() -> None:
        nonlocal went_well
        try:
            work()
            went_well = True
        finally:
            done.set()

    start_real("drain-step", attempt)
    return done.wait(seconds) and went_well

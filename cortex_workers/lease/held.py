"""One term that this process holds: what the loop of a run asks at every boundary.

Trust ends ``lease_trust_s`` after the last confirmed renewal was *sent*, by this process's own clock, long before the
database would let anybody else take the run. Loss of trust blocks; it does not kill.
Source: ruling 28; decision R18.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Protocol, Self

from cortex_workers import telemetry
from cortex_workers.errors import LeaseLost
from cortex_workers.schemas.lease import Term

WAIT_S = 0.5
"""A waiter looks again this often, so that a wake-up lost between a greenlet and a thread costs half a second."""
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """This process's clock for trust: it goes on while the machine sleeps, as the database's does (on Linux)."""
    return time.clock_gettime(_CLOCK)


class Keeps(Protocol):
    """What a held term needs of its keeper."""

    trust_s: float

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    def forget(self, held: Held) -> None: ...

    def await_verdict(self, timeout_s: float) -> None: ...


class Held:
    """One term in the keeper's set; release it the moment the term is given up."""

    def __init__(self, keeper: Keeps, term: Term, since: float) -> None:
        self.term = term
        self._keeper = keeper
        self._confirmed_at = since
        self._lost = False
        self._ending = False
        self._stop_reason: str | None = None
        self._callbacks: list[Callable[[], None]] = []

    @property
    def lost(self) -> bool:
        """Whether somebody else has the run, or this process gave up all it had."""
        return self._lost

    @property
    def stop_requested(self) -> str | None:
        """Why somebody wants the run given back at its next boundary; None when nobody does."""
        return self._stop_reason

    @property
    def is_ending(self) -> bool:
        """Whether this worker is itself writing the end of the term."""
        return self._ending

    @property
    def confirmed_at(self) -> float:
        """When the last renewal that went through was sent (``now``); the claim, before the first."""
        return self._confirmed_at

    def trusted(self) -> bool:
        """Whether an effect may be started now."""
        return not self._lost and now() < self._confirmed_at + self._keeper.trust_s

    def wait_trusted(self, deadline_s: float | None = None) -> bool:
        """Block while trust is gone; False when that took longer than ``deadline_s`` seconds.

        Raises: LeaseLost when the verdict is that somebody else has the run.
        """
        end = math.inf if deadline_s is None else now() + deadline_s
        while not self.trusted():
            if self._lost:
                raise LeaseLost(run_id=self.term.run_id)
            left = end - now()
            if left <= 0:
                return False
            self._keeper.await_verdict(min(left, WAIT_S))
        return True

    def on_stop(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back once, from any thread, when the run is lost or a stop is requested; at once if it is already.

        The callback must be quick. Returns what takes it back.
        """
        with self._keeper.lock:
            if not (self._lost or self._stop_reason):
                self._callbacks.append(callback)
                return lambda: self._take_back(callback)
        callback()
        return lambda: None

    def note_stop(self, reason: str) -> None:
        """Take note of a stop request that a renewal or a fenced write read back."""
        with self._keeper.lock:
            self._stop_reason = reason
            told = self._take_callbacks()
        _call(told)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Around the transaction that ends this term: when it went through, the term leaves the set.

        Meanwhile the keeper draws no conclusion from a row that its own worker has just moved.
        """
        self._ending = True
        try:
            yield
            self.release()
        finally:
            self._ending = False

    def release(self) -> None:
        """Leave the keeper's set at once: the next renewal does not name this term. Twice is harmless."""
        self._keeper.forget(self)

    def confirm(self, sent_at: float, stop_reason: str | None) -> None:
        """Take the keeper's good news: the lease was renewed by a statement sent at that time (``now``)."""
        self._confirmed_at = max(self._confirmed_at, sent_at)
        if stop_reason is not None:
            self.note_stop(stop_reason)

    def lose(self) -> None:
        """Take the keeper's bad news."""
        with self._keeper.lock:
            self._lost = True
            told = self._take_callbacks()
        _call(told)

    def __enter__(self) -> Self:
        """Hold."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release."""
        self.release()

    def _take_back(self, callback: Callable[[], None]) -> None:
        with self._keeper.lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

    def _take_callbacks(self) -> list[Callable[[], None]]:
        told, self._callbacks = self._callbacks, []
        return told


def _call(callbacks: Sequence[Callable[[], None]]) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception as error:  # noqa: BLE001  one run's callback must not cost the others their renewal
            telemetry.event("hook.failed", level="error", kind="on_stop", error=repr(error))

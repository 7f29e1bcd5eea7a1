"""A holder's writes outlive a loss of Postgres: repeated until they are known to be in, or the run is somebody else's.

An error before the commit wrote nothing. An error during the commit is "unknown": the row is read again, and tells
whether this very write is in (bug cases C14, C51). A refusal may only mean that the lease ran out while nobody could
renew it: the keeper's next renewal tells (ruling 28). Without this, an outage of Postgres would turn every outcome in
hand into an uncertain effect.
Source: celery.md 17; ruling 8.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from cortex_workers import telemetry
from cortex_workers.engine.execution import Execution
from cortex_workers.errors import LeaseLost, StoreUnavailable
from cortex_workers.lease.held import WAIT_S, Held, now
from cortex_workers.schemas.lifecycle import transition
from cortex_workers.store import runs, transitions
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit

T = TypeVar("T")
_FIRST_PAUSE_S = 0.1
_MOST_PAUSE_S = 2.0


def write(ex: Execution, work: Callable[[Unit], T], landed: Callable[[Row], T | None]) -> T:
    """Do one fenced transaction of a holder.

    ``landed`` is given the row as it is after an unknown commit and returns what ``work`` would have returned when
    the write is in, else None.
    Raises: LeaseLost when the term is over, StoreUnavailable when this process gives its runs up first.
    """
    pauses, unknown = _Pauses(ex.held), False
    while True:
        sent_at = now()
        try:
            if unknown:
                found = _look(ex, landed)
                if found is not None:
                    return found
            return ex.rt.database.run(work)
        except LeaseLost:
            if not _renewed_since(ex, sent_at):
                raise
        except StoreUnavailable as error:
            unknown = unknown or bool(error.data.get("unknown"))
            if ex.held.lost:
                raise
            pauses.wait(unknown)


def read(ex: Execution, work: Callable[[Unit], T]) -> T:
    """Read for a run that is held, past an outage of Postgres.

    Raises: StoreUnavailable when this process gives its runs up first.
    """

    def once() -> T:
        with ex.rt.database.read() as unit:
            return work(unit)

    return patiently(ex.held, once)


def patiently(held: Held, work: Callable[[], T]) -> T:
    """Do something for a run that is held, past an outage of Postgres: given up, the run would lapse for it.

    Raises: StoreUnavailable when this process gives its runs up first, and whatever else ``work`` raises.
    """
    pauses = _Pauses(held)
    while True:
        try:
            return work()
        except StoreUnavailable:
            if held.lost:
                raise
            pauses.wait()


class _Pauses:
    """The growing waits between two tries."""

    def __init__(self, held: Held) -> None:
        self._run_id = held.term.run_id
        self._next_s = _FIRST_PAUSE_S
        self._waited = threading.Event()

    def wait(self, unknown: bool = False) -> None:
        telemetry.event("store.retry", "warning", run_id=self._run_id, unknown=unknown)
        self._waited.wait(self._next_s)
        self._next_s = min(self._next_s * 2, _MOST_PAUSE_S)


def _renewed_since(ex: Execution, sent_at: float) -> bool:
    """Whether the keeper has renewed this term after a write of it was refused: then only the lease had run out."""
    while not ex.held.lost:
        if ex.rt.keeper.kick(WAIT_S):
            return ex.held.confirmed_at > sent_at
    return False


def _look(ex: Execution, landed: Callable[[Row], T | None]) -> T | None:
    # Locked: a commit whose answer was lost may still be on its way, and must be waited for.
    row = ex.rt.database.run(lambda unit: runs.lock(unit, ex.run_id))
    if row is None:
        raise LeaseLost(run_id=ex.run_id)
    return landed(row)


def moved_by(ex: Execution, name: str, seqs: int) -> Callable[[Row], tuple[Row, int] | None]:
    """Tells whether this term's own transition is in, and gives its row and first ordinal."""
    target = transition("run", name).target

    def landed(row: Row) -> tuple[Row, int] | None:
        if row["revision"] == ex.term.revision + 1 and row["state"] == target:
            return row, transitions.base(row, seqs)
        return None

    return landed


def saved_by(ex: Execution, seqs: int) -> Callable[[Row], tuple[int, str | None] | None]:
    """Tells whether this term's own progress is in: while it holds the run, nobody else moves the ordinals."""

    def landed(row: Row) -> tuple[int, str | None] | None:
        if row["revision"] == ex.term.revision and row["next_seq"] == ex.next_seq + seqs:
            return int(row["next_seq"]) - seqs, row["stop_requested_reason"]
        return None

    return landed

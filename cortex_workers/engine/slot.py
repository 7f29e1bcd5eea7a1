"""A slot of a worker: claim with preference, work, then take the next run straight from Postgres for a while.

Source: decision R8; rulings 13, 14, 16, 18, 31.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Literal

from cortex_workers import probes, telemetry
from cortex_workers.engine import suspend
from cortex_workers.engine.continue_run import execute
from cortex_workers.engine.runtime import Runtime
from cortex_workers.errors import NotContinuable, RunAlreadyDone, RunLeased, RunNotFound, Stopping
from cortex_workers.schemas.lease import Term
from cortex_workers.schemas.lifecycle import TERMINAL_RUN_STATES
from cortex_workers.schemas.outcomes import Continued
from cortex_workers.store import claims, leases, runs
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit

Kind = Literal["start", "begun"]
_NAMED_TRIES = 3
_NAMED_PAUSE_S = 0.033


@dataclass(slots=True)
class _Shift:
    """One task's stay in a slot."""

    began: float
    worked: int = 0
    last_state: str = "nothing"


def work(rt: Runtime, run_id: str | None, kind: Kind = "start") -> Continued:
    """Take a slot, work on the named run (or the best one), then on further runs while the stay lasts.

    A hint for a start is a wake-up with a preference: begun runs go first (ruling 14).
    Raises: Stopping while draining, RunLeased, RunAlreadyDone, NotContinuable, RunNotFound when the named run needs
    nothing and nothing else waits.
    """
    if rt.drain.is_set():
        raise Stopping()
    if not rt.slots.try_enter(kind):
        telemetry.PUBLISH_DROPPED.labels("reserve").inc()
        raise NotContinuable("no slot is free for a start; slots that free up claim from the table")
    try:
        return _shift(rt, run_id, kind)
    finally:
        rt.slots.leave(kind)


def _shift(rt: Runtime, run_id: str | None, kind: Kind) -> Continued:
    shift = _Shift(time.monotonic())
    claimed = _first_claim(rt, run_id, kind)
    if not claimed and run_id is not None and kind == "begun":
        claimed = _next(rt, kind)
    while claimed:
        row = claimed.pop(0)
        began = time.monotonic()
        shift.last_state = _work_on(rt, row, claimed)
        shift.worked += 1
        rt.slots.note_run(time.monotonic() - began)
        if not claimed and not _over(rt, shift):
            claimed = _next(rt, kind)
    if shift.worked == 0 and run_id is not None:
        _explain(rt, run_id)
    return Continued(run_id=run_id, last_state=shift.last_state, runs=shift.worked)


def _over(rt: Runtime, shift: _Shift) -> bool:
    return rt.drain.is_set() or time.monotonic() - shift.began >= rt.settings.table_claim_s


def _first_claim(rt: Runtime, run_id: str | None, kind: Kind) -> list[Row]:
    if run_id is None:
        return _next(rt, kind)
    if kind == "begun":
        return claim_named(rt, run_id)

    def wanted(unit: Unit) -> list[Row]:
        if claims.begun_waits(unit, rt.claimer):
            return []
        return claims.claim_named(unit, rt.claimer, run_id)

    return _checked(rt, _try(rt, wanted)) or _next(rt, kind)


def claim_named(rt: Runtime, run_id: str) -> list[Row]:
    """Claim one run by its id; tries three times in 100 ms, for its session's row may be locked for a moment."""
    for attempt in range(_NAMED_TRIES):
        found = _checked(rt, _try(rt, lambda unit: claims.claim_named(unit, rt.claimer, run_id)))
        if found:
            return found
        if attempt + 1 < _NAMED_TRIES and not _worth_another_try(rt, run_id):
            break
        threading.Event().wait(_NAMED_PAUSE_S)
    return []


def _worth_another_try(rt: Runtime, run_id: str) -> bool:
    with rt.database.read() as unit:
        row = runs.get(unit, run_id)
    return (
        row is not None
        and row["shared"]
        and row["state"] in ("ready", "reclaimable")
        and not row["wait_reason"]
    )


def _next(rt: Runtime, kind: Kind) -> list[Row]:
    """The best claimable runs; starts only within the reserve."""
    if rt.drain.is_set():
        return []
    starts = kind == "start" or rt.slots.free_for_start > 0
    median = rt.slots.median_run_s
    batch = rt.settings.claim_batch if median < 0.1 else 1
    return _checked(
        rt, _try(rt, lambda unit: claims.claim_next(unit, rt.claimer, starts=starts, batch=batch))
    )


def _try(rt: Runtime, claim: object) -> list[Row]:
    def attempt(unit: Unit) -> list[Row]:
        rows: list[Row] = claim(unit)  # type: ignore[operator]
        if rows:
            probes.reach("claim.before_commit")
        return rows

    try:
        return rt.database.run(attempt)
    except claims.TurnTaken:
        return []


def _checked(rt: Runtime, rows: list[Row]) -> list[Row]:
    """No fresh claim once a drain began: what slipped in goes straight back, with its instruction (ruling 31)."""
    if not rows:
        return rows
    probes.reach("claim.after_commit")
    for row in rows:
        telemetry.CLAIMS.labels(row["before"]).inc()
        if row["before"] == "ready" and row["queue_class"] == "start":
            rt.slots.note_start_rank(int(row["rank"]))
    if rt.drain.is_set():
        for row in rows:
            give_back(rt, row, "drain")
        return []
    return rows


def give_back(rt: Runtime, row: Row, reason: str) -> None:
    """Undo a claim that dispatched nothing."""
    suspend.hand_back_claimed(rt.database.run, row, term_of(row), 0.0, rt.settings.sweep_interval_s, reason)


def give_back_interrupted(rt: Runtime, row: Row) -> None:
    """Hand off a run whose caller was interrupted, with what is stored of it."""
    term = term_of(row)
    rt.database.run(lambda unit: leases.hand_off_all(unit, term.owner, [term], term.owner))


def term_of(row: Row) -> Term:
    """The term that a claim began."""
    return Term(run_id=row["id"], owner=row["lease_owner"], revision=row["revision"])


def _work_on(rt: Runtime, row: Row, ahead: list[Row]) -> str:
    """Execute one claimed run; what is held ahead is renewed meanwhile and given back when it is not begun soon."""
    waiting = [rt.keeper.hold(term_of(item)) for item in ahead]
    try:
        state = execute(rt, row, rt.keeper.hold(term_of(row)))
    finally:
        for held in waiting:
            held.release()
    return state


def _explain(rt: Runtime, run_id: str) -> None:
    """Say why a named run was not continued: an ordinary outcome."""
    with rt.database.read() as unit:
        row = runs.get(unit, run_id)
    if row is None:
        raise RunNotFound(f"there is no run {run_id}")
    if row["state"] in TERMINAL_RUN_STATES:
        raise RunAlreadyDone(run=runs.to_run(row))
    if row["state"] == "running":
        raise RunLeased(owner=row["lease_owner"], expires_at=row["lease_expires_at"])
    raise NotContinuable(
        f"the run is {row['state']}" + (f" and waits: {row['wait_reason']}" if row["wait_reason"] else "")
    )

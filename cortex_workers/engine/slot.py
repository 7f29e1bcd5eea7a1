"""A slot of a worker: claim with preference, work, then take the next run straight from Postgres for a while.

Source: decision R8; rulings 13, 14, 16, 18, 31.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cortex_workers import probes, telemetry
from cortex_workers.engine import suspend
from cortex_workers.engine.ahead import Ahead, Claimed
from cortex_workers.engine.continue_run import execute
from cortex_workers.engine.runtime import Runtime
from cortex_workers.errors import (
    NotContinuable,
    RunAlreadyDone,
    RunLeased,
    RunNotFound,
    Stopping,
    Unavailable,
)
from cortex_workers.schemas.lease import Term
from cortex_workers.schemas.lifecycle import TERMINAL_RUN_STATES
from cortex_workers.schemas.outcomes import Continued
from cortex_workers.store import announcing, claims, leases, runs
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit

Kind = Literal["start", "begun"]
SHORT_RUN_S = 0.1
_NAMED_TRIES = 3
_NAMED_PAUSE_S = 0.033


@dataclass(slots=True)
class _Shift:
    """One task's stay in a slot; ``kind`` is what the slot counts as now."""

    kind: Kind
    began: float
    worked: int = 0
    last_state: str = "nothing"


def work(
    rt: Runtime, run_id: str | None, kind: Kind = "start", suspension_id: str | None = None
) -> Continued:
    """Take a slot, work on the named run (or the best one), then on further runs while the stay lasts.

    A hint for a start is a wake-up with a preference: begun runs go first (ruling 14). ``suspension_id`` pins the
    answer that was admitted for this very pause.
    Raises: Stopping while draining, RunLeased, RunAlreadyDone, NotContinuable, RunNotFound when the named run needs
    nothing and nothing else waits.
    """
    if rt.drain.is_set():
        raise Stopping()
    if not rt.slots.try_enter(kind):
        telemetry.PUBLISH_DROPPED.labels("reserve").inc()
        raise NotContinuable("no slot is free for it; slots that free up claim from the table")
    shift = _Shift(kind, time.monotonic())
    try:
        return _work(rt, run_id, shift, suspension_id)
    finally:
        rt.slots.leave(shift.kind)


def _work(rt: Runtime, run_id: str | None, shift: _Shift, suspension_id: str | None) -> Continued:
    current = _first_claim(rt, run_id, shift, suspension_id)
    if current is not None and rt.slots.free > 0:
        _nudge(rt)
    while current is not None:
        if not _fits(rt, shift, current):
            break
        began = time.monotonic()
        shift.last_state = execute(rt, current.row, current.held)
        shift.worked += 1
        rt.slots.note_run(time.monotonic() - began)
        current = None if _over(rt, shift) else _next(rt, shift)
    if shift.worked == 0 and run_id is not None:
        explain(rt, run_id)
    if shift.worked and _over(rt, shift) and not rt.drain.is_set():
        _nudge(rt)
    return Continued(run_id=run_id, last_state=shift.last_state, runs=shift.worked)


def _over(rt: Runtime, shift: _Shift) -> bool:
    return rt.drain.is_set() or time.monotonic() - shift.began >= rt.settings.table_claim_s


def _fits(rt: Runtime, shift: _Shift, current: Claimed) -> bool:
    """Count the slot as what it holds now; a start that the reserve has no room for goes back (ruling 13)."""
    wanted: Kind = "start" if current.row["queue_class"] == "start" else "begun"
    if wanted == shift.kind:
        return True
    if rt.slots.switch(shift.kind, wanted):
        shift.kind = wanted
        return True
    give_back(rt, current, "reserve")
    return False


def _first_claim(rt: Runtime, run_id: str | None, shift: _Shift, suspension_id: str | None) -> Claimed | None:
    if run_id is None:
        return _next(rt, shift)
    if shift.kind == "begun":
        return claim_named(rt, run_id, suspension_id) or _next(rt, shift)

    def wanted(unit: Unit) -> list[Row]:
        if claims.begun_waits(unit, rt.claimer):
            return []
        return claims.claim_named(unit, rt.claimer, run_id)

    return _claim(rt, wanted) or _next(rt, shift)


def claim_named(rt: Runtime, run_id: str, suspension_id: str | None = None) -> Claimed | None:
    """Claim one run by its id; tries three times in 100 ms, for its session's row may be locked for a moment."""
    for attempt in range(_NAMED_TRIES):
        found = _claim(
            rt, lambda unit: claims.claim_named(unit, rt.claimer, run_id, suspension_id=suspension_id)
        )
        if found is not None or not _worth_another_try(rt, run_id):
            return found
        if attempt + 1 < _NAMED_TRIES:
            threading.Event().wait(_NAMED_PAUSE_S)
    return None


def _worth_another_try(rt: Runtime, run_id: str) -> bool:
    with rt.database.read() as unit:
        row = runs.get(unit, run_id)
    return (
        row is not None
        and row["shared"]
        and row["state"] in ("ready", "reclaimable")
        and not row["wait_reason"]
    )


def _next(rt: Runtime, shift: _Shift) -> Claimed | None:
    """What was claimed ahead, else the best claimable run; starts only within the reserve."""
    if rt.drain.is_set():
        return None
    shelf = ahead(rt)
    waiting = shelf.take()
    if waiting is not None:
        return waiting
    starts = shift.kind == "start" or rt.slots.free_for_start > 0
    batch = min(rt.settings.claim_batch, shelf.room) if rt.slots.median_run_s < SHORT_RUN_S else 1
    return _claim(rt, lambda unit: claims.claim_next(unit, rt.claimer, starts=starts, batch=max(1, batch)))


def _claim(rt: Runtime, statement: Callable[[Unit], list[Row]]) -> Claimed | None:
    """Claim and hold; the first row is worked on now, others are kept ahead.

    No fresh claim once a drain began: what slipped in goes straight back, with its instruction (ruling 31).
    """

    def attempt(unit: Unit) -> list[Row]:
        rows = statement(unit)
        if rows:
            probes.reach("claim.before_commit")
        return rows

    sent = time.monotonic()
    try:
        rows = rt.database.run(attempt)
    except claims.TurnTaken:
        return None
    if not rows:
        return None
    claimed = [Claimed(row, rt.keeper.hold(term_of(row), time.monotonic() - sent)) for row in rows]
    probes.reach("claim.after_commit")
    for row in rows:
        telemetry.CLAIMS.labels(row["before"]).inc()
        telemetry.event("run.claimed", "debug", run_id=row["id"], revision=row["revision"])
        if row["queue_class"] == "start":
            rt.slots.note_start_rank(int(row["rank"]))
    if rt.drain.is_set():
        shelf = ahead(rt)
        shelf.put(claimed)
        shelf.give_back_all()
        return None
    ahead(rt).put(claimed[1:])
    return claimed[0]


def ahead(rt: Runtime) -> Ahead:
    """The shelf of this process."""
    if rt.ahead is None:
        rt.ahead = Ahead(lambda item: give_back(rt, item, "not begun"))
        rt.drain.on_drain(rt.ahead.give_back_all)
    return rt.ahead


def give_back(rt: Runtime, item: Claimed, reason: str) -> None:
    """Undo a claim that dispatched nothing; where that fails, the run is left to its lease and not held for nothing.

    Raises: StoreUnavailable.
    """
    try:
        with item.held.ending():
            suspend.hand_back_claimed(
                rt.database.run, item.row, item.held.term, 0.0, rt.settings.sweep_interval_s, reason
            )
    finally:
        item.held.release()


def give_back_interrupted(rt: Runtime, row: Row) -> None:
    """Hand off a run whose caller was interrupted, with what is stored of it."""
    term = term_of(row)
    rt.database.run(lambda unit: leases.hand_off_all(unit, term.owner, [term], term.owner))


def term_of(row: Row) -> Term:
    """The term that a claim began."""
    return Term(run_id=row["id"], owner=row["lease_owner"], revision=row["revision"])


def _nudge(rt: Runtime) -> None:
    """More may be claimable than hints are under way: publish one (ruling 16); hosts' hooks are not told again."""
    if rt.nudge is None:
        return
    try:
        with rt.database.read() as unit:
            row = claims.best_waiting(unit, rt.claimer)
        if row is not None:
            rt.nudge(announcing.waiting(row, renotified=True))
    except Unavailable as error:
        # A hint less: this slot may hold a claimed run, which must not wait for it.
        telemetry.event("hint.failed", "warning", error=error.code)


def explain(rt: Runtime, run_id: str) -> None:
    """Say why a named run was not continued: an ordinary outcome."""
    with rt.database.read() as unit:
        row = runs.get(unit, run_id)
    if row is None:
        raise RunNotFound(f"there is no run {run_id}")
    if row["state"] in TERMINAL_RUN_STATES:
        raise RunAlreadyDone(run=runs.to_run(row))
    if row["state"] == "running":
        raise RunLeased(owner=row["lease_owner"], expires_at=row["lease_expires_at"])
    raise NotContinuable(f"the run is {row['state']}{_why_not(rt, row)}")


def _why_not(rt: Runtime, row: Row) -> str:
    """What keeps this process from a run that is neither running nor over."""
    if row["state"] not in ("ready", "reclaimable"):
        return ""
    if row["wait_reason"]:
        return f" and waits: {row['wait_reason']}"
    definition = rt.versions.get(row["agent_digest"])
    missing = rt.served.missing_tools(definition) if definition is not None else ["its agent's version"]
    return f", and this process does not have {', '.join(missing)}" if missing else " and not free right now"

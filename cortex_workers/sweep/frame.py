"""The frame of every sweep: named passes, each taken by one conditional update, in an order that matters.

Whoever sweeps (beat's task, an operator, a worker's fallback) calls the same function; a sweep that comes while another
one is at work, or just was, is a cheap no-op.
Source: decision R5; rulings 25, 29; bug cases C16, C40, C41.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cortex_workers import telemetry
from cortex_workers.engine.runtime import Runtime
from cortex_workers.errors import InvalidArgument, Unavailable
from cortex_workers.schemas.outcomes import Swept
from cortex_workers.store import sweeps
from cortex_workers.store.sweeps import Look, Taken
from cortex_workers.sweep import expired, fleet, hints, lapsed, messages, orphans, waits
from cortex_workers.sweep.rows import PassRun

LEAST_INTERVALS = 0.5
"""A pass that started less than so many intervals ago is not due: half, so that a beat's jitter never costs one."""
PATIENCE_INTERVALS = 2.5
"""A holder that has not finished after so many intervals is taken for dead; under three, as C16 asks."""
GAP_INTERVALS = 3.0
SETTLE_S = 2.0
"""Keepers try again every second, so within this the living have renewed after an outage; or one interval, if less."""
MOST_WAITS = 2
_WAITED_AT, _WAITS = "waited_at", "waits"


@dataclass(frozen=True, slots=True)
class Pass:
    """One kind of periodic work; ``every_s`` None means with each sweep."""

    name: str
    work: Callable[[PassRun], None]
    every_s: float | None = None


PASSES: tuple[Pass, ...] = (
    Pass("lapses", lapsed.sweep_lapses),
    Pass("start_by", expired.sweep_start_by),
    Pass("asks", messages.sweep_asks),
    Pass("polls", expired.sweep_polls),
    Pass("expiries", expired.sweep_expiries),
    Pass("deliveries", messages.sweep_deliveries),
    Pass("waits", waits.sweep_waits),
    Pass("hints", hints.sweep_hints),
    Pass("checkpoints", orphans.sweep_checkpoints, every_s=orphans.EVERY_S),
    Pass("replies", messages.sweep_replies, every_s=messages.EVERY_S),
    Pass("workers", fleet.sweep_workers),
)
"""In this order: who lost a worker is freed before anything is hinted at. A later room adds its passes here."""

NAMES = tuple(each.name for each in PASSES)


def sweep(
    rt: Runtime, passes: Sequence[str] | None = None, by: str = "beat", *, force: bool = False
) -> Swept:
    """Do every pass that is due, or those named; returns the rows moved per pass, and how many passes were not due.

    ``force`` does passes that were done just now too (an operator asked), never one that is at work.
    Raises: InvalidArgument for an unknown name, StoreUnavailable when the database is gone.
    """
    wanted = _named(passes)
    with rt.database.read() as unit:
        known = sweeps.look(unit, [each.name for each in wanted])
    done: dict[str, int] = {}
    skipped = 0
    for each in wanted:
        if not _is_due(rt, each, known[each.name], force):
            skipped += 1
            continue
        run = _take_and_do(rt, each, by, force)
        if run is None:
            skipped += 1
        else:
            done[each.name] = run.done
    return Swept(done=done, skipped=skipped)


def last_sweep_age_s(rt: Runtime) -> float | None:
    """How long ago the fleet last swept, judged by the pass that is behind the most; None when it never did."""
    with rt.database.read() as unit:
        return sweeps.oldest_age_s(unit, [each.name for each in PASSES if each.every_s is None])


def look_around(rt: Runtime) -> None:
    """What each worker process does for itself now and then, whoever sweeps: serve versions that are new."""
    fleet.serve_new_versions(rt)


def _named(passes: Sequence[str] | None) -> list[Pass]:
    if passes is None:
        return list(PASSES)
    unknown = sorted(set(passes) - set(NAMES))
    if unknown:
        raise InvalidArgument(f"no such pass: {', '.join(unknown)[:100]}; there are {', '.join(NAMES)}")
    return [each for each in PASSES if each.name in passes]


def _every_s(rt: Runtime, each: Pass, force: bool) -> float:
    if force:
        return 0.0
    return each.every_s or LEAST_INTERVALS * rt.settings.sweep_interval_s


def _patience_s(rt: Runtime) -> float:
    return PATIENCE_INTERVALS * rt.settings.sweep_interval_s


def _is_due(rt: Runtime, each: Pass, found: Look, force: bool) -> bool:
    return found.is_due(_every_s(rt, each, force), _patience_s(rt))


def _take_and_do(rt: Runtime, each: Pass, by: str, force: bool) -> PassRun | None:
    """One pass from its conditional update to its end; None when somebody else has it, or it waits once (ruling 29)."""
    with rt.database.read() as unit:
        taken = sweeps.take(unit, each.name, rt.worker_id, _every_s(rt, each, force), _patience_s(rt))
    if taken is None or _waits_once(rt, taken):
        return None
    run = PassRun(rt, each.name, taken.cursor)
    began = time.monotonic()
    try:
        with telemetry.span("cortex.sweep", sweep=each.name):
            each.work(run)
    except Unavailable:
        raise
    except Exception as error:  # noqa: BLE001  one broken pass must not keep the others from their rows
        telemetry.event("sweep.row_failed", level="error", sweep=each.name, error=type(error).__name__)
    with rt.database.read() as unit:
        sweeps.finish(unit, taken, rt.worker_id, run.cursor, run.counts)
    _tell(run, by, time.monotonic() - began)
    return run


def _waits_once(rt: Runtime, taken: Taken) -> bool:
    """After a time in which nobody swept, leases are left alone once, so that those who live renew theirs first.

    The pass is given back as if never begun; a mark in its row says since when it waits.
    """
    interval_s = rt.settings.sweep_interval_s
    mark = _mark(taken, GAP_INTERVALS * interval_s, min(SETTLE_S, interval_s))
    if taken.name != "lapses" or mark is None:
        return False
    if mark[_WAITED_AT] != taken.cursor.get(_WAITED_AT):
        telemetry.event("sweep.done", sweep=taken.name, waited=True, waits=mark[_WAITS])
    with rt.database.read() as unit:
        sweeps.give_back(unit, taken, rt.worker_id, {**taken.cursor, **mark})
    return True


def _mark(taken: Taken, gap_s: float, settle_s: float) -> dict[str, Any] | None:
    """What the row says while the pass waits; None when it need not wait, or not any longer.

    A mark of a moment ago holds: another worker may sweep in the same instant. One that is older than a gap was made
    before this outage and is made anew, but only once: sweeps that are always so rare would wait for ever.
    """
    since, waits = taken.cursor.get(_WAITED_AT), int(taken.cursor.get(_WAITS, 0))
    anew = {_WAITED_AT: taken.started_at.isoformat(), _WAITS: waits + 1}
    if since is None:
        return anew if taken.gap_s is not None and taken.gap_s > gap_s else None
    waited_s = (taken.started_at - datetime.fromisoformat(since)).total_seconds()
    if waited_s < settle_s:
        return {_WAITED_AT: since, _WAITS: waits}
    return anew if waited_s > gap_s and waits < MOST_WAITS else None


def _tell(run: PassRun, by: str, seconds: float) -> None:
    telemetry.SWEEP_SECONDS.labels(run.name).observe(seconds)
    telemetry.SWEEP_ROWS.labels(run.name).inc(run.done)
    busy = run.due > 0
    telemetry.event(
        "sweep.done",
        level="info" if busy else "debug",
        sweep=run.name,
        by=by,
        seconds=round(seconds, 3),
        **run.counts,
    )

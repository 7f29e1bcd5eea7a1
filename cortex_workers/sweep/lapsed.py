"""Running rows whose lease ran out become reclaimable, with one reclaim counted.

Source: runs.md T20, 9.2; ruling 29.
"""

from __future__ import annotations

from cortex_workers import telemetry
from cortex_workers.engine import expire
from cortex_workers.engine.runtime import Runtime
from cortex_workers.store import due
from cortex_workers.sweep.rows import PassRun


def sweep_lapses(run: PassRun) -> None:
    """Take runs from workers that are dead or cut off."""
    run.each_due(due.lapsed_across_scopes, _lapse)


def _lapse(rt: Runtime, run_id: str) -> bool:
    moved = expire.lapse(rt, run_id)
    if moved:
        telemetry.RECLAIMS.inc()
    return moved

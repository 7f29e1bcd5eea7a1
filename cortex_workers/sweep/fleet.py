"""Who is there and what is served: silent workers are noted as ended, agents get their current version.

Source: rulings 51, 53; tables.md (workers).
"""

from __future__ import annotations

from cortex_workers.engine.runtime import Runtime
from cortex_workers.store import agents, workers
from cortex_workers.store.unit import Unit
from cortex_workers.sweep.rows import PassRun


def sweep_workers(run: PassRun) -> None:
    """Note which workers ended without a word, then which version of each agent is current among the live ones'."""
    silent_s, limit = run.rt.settings.lease_ttl_s, run.page
    run.repeat(lambda unit: len(workers.end_silent(unit, silent_s, limit)))
    run.rt.database.run(agents.recompute_current)


def serve_new_versions(rt: Runtime) -> int:
    """Look at agent versions that appeared since this worker started, and say which of them it can run.

    Each worker process has to look for itself; returns how many more it serves.
    """
    if rt.host is None or rt.slots.total == 0:
        return 0
    with rt.database.read() as unit:
        found = agents.unknown_versions(unit, rt.served.known)
    before = len(rt.served.digests)
    for digest, definition in found:
        rt.served.look_at(digest, definition)
    more = len(rt.served.digests) - before
    if more:
        _publish(rt)
    return more


def _publish(rt: Runtime) -> None:
    def work(unit: Unit) -> None:
        workers.set_served(unit, rt.worker_id, rt.served.digests)

    rt.database.run(work)

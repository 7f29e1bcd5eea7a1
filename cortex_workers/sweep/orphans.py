"""Checkpoints that no decision can reach any more are closed, a page every five minutes.

Source: runs.md 9.2 (4); ruling 25.
"""

from __future__ import annotations

from cortex_workers.engine.expire import SWEEPER
from cortex_workers.store import checkpoints, due, tables
from cortex_workers.store.due import Asked
from cortex_workers.store.unit import Unit
from cortex_workers.sweep.rows import PassRun

EVERY_S = 300.0


def sweep_checkpoints(run: PassRun) -> None:
    """Look at the next page of open questions, by id; after the last page the first comes again."""
    with run.rt.database.read() as unit:
        page = due.open_questions_across_scopes(unit, run.came_from.get("after_id"), run.page)
    for asked in page:
        if asked.why is not None:
            run.row(asked.id, lambda asked=asked: _close(run, asked))  # type: ignore[misc]
    if len(page) == run.page:
        run.cursor = {"after_id": page[-1].id}


def _close(run: PassRun, asked: Asked) -> bool:
    # Once out of reach, always out of reach: a run never comes back to a pause it has left.
    decision = {
        "approved": False,
        "decided_by": "cortex",
        "actor": SWEEPER,
        "reason": f"superseded: {asked.why}",
    }

    def work(unit: Unit) -> bool:
        where = [tables.checkpoints.c.id == asked.id]
        return bool(checkpoints.close(unit, "superseded", where, {"decision": decision}, asked.run_revision))

    return run.rt.database.run(work)

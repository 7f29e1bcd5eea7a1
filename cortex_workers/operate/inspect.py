"""One run as an operator may see it: its row, its story in order, and what it waits for.

Source: house.md 3.3 (labels derived only from what the rows prove); ruling 58.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from cortex_workers.engine.runtime import Runtime
from cortex_workers.engine.validate import checked_id
from cortex_workers.errors import RunNotFound
from cortex_workers.operate.hint import next_step_hint
from cortex_workers.operate.story import Entry, entries
from cortex_workers.schemas.base import Document
from cortex_workers.schemas.checkpoint import Checkpoint
from cortex_workers.schemas.ids import RUN
from cortex_workers.schemas.run import Run
from cortex_workers.store import overview, runs, transcript


class Timeline(Document):
    """A run's story. ``next`` says what happens next, or what is waited for; ``now`` is the database's time.

    ``missing`` names what somebody deleted or broke by hand.
    """

    run: Run
    now: datetime
    next: str
    entries: tuple[Entry, ...]
    missing: tuple[str, ...] = ()


def timeline(rt: Runtime, run_id: str, scope: str, most: int | None = 200) -> Timeline:
    """Tell a run in order; contents are cut to ``most`` characters (None: whole).

    Raises: InvalidId, RunNotFound.
    """
    checked_id(RUN, run_id)
    with rt.database.read() as unit:
        traces = overview.traces(unit, run_id, scope)
        if traces is None:
            raise RunNotFound(f"there is no run {run_id} in this scope")
        hint = next_step_hint(unit, traces)
    run = runs.to_run(traces.run)
    return Timeline(
        run=run,
        now=traces.now,
        next=hint,
        entries=tuple(entries(traces, most)),
        missing=(*traces.missing, *run.unreadable),
    )


_EVIDENCE = ("call_id", "tool", "state", "attempt", "term_owner", "started_at", "late_result", "late_at")


def evidence(rt: Runtime, checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """What is known of the calls that a checkpoint asks about: who began them and when, and what came too late."""
    asked = {call.call_id for call in checkpoint.pending}
    with rt.database.read() as unit:
        rows = transcript.load_calls(unit, checkpoint.run_id)
    return [{name: row[name] for name in _EVIDENCE} for row in rows if row["call_id"] in asked]

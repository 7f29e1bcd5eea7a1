"""End a run by its revision, whatever state it is in.

Source: runs.md 3.8, T16, T27, T28, T34, K12; decision R6; ruling 30.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import partial

from cortex_workers.engine.runtime import Runtime
from cortex_workers.engine.validate import checked_id, checked_text
from cortex_workers.errors import InvalidState, NotSuspended, RunNotFound
from cortex_workers.schemas.ids import RUN
from cortex_workers.schemas.lifecycle import TERMINAL_RUN_STATES
from cortex_workers.schemas.run import Run
from cortex_workers.store import checkpoints, runs, sessions, transcript, turns
from cortex_workers.store.transitions import Guard, Move, Row
from cortex_workers.store.unit import Unit

_TRIES = 5


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A cancelled run; for a running one: which worker stops, by when at the latest, and what it was calling."""

    run: Run
    stops_worker: str | None = None
    stops_by: datetime | None = None
    in_flight: tuple[str, ...] = ()


def cancel(rt: Runtime, run_id: str, scope: str | None, actor: str, reason: str | None = None) -> Cancelled:
    """Cancel a run at once; its holder, if any, is stopped by the fence before its next side effect.

    Raises: InvalidId, RunNotFound, InvalidState for a run that has ended, NotSuspended when it keeps moving.
    """
    checked_id(RUN, run_id)
    if reason is not None:
        checked_text("the reason", reason)
    for _ in range(_TRIES):
        with rt.database.read() as unit:
            before = runs.get_scoped(unit, run_id, scope)
        if before is None:
            raise RunNotFound(f"there is no run {run_id} in this scope")
        if before["state"] in TERMINAL_RUN_STATES:
            raise InvalidState(f"the run has ended already: {before['state']}")
        found = rt.database.run(partial(_end, before=before, actor=actor, reason=reason))
        if found is not None:
            return found
    raise NotSuspended("the run kept moving while it was cancelled; look at it and try again")


def _end(unit: Unit, before: Row, actor: str, reason: str | None) -> Cancelled | None:
    sessions.lock(unit, before["session_id"])
    in_flight = (
        [row["tool"] for row in transcript.load_calls(unit, before["id"]) if row["state"] == "started"]
        if before["state"] in ("running", "reclaimable")
        else []
    )
    guard = Guard(revision=before["revision"], suspension_id=before["suspension_id"])
    data = {"reason": (reason or "")[:500]} if reason else None
    values = {"error_code": "cancelled", "error_text": reason[:4000] if reason else None}
    name = f"cancel_{before['state']}"
    moved = turns.move(unit, name, before, guard, Move(values=values, actor=actor, data=data))
    if moved is None:
        return None
    checkpoints.close_of_run(unit, before["id"], "cancelled", int(moved["revision"]), "the run was cancelled")
    transcript.close_all_pending(unit, before["id"], "the run was cancelled")
    return Cancelled(
        run=runs.to_run(moved),
        stops_worker=before["lease_owner"],
        stops_by=moved["fenced_until"] if before["state"] == "running" else None,
        in_flight=tuple(in_flight),
    )

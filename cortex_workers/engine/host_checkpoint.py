"""Checkpoints that a host writes for its own purposes: only recorded; no run is touched, whichever way it is decided.

Source: runs.md 3.5 (3), invariant 75; ruling 71.
"""

from __future__ import annotations

from typing import Any

from cortex_workers.engine.runtime import Runtime
from cortex_workers.engine.validate import checked_id, checked_metadata, checked_text
from cortex_workers.errors import InvalidArgument, InvalidDecision, InvalidState, RunNotFound
from cortex_workers.schemas.checkpoint import Checkpoint, CheckpointKind, Decision
from cortex_workers.schemas.ids import CHECKPOINT, RUN, new_id
from cortex_workers.store import checkpoints, runs, tables
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit


def open_checkpoint(
    rt: Runtime, run_id: str, reason: str, metadata: dict[str, Any] | None, scope: str
) -> Checkpoint:
    """Ask something about a run without stopping it.

    Raises: InvalidId, RunNotFound, InvalidArgument, UnstorableText, InputTooLarge.
    """
    checked_id(RUN, run_id)
    if not checked_text("the reason", reason).strip() or len(reason) > 500:
        raise InvalidArgument("the reason has 1 to 500 characters")
    checked_metadata(metadata)
    if metadata is not None and "suspension_id" in metadata:
        raise InvalidArgument("metadata may not hold suspension_id: it marks checkpoints that stop a run")

    def work(unit: Unit) -> Checkpoint:
        run = runs.get_scoped(unit, run_id, scope)
        if run is None:
            raise RunNotFound(f"there is no run {run_id} in this scope")
        row = {
            "id": new_id(CHECKPOINT),
            "scope": run["scope"],
            "run_id": run_id,
            "agent": run["agent"],
            "kind": CheckpointKind.HOST,
            "reason": reason,
            "step_index": int(run["next_step"]),
            "metadata": metadata or {},
        }
        checkpoints.open_(unit, row, int(run["revision"]))
        made = checkpoints.get(unit, str(row["id"]))
        assert made is not None
        return checkpoints.to_checkpoint(unit, made)

    return rt.database.run(work)


def record(rt: Runtime, row: Row, decision: Decision, principal: bytes | None) -> Checkpoint:
    """Record the first decision, well formed, on a host's own checkpoint.

    Raises: InvalidDecision, InvalidState (``recorded`` carries the first decision).
    """
    if decision.calls is not None or decision.amended_arguments is not None or decision.outcome is not None:
        raise InvalidDecision("this checkpoint stops no call: approve or reject it as a whole")

    def work(unit: Unit) -> list[Row]:
        run = runs.get(unit, row["run_id"])
        public = decision.model_dump(mode="json", exclude_none=True, exclude={"decided_at"})
        values = {"decision": public, "decider_principal": principal}
        where = [tables.checkpoints.c.id == row["id"]]
        return checkpoints.close(unit, "decided", where, values, int(run["revision"]) if run else 0)

    closed = rt.database.run(work)
    with rt.database.read() as unit:
        found = closed[0] if closed else checkpoints.get(unit, row["id"])
        assert found is not None
        shown = checkpoints.to_checkpoint(unit, found)
    if closed or (shown.decision is not None and shown.decision.same_content(decision)):
        return shown
    raise InvalidState("the checkpoint was decided already", recorded=shown.decision)

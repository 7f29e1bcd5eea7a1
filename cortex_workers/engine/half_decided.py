"""Finish a decision whose run has moved while its checkpoint was left pending.

One transaction writes both, so such a half is only ever found after somebody repaired rows by hand or restored them.
Source: decision R2; runs.md 3.5 steps 8 and 9, invariants 70 to 73.
"""

from __future__ import annotations

from cortex_workers.engine import decide as deciding
from cortex_workers.engine.decide import Pause
from cortex_workers.engine.runtime import Runtime
from cortex_workers.errors import InvalidState
from cortex_workers.schemas.checkpoint import Checkpoint, Decision
from cortex_workers.schemas.lifecycle import Instruction, RunState
from cortex_workers.store import checkpoints, runs, sessions
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit


def half_decided(rt: Runtime, pause: Pause, decision: Decision, principal: bytes | None) -> Checkpoint:
    """Record a decision that its run carries out already, when this is the same one; else close what is stale.

    Raises: InvalidState when the run was claimed meanwhile (the decision is recorded), when it carries out another
    decision (nothing is written), or when it has moved to another pause (the checkpoint is closed as superseded).
    """

    def work(unit: Unit) -> tuple[Checkpoint | None, str]:
        sessions.lock(unit, pause.run["session_id"])
        run = runs.lock(unit, pause.run["id"])
        if run is None or not _left_by_decision(pause, run):
            _supersede(unit, pause)
            return None, "the run has moved on; the checkpoint is closed"
        return _record(unit, pause, run, decision, principal)

    recorded, why = rt.database.run(work)
    if recorded is None:
        raise InvalidState(why)
    return recorded


def _left_by_decision(pause: Pause, run: Row) -> bool:
    return run["suspension_id"] == pause.suspension["id"] and pause.suspension["ended_as"] in (
        "answered",
        "rejected",
    )


def _supersede(unit: Unit, pause: Pause) -> None:
    where = [checkpoints.checkpoints.c.id == pause.checkpoint["id"]]
    decision = {"approved": False, "decided_by": "cortex", "reason": "the run has moved on"}
    checkpoints.close(unit, "superseded", where, {"decision": decision}, int(pause.run["revision"]))


def _record(
    unit: Unit, pause: Pause, run: Row, decision: Decision, principal: bytes | None
) -> tuple[Checkpoint | None, str]:
    found = checkpoints.verdicts(unit, run["id"], deciding.ids(pause.pending))
    mine = [row for row in found.values() if row["checkpoint_id"] == pause.checkpoint["id"]]
    if any((row["outcome"], row["note"]) != deciding.verdict_of(decision, row["call_id"]) for row in mine):
        return None, "the run carries out another decision"
    waits = run["state"] == RunState.READY and run["instruction"] == Instruction.ANSWER
    if not mine:
        if not waits or deciding.ends_run(pause, decision):
            return None, "the pause was left in the meantime"
        deciding.adjudicate(unit, pause, decision, principal)
    closed = deciding.record(unit, pause, decision, principal, int(run["revision"]), "decided")
    if closed is None:
        return None, "the checkpoint was closed in the same moment"
    if not waits:
        return None, "the decision was recorded; its run had been claimed already"
    return checkpoints.to_checkpoint(unit, closed), ""

"""Turns a run's row into the notification that tells of it; the one place where `why` is derived.

Source: ruling 12 (RunReady carries why = start | answer | slice | reclaim).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cortex_workers.schemas.lifecycle import Instruction, RunState
from cortex_workers.schemas.notifications import (
    Notification,
    ResumeAdmitted,
    RunCancelled,
    RunCompleted,
    RunFailed,
    RunReady,
    RunReclaimable,
)


def waiting(row: Mapping[str, Any], renotified: bool = False) -> Notification:
    """The notification of a run that waits for a worker."""
    if row["state"] == RunState.RECLAIMABLE:
        return RunReclaimable(
            run_id=row["id"],
            revision=row["revision"],
            hand_off=row["handed_off"],
            pool=row["pool"],
            renotified=renotified,
        )
    return RunReady(
        run_id=row["id"], revision=row["revision"], why=_why(row), pool=row["pool"], renotified=renotified
    )


def admitted(row: Mapping[str, Any]) -> Notification:
    """The notification of an answer from outside that was retained."""
    return ResumeAdmitted(
        run_id=row["id"], revision=row["revision"], suspension_id=row["suspension_id"], pool=row["pool"]
    )


def _why(row: Mapping[str, Any]) -> Any:
    if row["queue_class"] == "start":
        return "start"
    return "answer" if row["instruction"] in (Instruction.ANSWER, Instruction.REPEAT_MODEL_CALL) else "slice"


def ended(row: Mapping[str, Any]) -> Notification:
    """The notification of a run that is over."""
    run_id, revision = row["id"], row["revision"]
    if row["state"] == RunState.COMPLETED:
        return RunCompleted(run_id=run_id, revision=revision)
    if row["state"] == RunState.CANCELLED:
        return RunCancelled(run_id=run_id, revision=revision)
    return RunFailed(run_id=run_id, revision=revision, code=row["error_code"] or "")

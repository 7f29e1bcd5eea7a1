"""The admission ledger as operators and hosts read it, and the one explicit end of an answer nobody began with.

Nothing expires an admission by time (ruling 41).
Source: seed suspension (ResumeRecoveryStore, ReplyDiscoveryStore); runs.md 2.15, invariants 177 to 182.
"""

from __future__ import annotations

from cortex_workers.engine.runtime import Runtime
from cortex_workers.engine.validate import checked_id
from cortex_workers.errors import (
    AdmissionConflict,
    AdmissionNotFound,
    InvalidArgument,
    InvalidState,
    ResumeAlreadyStarted,
    RunNotFound,
)
from cortex_workers.schemas.admission import ResumeAdmission, ResumeAdmissionPage, ResumeExpiry, ResumeStart
from cortex_workers.schemas.ids import RUN, SUSPENSION
from cortex_workers.store import admissions, runs, sessions, suspensions, turns
from cortex_workers.store.transitions import Guard, Move, Row
from cortex_workers.store.unit import Unit

DISCOVERY_MOST = 256


def page(rt: Runtime, run_id: str, scope: str, after: str | None, limit: int) -> ResumeAdmissionPage:
    """The answers of one run, in its exact scope, in order of their pauses; ``next`` is the cursor of the rest.

    Raises: InvalidId, InvalidArgument.
    """
    checked_id(RUN, run_id)
    if after is not None:
        checked_id(SUSPENSION, after)
    _check_limit(limit)
    with rt.database.read() as unit:
        rows = admissions.page(unit, scope, run_id, after, limit + 1)
    shown = tuple(admissions.to_admission(row) for row in rows[:limit])
    return ResumeAdmissionPage(
        admissions=shown, next=rows[limit - 1]["suspension_id"] if len(rows) > limit else None
    )


def latest(rt: Runtime, run_id: str, scope: str) -> ResumeAdmission:
    """The newest answer of a run.

    Raises: InvalidId, AdmissionNotFound.
    """
    checked_id(RUN, run_id)
    with rt.database.read() as unit:
        row = admissions.latest(unit, run_id)
    if row is None or row["scope"] != scope:
        raise AdmissionNotFound(f"no answer was admitted for run {run_id} in this scope")
    return admissions.to_admission(row)


def get(rt: Runtime, run_id: str, suspension_id: str, scope: str) -> ResumeAdmission:
    """The answer retained for one pause.

    Raises: InvalidId, AdmissionNotFound.
    """
    return admissions.to_admission(_row(rt, run_id, suspension_id, scope))


def start(rt: Runtime, run_id: str, suspension_id: str, scope: str) -> ResumeStart | None:
    """The receipt that a worker began with an answer; None before.

    Raises: InvalidId, AdmissionNotFound.
    """
    row = _row(rt, run_id, suspension_id, scope)
    with rt.database.read() as unit:
        receipt = admissions.receipt(unit, run_id, suspension_id, "start")
    return admissions.to_start(row, receipt) if receipt is not None else None


def expiry(rt: Runtime, run_id: str, suspension_id: str, scope: str) -> ResumeExpiry | None:
    """The receipt that an answer was given up; None while it was not.

    Raises: InvalidId, AdmissionNotFound.
    """
    row = _row(rt, run_id, suspension_id, scope)
    with rt.database.read() as unit:
        receipt = admissions.receipt(unit, run_id, suspension_id, "expiry")
    return admissions.to_expiry(row, receipt) if receipt is not None else None


def expire(
    rt: Runtime, run_id: str, suspension_id: str, request_digest: str, scope: str, actor: str
) -> ResumeExpiry:
    """Give up an admitted answer that nobody began with: the run fails, with a receipt. Not for an ordinary wait.

    The same request again returns the original receipt (not fresh).
    Raises: AdmissionNotFound, AdmissionConflict for another digest, ResumeAlreadyStarted, InvalidState also before the
    deadline of its pause (ruling 41).
    """
    row = _row(rt, run_id, suspension_id, scope)
    if row["request_digest"] != request_digest:
        raise AdmissionConflict("the digest names another answer than the one that was admitted")
    known = expiry(rt, run_id, suspension_id, scope)
    if known is not None:
        return known
    done = rt.database.run(lambda unit: _expire(unit, row, actor))
    if done is not None:
        return done
    known = expiry(rt, run_id, suspension_id, scope)
    if known is not None:
        return known
    if start(rt, run_id, suspension_id, scope) is not None:
        raise ResumeAlreadyStarted()
    raise InvalidState("the run does not wait with this answer any more")


def _expire(unit: Unit, row: Row, actor: str) -> ResumeExpiry | None:
    run = runs.get(unit, row["run_id"])
    if run is None:
        raise RunNotFound()
    sessions.lock(unit, run["session_id"])
    if run["state"] != "ready" or run["suspension_id"] != row["suspension_id"]:
        return None
    pause = suspensions.get(unit, row["suspension_id"])
    if pause is not None and pause["expires_at"] is not None and not pause["overdue"]:
        raise InvalidState(
            f"the answer may be given up after the deadline of its pause: {pause['expires_at']:%Y-%m-%d %H:%M:%S} UTC"
        )
    values = {
        "error_code": "admission_expired",
        "error_text": "the admitted answer was given up before anybody began",
    }
    data = {"suspension_id": row["suspension_id"], "request_digest": row["request_digest"]}
    guard = Guard(revision=run["revision"])
    moved = turns.move(unit, "expire_admission", run, guard, Move(values=values, actor=actor, data=data))
    if moved is None:
        return None
    receipt = {
        "run_id": row["run_id"],
        "suspension_id": row["suspension_id"],
        "kind": "expiry",
        "digest": row["request_digest"],
        "run_revision": moved["revision"],
        "event_id": admissions.event_of(unit, moved),
    }
    if not admissions.add_receipt(unit, receipt):
        raise ResumeAlreadyStarted()
    written = admissions.receipt(unit, row["run_id"], row["suspension_id"], "expiry")
    assert written is not None
    return admissions.to_expiry(row, written, fresh=True)


def discover_replies(rt: Runtime, scope: str, after: str | None, limit: int) -> list[str]:
    """Runs of an exact scope that keep agent-reply pauses or running admissions, by id after the cursor.

    Raises: InvalidArgument for a limit outside 1 to 256, InvalidId.
    """
    _check_limit(limit)
    if after is not None:
        checked_id(RUN, after)
    with rt.database.read() as unit:
        return admissions.discover(unit, scope, after, limit)


def _check_limit(limit: object) -> None:
    if not isinstance(limit, int) or not 1 <= limit <= DISCOVERY_MOST:
        raise InvalidArgument(f"limit is 1 to {DISCOVERY_MOST}")


def _row(rt: Runtime, run_id: str, suspension_id: str, scope: str) -> Row:
    checked_id(RUN, run_id)
    checked_id(SUSPENSION, suspension_id)
    with rt.database.read() as unit:
        row = admissions.get(unit, run_id, suspension_id)
    if row is None or row["scope"] != scope:
        raise AdmissionNotFound(f"no answer was admitted for pause {suspension_id} in this scope")
    return row

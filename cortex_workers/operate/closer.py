"""Close a run as incomplete when nobody can prove how far it came with an admitted answer.

It neither repeats work nor takes results, refunds nothing and permits nothing: it is the end of asking.
Source: seed suspension (ResumeCloser); runs.md 2.15, T32, invariant 183; rulings 41, 51, 68.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from pydantic import ValidationError

from cortex_workers import telemetry
from cortex_workers.engine.runtime import Runtime
from cortex_workers.engine.validate import checked_id
from cortex_workers.errors import (
    AdmissionConflict,
    AdmissionNotFound,
    ClosureRefused,
    CortexError,
    InvalidArgument,
    InvalidState,
    RunLeased,
    WaitTimeout,
)
from cortex_workers.host import foreign
from cortex_workers.ports import ResumeClosureAuthorizer, ResumeClosureFence
from cortex_workers.schemas.admission import ResumeClosure, ResumeClosureRequest
from cortex_workers.schemas.checkpoint import CheckpointKind
from cortex_workers.schemas.ids import RUN, SUSPENSION
from cortex_workers.schemas.lifecycle import TERMINAL_RUN_STATES, RunState
from cortex_workers.store import admissions, checkpoints, runs, sessions, transcript, turns
from cortex_workers.store.transitions import Guard, Move, Row
from cortex_workers.store.unit import Unit

WITHIN_S = 30.0
CODE = "closed_incomplete"
_ROWS = {
    RunState.RECLAIMABLE: "close_reclaimable",
    RunState.PAUSED: "close_paused",
    RunState.RUNNING: "close_running",
}
T = TypeVar("T")


class ResumeCloser:
    """Ends uncertain runs under the guards of the host; `operate/closing_proof.py` has guards to begin with."""

    def __init__(
        self,
        rt: Runtime,
        fence: ResumeClosureFence,
        authorizer: ResumeClosureAuthorizer,
        *,
        within_s: float = WITHIN_S,
    ) -> None:
        self._rt = rt
        self._fence = fence
        self._authorizer = authorizer
        self._within_s = min(within_s, WITHIN_S)

    def close(self, request: ResumeClosureRequest) -> ResumeClosure:
        """End a run as incomplete, or give back the receipt of the same request (not fresh).

        An error may follow a commit: send the same request again to learn what happened.
        Writes: the run, its event, its open question and the receipt, in one transaction.
        Raises: InvalidArgument, ClosureRefused by a guard or for its proof, AdmissionNotFound, AdmissionConflict for
        other content than what is retained (or was closed with), RunLeased, InvalidState, WaitTimeout after 30 seconds.
        """
        attempt = _Attempt(self._rt, _frozen(request), time.monotonic() + self._within_s)
        return _within(self._within_s, lambda: attempt.make(self._fence, self._authorizer))


def closure(rt: Runtime, run_id: str, suspension_id: str, scope: str) -> ResumeClosure | None:
    """The receipt of a run that was closed after the answer to this pause; None when it was not.

    Raises: InvalidId, AdmissionNotFound.
    """
    checked_id(RUN, run_id)
    checked_id(SUSPENSION, suspension_id)
    with rt.database.read() as unit:
        admission = admissions.get(unit, run_id, suspension_id)
        if admission is None or admission["scope"] != scope:
            raise AdmissionNotFound(f"no answer was admitted for pause {suspension_id} in this scope")
        row = admissions.receipt(unit, run_id, suspension_id, "closure")
    return admissions.to_closure(row) if row is not None else None


class _Attempt:
    """One call of ``close``: what it may still write, and what it wrote."""

    def __init__(self, rt: Runtime, request: ResumeClosureRequest, until: float) -> None:
        self._rt = rt
        self._request = request
        self._until = until
        self._done: ResumeClosure | None = None
        self._failed: CortexError | None = None

    def make(self, fence: ResumeClosureFence, authorizer: ResumeClosureAuthorizer) -> ResumeClosure:
        """Ask the authorizer, always; then close inside the fence, unless it was closed by this request before."""
        request = self._request
        _guarded(lambda: authorizer.authorize_resume_closure(request))
        with self._rt.database.read() as unit:
            known = _known(unit, request)
        if known is not None:
            return known
        _guarded(lambda: fence.with_resume_closure(request, self._commit))
        if self._failed is not None:
            raise self._failed
        if self._done is None:
            raise ClosureRefused("the fence returned without closing anything")
        return self._done

    def _commit(self, request: ResumeClosureRequest) -> None:
        """What the fence calls; a second call changes nothing."""
        if self._done is not None:
            return
        try:
            if request != self._request:
                raise ClosureRefused("the fence named another request than the one it was asked about")
            self._done = self._rt.database.run(self._close)
        except CortexError as error:
            self._failed = error
            raise
        self._failed = None
        telemetry.event(
            "run.closed",
            run_id=request.version.run_id,
            revision=self._done.run_revision,
            actor=request.actor,
            fresh=self._done.fresh,
        )

    def _close(self, unit: Unit) -> ResumeClosure:
        """The one transaction, in the one lock order: session, run, then what hangs on it."""
        request = self._request
        run = runs.get(unit, request.version.run_id)
        if run is None or run["scope"] != request.scope:
            raise AdmissionNotFound("no answer was admitted for this run in this scope")
        sessions.lock(unit, run["session_id"])
        run = runs.lock(unit, run["id"])
        assert run is not None
        known = _known(unit, request)
        if known is not None:
            return known
        _check_ledger(unit, request)
        name = _row_for(unit, request, run)
        _check_now(unit, request, run)
        self._check_time()
        return _end(unit, request, run, name)

    def _check_time(self) -> None:
        if time.monotonic() >= self._until:
            raise WaitTimeout("the closing took longer than it may; nothing was written")


def _known(unit: Unit, request: ResumeClosureRequest) -> ResumeClosure | None:
    """The receipt of this very request.

    Raises: AdmissionConflict when the run was closed by another one.
    """
    row = admissions.receipt(unit, request.version.run_id, request.version.suspension_id, "closure")
    if row is None:
        return None
    found = admissions.to_closure(row)
    if found.request_digest != request.digest():
        raise AdmissionConflict(
            f"the run was closed at {found.closed_at:%Y-%m-%d %H:%M:%S} UTC by another request", closure=found
        )
    return found


def _check_ledger(unit: Unit, request: ResumeClosureRequest) -> None:
    """The request names the latest answer of the run, and the start that was made with it, to the byte."""
    run_id, suspension_id = request.version.run_id, request.version.suspension_id
    row = admissions.get(unit, run_id, suspension_id)
    if row is None or row["scope"] != request.scope:
        raise AdmissionNotFound(f"no answer was admitted for pause {suspension_id} in this scope")
    latest = admissions.latest(unit, run_id)
    if latest is not None and latest["suspension_id"] != suspension_id:
        raise AdmissionConflict("a later answer was admitted for this run")
    admission = admissions.to_admission(row)
    if admission.request.version != request.version or admission.digest() != request.admission_digest:
        raise AdmissionConflict("the request names another answer than the one that was admitted")
    start = admissions.receipt(unit, run_id, suspension_id, "start")
    if start is None:
        raise InvalidState("nobody began with this answer; it can be given up instead (expire)")
    if admissions.to_start(row, start).digest() != request.start_digest:
        raise AdmissionConflict("the request names another start than the one that was made")


def _row_for(unit: Unit, request: ResumeClosureRequest, run: Row) -> str:
    """The transition for the state that the run is in, at the very revision that the request was made for."""
    if int(run["revision"]) != request.run_revision:
        raise InvalidState(
            f"the run moved: it is {run['state']} at revision {run['revision']}, not {request.run_revision}"
        )
    if run["state"] in TERMINAL_RUN_STATES:
        raise InvalidState(f"the run has ended: {run['state']}. There is nothing uncertain to close")
    name = _ROWS.get(run["state"])
    if name is None:
        raise InvalidState(f"the run is {run['state']}: there is nothing uncertain to close")
    if run["state"] == RunState.PAUSED:
        asked = checkpoints.of_pause(unit, run["suspension_id"])
        if asked is None or asked["kind"] != CheckpointKind.UNCERTAIN_EFFECT:
            raise InvalidState("the run waits for an answer and is not uncertain; answer or cancel it")
    return name


def _check_now(unit: Unit, request: ResumeClosureRequest, run: Row) -> None:
    """The proof counts and no lease is live, on the database clock, with every lock held."""
    now = admissions.standing(unit, run["id"], request.observed_at, request.expires_at)
    if not now["lease_over"]:
        raise RunLeased(
            f"a lease on this run ends at {now['lease_ends']:%Y-%m-%d %H:%M:%S} UTC",
            owner=run["lease_owner"],
            expires_at=now["lease_ends"],
        )
    if not now["observed"]:
        raise ClosureRefused("the proof was observed later than now, on the clock of the database")
    if now["expired"]:
        raise ClosureRefused(f"the proof expired at {request.expires_at:%Y-%m-%d %H:%M:%S} UTC")


def _end(unit: Unit, request: ResumeClosureRequest, run: Row, name: str) -> ResumeClosure:
    guard = Guard(revision=request.run_revision, suspension_id=run["suspension_id"])
    what = Move(
        values={"error_code": CODE, "error_text": "closed: how far it came with its answer cannot be proven"},
        actor=request.actor,
        data={"suspension_id": request.version.suspension_id, "request_digest": request.digest()},
    )
    moved = turns.move(unit, name, run, guard, what)
    if moved is None:
        raise InvalidState("the run moved in the same moment; look at it and ask again")
    note = "the run was closed as incomplete"
    checkpoints.close_of_run(unit, run["id"], "superseded", int(moved["revision"]), note)
    transcript.close_all_pending(unit, run["id"], note)
    made = admissions.add_closure(unit, request, moved)
    if made is None:
        raise AdmissionConflict("the run was closed in the same moment by another request")
    return made


def _frozen(request: ResumeClosureRequest) -> ResumeClosureRequest:
    try:
        return request.freeze()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "as a whole"
        raise InvalidArgument(f"the request to close: {place}: {first['msg']}") from None


def _guarded(ask: Callable[[], Any]) -> None:
    """Ask a guard of the host; whatever it raises that is not ours refuses."""
    try:
        ask()
    except CortexError:
        raise
    except BaseException as error:
        foreign.let_through(error)
        told = foreign.words(error) or type(error).__name__
        raise ClosureRefused(f"not allowed: {told[:300]}") from error


def _within(seconds: float, work: Callable[[], T]) -> T:
    """Wait so long and no longer: a guard that hangs is left behind, and can close nothing any more.

    Raises: WaitTimeout, and what the work raises.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001  handed to the thread that waits, whatever it is
            outcome.set_exception(error)

    threading.Thread(target=run, name="resume-closer", daemon=True).start()
    try:
        return outcome.result(seconds)
    except TimeoutError:
        if outcome.done():
            raise
        raise WaitTimeout(
            f"the closing was not done in {seconds:g} s; ask again with the same request"
        ) from None

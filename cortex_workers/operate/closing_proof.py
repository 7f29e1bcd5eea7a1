"""Guards of the closer to begin with: whoever held the run has ended, or an operator declares it dead.

They vouch for worker processes. That nothing a tool began outside is still under way, the operator vouches for by
asking; a host that can check that brings guards of its own.
Source: ruling 51; seed suspension (worker identities come from retained evidence).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import timedelta

from cortex_workers.engine.runtime import Runtime
from cortex_workers.engine.validate import checked_id
from cortex_workers.errors import (
    AdmissionConflict,
    AdmissionNotFound,
    ClosureRefused,
    InvalidArgument,
    InvalidState,
)
from cortex_workers.schemas.admission import ResumeClosure, ResumeClosureRequest
from cortex_workers.schemas.base import digest
from cortex_workers.schemas.ids import RUN
from cortex_workers.schemas.lifecycle import TERMINAL_RUN_STATES
from cortex_workers.store import admissions, runs, workers
from cortex_workers.store.unit import Unit

ISSUER = "cortex:workers"
ISSUER_REVISION = "1"
MOST_VALID = timedelta(hours=1)


class WorkersGone:
    """Fence and authorizer in one. ``declared_dead`` are worker ids that ``actor`` vouches for.

    A worker that only fell silent may come back and has to be declared; one that is heard of can not be.
    """

    def __init__(self, rt: Runtime, actor: str, declared_dead: Collection[str] = ()) -> None:
        self._rt = rt
        self._actor = actor
        self._declared = frozenset(declared_dead)

    def request(
        self, run_id: str, scope: str, *, valid_for: timedelta = timedelta(minutes=5)
    ) -> ResumeClosureRequest:
        """The request to close a run as it is now; of a run that was closed already, the one it was closed by.

        Raises: InvalidId, InvalidArgument, AdmissionNotFound, InvalidState, ClosureRefused naming who is still there,
        AdmissionConflict when somebody else closed it (``closure``).
        """
        checked_id(RUN, run_id)
        if not timedelta(0) < valid_for <= MOST_VALID:
            raise InvalidArgument("valid_for is more than zero and at most an hour")
        with self._rt.database.read() as unit:
            row = admissions.latest(unit, run_id)
            run = runs.get(unit, run_id)
            if row is None or run is None or row["scope"] != scope:
                raise AdmissionNotFound(f"no answer was admitted for run {run_id} in this scope")
            closed = admissions.receipt(unit, run_id, row["suspension_id"], "closure")
            if closed is not None:
                return self._first_request(admissions.to_closure(closed))
            if run["state"] in TERMINAL_RUN_STATES:
                raise InvalidState(f"the run has ended: {run['state']}. There is nothing uncertain to close")
            start = admissions.receipt(unit, run_id, row["suspension_id"], "start")
            if start is None:
                raise InvalidState("nobody began with this answer; it can be given up instead (expire)")
            proof = self._proof(unit, run_id)
            now = admissions.database_time(unit)
        admission = admissions.to_admission(row)
        return ResumeClosureRequest(
            scope=scope,
            version=admission.request.version,
            admission_digest=admission.digest(),
            start_digest=admissions.to_start(row, start).digest(),
            run_revision=run["revision"],
            actor=self._actor,
            issuer=ISSUER,
            issuer_revision=ISSUER_REVISION,
            proof_ref=f"workers:{run_id}@{run['revision']}",
            proof_digest=proof,
            observed_at=now,
            expires_at=now + valid_for,
        )

    def _first_request(self, made: ResumeClosure) -> ResumeClosureRequest:
        if made.request.actor == self._actor:
            return made.request
        raise AdmissionConflict(
            f"the run was closed at {made.closed_at:%Y-%m-%d %H:%M:%S} UTC by {made.request.actor}",
            closure=made,
        )

    def authorize_resume_closure(self, request: ResumeClosureRequest) -> None:
        """The asker is who the request names, and the proof is what the rows say, or was when it closed the run.

        Raises: ClosureRefused.
        """
        if request.actor != self._actor:
            raise ClosureRefused("the request names somebody else as its actor")
        if (request.issuer, request.issuer_revision) != (ISSUER, ISSUER_REVISION):
            raise ClosureRefused("the proof was not issued here")
        with self._rt.database.read() as unit:
            version = request.version
            closed = admissions.receipt(unit, version.run_id, version.suspension_id, "closure")
            if closed is not None and closed["digest"] == request.digest():
                return
            proof = self._proof(unit, version.run_id)
        if proof != request.proof_digest:
            raise ClosureRefused("the proof is not what the rows say of the run's workers")

    def with_resume_closure(
        self, request: ResumeClosureRequest, close: Callable[[ResumeClosureRequest], None]
    ) -> None:
        """Close while no former holder is heard of; an ended process never comes back under its id.

        A new holder is kept out by the run's revision, which the closer checks under the run's lock.
        Raises: ClosureRefused.
        """
        with self._rt.database.read() as unit:
            for holder in admissions.holders(unit, request.version.run_id):
                known = workers.get(unit, holder)
                if known is not None and known.alive:
                    raise ClosureRefused(f"worker {holder} is there: it was heard of just now")
        close(request)

    def _proof(self, unit: Unit, run_id: str) -> str:
        """The digest of what is known of every process that ever claimed the run.

        Raises: ClosureRefused naming all that may still be there, InvalidArgument for a declared worker that never held
        the run.
        """
        held = admissions.holders(unit, run_id)
        strangers = sorted(self._declared - set(held))
        if strangers:
            raise InvalidArgument(f"worker {strangers[0][:100]} never held this run")
        there = [why for holder in held if (why := self._doubt(unit, holder)) is not None]
        if there:
            raise ClosureRefused(f"{'; '.join(there)}. Declare dead whom you know to be")
        found = {holder: "declared dead" if holder in self._declared else "ended" for holder in held}
        return digest({"run_id": run_id, "holders": found, "actor": self._actor})

    def _doubt(self, unit: Unit, holder: str) -> str | None:
        """Why a process may still be there; None when it has ended or is declared dead."""
        if holder in self._declared:
            return None
        known = workers.get(unit, holder)
        if known is None:
            return f"nothing is known of worker {holder}"
        if known.ended_at is None or known.ended_as == workers.SILENT:
            return (
                f"worker {holder} has not ended (last heard of at {known.heartbeat_at:%Y-%m-%d %H:%M:%S} UTC)"
            )
        return None

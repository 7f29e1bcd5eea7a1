"""Answers from outside, and the ledger that keeps them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from cortex_workers.client.base import ClientBase, checked_seconds
from cortex_workers.engine import host_checkpoint, ledger, refusals
from cortex_workers.engine import resume as resuming
from cortex_workers.errors import AdmissionConflict, InvalidArgument, NotPausedYet
from cortex_workers.operate.closer import ResumeCloser, closure
from cortex_workers.operate.closing_proof import WorkersGone
from cortex_workers.schemas.admission import (
    BOTH,
    ResumeAdmission,
    ResumeAdmissionPage,
    ResumeClosure,
    ResumeExpiry,
    ToolResult,
)
from cortex_workers.schemas.checkpoint import Checkpoint
from cortex_workers.schemas.ids import RUN
from cortex_workers.schemas.suspension import Suspension

T = TypeVar("T")


class Machines(ClientBase):
    """The verbs of those who run tools for the fleet."""

    def provide_results(
        self, run_id: str, results: Sequence[ToolResult], *, scope: str | None = None, patience_s: float = 5.0
    ) -> ResumeAdmission:
        """Answer every external call of a run's pause at once; the run goes on elsewhere with exactly these bytes.

        The same answer again returns the original receipt (``fresh`` false). An answer that is quicker than its pause
        is sent again by itself for ``patience_s`` seconds.
        Raises: ResultsMismatch, RequiresApproval, NotAgentReplyResumable, SuspensionExpired, NotSuspended,
        NotPausedYet, AdmissionConflict, InvalidState after a partial answer, InputTooLarge, RunNotFound, InvalidId,
        InvalidArgument for what is no result.
        """
        where, seconds = self._any_scope(scope), checked_seconds("patience_s", patience_s)
        with refusals.told("provide_results", RUN, run_id, self._actor):
            items = _checked_results(results)
        return _patiently(
            seconds, lambda: resuming.provide_results(self._rt, run_id, items, where, self._actor)
        )

    def provide_result(
        self, run_id: str, result: ToolResult, *, scope: str | None = None, patience_s: float = 5.0
    ) -> ResumeAdmission | None:
        """Answer one external call; None while others of the pause are open, the admission with the last one.

        Raises: as ``provide_results``.
        """
        where, seconds = self._any_scope(scope), checked_seconds("patience_s", patience_s)
        with refusals.told("provide_result", RUN, run_id, self._actor):
            item = _checked_result(result)
        return _patiently(
            seconds, lambda: resuming.provide_result(self._rt, run_id, item, where, self._actor)
        )

    def suspension(self, run_id: str, *, scope: str | None = None) -> Suspension | None:
        """What a paused run waits for; None while it does not wait. ``runs_with`` is what a person made of a call.

        Raises: InvalidId, RunNotFound.
        """
        return resuming.waits_for(self._rt, run_id, self._any_scope(scope))

    def admissions(
        self, run_id: str, *, scope: str | None = None, after: str | None = None, limit: int = 50
    ) -> ResumeAdmissionPage:
        """The answers that were admitted for a run of exactly this scope; ``after`` is the cursor of a page before.

        Raises: InvalidId, InvalidArgument.
        """
        return ledger.page(self._rt, run_id, self._need_scope(scope), after, limit)

    def admission(self, run_id: str, suspension_id: str, *, scope: str | None = None) -> ResumeAdmission:
        """The answer that was admitted for one pause of a run of exactly this scope.

        Raises: InvalidId, AdmissionNotFound.
        """
        return ledger.get(self._rt, run_id, suspension_id, self._need_scope(scope))

    def expire_admission(
        self, run_id: str, suspension_id: str, request_digest: str, *, scope: str | None = None
    ) -> ResumeExpiry:
        """Give up an admitted answer that nobody began with; its run fails. An explicit act, never a timer's.

        Raises: AdmissionNotFound, AdmissionConflict, ResumeAlreadyStarted, InvalidState, InvalidId.
        """
        where = self._need_scope(scope)
        with refusals.told("expire_admission", RUN, run_id, self._actor):
            return ledger.expire(self._rt, run_id, suspension_id, request_digest, where, self._actor)

    def close_uncertain(
        self, run_id: str, declared_dead: Collection[str] = (), *, scope: str | None = None
    ) -> ResumeClosure:
        """End a run as incomplete of which nobody can prove how far it came with an admitted answer.

        Every process that ever held it has ended, or is named in ``declared_dead``, for which the client's actor
        vouches. Nothing is repeated and no result is taken. Again, it gives back the first receipt (``fresh`` false).
        Raises: ClosureRefused naming who may still be there, RunLeased, AdmissionNotFound, AdmissionConflict when
        somebody else closed it (``closure``) or a later answer is there, InvalidState, InvalidArgument for a process
        that never held it, InvalidId, WaitTimeout.
        """
        where = self._need_scope(scope)
        with refusals.told("close_uncertain", RUN, run_id, self._actor):
            return self._close_run(run_id, declared_dead, where)

    def _close_run(self, run_id: str, declared_dead: Collection[str], scope: str) -> ResumeClosure:
        proof = WorkersGone(self._rt, self._actor, _checked_workers(declared_dead))
        request = proof.request(run_id, scope)
        try:
            return ResumeCloser(self._rt, proof, proof).close(request)
        except AdmissionConflict as conflict:
            # The same actor closed it in the same moment, by a request that was made a moment earlier.
            made: ResumeClosure | None = conflict.data.get("closure")
            if made is not None and made.request.actor == self._actor:
                return made
            raise

    def closure(
        self, run_id: str, suspension_id: str | None = None, *, scope: str | None = None
    ) -> ResumeClosure | None:
        """The receipt of a run that was closed as incomplete after its newest answer, or after the one to this pause.

        None when it was not.
        Raises: AdmissionNotFound, InvalidId.
        """
        where = self._need_scope(scope)
        if suspension_id is None:
            suspension_id = ledger.latest(self._rt, run_id, where).request.version.suspension_id
        return closure(self._rt, run_id, suspension_id, where)

    def open_checkpoint(
        self, run_id: str, reason: str, *, metadata: dict[str, Any] | None = None, scope: str | None = None
    ) -> Checkpoint:
        """Ask people something about a run without stopping it; the decision is recorded and nothing else happens.

        Raises: InvalidId, RunNotFound, InvalidArgument, UnstorableText.
        """
        return host_checkpoint.open_checkpoint(self._rt, run_id, reason, metadata, self._any_scope(scope))


def _checked_results(results: object) -> list[ToolResult]:
    if isinstance(results, str | bytes | Mapping | ToolResult) or not isinstance(results, Iterable):
        raise InvalidArgument(f"results are a list of ToolResult(…), not {_kind(results)}")
    return [_checked_result(item) for item in results]


def _checked_result(result: object) -> ToolResult:
    if not isinstance(result, ToolResult):
        raise InvalidArgument(f"a result is a ToolResult(…), not {_kind(result)}")
    if result.content is not None and result.error is not None:
        # One that was made without validation; keeping the error alone would lose what the tool returned.
        raise InvalidArgument(BOTH)
    return result


def _checked_workers(names: object) -> list[str]:
    if isinstance(names, str | bytes | Mapping) or not isinstance(names, Iterable):
        raise InvalidArgument(f"declared_dead is a list of worker ids, not {_kind(names)}")
    found = []
    for name in names:
        if not isinstance(name, str):
            raise InvalidArgument(f"declared_dead is a list of worker ids; there is {_kind(name)} in it")
        found.append(name)
    return found


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _patiently(patience_s: float, attempt: Callable[[], T]) -> T:
    """Try again while the run does not wait yet: the pause may be a moment away."""
    end, waited = time.monotonic() + patience_s, threading.Event()
    while True:
        try:
            return attempt()
        except NotPausedYet:
            if time.monotonic() >= end:
                raise
            waited.wait(0.05)

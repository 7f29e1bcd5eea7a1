"""Storing runs, looking at them, waiting for them, cancelling them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from cortex_workers.client.base import ClientBase, checked_limit
from cortex_workers.engine import authority
from cortex_workers.engine import cancel as cancelling
from cortex_workers.engine import enqueue as enqueueing
from cortex_workers.engine.validate import checked_delay, checked_id, checked_label
from cortex_workers.errors import (
    InvalidArgument,
    RunNotFound,
    WaitTimeout,
)
from cortex_workers.schemas.ids import RUN, SESSION
from cortex_workers.schemas.lifecycle import RunState
from cortex_workers.schemas.run import Enqueued, EnqueueRun, Run, RunOverrides
from cortex_workers.store import runs


class Producers(ClientBase):
    """The verbs of a service that wants work done."""

    def enqueue(
        self,
        agent: str,
        input: str,
        *,
        scope: str | None = None,
        run_id: str | None = None,
        key: str | None = None,
        session: str | None = None,
        overrides: RunOverrides | None = None,
        metadata: dict[str, Any] | None = None,
        principal: Any = None,
        workload: str | None = None,
        start_by: timedelta | None = None,
    ) -> Enqueued:
        """Store a run for the fleet. ``run_id`` or ``key`` make it idempotent.

        ``session``: a session's id, a key of your own, ``"default"``, or nothing for a conversation of its own.
        Raises: NoScope, InvalidScope, InvalidId, InvalidArgument, InputTooLarge, UnstorableText, AgentNotFound,
        RunIdReused, RunIdTaken, SessionNotFound, SessionClosed, StoreUnavailable. Nothing is written by a refusal.
        """
        request = EnqueueRun.model_construct(
            agent=agent,
            input=input,
            scope=self._need_scope(scope),
            run_id=run_id,
            key=key,
            session=session,
            overrides=overrides,
            metadata=metadata,
            workload=workload,
            start_by_s=checked_delay("start_by", start_by),
        )
        return self.enqueue_many([request], principal=principal)[0]

    def enqueue_many(self, requests: Sequence[EnqueueRun], *, principal: Any = None) -> list[Enqueued]:
        """Store many runs, 1,000 a transaction; one outcome per request, in order.

        Validated as a whole: any conflict or bad input is refused before the first write.
        Raises: as ``enqueue``.
        """
        asked = list(requests)
        for each in asked:
            if not isinstance(each, EnqueueRun):
                raise InvalidArgument(f"a request is EnqueueRun(…), not {type(each).__name__}")
        self._check_schema()
        encoded = authority.encode(self._codec, principal)
        return enqueueing.enqueue(self._rt, asked, encoded)

    def get(self, run_id: str, *, scope: str | None = None) -> Run:
        """One run.

        Raises: InvalidId, RunNotFound.
        """
        checked_id(RUN, run_id)
        with self._rt.database.read() as unit:
            row = runs.get_scoped(unit, run_id, self._any_scope(scope))
        if row is None:
            raise RunNotFound(f"there is no run {run_id} in this scope")
        return runs.to_run(row)

    def wait(
        self,
        run_id: str,
        *,
        timeout_s: float | None = None,
        scope: str | None = None,
        until_paused: bool = False,
    ) -> Run:
        """Wait until a run has ended (or, with ``until_paused``, needs somebody). A lost run keeps its row waiting.

        Raises: WaitTimeout after ``timeout_s`` seconds, InvalidId, RunNotFound.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s, waited = 0.02, threading.Event()
        while True:
            run = self.get(run_id, scope=scope)
            if run.is_terminal or (until_paused and run.state is RunState.PAUSED):
                return run
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise WaitTimeout(f"run {run_id} is still {run.state} after {timeout_s:g} s")
            waited.wait(pause_s if left is None else min(pause_s, left))
            pause_s = min(pause_s * 1.5, 1.0)

    def runs(
        self,
        *,
        scope: str | None = None,
        state: str | None = None,
        agent: str | None = None,
        session: str | None = None,
        before: str | None = None,
        limit: int = 50,
    ) -> list[Run]:
        """The newest runs of a scope and below; ``before`` is the id of the last one seen.

        Raises: NoScope, InvalidScope, InvalidId, InvalidArgument, UnstorableText.
        """
        if state is not None and state not in list(RunState):
            raise InvalidArgument(f"no such state {state!r:.40}; one of {', '.join(RunState)}")
        checked_label("the agent's name", agent)
        if session is not None:
            checked_id(SESSION, session)
        if before is not None:
            checked_id(RUN, before)
        with self._rt.database.read() as unit:
            rows = runs.page(
                unit,
                self._need_scope(scope),
                state=state,
                agent=agent,
                session_id=session,
                before=before,
                limit=checked_limit(limit),
            )
        return [runs.to_run(row) for row in rows]

    def cancel(
        self, run_id: str, *, scope: str | None = None, reason: str | None = None
    ) -> cancelling.Cancelled:
        """Cancel a run in any live state, at once.

        Raises: InvalidId, RunNotFound, InvalidState when it has ended, NotSuspended when it keeps moving.
        """
        return cancelling.cancel(self._rt, run_id, self._any_scope(scope), self._actor, reason)

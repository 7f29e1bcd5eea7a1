"""The face for producers and operators: every verb is one use case, one transaction, one clear error.

In-process verbs (`run`, `resolve`, `continue_run`) need ``Client(host=…)``.
Source: decisions 4; rulings 45, 46, 54.
"""

from __future__ import annotations

import getpass
import os
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from cortex_workers import wiring
from cortex_workers.engine import authority, in_process
from cortex_workers.engine import cancel as cancelling
from cortex_workers.engine import decide as deciding
from cortex_workers.engine import enqueue as enqueueing
from cortex_workers.engine import settle as settling
from cortex_workers.engine.runtime import Runtime
from cortex_workers.engine.validate import checked_delay, checked_id, checked_label, checked_scope
from cortex_workers.errors import (
    CheckpointNotFound,
    InvalidArgument,
    InvalidDecision,
    NoScope,
    RunNotFound,
    SessionNotFound,
    WaitTimeout,
)
from cortex_workers.host import Host
from cortex_workers.ports import PrincipalCodec
from cortex_workers.schemas.checkpoint import Checkpoint, Decision, SettleOutcome
from cortex_workers.schemas.ids import CHECKPOINT, RUN, SESSION
from cortex_workers.schemas.lifecycle import RunState
from cortex_workers.schemas.run import Enqueued, EnqueueRun, Run, RunOverrides
from cortex_workers.settings import Settings, load_settings
from cortex_workers.store import checkpoints, migrate, runs, sessions

MAX_LIMIT = 1000


class Client:
    """Talks to the rows of one fleet; hints follow in the background. Use it as a context manager, or call ``close``.

    ``scope`` is the default of every verb; ``actor`` is who decides (default: the user of this process); ``codec``
    encodes principals; ``host`` lets this process run agents itself, always under a lease.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        scope: str | None = None,
        actor: str | None = None,
        host: Host | None = None,
        codec: PrincipalCodec | None = None,
        hints: bool = True,
    ) -> None:
        self.settings = settings or load_settings()
        self.settings.require_database()
        self._scope = scope or self.settings.scope
        self._actor = actor or self.settings.actor or f"client:{_user()}"
        checked_label("the actor", self._actor)
        self._codec = codec or (host.codec if host is not None else None)
        self._rt = wiring.build(self.settings, host=host, role="client")
        self._lock = threading.Lock()
        self._started = False
        self._checked = False
        if hints and self.settings.broker_url is not None:
            from cortex_workers.tasks.publish import attach

            attach(self._rt)
        self._close = weakref.finalize(self, _close, self._rt)

    # --- Life --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Send the hints still waiting (2 s at most) and close every connection."""
        self._close()

    @property
    def runtime(self) -> Runtime:
        """The parts of this process, for floors above."""
        return self._rt

    # --- Producers ---------------------------------------------------------------------------------------------------

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
                limit=_limit(limit),
            )
        return [runs.to_run(row) for row in rows]

    def cancel(
        self, run_id: str, *, scope: str | None = None, reason: str | None = None
    ) -> cancelling.Cancelled:
        """Cancel a run in any live state, at once.

        Raises: InvalidId, RunNotFound, InvalidState when it has ended, NotSuspended when it keeps moving.
        """
        return cancelling.cancel(self._rt, run_id, self._any_scope(scope), self._actor, reason)

    # --- People ------------------------------------------------------------------------------------------------------

    def checkpoints(
        self,
        *,
        scope: str | None = None,
        pending_only: bool = True,
        run_id: str | None = None,
        after: str | None = None,
        limit: int = 50,
    ) -> list[Checkpoint]:
        """What people are asked in a scope and below, oldest first.

        Raises: NoScope, InvalidScope, InvalidId.
        """
        if run_id is not None:
            checked_id(RUN, run_id)
        if after is not None:
            checked_id(CHECKPOINT, after)
        with self._rt.database.read() as unit:
            rows = checkpoints.page(
                unit,
                self._need_scope(scope),
                pending_only=pending_only,
                run_id=run_id,
                after=after,
                limit=_limit(limit),
            )
            return [checkpoints.to_checkpoint(unit, row) for row in rows]

    def checkpoint(self, checkpoint_id: str, *, scope: str | None = None) -> Checkpoint:
        """One checkpoint.

        Raises: InvalidId, CheckpointNotFound.
        """
        checked_id(CHECKPOINT, checkpoint_id)
        with self._rt.database.read() as unit:
            row = checkpoints.get(unit, checkpoint_id, self._any_scope(scope))
            if row is None:
                raise CheckpointNotFound(f"there is no checkpoint {checkpoint_id} in this scope")
            return checkpoints.to_checkpoint(unit, row)

    def decide(
        self,
        checkpoint_id: str,
        *,
        approved: bool,
        reason: str | None = None,
        decided_by: str | None = None,
        amended_arguments: dict[str, Any] | None = None,
        scope: str | None = None,
        principal: Any = None,
    ) -> Checkpoint:
        """Approve or reject a pause as a whole; the run goes on elsewhere. The same decision again changes nothing.

        ``amended_arguments`` replace the arguments of a pause's single call.
        Raises: InvalidDecision, InvalidState (``recorded`` carries the first decision), SuspensionExpired,
        CheckpointNotFound, InvalidId, SessionClosed.
        """
        if not isinstance(approved, bool):
            raise InvalidDecision("approved is True or False")
        decision = _decision(
            approved=approved,
            reason=reason,
            decided_by=decided_by,
            actor=self._actor,
            amended_arguments=amended_arguments,
        )
        encoded = authority.encode(self._codec, principal)
        return deciding.decide(self._rt, checkpoint_id, decision, self._any_scope(scope), encoded)

    def settle(
        self,
        checkpoint_id: str,
        outcome: str,
        *,
        result: Any = None,
        reason: str | None = None,
        decided_by: str | None = None,
        now: bool = False,
        scope: str | None = None,
        principal: Any = None,
    ) -> Checkpoint:
        """Say what became of an uncertain effect: ``happened`` (with its result), ``did_not_happen`` or ``stop``.

        ``now`` skips the wait before a call that did not happen is run again.
        Raises: as ``decide``.
        """
        if outcome not in list(SettleOutcome):
            raise InvalidDecision("settle with one of: happened, did_not_happen, stop")
        decision = _decision(
            approved=outcome != SettleOutcome.STOP,
            reason=reason,
            decided_by=decided_by,
            actor=self._actor,
            outcome=SettleOutcome(outcome),
            result=result,
        )
        encoded = authority.encode(self._codec, principal)
        return settling.settle(
            self._rt, checkpoint_id, decision, self._any_scope(scope), now=now, principal=encoded
        )

    # --- Sessions ----------------------------------------------------------------------------------------------------

    def sessions(
        self, *, scope: str | None = None, before: str | None = None, limit: int = 50
    ) -> list[dict[str, Any]]:
        """The sessions of a scope and below, the most recently active first.

        Raises: NoScope, InvalidScope, InvalidId.
        """
        if before is not None:
            checked_id(SESSION, before)
        with self._rt.database.read() as unit:
            return sessions.page(unit, self._need_scope(scope), before=before, limit=_limit(limit))

    def session(self, session_id: str, *, scope: str | None = None) -> dict[str, Any]:
        """One session.

        Raises: InvalidId, SessionNotFound.
        """
        checked_id(SESSION, session_id)
        with self._rt.database.read() as unit:
            row = sessions.get_scoped(unit, session_id, self._any_scope(scope))
        if row is None:
            raise SessionNotFound(f"there is no session {session_id} in this scope")
        return dict(row)

    def clear_session(self, session_id: str, *, scope: str | None = None) -> int:
        """Forget a conversation from here on; nothing is deleted. Returns the number of messages hidden.

        Raises: InvalidId, SessionNotFound.
        """
        self.session(session_id, scope=scope)
        return self._rt.database.run(lambda unit: sessions.clear(unit, session_id, self._actor))

    # --- In process --------------------------------------------------------------------------------------------------

    def run(
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
        on_exit: str = "hand_off",
    ) -> Run:
        """Run an agent in this process, under a lease like any worker; returns when the run ended or paused.

        ``on_exit``: when this call is interrupted (Ctrl-C), the run is handed to the fleet or cancelled.
        Raises: NoHost, and as ``enqueue``.
        """
        if on_exit not in ("hand_off", "cancel"):
            raise InvalidArgument("on_exit is hand_off or cancel")
        self._start()
        request = EnqueueRun.model_construct(
            agent=agent,
            input=input,
            scope=self._need_scope(scope),
            run_id=run_id,
            key=key,
            session=session,
            overrides=overrides,
            metadata=metadata,
            workload=None,
            start_by_s=None,
        )
        encoded = authority.encode(self._codec, principal)
        made = in_process.run(self._rt, request, encoded, on_exit, self._actor)
        return self.get(made, scope=request.scope)

    def continue_run(self, run_id: str, *, scope: str | None = None) -> Run:
        """Continue a ready or reclaimable run in this process; returns when it ended or paused.

        Raises: NoHost, InvalidId, RunNotFound, RunLeased, RunAlreadyDone (``run`` carries it), NotContinuable; Stopping
        and RunInterrupted when this process drains; EffectUncertain (``run``, ``checkpoint_id``) when nobody knows what
        became of a call.
        """
        self._start()
        self.get(run_id, scope=scope)
        in_process.continue_run(self._rt, run_id)
        return self.get(run_id, scope=scope)

    def resolve(
        self,
        checkpoint_id: str,
        *,
        approved: bool,
        reason: str | None = None,
        decided_by: str | None = None,
        amended_arguments: dict[str, Any] | None = None,
        scope: str | None = None,
        principal: Any = None,
    ) -> Run:
        """Decide, and continue the run in this process.

        Raises: NoHost, Stopping (nothing is recorded), as ``decide``; as ``continue_run`` when the decision is in but
        the run went on elsewhere.
        """
        self._start()
        in_process.refuse_while_draining(self._rt)
        decided = self.decide(
            checkpoint_id,
            approved=approved,
            reason=reason,
            decided_by=decided_by,
            amended_arguments=amended_arguments,
            scope=scope,
            principal=principal,
        )
        run = self.get(decided.run_id, scope=scope)
        return run if run.is_terminal else self.continue_run(decided.run_id, scope=scope)

    # --- Inside ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._rt.require_host()
        with self._lock:
            if not self._started:
                self._rt.start()
                self._started = True

    def _check_schema(self) -> None:
        """A producer finds out at its first write that the schema is behind, with what to do about it."""
        if not self._checked:
            migrate.require_current(self.settings.require_database())
            self._checked = True

    def _need_scope(self, scope: str | None) -> str:
        chosen = scope if scope is not None else self._scope
        if not chosen:
            raise NoScope()
        return checked_scope(chosen).text

    def _any_scope(self, scope: str | None) -> str:
        return self._need_scope(scope)


def _close(rt: Runtime) -> None:
    with suppress(Exception):  # closing must not raise into whoever is leaving already
        rt.stop()


def _decision(**values: Any) -> Decision:
    amended = values.get("amended_arguments")
    if amended is not None and not isinstance(amended, dict):
        raise InvalidDecision("amended arguments must be a JSON object")
    return Decision.model_construct(None, **values)


def _limit(limit: int) -> int:
    if not isinstance(limit, int) or not 1 <= limit <= MAX_LIMIT:
        raise InvalidArgument(f"limit is 1 to {MAX_LIMIT}")
    return limit


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid()) if hasattr(os, "getuid") else "unknown"

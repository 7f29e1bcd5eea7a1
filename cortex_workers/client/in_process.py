"""Running agents in this process; needs ``Client(host=…)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cortex_workers.client.machines import Machines
from cortex_workers.client.people import People
from cortex_workers.client.producers import Producers
from cortex_workers.engine import authority, in_process
from cortex_workers.errors import (
    InvalidArgument,
)
from cortex_workers.schemas.admission import ToolResult
from cortex_workers.schemas.checkpoint import CallDecision, CheckpointKind
from cortex_workers.schemas.run import EnqueueRun, Run, RunOverrides


class InProcess(Producers, People, Machines):
    """The verbs that do the work here, under a lease like any worker."""

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
        approved: bool | None = None,
        reason: str | None = None,
        decided_by: str | None = None,
        amended_arguments: dict[str, Any] | None = None,
        calls: Mapping[str, CallDecision | Mapping[str, Any]] | None = None,
        scope: str | None = None,
        principal: Any = None,
    ) -> Run:
        """Decide, and continue the run in this process; a host's own checkpoint is only recorded.

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
            calls=calls,
            scope=scope,
            principal=principal,
        )
        run = self.get(decided.run_id, scope=scope)
        stays = run.is_terminal or decided.kind == CheckpointKind.HOST
        return run if stays else self.continue_run(decided.run_id, scope=scope)

    def resume(
        self,
        run_id: str,
        results: Sequence[ToolResult],
        *,
        scope: str | None = None,
        patience_s: float = 5.0,
    ) -> Run:
        """Answer every external call of a run's pause, and continue the run in this process.

        Raises: NoHost, Stopping (nothing is recorded), as ``provide_results``; as ``continue_run`` when the answer is
        in but the run went on elsewhere.
        """
        self._start()
        in_process.refuse_while_draining(self._rt)
        self.provide_results(run_id, results, scope=scope, patience_s=patience_s)
        return self.continue_run(run_id, scope=scope)

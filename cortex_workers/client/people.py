"""What people are asked, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cortex_workers.client.base import ClientBase, checked_limit
from cortex_workers.engine import authority, refusals
from cortex_workers.engine import decide as deciding
from cortex_workers.engine import settle as settling
from cortex_workers.engine.validate import checked_id
from cortex_workers.errors import (
    CheckpointNotFound,
    InvalidDecision,
)
from cortex_workers.schemas.checkpoint import CallDecision, Checkpoint, Decision, SettleOutcome
from cortex_workers.schemas.ids import CHECKPOINT, RUN
from cortex_workers.store import checkpoints


class People(ClientBase):
    """The verbs of those who decide."""

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
                limit=checked_limit(limit),
            )
            return [checkpoints.to_checkpoint(unit, row) for row in rows]

    def count_checkpoints(self, *, scope: str | None = None, run_id: str | None = None) -> int:
        """How many questions of a scope and below wait for a decision.

        Raises: NoScope, InvalidScope, InvalidId.
        """
        if run_id is not None:
            checked_id(RUN, run_id)
        with self._rt.database.read() as unit:
            return checkpoints.count_pending(unit, self._need_scope(scope), run_id)

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
        approved: bool | None = None,
        reason: str | None = None,
        decided_by: str | None = None,
        amended_arguments: dict[str, Any] | None = None,
        calls: Mapping[str, CallDecision | Mapping[str, Any]] | None = None,
        scope: str | None = None,
        principal: Any = None,
    ) -> Checkpoint:
        """Decide a pause as a whole (``approved``) or call by call (``calls``, by call id); the run goes on elsewhere.

        The same decision again changes nothing. ``amended_arguments`` replace the arguments of a pause's single call;
        each ``CallDecision`` may carry its own.
        Raises: InvalidDecision, InvalidState (``recorded`` carries the first decision), SuspensionExpired,
        CheckpointNotFound, InvalidId, SessionClosed.
        """
        with refusals.told("decide", CHECKPOINT, checkpoint_id, self._actor):
            decision = _decision(
                approved=_approved(approved, calls is not None),
                reason=reason,
                decided_by=decided_by,
                actor=self._actor,
                amended_arguments=amended_arguments,
                calls=_call_decisions(calls),
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
        with refusals.told("settle", CHECKPOINT, checkpoint_id, self._actor):
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


def _decision(**values: Any) -> Decision:
    amended = values.get("amended_arguments")
    if amended is not None and not isinstance(amended, dict):
        raise InvalidDecision("amended arguments must be a JSON object")
    return Decision.model_construct(None, **values)


def _approved(approved: object, by_call: bool) -> bool:
    if by_call:
        if approved is not None:
            raise InvalidDecision("decide the pause as a whole or call by call, not both")
        return False
    if not isinstance(approved, bool):
        raise InvalidDecision("approved is True or False")
    return approved


def _call_decisions(
    calls: Mapping[str, CallDecision | Mapping[str, Any]] | None,
) -> dict[str, CallDecision] | None:
    if calls is None:
        return None
    if not isinstance(calls, Mapping) or not calls:
        raise InvalidDecision("calls maps each pending call's id to its decision")
    found = {}
    for call_id, given in calls.items():
        values: Mapping[str, Any] = given.model_dump() if isinstance(given, CallDecision) else given
        known = isinstance(values, Mapping) and set(values) <= set(CallDecision.model_fields)
        if not known or not isinstance(values.get("approved"), bool):
            raise InvalidDecision("a call's decision has approved (True or False), amended_arguments, reason")
        found[str(call_id)] = CallDecision.model_construct(
            None, **{"amended_arguments": None, "reason": None, **values}
        )
    return found

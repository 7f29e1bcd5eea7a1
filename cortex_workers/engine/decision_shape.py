"""What can be wrong with a decision, said before anything moves.

Source: runs.md 2.13, 6.8; rulings 6, 45; bug case C46.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema

from cortex_workers.engine.validate import checked_object, checked_text
from cortex_workers.errors import InputTooLarge, InvalidArgument, InvalidDecision
from cortex_workers.schemas.agent import AgentDefinition
from cortex_workers.schemas.checkpoint import CallDecision, CheckpointKind, Decision
from cortex_workers.store.transitions import Row

MECHANISM_PREFIX = "cortex:"


def checked(decision: Decision, limit_bytes: int) -> Decision:
    """The texts of a decision can be stored, and no person claims to be a mechanism.

    Raises: InvalidDecision, UnstorableText, InputTooLarge when its arguments have more bytes of UTF-8.
    """
    for what, text in (
        ("the reason", decision.reason),
        ("decided_by", decision.decided_by),
        ("actor", decision.actor),
    ):
        if text is not None:
            checked_text(what, text)
            if len(text) > 10_000:
                raise InvalidDecision(f"{what} is longer than 10,000 characters")
    for name in (decision.decided_by, decision.actor):
        if name is not None and name.startswith(MECHANISM_PREFIX):
            raise InvalidDecision(f"names that start with {MECHANISM_PREFIX!r} are reserved for mechanisms")
    _check_size(decision, limit_bytes)
    if decision.calls is None:
        return decision if decision.approved else decision.model_copy(update={"amended_arguments": None})
    if decision.amended_arguments is not None:
        raise InvalidDecision("decide the pause as a whole or call by call, not both")
    calls = {call_id: _checked_call(call_id, mine) for call_id, mine in decision.calls.items()}
    approved = any(mine.approved for mine in calls.values())
    return decision.model_copy(update={"calls": calls, "approved": approved})


def _checked_call(call_id: str, mine: CallDecision) -> CallDecision:
    checked_text("a call id", call_id)
    if mine.reason is not None:
        checked_text("a call's reason", mine.reason)
        if len(mine.reason) > 10_000:
            raise InvalidDecision("a call's reason is longer than 10,000 characters")
    return mine if mine.approved else mine.model_copy(update={"amended_arguments": None})


def _check_size(decision: Decision, limit_bytes: int) -> None:
    amended = [decision.amended_arguments]
    amended += [mine.amended_arguments for mine in (decision.calls or {}).values()]
    size = sum(_bytes(arguments) for arguments in amended if arguments is not None)
    if size > limit_bytes:
        raise InputTooLarge(f"the amended arguments have {size} bytes, the limit is {limit_bytes}")


def _bytes(arguments: object) -> int:
    try:
        return len(checked_object("amended arguments", arguments).encode())
    except InvalidArgument as error:
        raise InvalidDecision(error.message) from None


def check(kind: str, pending: Sequence[Row], agent: AgentDefinition, decision: Decision) -> None:
    """Everything about a decision that can be wrong for this pause, before anything moves.

    Raises: InvalidDecision.
    """
    if kind == CheckpointKind.UNCERTAIN_EFFECT:
        raise InvalidDecision(
            "this checkpoint asks what became of a call: settle it as happened, did_not_happen or stop"
        )
    if decision.outcome is not None:
        raise InvalidDecision(
            "an outcome settles an uncertain effect; this checkpoint is approved or rejected"
        )
    if kind == CheckpointKind.DEFERRED_MODEL_CALL and (decision.calls or decision.amended_arguments):
        raise InvalidDecision("a deferred model call has no tool calls to decide or amend")
    if decision.calls is not None:
        _check_calls(pending, agent, decision.calls)
    elif decision.amended_arguments is not None:
        if len(pending) != 1:
            raise InvalidDecision(
                f"amended arguments fit a pause with exactly one call; this one has {len(pending)}: decide call by call"
            )
        check_arguments(agent, pending[0]["tool"], decision.amended_arguments)


def _check_calls(pending: Sequence[Row], agent: AgentDefinition, calls: Mapping[str, CallDecision]) -> None:
    """Every pending call is decided, and nothing else (runs.md 2.13)."""
    tools = {call["call_id"]: call["tool"] for call in pending}
    foreign = sorted(set(calls) - set(tools))
    if foreign:
        raise InvalidDecision(f"no such call waits here: {foreign[0][:80]!r}")
    missing = [call_id for call_id in tools if call_id not in calls]
    if missing:
        raise InvalidDecision(f"every call of the pause must be decided; missing: {', '.join(missing)[:300]}")
    for call_id, mine in calls.items():
        if mine.amended_arguments is not None:
            check_arguments(agent, tools[call_id], mine.amended_arguments)


def check_arguments(agent: AgentDefinition, tool: str, arguments: dict[str, Any]) -> None:
    """Check arguments against the published schema of the run's frozen version.

    Raises: InvalidDecision, naming the place that does not fit.
    """
    spec = agent.tool(tool)
    if spec is None:
        raise InvalidDecision(f"the run's agent has no tool named {tool!r}")
    validator = jsonschema.validators.validator_for(spec.parameters)(spec.parameters)
    error = next(
        iter(sorted(validator.iter_errors(arguments), key=lambda item: list(map(str, item.path)))), None
    )
    if error is not None:
        where = ".".join(str(part) for part in error.path) or "the object"
        raise InvalidDecision(f"amended arguments do not fit tool {tool}: {where}: {error.message[:300]}")

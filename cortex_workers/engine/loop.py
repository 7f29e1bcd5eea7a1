"""The reasoning loop: control flow only.

Source: runs.md 6.1; decision R9.
"""

from __future__ import annotations

from cortex_workers.engine import boundary, finish, gates, suspend, turn
from cortex_workers.engine.execution import Execution, Planned
from cortex_workers.engine.model_call import call_model
from cortex_workers.errors import DeferredModelCall, MaxSteps


def run_loop(ex: Execution) -> None:
    """Go on with a claimed run until it ends, pauses, or is given to another worker.

    Raises: LeaseLost, RunFailure, RefusedForNow, HandOff, SliceEnd; the caller turns each into its transition.
    """
    outstanding = outstanding_calls(ex)
    if outstanding:
        verdicts, rows = turn.load_verdicts(ex, outstanding)
        if turn.continued_turn(ex, verdicts, rows, outstanding) is turn.TurnEnd.PAUSED:
            return
    while True:
        boundary.check_step(ex)
        if ex.next_step >= ex.agent.max_steps:
            raise MaxSteps(f"the run used all of its {ex.agent.max_steps} steps without reaching an answer")
        try:
            answered = call_model(ex, gates.visible_tools(ex))
        except DeferredModelCall as deferral:
            suspend.pause_deferred(ex, deferral)
            return
        ex.deferral = None
        if not answered.message.tool_calls:
            # In a drain, what finishes first simply finishes (runs.md 3.10).
            finish.complete(ex, answered)
            return
        if turn.new_turn(ex, answered) is turn.TurnEnd.PAUSED:
            return


def outstanding_calls(ex: Execution) -> list[Planned]:
    """The calls of the last assistant message that have no result yet."""
    last = next(
        (index for index in range(len(ex.own) - 1, -1, -1) if ex.own[index].role == "assistant"), None
    )
    if last is None or not ex.own[last].tool_calls:
        return []
    answered = {item.tool_call_id for item in ex.own[last + 1 :]}
    raw = ex.own[last].raw or {}
    planned = gates.plan(
        ex, ex.own[last].tool_calls, ex.last_step_index, ex.last_message_seq, raw.get("provider_call_ids", ())
    )
    return [item for item in planned if item.call.id not in answered]

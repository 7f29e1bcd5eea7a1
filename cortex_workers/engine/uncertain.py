"""A started, unsafe call without an outcome: a lookup is asked, then a person; nothing is guessed.

Source: decision R13; rulings 4 to 8; bug case C08.
"""

from __future__ import annotations

from enum import Enum

from cortex_workers.engine import dispatch, gates, persist, suspend
from cortex_workers.engine.execution import Execution, Planned, Result, as_it_ran
from cortex_workers.errors import EffectUncertain, RefusedForNow
from cortex_workers.host import (
    BadArguments,
    DidNotHappen,
    Happened,
    LookupAnswer,
    ResultNotEncodable,
    Unknown,
    clean_text,
    cut_result,
    encode_result,
    foreign,
)
from cortex_workers.store import transcript


class Verdict(Enum):
    """What becomes of the call without a result."""

    RUN_AGAIN = "run_again"
    GIVEN_AWAY = "given_away"


def resolve(ex: Execution, item: Planned, *, why: str = "its worker was lost") -> Result | Verdict:
    """Find out what became of a call, or let the run wait for somebody who knows.

    Returns its result, RUN_AGAIN when it is proven not to have happened, or GIVEN_AWAY when the run was paused. A call
    that was run again ``reclaim_limit`` times is asked about in any case.
    Raises: EffectUncertain when the agent says so, LeaseLost, RefusedForNow.
    """
    if item.row.get("late_result") == dispatch.NEVER_ENTERED:
        return Verdict.RUN_AGAIN
    if item.row.get("settled_as") == "did_not_happen":
        return Verdict.RUN_AGAIN
    answer = _look_up(ex, item)
    if isinstance(answer, Happened):
        try:
            text = cut_result(clean_text(encode_result(answer.result))[0], ex.rt.settings.result_bytes)
            return Result(item, "complete", as_it_ran(text, *_amendment(item)))
        except ResultNotEncodable:
            why = f"{why}; its lookup says that it happened, with a result that cannot be stored"
    if isinstance(answer, DidNotHappen) and int(item.row.get("attempt", 1)) <= ex.rt.settings.reclaim_limit:
        wait_s = _still_open_s(ex, item)
        if wait_s <= 0:
            return Verdict.RUN_AGAIN
        # A negative lookup is believed late (ruling 7): the old worker may still act.
        raise RefusedForNow(
            "a negative lookup is believed later", retry_in_s=wait_s, reason="uncertain_settle"
        )
    if ex.agent.on_uncertain_effect == "fail":
        raise EffectUncertain(
            f"the call {item.call.id} of tool {item.call.name} in step {item.step_index} may have taken effect"
        )
    suspend.pause_uncertain(ex, item, why)
    return Verdict.GIVEN_AWAY


def _amendment(item: Planned) -> tuple[str | None, str | None]:
    """What ran in place of the model's arguments, and by whom: from this term, else from the record of a former one."""
    if item.executed_args is not None:
        return item.executed_args, item.amended_by
    return item.row.get("executed_args"), item.row.get("amended_by")


def settle_after_s(ex: Execution, item: Planned) -> float:
    """How long after the old lease's end a "did not happen" is believed."""
    timeout = dispatch.timeout_s(ex, item)
    settings = ex.rt.settings
    return (
        settings.uncertain_settle_no_timeout_s if timeout is None else timeout + settings.uncertain_settle_s
    )


def _still_open_s(ex: Execution, item: Planned) -> float:
    after_s = settle_after_s(ex, item)
    return persist.read(
        ex, lambda unit: transcript.seconds_until_settled(unit, ex.run_id, item.call.id, after_s)
    )


def _look_up(ex: Execution, item: Planned) -> LookupAnswer:
    """Ask the tool's lookup, where it has one; an error of it is an Unknown."""
    tool = item.tool
    if tool is None or item.spec is None or not tool.spec.has_lookup:
        return Unknown()
    try:
        ready = item.ready or tool.validate(item.row.get("executed_args") or item.call.arguments)
        ctx = gates.context(ex, item)
        if tool.lookup_is_async:
            found: LookupAnswer = ex.rt.loops.call(
                "tools",
                tool.lookup_call_async,
                ready,
                ctx,
                cancel=None,
                timeout_s=60.0,
                name=f"{item.call.name}.lookup",
            )
            return found
        return tool.lookup_call(ready, ctx)
    except BadArguments:
        return Unknown()
    except BaseException as error:  # noqa: BLE001  foreign code: a lookup that fails cannot tell, so a person is asked
        foreign.let_through(error)
        return Unknown()

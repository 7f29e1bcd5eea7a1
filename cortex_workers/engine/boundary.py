"""Before each model call and each dispatch: may this worker go on with the run?

Source: runs.md 6.2; rulings 4, 18, 28, 30, 34.
"""

from __future__ import annotations

import time

from cortex_workers.engine.execution import Execution
from cortex_workers.errors import BudgetExhausted, LeaseLost


class HandOff(Exception):
    """The run goes on with another worker: this one drains, or somebody asked the run to stop here."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class SliceEnd(Exception):
    """The task has worked long enough; the run goes on in another one."""


def check(ex: Execution) -> None:
    """Stop before the next side effect when the run is not ours to go on with, or has used up its budget.

    Raises: LeaseLost, HandOff, BudgetExhausted.
    """
    check_hold(ex)
    if _over_budget(ex):
        raise BudgetExhausted(f"the run used up its budget of {ex.agent.budget_s:g} s of leased time")


def check_hold(ex: Execution) -> None:
    """Stop when the run is not ours to go on with; waits while the lease is not confirmed (ruling 28).

    Raises: LeaseLost, HandOff.
    """
    if ex.held.lost:
        raise LeaseLost(run_id=ex.run_id)
    if not ex.held.trusted():
        ex.held.wait_trusted()
    reason = stop_reason(ex)
    if reason is not None:
        raise HandOff(reason)


def check_step(ex: Execution) -> None:
    """The same before a model call, where a slice may end as well.

    Raises: SliceEnd, and what ``check`` raises.
    """
    check(ex)
    settings = ex.rt.settings
    used = time.monotonic() - ex.slice_began
    if ex.steps_here >= settings.slice_steps or (used >= settings.slice_s and ex.acted):
        raise SliceEnd()


def may_start(ex: Execution) -> bool:
    """Whether a commit may carry the start record of the next call; else that call meets ``check`` first."""
    return stop_reason(ex) is None and not _over_budget(ex)


def _over_budget(ex: Execution) -> bool:
    return ex.agent.budget_s is not None and leased_s(ex) > ex.agent.budget_s


def stop_reason(ex: Execution) -> str | None:
    """Why a holder should let go now: ``drain``, or the reason of a stop request."""
    if ex.rt.drain.is_set():
        return "drain"
    return ex.held.stop_requested


def leased_s(ex: Execution) -> float:
    """Seconds of leased time the run has used, this term included (ruling 34)."""
    return float(ex.row["leased_time"]) + (time.monotonic() - ex.began)

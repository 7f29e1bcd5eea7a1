"""What a tool is told about the call it serves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cortex_workers.errors import RunInterrupted


def _no() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """One tool call of one run, as its handler sees it.

    ``call_id`` is unique within the run. ``attempt`` counts from 1 and grows when a call is run again after a
    crash. ``chain`` names who sent this run to work, the nearest first, where messages between agents led to it.
    ``cancelled()`` and ``draining()`` may be asked at any time, from any thread.
    Units: ``deadline`` is on this process's monotonic clock; None means no limit.
    """

    run_id: str
    step: int
    call_id: str
    agent: str
    scope: str = ""
    principal: Any = None
    session_id: str | None = None
    chain: tuple[str, ...] = ()
    attempt: int = 1
    deadline: float | None = None
    cancelled: Callable[[], bool] = _no
    draining: Callable[[], bool] = _no

    @property
    def idempotency_key(self) -> str:
        """The same text whenever this very call is run, by whomever; pass it on to what has the effect."""
        return f"{self.run_id}/{self.step}/{self.call_id}"

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the deadline, never negative; None without a deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def raise_if_stopping(self) -> None:
        """Leave the tool when its run was cancelled or its worker drains.

        A retry-safe call is run again elsewhere; any other counts as uncertain, so ask before the effect.
        Raises: RunInterrupted.
        """
        if self.cancelled():
            raise RunInterrupted("the run was taken from this worker")
        if self.draining():
            raise RunInterrupted("this worker drains")

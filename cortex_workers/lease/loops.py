"""Where foreign code runs: two event loops of this process, and threads for plain tools with a timeout.

One loop is for model clients, one for users' async tools: a tool that blocks its loop must not stop every model
stream. Each has a thread of the operating system, whatever the pool.
Source: decision S3; rulings 4, 8, 33.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

from cortex_workers import telemetry
from cortex_workers.errors import LeaseLost, RunInterrupted, ToolTimeout
from cortex_workers.lease.drain import DrainSwitch
from cortex_workers.lease.event_loop import EventLoop, Job
from cortex_workers.lease.held import Held
from cortex_workers.lease.outcome import GivenUp, Late, Outcome, Overdue
from cortex_workers.lease.threads import start_real
from cortex_workers.settings import Settings

__all__ = ["LAG_WARNING_S", "Late", "Loops", "ThreadRunner", "ToolTimeout"]

T = TypeVar("T")
Which = Literal["models", "tools"]
LAG_WARNING_S = 1.0
_LOOK_S = 0.25


class Loops:
    """The two event loops of one process, started when they are first needed."""

    def __init__(self) -> None:
        self.models = EventLoop("models")
        self.tools = EventLoop("tools")
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watched = False

    def call(
        self,
        which: Which,
        function: Callable[..., Awaitable[T]],
        *args: Any,
        cancel: Held | None = None,
        timeout_s: float | None = None,
        name: str | None = None,
        on_late: Late | None = None,
    ) -> T:
        """Run a coroutine function on a loop and block this thread until its end.

        A call that passes the timeout, or whose run is lost or asked to stop, is cancelled and not waited for; what it
        returns or raises nevertheless goes to ``on_late``, in a thread of its own. ``entered=False`` in the data of a
        ToolTimeout tells that it was never begun, and never will be.
        Raises: what the function raised; LeaseLost, RunInterrupted (``cancel``); past the timeout ToolTimeout from
        the loop of tools, TimeoutError from that of models.
        """
        loop = self.models if which == "models" else self.tools
        label = name or str(getattr(function, "__qualname__", "call"))
        job = Job(label, lambda: function(*args), on_late)
        loop.submit(job)
        self._watch()
        take_back = cancel.on_stop(lambda: loop.cancel(job)) if cancel is not None else None
        try:
            return job.outcome.take(timeout_s)
        except Overdue:
            loop.cancel(job)
            raise _overdue(which, job, timeout_s) from None
        except GivenUp:
            raise _stopped(cancel) from None
        finally:
            if take_back is not None:
                take_back()

    def close(self) -> None:
        """Cancel what runs and end both loops."""
        self._closed.set()
        self.models.close()
        self.tools.close()

    def _watch(self) -> None:
        if self._watched:
            return
        with self._lock:
            if not self._watched:
                self._watched = True
                start_real("loop-watch", self._look)

    def _look(self) -> None:
        """Look from outside: a blocked loop cannot tell of itself."""
        lagging: set[str] = set()
        while not self._closed.wait(_LOOK_S):
            for loop in (self.models, self.tools):
                if not loop.is_started:
                    continue
                lag_s, busy_with = loop.lag_s(), loop.busy_with()
                telemetry.LOOP_LAG.labels(loop.name).set(lag_s)
                if lag_s <= LAG_WARNING_S:
                    lagging.discard(loop.name)
                elif loop.name not in lagging:
                    lagging.add(loop.name)
                    telemetry.event(
                        "loop.lagging", level="warning", loop=loop.name, lag_s=round(lag_s, 2), task=busy_with
                    )


def _overdue(which: Which, job: Job[Any], timeout_s: float | None) -> Exception:
    if which == "models":
        return TimeoutError(f"{job.name} did not return within {timeout_s:g} s")
    if job.turned_away():
        text = f"{job.name} was not begun within {timeout_s:g} s: another call blocks the event loop"
        return ToolTimeout(text, entered=False)
    return ToolTimeout(f"{job.name} did not return within {timeout_s:g} s")


def _stopped(held: Held | None) -> Exception:
    if held is None or held.lost:
        return LeaseLost(run_id=held.term.run_id) if held is not None else RunInterrupted()
    return RunInterrupted(held.stop_requested, reason=held.stop_requested)


class ThreadRunner:
    """Runs plain tools; those with a timeout in a thread of their own, which is left behind when it passes.

    Too many left behind, and this process drains: they hold memory and whatever they wait for.
    """

    def __init__(self, settings: Settings, drain: DrainSwitch) -> None:
        self._most = settings.abandoned_tools_max
        self._drain = drain
        self._lock = threading.Lock()
        self._abandoned = 0

    @property
    def abandoned(self) -> int:
        """Threads left behind that have not returned yet."""
        return self._abandoned

    def run_with_timeout(
        self, function: Callable[[], T], timeout_s: float | None, name: str, on_late: Late | None = None
    ) -> T:
        """Run a function, in this thread when there is no timeout.

        What a thread left behind returns or raises in the end goes to ``on_late``, in that thread.
        Raises: what the function raised, ToolTimeout.
        """
        if timeout_s is None:
            return function()
        outcome: Outcome[T] = Outcome()
        context = contextvars.copy_context()
        threading.Thread(
            target=lambda: context.run(self._run, function, outcome, on_late),
            name=f"tool-{name}",
            daemon=True,
        ).start()
        try:
            return outcome.take(timeout_s)
        except Overdue:
            self._left_behind(name)
            raise ToolTimeout(f"{name} did not return within {timeout_s:g} s") from None

    def _run(self, function: Callable[[], T], outcome: Outcome[T], on_late: Late | None) -> None:
        value: T | None = None
        error: BaseException | None = None
        try:
            value = function()
        except BaseException as raised:  # noqa: BLE001  foreign code: its error belongs to who waits
            error = raised
        if outcome.settle(value, error):
            return
        self._count(-1)
        if on_late is not None:
            on_late(value if error is None else error)

    def _left_behind(self, name: str) -> None:
        count = self._count(+1)
        telemetry.event("tool.abandoned", level="warning", tool=name, abandoned=count, most=self._most)
        if count > self._most:
            self._drain.set()

    def _count(self, change: int) -> int:
        with self._lock:
            self._abandoned += change
            telemetry.ABANDONED_TOOLS.set(self._abandoned)
            return self._abandoned

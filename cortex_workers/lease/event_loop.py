"""One event loop on a thread of its own, for calls that other threads wait for.

anyio's blocking portal would do the same, but waits until the loop has taken a call in: behind a tool that blocks the
loop, that is beyond any timeout and beyond the loss of the run.
Source: ruling 33.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import anyio

from cortex_workers.lease.outcome import Late, Outcome, wait_for
from cortex_workers.lease.threads import start_real

T = TypeVar("T")
_BEAT_S = 0.25


class Job(Generic[T]):
    """One call on a loop."""

    def __init__(self, name: str, make: Callable[[], Awaitable[T]], on_late: Late | None) -> None:
        self.name = name
        self.outcome: Outcome[T] = Outcome()
        self._make = make
        self._on_late = on_late
        self._scope: anyio.CancelScope | None = None
        self._entry = threading.Lock()
        self._entered = False

    def turned_away(self) -> bool:
        """Whether an abandoned call was never entered; then it never will be. From any thread."""
        with self._entry:
            return self.outcome.abandoned and not self._entered

    async def run(self) -> None:
        """Run it on the loop; whatever happens inside, the loop lives on."""
        with self._entry:
            if self.outcome.abandoned:
                return
            self._entered = True
        self._scope = anyio.CancelScope()
        try:
            with self._scope as scope:
                value = await self._make()
        except Exception as error:  # noqa: BLE001  foreign code: its error belongs to who waits
            self._settle(None, error)
        except (SystemExit, KeyboardInterrupt) as error:
            # Let through, it would end the loop and with it every other call.
            self._settle(None, RuntimeError(f"{self.name} raised {type(error).__name__}"))
        except BaseException:
            # Cancelled, though not by us: by its own code, or because the loop closes.
            self._settle(None, RuntimeError(f"{self.name} was cancelled"))
            raise
        else:
            if not scope.cancelled_caught:
                self._settle(value, None)

    def cancel(self) -> None:
        """Cancel it, on the loop."""
        if self._scope is not None:
            self._scope.cancel()

    def _settle(self, value: T | None, error: BaseException | None) -> None:
        if not self.outcome.settle(value, error) and self._on_late is not None:
            on_late, late = self._on_late, value if error is None else error
            # It may write to the database, which the loop must not wait for.
            start_real("late-result", lambda: on_late(late))


class EventLoop:
    """Started by its first call."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._life: anyio.CancelScope | None = None
        self._jobs: dict[asyncio.Task[None], Job[Any]] = {}
        self._ident: int | None = None
        self._beat_at = 0.0
        self._over = threading.Event()

    def submit(self, job: Job[Any]) -> None:
        """Hand a call to the loop, without waiting for it to be taken in.

        Raises: RuntimeError from the loop's own thread, which would wait for itself for ever.
        """
        if threading.get_ident() == self._ident:
            raise RuntimeError(f"{job.name} was called from inside the event loop that should run it")
        self._started().call_soon_threadsafe(self._take_in, job, context=contextvars.copy_context())

    def cancel(self, job: Job[Any]) -> None:
        """Let nobody wait for a call any more, and cancel it. From any thread."""
        job.outcome.abandon()
        loop = self._loop
        if loop is not None and not self._over.is_set():
            loop.call_soon_threadsafe(job.cancel)

    def close(self, wait_s: float = 2.0) -> None:
        """Cancel what runs and end the loop; it does not start again."""
        with self._lock:
            if self._loop is None or self._life is None:
                self._over.set()
                return
        if not self._over.is_set():
            self._loop.call_soon_threadsafe(self._life.cancel)
            self._over.wait(wait_s)

    @property
    def is_started(self) -> bool:
        """Whether the loop runs."""
        return self._loop is not None and not self._over.is_set()

    def lag_s(self) -> float:
        """How late the loop is to wake up; it grows while something blocks it."""
        return max(0.0, time.monotonic() - self._beat_at - _BEAT_S)

    def busy_with(self) -> str:
        """The call that the loop executes in this instant, else (a task that a call made itself) all it knows of."""
        names = {job.name for job in tuple(self._jobs.values())}
        task = asyncio.current_task(self._loop) if self._loop is not None else None
        current = task.get_name() if task is not None else ""
        return current if current in names else ", ".join(sorted(names)[:5])

    def _take_in(self, job: Job[Any]) -> None:
        # Not by a task group of anyio: that needs its own context, and a call is to have that of its caller.
        task = asyncio.get_running_loop().create_task(job.run(), name=job.name)
        self._jobs[task] = job
        task.add_done_callback(self._jobs.pop)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._over.is_set():
                raise RuntimeError(f"the event loop of {self.name} is closed")
            if self._loop is None:
                ready: Future[asyncio.AbstractEventLoop] = Future()
                start_real(f"loop-{self.name}", lambda: self._main(ready))
                self._loop = wait_for(ready, None)
            return self._loop

    def _main(self, ready: Future[asyncio.AbstractEventLoop]) -> None:
        try:
            anyio.run(self._serve, ready)
        except Exception as error:  # noqa: BLE001  the last frame of a thread: who waits for the loop must hear
            if ready.done():
                raise
            ready.set_exception(error)
        finally:
            self._over.set()

    async def _serve(self, ready: Future[asyncio.AbstractEventLoop]) -> None:
        self._ident = threading.get_ident()
        self._beat_at = time.monotonic()
        with anyio.CancelScope() as self._life:
            ready.set_result(asyncio.get_running_loop())
            while True:
                await anyio.sleep(_BEAT_S)
                self._beat_at = time.monotonic()

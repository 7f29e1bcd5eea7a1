"""Where foreign code runs: cancelled, timed out, left behind, and never in the way of somebody else's."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import structlog

from cortex_workers.errors import LeaseLost, RunInterrupted, ToolTimeout
from cortex_workers.lease.drain import DrainSwitch
from cortex_workers.lease.held import Held
from cortex_workers.lease.loops import Loops, ThreadRunner
from cortex_workers.schemas.lease import Term
from cortex_workers.settings import load_settings
from cortex_workers.telemetry import ABANDONED_TOOLS, LOOP_LAG
from tests.waiting import DEADLINE_S, wait_until


class NoKeeper:
    """What a held term asks of a keeper, for one that nobody renews."""

    trust_s = 60.0
    lock = threading.RLock()

    def forget(self, held: Held) -> None:
        """Nothing is kept."""

    def await_verdict(self, timeout_s: float) -> None:
        """There is none."""


def held_run() -> Held:
    return Held(NoKeeper(), Term(run_id="arun_1", owner="me", revision=3), 0.0)


@pytest.fixture
def loops() -> Iterator[Loops]:
    made = Loops()
    yield made
    made.close()


@pytest.fixture
def drain() -> DrainSwitch:
    return DrainSwitch()


@pytest.fixture
def threads(drain: DrainSwitch) -> ThreadRunner:
    return ThreadRunner(load_settings(abandoned_tools_max=1), drain)


@contextmanager
def in_background(work: Callable[[], Any]) -> Iterator[list[Any]]:
    """Do something in another thread; what it returned or raised is in the list when the block is over."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield outcome
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


async def forever(entered: threading.Event) -> None:
    entered.set()
    await asyncio.Event().wait()


# --- Event loops ------------------------------------------------------------------------------------------------------


def test_a_call_returns_what_the_coroutine_returned(loops: Loops) -> None:
    async def add(left: int, right: int) -> int:
        await asyncio.sleep(0)
        return left + right

    assert loops.call("models", add, 2, 3) == 5


def test_a_call_raises_what_the_coroutine_raised(loops: Loops) -> None:
    async def fail() -> None:
        raise ZeroDivisionError("by hand")

    with pytest.raises(ZeroDivisionError, match="by hand"):
        loops.call("tools", fail)


def test_models_and_tools_have_a_thread_each_and_keep_it(loops: Loops) -> None:
    async def where() -> str:
        return threading.current_thread().name

    assert {loops.call("models", where) for _ in range(3)} == {"loop-models"}
    assert {loops.call("tools", where) for _ in range(3)} == {"loop-tools"}


def test_a_call_sees_the_context_of_its_caller(loops: Loops) -> None:
    run = contextvars.ContextVar("run", default="nobody")
    run.set("arun_1")

    async def who() -> str:
        return run.get()

    assert loops.call("tools", who) == "arun_1"


def test_a_lost_run_cancels_its_call_and_nobody_elses(loops: Loops) -> None:
    held, cancelled, entered = held_run(), threading.Event(), threading.Event()
    go_on, other_entered = threading.Event(), threading.Event()

    async def wait() -> None:
        try:
            await forever(entered)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def other() -> str:
        other_entered.set()
        while not go_on.is_set():
            await asyncio.sleep(0)
        return "unharmed"

    with in_background(lambda: loops.call("models", other)) as unharmed:
        assert other_entered.wait(DEADLINE_S)
        with in_background(lambda: loops.call("models", wait, cancel=held)) as outcome:
            assert entered.wait(DEADLINE_S)
            held.lose()
        assert isinstance(outcome[0], LeaseLost)
        assert cancelled.wait(DEADLINE_S)
        go_on.set()
    assert unharmed == ["unharmed"]


def test_a_stop_request_interrupts_a_call_with_its_reason(loops: Loops) -> None:
    held, entered = held_run(), threading.Event()
    with in_background(lambda: loops.call("models", forever, entered, cancel=held)) as outcome:
        assert entered.wait(DEADLINE_S)
        held.note_stop("pause")
    (error,) = outcome
    assert isinstance(error, RunInterrupted)
    assert error.data == {"reason": "pause"}


def test_a_run_that_is_lost_already_calls_nothing(loops: Loops) -> None:
    held, entered = held_run(), threading.Event()
    held.lose()
    with pytest.raises(LeaseLost):
        loops.call("models", forever, entered, cancel=held)


def test_a_call_that_is_over_leaves_nothing_with_its_run(loops: Loops) -> None:
    held = held_run()

    async def answer() -> int:
        return 42

    for _ in range(3):
        assert loops.call("models", answer, cancel=held) == 42
    assert held._callbacks == []


@pytest.mark.parametrize(("which", "error"), [("models", TimeoutError), ("tools", ToolTimeout)])
def test_a_call_past_its_timeout_is_cancelled(loops: Loops, which: Any, error: type[Exception]) -> None:
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(error, match=r"slow did not return within 0\.05 s") as caught:
        loops.call(which, wait, timeout_s=0.05, name="slow")
    assert type(caught.value) is error
    assert cancelled.wait(DEADLINE_S)


def test_a_timeout_of_the_code_itself_is_told_from_ours(loops: Loops) -> None:
    async def give_up() -> None:
        raise TimeoutError("the network")

    with pytest.raises(TimeoutError, match="the network") as caught:
        loops.call("tools", give_up, timeout_s=DEADLINE_S)
    assert not isinstance(caught.value, ToolTimeout)


def test_what_a_call_returns_after_its_timeout_is_not_lost(loops: Loops) -> None:
    late: list[Any] = []

    async def stubborn() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            asyncio.current_task().uncancel()  # type: ignore[union-attr]
        return "refunded"

    with pytest.raises(ToolTimeout):
        loops.call("tools", stubborn, timeout_s=0.05, on_late=late.append)
    assert wait_until(lambda: late, what="the late result") == ["refunded"]


def test_a_call_that_was_cancelled_has_no_late_result(loops: Loops) -> None:
    late: list[Any] = []
    over = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            over.set()

    with pytest.raises(ToolTimeout):
        loops.call("tools", wait, timeout_s=0.05, on_late=late.append)
    assert over.wait(DEADLINE_S)
    assert loops.call("tools", asyncio.sleep, 0) is None
    assert late == []


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_code_that_wants_to_end_the_process_ends_its_call_only(loops: Loops, error: BaseException) -> None:
    async def leave() -> None:
        raise error

    async def still_here() -> str:
        return "yes"

    with pytest.raises(RuntimeError, match="leave"):
        loops.call("tools", leave)
    assert loops.call("tools", still_here) == "yes"


def test_a_blocked_loop_holds_nobody_beyond_the_timeout_and_not_the_other_loop(loops: Loops) -> None:
    go_on, entered, wanted = threading.Event(), threading.Event(), threading.Event()

    async def hog() -> str:
        entered.set()
        go_on.wait(DEADLINE_S)
        return "done"

    async def answer() -> str:
        wanted.set()
        return "answer"

    with in_background(lambda: loops.call("tools", hog)) as hogged:
        assert entered.wait(DEADLINE_S)
        with pytest.raises(ToolTimeout):
            loops.call("tools", answer, timeout_s=0.05)
        assert loops.call("models", answer) == "answer"
        wanted.clear()
        go_on.set()
    assert hogged == ["done"]
    assert loops.call("tools", asyncio.sleep, 0) is None
    assert not wanted.is_set(), "a call that nobody waits for any more was made"


def test_a_loop_that_is_blocked_is_told_with_the_name_of_the_tool(loops: Loops) -> None:
    go_on, entered = threading.Event(), threading.Event()

    async def hog() -> None:
        entered.set()
        go_on.wait(DEADLINE_S)

    with structlog.testing.capture_logs() as logs:
        with in_background(lambda: loops.call("tools", hog, name="resize_images")):
            assert entered.wait(DEADLINE_S)
            wait_until(lambda: lagging(logs), what="the warning")
            assert LOOP_LAG.labels("tools")._value.get() > 1
            go_on.set()
        wait_until(lambda: LOOP_LAG.labels("tools")._value.get() < 0.5, what="the loop to recover")
    (warning,) = lagging(logs)
    assert (warning["loop"], warning["task"], warning["log_level"]) == ("tools", "resize_images", "warning")
    assert warning["lag_s"] >= 1


def lagging(logs: Any) -> list[Any]:
    return [entry for entry in logs if entry["event"] == "loop.lagging"]


def test_a_coroutine_that_would_wait_for_itself_is_refused(loops: Loops) -> None:
    async def inner() -> int:
        return 1

    async def outer() -> int:
        return loops.call("tools", inner)

    with pytest.raises(RuntimeError, match="from inside the event loop"):
        loops.call("tools", outer)


def test_closing_ends_what_runs_and_takes_nothing_more(loops: Loops) -> None:
    entered = threading.Event()
    with in_background(lambda: loops.call("tools", forever, entered)) as outcome:
        assert entered.wait(DEADLINE_S)
        loops.close()
    assert isinstance(outcome[0], RuntimeError)
    with pytest.raises(RuntimeError, match="closed"):
        loops.call("models", asyncio.sleep, 0)


# --- Threads ----------------------------------------------------------------------------------------------------------


def test_without_a_timeout_a_tool_runs_in_the_callers_thread(threads: ThreadRunner) -> None:
    assert threads.run_with_timeout(threading.get_ident, None, "who") == threading.get_ident()
    assert threads.run_with_timeout(threading.get_ident, DEADLINE_S, "who") != threading.get_ident()


def test_a_tool_in_time_returns_raises_and_sees_its_callers_context(threads: ThreadRunner) -> None:
    run = contextvars.ContextVar("run", default="nobody")
    run.set("arun_1")
    assert threads.run_with_timeout(run.get, DEADLINE_S, "who") == "arun_1"
    with pytest.raises(KeyError):
        threads.run_with_timeout(lambda: {}["missing"], DEADLINE_S, "broken")
    assert threads.abandoned == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_tool_past_its_timeout_is_left_behind_and_its_late_outcome_kept(
    threads: ThreadRunner, fails: bool
) -> None:
    go_on, late = threading.Event(), list[Any]()

    def slow() -> str:
        go_on.wait(DEADLINE_S)
        if fails:
            raise ValueError("late")
        return "refunded"

    with pytest.raises(ToolTimeout, match=r"refund did not return within 0\.05 s"):
        threads.run_with_timeout(slow, 0.05, "refund", on_late=late.append)
    assert (threads.abandoned, ABANDONED_TOOLS._value.get()) == (1, 1)
    assert late == []
    go_on.set()
    wait_until(lambda: late, what="the late outcome")
    assert isinstance(late[0], ValueError) if fails else late == ["refunded"]
    assert (threads.abandoned, ABANDONED_TOOLS._value.get()) == (0, 0)


def test_too_many_left_behind_drain_the_process(threads: ThreadRunner, drain: DrainSwitch) -> None:
    go_on = threading.Event()
    for number in (1, 2):
        assert not drain.is_set()
        with pytest.raises(ToolTimeout):
            threads.run_with_timeout(lambda: go_on.wait(DEADLINE_S), 0.01, "stuck")
        assert threads.abandoned == number
    assert drain.is_set()
    go_on.set()
    wait_until(lambda: threads.abandoned == 0, what="the threads to return")


def test_a_tools_own_timeout_is_told_from_ours(threads: ThreadRunner) -> None:
    def give_up() -> None:
        raise TimeoutError("the network")

    with pytest.raises(TimeoutError) as caught:
        threads.run_with_timeout(give_up, DEADLINE_S, "fetch")
    assert not isinstance(caught.value, ToolTimeout)

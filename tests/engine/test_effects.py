"""Effects: what a worker that dies leaves behind, and that nothing happens twice by itself."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import anyio
import pytest

from cortex_workers import Client, DidNotHappen, EffectUncertain, Happened, Host, ToolContext, Unknown
from cortex_workers.engine import expire
from cortex_workers.errors import InvalidDecision
from cortex_workers.schemas.llm import ModelRequest
from cortex_workers.store import tables
from tests.engine.world import TTL_S, Worker, World, at, call, error_of, only, results, say, turn
from tests.waiting import wait_until

SHIP = [turn(call("ship", order="17")), say()]


def begin(world: World, script: Any = None, **options: Any) -> tuple[Client, Worker, str]:
    world.shop(script or SHIP, **options)
    worker, client = world.worker(), world.client()
    return client, worker, client.enqueue("support", "Go").id


# --- Where a worker may die ------------------------------------------------------------------------------------------


@pytest.mark.invariant("I7")
def test_the_start_record_of_an_unsafe_call_is_in_before_its_handler_runs(world: World) -> None:
    seen: list[str] = []

    @world.host.tool
    def look(ctx: ToolContext) -> str:
        """Look at the record."""
        seen.append(world.call(ctx.run_id)["state"])
        return "seen"

    _client, worker, run_id = begin(world, [turn(call("look")), say()])
    worker.work(run_id)
    assert seen == ["started"]
    assert world.call(run_id)["state"] == "completed"


@pytest.mark.parametrize("probe", ["turn.after_commit", "tool.after_handler"])
def test_a_safe_call_runs_again_with_the_stored_id_arguments_and_key(world: World, probe: str) -> None:
    def script(request: ModelRequest) -> dict[str, Any]:
        asked = len(world.model.requests)
        return say() if request.step else turn(call("find", order=f"asked {asked}"))

    _client, worker, run_id = begin(world, script)
    worker.lose_at(probe, run_id)
    run = worker.work(run_id)
    assert run["state"] == "completed"
    # The model's answer was stored: it is not asked again, and nothing of a new answer is run.
    assert len(world.model.requests) == 2
    assert {effect.arguments["order"] for effect in world.effects} == {"asked 1"}
    assert len({effect.key for effect in world.effects}) == 1
    assert world.call(run_id)["state"] == "completed"


@pytest.mark.parametrize("probe", ["model.before", "model.after", "turn.before_commit"])
def test_a_worker_that_dies_before_the_turn_is_in_has_done_nothing(world: World, probe: str) -> None:
    _client, worker, run_id = begin(world)
    worker.lose_at(probe, run_id)
    assert (world.calls(run_id), world.steps(run_id), world.effects) == ([], [], [])
    assert worker.work(run_id)["state"] == "completed"
    assert len(world.effects) == 1


@pytest.mark.invariant("I7")
@pytest.mark.parametrize("probe", ["tool.after_start_record", "tool.after_handler"])
def test_an_unsafe_call_without_an_outcome_is_asked_about_and_not_run_again(world: World, probe: str) -> None:
    client, worker, run_id = begin(world)
    worker.lose_at(probe, run_id)
    done = len(world.effects)
    run = worker.work(run_id)
    assert run["state"] == "paused"
    assert len(world.effects) == done
    checkpoint = only(client.checkpoints())
    assert checkpoint.kind == "uncertain_effect"
    assert checkpoint.reason == "outcome unknown of: ship"
    assert (checkpoint.pending[0].kind, checkpoint.pending[0].tool) == ("uncertain_effect", "ship")
    assert checkpoint.expires_at is None
    assert world.call(run_id)["state"] == "started"
    (pause,) = world.pauses(run_id)
    assert pause["reason"] == "approval"


@pytest.mark.invariant("I7")
def test_a_recorded_outcome_is_used_and_the_call_is_not_run_again(world: World) -> None:
    _client, worker, run_id = begin(world)
    worker.lose_at("tool.after_outcome", run_id)
    assert worker.work(run_id)["output"] == "Done: ship done"
    assert len(world.effects) == 1
    assert len(results(world.messages(run_id))) == 1


@pytest.mark.invariant("I7")
def test_of_three_calls_none_is_repeated_when_a_worker_dies_between_them(world: World) -> None:
    script = [turn(call("ship", order="1"), call("find", order="2"), call("ship", order="3")), say("Done.")]
    _client, worker, run_id = begin(world, script)
    worker.lose_at("tool.before_start_record", run_id)
    run = worker.work(run_id)
    assert run["state"] == "completed"
    orders = [effect.arguments["order"] for effect in world.effects]
    # The safe one had run, and its result was in hand only.
    assert orders == ["1", "2", "2", "3"]
    assert len({effect.key for effect in world.effects}) == 3


@pytest.mark.parametrize("probe", ["finish.before_commit", "finish.after_commit"])
def test_a_run_ends_once_wherever_its_worker_dies(world: World, probe: str) -> None:
    _client, worker, run_id = begin(world)
    worker.die_at(probe, run_id)
    if probe == "finish.before_commit":
        worker.lapse(run_id)
        worker.work(run_id)
    run = world.run(run_id)
    assert (run["state"], len(world.effects)) == ("completed", 1)
    ends = [event for event in world.events(run_id) if event["kind"] == "run.complete"]
    assert len(ends) == 1


def test_results_of_a_long_phase_are_stored_at_once(world: World) -> None:
    world.shop([turn(call("find", order="1")), say("Done.")])
    worker = world.worker(phase_commit_s=0.0)
    run_id = world.client().enqueue("support", "Go").id
    worker.lose_at("model.before", run_id, nth=2)
    assert worker.work(run_id)["state"] == "completed"
    assert len(world.effects) == 1


def test_results_of_a_short_phase_travel_with_the_next_commit(world: World) -> None:
    _client, worker, run_id = begin(world, [turn(call("find", order="1")), say("Done.")])
    worker.lose_at("model.before", run_id, nth=2)
    assert worker.work(run_id)["state"] == "completed"
    assert len(world.effects) == 2
    assert len({effect.key for effect in world.effects}) == 1


def test_a_call_that_runs_again_is_told_how_often_it_was_tried(world: World) -> None:
    attempts: list[int] = []

    @world.host.tool
    def look(ctx: ToolContext) -> str:
        """Look."""
        attempts.append(ctx.attempt)
        return "seen"

    client, worker, run_id = begin(world, [turn(call("look")), say()])
    worker.lose_at("tool.after_handler", run_id)
    worker.work(run_id)
    client.settle(only(client.checkpoints()).id, "did_not_happen", now=True)
    worker.work(run_id)
    assert attempts == [1, 2]
    assert world.call(run_id)["attempt"] == 2


# --- Lookups ---------------------------------------------------------------------------------------------------------


def lookup(
    world: World, answer: Callable[[], Any], timeout: timedelta | None = None, **options: Any
) -> list[str]:
    """An unsafe tool `order_food` that can be asked whether it took effect; returns who was asked about what."""
    asked: list[str] = []

    @world.host.tool(timeout=timeout, **options)
    def order_food(dish: str, ctx: ToolContext) -> str:
        """Order."""
        return world.act("order_food", ctx, dish=dish)

    @order_food.lookup
    def ordered(dish: str, ctx: ToolContext) -> Any:
        asked.append(f"{ctx.idempotency_key}:{dish}")
        return answer()

    return asked


FOOD = [turn(call("order_food", dish="soup")), say()]


def test_a_lookup_that_knows_the_result_lets_the_run_go_on(world: World) -> None:
    asked = lookup(world, lambda: Happened({"ticket": 5}))
    client, worker, run_id = begin(world, FOOD)
    worker.lose_at("tool.after_handler", run_id)
    assert worker.work(run_id)["output"] == 'Done: {"ticket":5}'
    assert (len(world.effects), client.checkpoints()) == (1, [])
    assert asked == [f"{world.effects[0].key}:soup"]
    assert world.call(run_id)["state"] == "completed"


def test_a_lookup_that_is_async_is_awaited(world: World) -> None:
    @world.host.tool
    async def send(ctx: ToolContext) -> str:
        """Send."""
        return world.act("send", ctx)

    @send.lookup
    async def sent() -> Happened:
        await asyncio.sleep(0)
        return Happened("it was sent")

    _client, worker, run_id = begin(world, [turn(call("send")), say()])
    worker.lose_at("tool.after_handler", run_id)
    assert worker.work(run_id)["output"] == "Done: it was sent"


def raises() -> Any:
    raise ConnectionError("no answer")


@pytest.mark.parametrize("answer", [Unknown, raises, lambda: "maybe"], ids=["unknown", "raises", "nonsense"])
def test_a_lookup_that_cannot_tell_leaves_it_to_a_person(world: World, answer: Callable[[], Any]) -> None:
    lookup(world, answer)
    client, worker, run_id = begin(world, FOOD)
    worker.lose_at("tool.after_handler", run_id)
    assert worker.work(run_id)["state"] == "paused"
    assert only(client.checkpoints()).kind == "uncertain_effect"
    assert len(world.effects) == 1


@pytest.mark.parametrize(("timeout", "settle_s"), [(timedelta(seconds=20), 50), (None, 600)])
def test_a_negative_lookup_is_believed_only_when_the_old_worker_can_no_longer_act(
    world: World, timeout: timedelta | None, settle_s: float
) -> None:
    """Ruling 7: the tool's timeout and 30 s after the old lease's end, 10 min without a timeout."""
    asked = lookup(world, DidNotHappen, timeout)
    client, worker, run_id = begin(world, FOOD)
    worker.die_at("tool.after_start_record", run_id)
    old_lease = world.run(run_id)["lease_expires_at"]
    worker.lapse(run_id)
    run = worker.work(run_id)
    assert (run["state"], run["lease_owner"], run["wait_reason"]) == ("reclaimable", None, "later")
    assert (run["not_before"] - old_lease).total_seconds() == pytest.approx(settle_s, abs=4)
    assert (world.effects, client.checkpoints(), run["reclaim_count"]) == ([], [], 1)
    world.later(settle_s)
    world.wake()
    assert worker.work(run_id)["state"] == "completed"
    assert [effect.tool for effect in world.effects] == ["order_food"]
    # It was asked again before the call was run.
    assert len(asked) == 2
    assert world.call(run_id)["attempt"] == 2


def test_a_negative_lookup_that_becomes_positive_is_believed(world: World) -> None:
    answers: list[Any] = [DidNotHappen(), Happened("late, but there")]
    lookup(world, lambda: answers.pop(0))
    _client, worker, run_id = begin(world, FOOD)
    worker.lose_at("tool.after_handler", run_id)
    worker.work(run_id)
    world.later(700)
    world.wake()
    assert worker.work(run_id)["output"] == "Done: late, but there"
    assert len(world.effects) == 1


def test_a_call_that_never_happens_is_not_tried_for_ever(world: World) -> None:
    @world.host.tool
    def flaky(ctx: ToolContext) -> str:
        """Do something over a bad line."""
        world.act("flaky", ctx)
        raise EffectUncertain("the line was cut")

    @flaky.lookup
    def found() -> DidNotHappen:
        return DidNotHappen()

    world.shop([turn(call("flaky")), say()])
    worker = world.worker(uncertain_settle_s=0.0, uncertain_settle_no_timeout_s=0.0)
    client = world.client()
    run = worker.work(client.enqueue("support", "Go").id)
    assert run["state"] == "paused"
    assert only(client.checkpoints()).kind == "uncertain_effect"
    assert len(world.effects) == 4
    assert len({effect.key for effect in world.effects}) == 1
    assert world.call(run["id"])["attempt"] == 4


# --- The tool says so itself, or takes too long ----------------------------------------------------------------------


def test_a_tool_may_say_that_its_effect_is_uncertain(world: World) -> None:
    @world.host.tool
    def post(ctx: ToolContext) -> str:
        """Post something."""
        world.act("post", ctx)
        raise EffectUncertain("the connection \x00 was cut")

    client, worker, run_id = begin(world, [turn(call("post")), say()])
    assert worker.work(run_id)["state"] == "paused"
    checkpoint = only(client.checkpoints())
    assert checkpoint.kind == "uncertain_effect"
    assert checkpoint.metadata["why"] == "the connection \ufffd was cut"
    assert world.call(run_id)["state"] == "started"
    # The run was let go in good order: nothing was lost or reclaimed.
    assert world.run(run_id)["reclaim_total"] == 0


def test_a_safe_tool_that_says_so_has_failed(world: World) -> None:
    @world.host.tool(retry_safe=True)
    def look(ctx: ToolContext) -> str:
        """Look."""
        raise EffectUncertain("no idea")

    _client, worker, run_id = begin(world, [turn(call("look")), say("I see.")])
    assert worker.work(run_id)["state"] == "completed"
    assert error_of(world.messages(run_id)[1]) == "no idea"


def test_a_timeout_of_the_tools_own_network_is_a_failure(world: World) -> None:
    @world.host.tool(timeout=timedelta(seconds=30))
    def fetch() -> str:
        """Fetch something."""
        raise TimeoutError("read timed out")

    _client, worker, run_id = begin(world, [turn(call("fetch")), say("I see.")])
    assert worker.work(run_id)["state"] == "completed"
    assert error_of(world.messages(run_id)[1]) == "TimeoutError: read timed out"


class Slow:
    """A tool that takes longer than its timeout, until the test lets it go on."""

    def __init__(
        self, world: World, *, retry_safe: bool, asynchronous: bool = False, raises: bool = False
    ) -> None:
        self.keys: list[str] = []
        self.go = threading.Event()
        options: dict[str, Any] = {"timeout": timedelta(seconds=0.3), "retry_safe": retry_safe}
        if asynchronous:

            @world.host.tool(name="slow", **options)
            async def later(ctx: ToolContext) -> str:
                """Take your time."""
                self.keys.append(ctx.idempotency_key)
                with anyio.CancelScope(shield=True):
                    while not self.go.is_set():
                        await asyncio.sleep(0)
                return "late"

        else:

            @world.host.tool(name="slow", **options)
            def slow(ctx: ToolContext) -> str:
                """Take your time."""
                self.keys.append(ctx.idempotency_key)
                if len(self.keys) > 1:
                    return "in time"
                self.go.wait(30)
                if raises:
                    raise ConnectionError("too late")
                return "late"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_safe_tool_that_takes_too_long_has_failed_and_its_late_value_is_dropped(
    world: World, asynchronous: bool
) -> None:
    """Bug case C08."""
    slow = Slow(world, retry_safe=True, asynchronous=asynchronous)
    _client, worker, run_id = begin(world, [turn(call("slow")), say("I see.")])
    run = worker.work(run_id)
    assert (run["state"], run["step_count"]) == ("completed", 2)
    assert error_of(world.messages(run_id)[1]) == "the tool did not return within 0.3 s"
    before = world.snapshot()
    slow.go.set()
    wait_until(lambda: worker.rt.threads.abandoned == 0, "the abandoned tool to end")
    assert world.snapshot() == before


def test_an_unsafe_tool_that_takes_too_long_is_uncertain_and_its_late_value_is_evidence(world: World) -> None:
    """Bug case C08."""
    slow = Slow(world, retry_safe=False)
    client, worker, run_id = begin(world, [turn(call("slow")), say()])
    assert worker.work(run_id)["state"] == "paused"
    checkpoint = only(client.checkpoints())
    assert checkpoint.metadata["why"] == "the tool did not return within 0.3 s"
    messages = world.messages(run_id)
    slow.go.set()
    wait_until(lambda: world.call(run_id)["late_result"], "the late result")
    assert world.call(run_id)["late_result"] == "late"
    assert only(client.checkpoints()).pending[0].late_result == "late"
    # It is no conversation, moves no run and counts no step.
    assert world.messages(run_id) == messages
    assert (world.run(run_id)["state"], world.run(run_id)["step_count"]) == ("paused", 1)
    client.settle(checkpoint.id, "did_not_happen", now=True)
    assert worker.work(run_id)["output"] == "Done: in time"
    assert len(slow.keys) == 2
    assert len(set(slow.keys)) == 1


def test_a_late_error_is_evidence_too(world: World) -> None:
    slow = Slow(world, retry_safe=False, raises=True)
    _client, worker, run_id = begin(world, [turn(call("slow")), say()])
    worker.work(run_id)
    slow.go.set()
    late = wait_until(lambda: world.call(run_id)["late_result"], "the late result")
    assert json.loads(late) == {"raised": "ConnectionError", "text": "too late"}


def test_an_unsafe_async_tool_that_takes_too_long_is_uncertain_and_its_late_value_is_evidence(
    world: World,
) -> None:
    slow = Slow(world, retry_safe=False, asynchronous=True)
    _client, worker, run_id = begin(world, [turn(call("slow")), say()])
    assert worker.work(run_id)["state"] == "paused"
    slow.go.set()
    assert wait_until(lambda: world.call(run_id)["late_result"], "the late result") == "late"


def test_a_timeout_of_the_setting_holds_for_tools_without_their_own(world: World) -> None:
    go = threading.Event()

    @world.host.tool(retry_safe=True)
    def hang() -> str:
        """Hang."""
        go.wait(30)
        return "late"

    world.shop([turn(call("hang")), say("I see.")])
    worker = world.worker(tool_timeout_s=0.3)
    run = worker.work(world.client().enqueue("support", "Go").id)
    assert run["state"] == "completed"
    assert "did not return within 0.3 s" in error_of(world.messages(run["id"])[1])
    go.set()


def test_a_tool_knows_its_deadline(world: World) -> None:
    left: list[float | None] = []

    @world.host.tool(timeout=timedelta(seconds=30))
    def timed(ctx: ToolContext) -> str:
        """Look at the clock."""
        left.append(ctx.seconds_left)
        return "ok"

    @world.host.tool
    def free(ctx: ToolContext) -> str:
        """Look at the clock."""
        left.append(ctx.seconds_left)
        return "ok"

    _client, worker, run_id = begin(world, [turn(call("timed"), call("free")), say()])
    worker.work(run_id)
    assert left[0] == pytest.approx(30, abs=5)
    assert left[1] is None


# --- Policies --------------------------------------------------------------------------------------------------------


def test_an_agent_may_fail_on_an_uncertain_effect(world: World) -> None:
    client, worker, run_id = begin(world, on_uncertain_effect="fail")
    worker.lose_at("tool.after_handler", run_id)
    run = worker.work(run_id)
    assert (run["state"], run["error_code"], client.checkpoints()) == ("failed", "effect_uncertain", [])
    assert "ship" in run["error_text"]
    # What may have happened stays marked as such.
    assert (world.call(run_id)["state"], len(world.effects)) == ("started", 1)


def test_an_agent_that_fails_on_them_still_believes_a_lookup(world: World) -> None:
    lookup(world, lambda: Happened("yes"))
    _client, worker, run_id = begin(world, FOOD, on_uncertain_effect="fail")
    worker.lose_at("tool.after_handler", run_id)
    assert worker.work(run_id)["output"] == "Done: yes"


def test_an_uncertain_pause_has_no_deadline_and_no_policy(world: World) -> None:
    client, worker, run_id = begin(world, suspension_ttl=timedelta(seconds=2), on_expiry="return_to_model")
    worker.lose_at("tool.after_handler", run_id)
    worker.work(run_id)
    world.later(1e6)
    assert not expire.expire_pause(worker.rt, world.run(run_id)["suspension_id"])
    assert len(client.checkpoints()) == 1


@pytest.mark.parametrize("approved", [True, False])
def test_an_uncertain_effect_is_neither_approved_nor_rejected(world: World, approved: bool) -> None:
    client, worker, run_id = begin(world, on_rejection="return_to_model")
    worker.lose_at("tool.after_handler", run_id)
    worker.work(run_id)
    before = world.snapshot()
    with pytest.raises(InvalidDecision) as refused:
        client.decide(only(client.checkpoints()).id, approved=approved)
    assert all(word in str(refused.value) for word in ("happened", "did_not_happen", "stop"))
    assert world.snapshot() == before


def test_an_approved_call_that_became_uncertain_is_not_asked_to_be_approved_again(world: World) -> None:
    client, worker, run_id = begin(world, [turn(call("pay", amount=5)), say()])
    worker.work(run_id)
    client.decide(only(client.checkpoints()).id, approved=True, amended_arguments={"amount": 3})
    worker.lose_at("tool.after_start_record", run_id)
    assert worker.work(run_id)["state"] == "paused"
    client.settle(only(client.checkpoints()).id, "did_not_happen", now=True)
    assert worker.work(run_id)["state"] == "completed"
    assert [effect.arguments["amount"] for effect in world.effects] == [3]


def test_a_result_found_by_lookup_tells_what_was_changed(world: World) -> None:
    lookup(world, lambda: Happened("yes"), needs_approval=True)
    client, worker, run_id = begin(world, FOOD)
    worker.work(run_id)
    client.decide(only(client.checkpoints()).id, approved=True, amended_arguments={"dish": "bread"})
    worker.lose_at("tool.after_handler", run_id)
    run = worker.work(run_id)
    assert run["output"].endswith("yes")
    assert "bread" in run["output"]


def test_a_call_proven_not_to_have_happened_that_is_forbidden_by_then_has_failed(world: World) -> None:
    from cortex_workers import JsonPrincipalCodec
    from tests.engine.test_authority import Guard

    guard = Guard()
    world.host = Host(authorizer=guard, codec=JsonPrincipalCodec())
    client, worker, run_id = begin(world)
    worker.lose_at("tool.after_start_record", run_id)
    worker.work(run_id)
    client.settle(only(client.checkpoints()).id, "did_not_happen", now=True)
    guard.answers = {"ship": PermissionError("not any more")}
    assert worker.work(run_id)["state"] == "completed"
    assert error_of(world.messages(run_id)[1]) == "not any more"
    # The record is closed: nothing uncertain is left of it.
    assert world.call(run_id)["state"] == "failed"
    assert world.effects == []


def test_results_in_hand_are_kept_by_a_pause_for_an_uncertain_effect(world: World) -> None:
    @world.host.tool
    def post(ctx: ToolContext) -> str:
        """Post something."""
        raise EffectUncertain("cut")

    client, worker, run_id = begin(world, [turn(call("find", order="1"), call("post")), say("Done.")])
    assert worker.work(run_id)["state"] == "paused"
    assert [row["state"] for row in world.calls(run_id)] == ["completed", "started"]
    client.settle(only(client.checkpoints()).id, "happened", result="posted")
    assert worker.work(run_id)["state"] == "completed"
    assert [effect.tool for effect in world.effects] == ["find"]


def test_other_calls_of_the_turn_wait_for_the_uncertain_one(world: World) -> None:
    client, worker, run_id = begin(
        world, [turn(call("ship", order="1"), call("ship", order="2")), say("Done.")]
    )
    worker.lose_at("tool.after_handler", run_id)
    worker.work(run_id)
    assert [row["state"] for row in world.calls(run_id)] == ["started"]
    client.settle(only(client.checkpoints()).id, "happened", result="shipped")
    assert worker.work(run_id)["state"] == "completed"
    assert [effect.arguments["order"] for effect in world.effects] == ["1", "2"]
    assert results(world.messages(run_id)) == ["shipped", "ship done"]


def test_a_hanging_tool_makes_its_run_reclaimable_and_not_paused(world: World) -> None:
    """Bug case C17 (a)."""
    entered, go = threading.Event(), threading.Event()

    @world.host.tool(retry_safe=True)
    def hang(ctx: ToolContext) -> str:
        """Hang the first time."""
        world.act("hang", ctx)
        if not entered.is_set():
            entered.set()
            go.wait(30)
        return "there"

    _client, worker, run_id = begin(world, [turn(call("hang")), say()])
    claimed = worker.claim(run_id)
    stuck = threading.Thread(target=worker.go_on, args=(claimed,))
    stuck.start()
    assert entered.wait(10)
    claimed.held.release()
    assert worker.lapse(run_id)["state"] == "reclaimable"
    other = world.worker()
    assert other.work(run_id)["output"] == "Done: there"
    ended = world.snapshot()
    go.set()
    stuck.join(10)
    assert {**world.snapshot(), "runs": 0} == {**ended, "runs": 0}
    assert world.run(run_id)["output"] == "Done: there"
    assert world.run(run_id)["reclaim_total"] == 1
    assert TTL_S == 60.0


def test_dying_in_the_probe_of_an_action_is_what_the_harness_says(world: World) -> None:
    """The harness itself: a probe that nobody passes fails the test."""
    with pytest.raises(AssertionError, match="nobody passed"), at("hand_off.after_commit", lambda: None):
        pass
    assert world.rows(tables.runs) == []

"""A model client that puts its call off: a person is asked, or the same call is made again later."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from cortex_workers import Client
from cortex_workers.engine import expire
from cortex_workers.errors import (
    DeferredModelCall,
    InvalidDecision,
    Misconfiguration,
    NotSuspended,
    RequiresApproval,
    SuspensionExpired,
    UnknownModel,
)
from cortex_workers.llm.scripted import ScriptedModel
from cortex_workers.llm.spend_gate import SpendGate
from cortex_workers.schemas.llm import ModelDelta, ModelReply, ModelRequest
from cortex_workers.store import tables
from tests.engine.outside import A, result
from tests.engine.world import Worker, World, call, only, say, turn

ANSWER = [turn(call("find", order="1")), say("Done.")]


class Deferring:
    """Puts a call off while the test says so; then a scripted model answers."""

    def __init__(self, script: Any, decide: Callable[[ModelRequest], DeferredModelCall | None]) -> None:
        self.inner = ScriptedModel(script)
        self.decide = decide
        self.asked: list[ModelRequest] = []

    def complete(self, request: ModelRequest) -> Any:
        self.asked.append(request)
        deferral = self.decide(request)
        if deferral is not None:
            raise deferral
        reply: ModelReply = self.inner.complete(request)  # type: ignore[assignment]
        return reply

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        yield ModelDelta(reply=self.complete(request))


def started(world: World, model: Any, **options: Any) -> tuple[Client, Worker, str]:
    """A run of an agent with this model, not begun: a client, a worker, the run."""
    world.shop(ANSWER)
    world.host.agent("spender", model=model, instructions="Help.", tools=sorted(world.host.tools), **options)
    worker, client = world.worker(), world.client()
    return client, worker, client.enqueue("spender", "Go").id


def asks(request: ModelRequest) -> DeferredModelCall | None:
    """A person is asked about every call that nobody has approved."""
    if request.deferral is not None and request.deferral.approved:
        return None
    return DeferredModelCall("wait", kind="budget", reason="too dear", ttl=timedelta(hours=1), ref="h-1")


def same(one: ModelRequest, other: ModelRequest) -> bool:
    """Whether two requests are the same but for what became of the deferral."""
    return one.model_copy(update={"deferral": None}) == other.model_copy(update={"deferral": None})


# --- A person is asked -----------------------------------------------------------------------------------------------


def test_a_deferred_call_pauses_the_run_with_a_question_and_no_step(world: World) -> None:
    client, worker, run_id = started(world, Deferring(ANSWER, asks))
    run = worker.work(run_id)
    assert (run["state"], run["step_count"], run["next_step"]) == ("paused", 0, 0)
    assert world.steps(run_id) == []
    assert run["usage"].get("input_tokens", 0) == 0
    (pause,) = world.pauses(run_id)
    assert (pause["reason"], pause["deferral_kind"], pause["deferral_ref"]) == ("approval", "budget", "h-1")
    assert pause["next_poll_at"] is None
    assert abs((pause["expires_at"] - pause["created_at"]).total_seconds() - 3600) < 1
    assert world.pending(pause["id"]) == []
    asked = only(client.checkpoints())
    assert (asked.kind, asked.pending, asked.reason) == ("deferred_model_call", (), "too dear")
    assert asked.metadata["kind"] == "deferred_model_call"
    assert asked.metadata["deferral_kind"] == "budget"


def test_an_approval_makes_the_same_call_again(world: World) -> None:
    model = Deferring(ANSWER, lambda request: asks(request) if request.step == 0 else None)
    client, worker, run_id = started(world, model)
    worker.work(run_id)
    client.decide(only(client.checkpoints()).id, approved=True, decided_by="The boss")
    run = world.run(run_id)
    assert (run["state"], run["instruction"]) == ("ready", "repeat_model_call")
    run = worker.work(run_id)
    assert (run["state"], run["step_count"]) == ("completed", 2)
    first, again, then = model.asked
    assert same(first, again)
    assert again.deferral is not None
    assert (again.deferral.kind, again.deferral.ref, again.deferral.approved) == ("budget", "h-1", True)
    assert again.deferral.decided_by == "The boss"
    assert then.deferral is None
    assert [row["step_index"] for row in world.steps(run_id)] == [0, 1]


@pytest.mark.parametrize("policy", ["fail", "return_to_model"])
def test_a_rejection_fails_the_run_whatever_the_agent_says_of_rejections(world: World, policy: Any) -> None:
    model = Deferring(ANSWER, asks)
    client, worker, run_id = started(world, model, on_rejection=policy)
    worker.work(run_id)
    client.decide(only(client.checkpoints()).id, approved=False, reason="no money")
    run = world.run(run_id)
    assert (run["state"], run["error_code"]) == ("failed", "checkpoint_rejected")
    assert "no money" in run["error_text"]
    assert len(model.asked) == 1


@pytest.mark.parametrize(
    "given",
    [
        {"calls": {"call_0_0": {"approved": True}}},
        {"approved": True, "amended_arguments": {"amount": 1}},
    ],
    ids=["calls", "arguments"],
)
def test_there_is_no_call_to_decide_and_nothing_to_amend(world: World, given: dict[str, Any]) -> None:
    client, worker, run_id = started(world, Deferring(ANSWER, asks))
    worker.work(run_id)
    before = world.snapshot()
    with pytest.raises(InvalidDecision):
        client.decide(only(client.checkpoints()).id, **given)
    with pytest.raises(RequiresApproval):
        client.provide_results(run_id, [result(A)])
    assert world.snapshot() == before


@pytest.mark.parametrize("policy", ["fail", "return_to_model"])
def test_nobody_decides_in_time_and_the_run_fails(world: World, policy: Any) -> None:
    client, worker, run_id = started(world, Deferring(ANSWER, asks), on_expiry=policy)
    worker.work(run_id)
    checkpoint_id = only(client.checkpoints()).id
    world.later(3601)
    with pytest.raises(SuspensionExpired):
        client.decide(checkpoint_id, approved=True)
    assert expire.expire_pause(worker.rt, world.run(run_id)["suspension_id"])
    assert world.run(run_id)["error_code"] == "suspension_expired"
    assert client.checkpoint(checkpoint_id).closed_as == "expired"


def test_results_in_hand_are_kept_by_the_pause(world: World) -> None:
    model = Deferring(ANSWER, lambda request: asks(request) if request.step == 1 else None)
    client, worker, run_id = started(world, model)
    assert worker.work(run_id)["state"] == "paused"
    assert len(world.steps(run_id)) == 1
    assert [item.role for item in world.messages(run_id)] == ["assistant", "tool"]
    client.decide(only(client.checkpoints()).id, approved=True)
    assert world.worker().work(run_id)["state"] == "completed"
    assert [effect.tool for effect in world.effects] == ["find"]


def test_an_approval_outlives_the_worker_that_was_to_use_it(world: World) -> None:
    model = Deferring(ANSWER, lambda request: asks(request) if request.step == 0 else None)
    client, worker, run_id = started(world, model)
    worker.work(run_id)
    client.decide(only(client.checkpoints()).id, approved=True)
    world.worker().lose_at("model.before", run_id)
    assert worker.work(run_id)["state"] == "completed"
    assert client.checkpoints() == []
    assert len(world.pauses(run_id)) == 1


def test_an_approval_is_for_one_call_even_if_the_worker_dies_after_it(world: World) -> None:
    model = Deferring(ANSWER, asks)
    client, worker, run_id = started(world, model)
    worker.work(run_id)
    client.decide(only(client.checkpoints()).id, approved=True)
    world.worker().lose_at("turn.after_commit", run_id)
    assert worker.work(run_id)["state"] == "paused"
    assert model.asked[-1].step == 1
    assert model.asked[-1].deferral is None
    client.decide(only(client.checkpoints()).id, approved=True)
    assert worker.work(run_id)["state"] == "completed"


def test_a_streamed_call_may_be_put_off_too(world: World) -> None:
    model = Deferring(ANSWER, lambda request: asks(request) if request.step == 0 else None)
    client, worker, run_id = started(world, model, stream=True)
    assert worker.work(run_id)["state"] == "paused"
    client.decide(only(client.checkpoints()).id, approved=True)
    assert worker.work(run_id)["state"] == "completed"


# --- The same call again, by itself ----------------------------------------------------------------------------------


def polls(times: int) -> Callable[[ModelRequest], DeferredModelCall | None]:
    """A provider that has its answer after so many looks."""
    looked: list[str | None] = []

    def decide(request: ModelRequest) -> DeferredModelCall | None:
        looked.append(request.deferral.ref if request.deferral is not None else None)
        if request.step > 0 or len(looked) > times:
            return None
        return DeferredModelCall(
            "not yet", kind="batch", ref=f"b-{len(looked)}", poll_after=timedelta(seconds=30)
        )

    decide.looked = looked  # type: ignore[attr-defined]
    return decide


def poll(world: World, worker: Worker, run_id: str) -> bool:
    return expire.poll(worker.rt, world.run(run_id)["suspension_id"])


def test_a_call_that_the_system_makes_again_asks_nobody(world: World) -> None:
    client, worker, run_id = started(world, Deferring(ANSWER, polls(1)))
    assert worker.work(run_id)["state"] == "paused"
    (pause,) = world.pauses(run_id)
    assert (pause["reason"], pause["deferral_kind"]) == ("external_tool", "batch")
    assert abs((pause["next_poll_at"] - pause["created_at"]).total_seconds() - 30) < 1
    assert world.pending(pause["id"]) == []
    assert world.rows(tables.checkpoints) == []
    for door in (
        lambda: client.provide_results(run_id, []),
        lambda: client.provide_results(run_id, [result(A)]),
    ):
        with pytest.raises(NotSuspended):
            door()


def test_the_call_is_made_again_with_its_handle_until_there_is_an_answer(world: World) -> None:
    decide = polls(3)
    model = Deferring(ANSWER, decide)
    _client, worker, run_id = started(world, model)
    for number in (1, 2, 3):
        assert worker.work(run_id)["state"] == "paused"
        run = world.run(run_id)
        assert (run["step_count"], run["lease_owner"]) == (0, None)
        assert world.pauses(run_id)[-1]["deferral_ref"] == f"b-{number}"
        world.later(31)
        assert poll(world, worker, run_id)
        assert not poll(world, worker, run_id)
        assert world.run(run_id)["instruction"] == "repeat_model_call"
    assert worker.work(run_id)["state"] == "completed"
    assert decide.looked == [None, "b-1", "b-2", "b-3", None]  # type: ignore[attr-defined]
    assert all(same(model.asked[0], request) for request in model.asked[:4])
    assert not any(request.deferral.approved for request in model.asked if request.deferral is not None)
    assert [row["ended_as"] for row in world.pauses(run_id)] == ["answered"] * 3


def test_a_client_that_looks_again_and_again_keeps_the_deadline_of_its_first_look(world: World) -> None:
    def decide(request: ModelRequest) -> DeferredModelCall:
        return DeferredModelCall(
            "not yet", kind="never", poll_after=timedelta(seconds=30), ttl=timedelta(seconds=100)
        )

    _client, worker, run_id = started(world, Deferring(ANSWER, decide))
    for _ in range(3):
        worker.work(run_id)
        world.later(31)
        assert poll(world, worker, run_id)
    worker.work(run_id)
    first, *others = (pause["expires_at"] for pause in world.pauses(run_id))
    assert len(others) == 3
    assert set(others) == {first}
    world.later(31)
    assert expire.expire_pause(worker.rt, world.run(run_id)["suspension_id"])
    assert (world.run(run_id)["state"], world.run(run_id)["error_code"]) == ("failed", "suspension_expired")


def test_the_sweep_finds_what_is_due_and_nothing_else(world: World) -> None:
    from cortex_workers.sweep import frame

    _client, worker, run_id = started(world, Deferring(ANSWER, polls(1)))
    worker.work(run_id)
    frame.sweep(worker.rt, ["polls"])
    assert world.run(run_id)["state"] == "paused"
    world.later(31)
    frame.sweep(worker.rt, ["polls"])
    assert world.run(run_id)["state"] == "ready"
    assert worker.work(run_id)["state"] == "completed"


def test_a_cancelled_run_is_not_asked_again(world: World) -> None:
    client, worker, run_id = started(world, Deferring(ANSWER, polls(1)))
    worker.work(run_id)
    client.cancel(run_id)
    world.later(31)
    assert not poll(world, worker, run_id)
    assert world.run(run_id)["state"] == "cancelled"


def test_a_handle_outlives_a_worker(world: World) -> None:
    decide = polls(1)
    _client, worker, run_id = started(world, Deferring(ANSWER, decide))
    worker.work(run_id)
    world.later(31)
    poll(world, worker, run_id)
    world.worker().lose_at("model.before", run_id)
    assert worker.work(run_id)["state"] == "completed"
    assert decide.looked[:2] == [None, "b-1"]  # type: ignore[attr-defined]


# --- The spend gate --------------------------------------------------------------------------------------------------


def test_an_expensive_call_waits_for_a_person_and_each_expensive_call_asks_anew(world: World) -> None:
    inner = ScriptedModel(ANSWER)
    gate = SpendGate(inner, max_tokens=1, ttl=timedelta(minutes=10))
    client, worker, run_id = started(world, gate)
    for number in range(2):
        assert worker.work(run_id)["state"] == "paused"
        assert len(inner.requests) == number
        asked = only(client.checkpoints())
        assert asked.metadata["deferral_kind"] == "spend"
        assert "the limit is 1" in asked.reason
        client.decide(asked.id, approved=True)
    assert worker.work(run_id)["state"] == "completed"
    assert len(inner.requests) == 2


def test_an_expensive_call_that_is_rejected_is_never_made(world: World) -> None:
    inner = ScriptedModel(ANSWER)
    client, worker, run_id = started(world, SpendGate(inner, max_tokens=1))
    worker.work(run_id)
    client.decide(only(client.checkpoints()).id, approved=False, reason="no")
    assert world.run(run_id)["state"] == "failed"
    assert inner.requests == []


def test_a_cheap_call_asks_nobody(world: World) -> None:
    client, worker, run_id = started(world, SpendGate(ScriptedModel(ANSWER), max_tokens=1_000_000))
    assert worker.work(run_id)["state"] == "completed"
    assert client.checkpoints(pending_only=False) == []


def test_a_gate_takes_the_name_of_a_model_and_opens_it_where_it_is_called(
    world: World, tmp_path: Path
) -> None:
    file = tmp_path / "script.json"
    gate = SpendGate(SpendGate(f"scripted:{file}", max_tokens=1), max_tokens=1_000_000)
    world.shop(ANSWER)
    world.host.agent("spender", model=gate, instructions="Help.", tools=sorted(world.host.tools))
    with pytest.raises(Misconfiguration, match=r"agent 'spender': script .* No such file"):
        world.worker()  # as with any other model: when a worker starts, and not in the first run
    file.write_text(json.dumps(ANSWER))
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("spender", "Go").id
    for _ in range(2):
        assert worker.work(run_id)["state"] == "paused"
        client.decide(only(client.checkpoints()).id, approved=True)
    assert worker.work(run_id)["state"] == "completed"


@pytest.mark.parametrize(
    "client", [None, 5, ScriptedModel, lambda: ScriptedModel(ANSWER)], ids=lambda it: type(it).__name__
)
def test_a_gate_around_something_else_is_refused_where_it_is_made(client: Any) -> None:
    with pytest.raises(Misconfiguration, match="like openai:gpt-5-mini"):
        SpendGate(client, max_tokens=1)


@pytest.mark.parametrize("name", ["", "gpt-5-mini", ":x", "openai:"])
def test_a_gate_around_a_text_that_names_no_model_is_refused_too(name: str) -> None:
    with pytest.raises(UnknownModel, match="like openai:gpt-5-mini"):
        SpendGate(name, max_tokens=1)


def test_money_is_a_limit_too(world: World) -> None:
    costs: list[int] = []

    def cost(request: ModelRequest, tokens: int) -> float:
        costs.append(tokens)
        return 2.5 if request.step == 0 else 0.1

    gate = SpendGate(ScriptedModel(ANSWER), max_cost=1.0, cost=cost)
    client, worker, run_id = started(world, gate)
    assert worker.work(run_id)["state"] == "paused"
    assert "about 2.5, the limit is 1" in only(client.checkpoints()).reason
    client.decide(only(client.checkpoints()).id, approved=True)
    assert worker.work(run_id)["state"] == "completed"
    assert costs[0] > 0
    with pytest.raises(Misconfiguration):
        SpendGate(ScriptedModel(ANSWER))
    with pytest.raises(Misconfiguration):
        SpendGate(ScriptedModel(ANSWER), max_cost=1.0)


def test_a_client_behind_the_gate_may_put_its_calls_off_without_asking_again(world: World) -> None:
    inner = Deferring(ANSWER, polls(2))
    client, worker, run_id = started(world, SpendGate(inner, max_tokens=1))
    assert worker.work(run_id)["state"] == "paused"
    client.decide(only(client.checkpoints()).id, approved=True)
    for _ in range(2):
        assert worker.work(run_id)["state"] == "paused"
        assert client.checkpoints() == []
        world.later(31)
        assert poll(world, worker, run_id)
    assert worker.work(run_id)["state"] == "paused"
    assert only(client.checkpoints()).step_index == 1
    assert len(world.steps(run_id)) == 1

"""A draining worker hands its runs off at their next boundary, with everything in hand."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any

import pytest

from cortex_workers import Client, Host, ToolContext
from cortex_workers.engine import slot
from cortex_workers.errors import Stopping
from cortex_workers.schemas.llm import ModelReply, ModelRequest
from tests.engine.world import Worker, World, at, call, commits, only, results, say, turn


def begin(world: World, script: Any, **options: Any) -> tuple[Client, Worker, str]:
    world.shop(script, **options)
    worker, client = world.worker(), world.client()
    return client, worker, client.enqueue("support", "Go").id


def drain_in(world: World, worker: Worker, script: Any) -> Any:
    """A script whose model call is under way when the drain begins."""

    def answer(request: ModelRequest) -> Any:
        worker.rt.drain.set()
        return script

    return answer


@pytest.mark.invariant("I8")
def test_a_run_is_handed_off_before_its_next_model_call_with_its_results(world: World) -> None:
    @world.host.tool(retry_safe=True)
    def last(ctx: ToolContext) -> str:
        """The drain begins meanwhile."""
        worker.rt.drain.set()
        return world.act("last", ctx)

    _client, worker, run_id = begin(world, [turn(call("find", order="1"), call("last")), say("Done.")])
    world.told.clear()
    run = worker.work(run_id)
    assert (run["state"], run["handed_off"], run["lease_owner"]) == ("reclaimable", True, None)
    assert (run["reclaim_count"], run["reclaim_total"], run["interrupted_reason"]) == (0, 0, "drain")
    assert (run["wait_reason"], run["fenced_until"]) == (None, None)
    assert run["not_before"] - run["state_since"] < timedelta(seconds=0.1)
    assert results(world.messages(run_id)) == ['{"order":"1"}', "last done"]
    (told,) = world.told
    assert (told.kind, told.hand_off) == ("RunReclaimable", True)  # type: ignore[union-attr]
    assert world.events(run_id)[-1]["data"] == {"reason": "drain"}
    assert world.worker().work(run_id)["state"] == "completed"
    assert [effect.tool for effect in world.effects] == ["find", "last"]


def test_a_run_that_ends_first_simply_ends(world: World) -> None:
    _client, worker, run_id = begin(world, [say("Hi.")])
    world.model._decide = drain_in(world, worker, say("Bye."))
    run = worker.work(run_id)
    assert (run["state"], run["output"]) == ("completed", "Bye.")


@pytest.mark.parametrize("tool", ["ship", "find"])
def test_an_answer_that_arrives_in_a_drain_is_stored_with_the_hand_off(world: World, tool: str) -> None:
    _client, worker, run_id = begin(world, [say("Hi.")])
    script = world.model._decide
    world.model._decide = drain_in(world, worker, turn(call(tool, order="1")))
    with commits(worker.rt) as made:
        run = worker.work(run_id)
    # A claim and the hand-off.
    assert len(made) == 2
    assert (run["state"], run["step_count"], run["instruction"]) == ("reclaimable", 1, "go_on")
    assert (len(world.messages(run_id)), world.calls(run_id), world.effects) == (1, [], [])
    world.model._decide = script
    assert world.worker().work(run_id)["state"] == "failed"
    assert [effect.tool for effect in world.effects] == [tool]
    assert len([request for request in world.model.requests if request.step == 0]) == 1


def test_an_answer_that_asks_for_approval_in_a_drain_pauses_on_the_next_worker(world: World) -> None:
    client, worker, run_id = begin(world, [say("Hi.")])
    world.model._decide = drain_in(world, worker, turn(call("pay", amount=5)))
    assert worker.work(run_id)["state"] == "reclaimable"
    assert world.worker().work(run_id)["state"] == "paused"
    assert len(client.checkpoints()) == 1


def test_a_start_record_whose_handler_was_not_entered_is_taken_back(world: World) -> None:
    """Ruling 4: the drain begins between the record and the handler."""
    client, worker, run_id = begin(world, [turn(call("ship", order="1")), say("Done.")])
    with at("tool.after_start_record", worker.rt.drain.set):
        run = worker.work(run_id)
    assert (run["state"], run["handed_off"]) == ("reclaimable", True)
    row = world.call(run_id)
    assert (row["state"], row["started_at"], world.effects) == ("pending", None, [])
    assert world.worker().work(run_id)["state"] == "completed"
    assert (len(world.effects), client.checkpoints()) == (1, [])
    assert world.call(run_id)["attempt"] == 1


def test_a_record_that_was_taken_back_and_started_again_is_uncertain_like_any_other(world: World) -> None:
    _client, worker, run_id = begin(world, [turn(call("ship", order="1")), say("Done.")])
    with at("tool.after_start_record", worker.rt.drain.set):
        worker.work(run_id)
    other = world.worker()
    other.lose_at("tool.after_handler", run_id)
    assert other.work(run_id)["state"] == "paused"
    assert len(world.effects) == 1


def test_a_drain_between_two_unsafe_calls_records_no_second_start(world: World) -> None:
    @world.host.tool
    def first(ctx: ToolContext) -> str:
        """The drain begins meanwhile."""
        worker.rt.drain.set()
        return world.act("first", ctx)

    _client, worker, run_id = begin(world, [turn(call("first"), call("ship", order="2")), say("Done.")])
    assert worker.work(run_id)["handed_off"]
    assert [row["state"] for row in world.calls(run_id)] == ["completed"]
    assert world.worker().work(run_id)["state"] == "completed"
    assert [effect.tool for effect in world.effects] == ["first", "ship"]


def test_a_stop_request_that_a_commit_reads_back_is_obeyed_before_the_handler(world: World) -> None:
    """Ruling 4: the commit carried the start record."""
    _client, worker, run_id = begin(world, [turn(call("ship", order="1")), say("Done.")])

    def ask() -> None:
        world.sql("update runs set stop_requested_at = now(), stop_requested_reason = 'maintenance'")

    with at("model.after", ask):
        run = worker.work(run_id)
    assert (run["state"], run["interrupted_reason"], world.effects) == ("reclaimable", "maintenance", [])
    assert world.call(run_id)["state"] == "pending"
    assert (run["stop_requested_at"], run["stop_requested_reason"]) == (None, None)
    assert world.worker().work(run_id)["state"] == "completed"


def test_a_safe_tool_that_leaves_because_of_the_drain_runs_again_elsewhere(world: World) -> None:
    @world.host.tool(retry_safe=True)
    def patient(ctx: ToolContext) -> str:
        """Leave when the worker drains."""
        world.act("patient", ctx)
        if not worker.rt.drain.is_set():
            worker.rt.drain.set()
            ctx.raise_if_stopping()
        return "there"

    _client, worker, run_id = begin(world, [turn(call("patient")), say()])
    assert worker.work(run_id)["handed_off"]
    assert world.calls(run_id) == []
    assert world.worker().work(run_id)["output"] == "Done: there"
    assert len({effect.key for effect in world.effects}) == 1


def test_an_unsafe_tool_that_leaves_because_of_the_drain_is_uncertain(world: World) -> None:
    @world.host.tool
    def patient(ctx: ToolContext) -> str:
        """Leave when the worker drains."""
        worker.rt.drain.set()
        ctx.raise_if_stopping()
        return "there"

    client, worker, run_id = begin(world, [turn(call("patient")), say()])
    assert worker.work(run_id)["state"] == "paused"
    assert only(client.checkpoints()).kind == "uncertain_effect"


def test_an_async_tool_is_told_of_the_drain_and_may_finish(world: World) -> None:
    @world.host.tool
    async def finish(ctx: ToolContext) -> str:
        """Finish although the worker drains."""
        worker.rt.drain.set()
        while not ctx.draining():
            await asyncio.sleep(0)
        return world.act("finish", ctx)

    _client, worker, run_id = begin(world, [turn(call("finish")), say("Done.")])
    run = worker.work(run_id)
    assert (run["state"], world.call(run_id)["state"]) == ("reclaimable", "completed")
    assert world.worker().work(run_id)["state"] == "completed"
    assert len(world.effects) == 1


def test_a_draining_worker_takes_nothing_new(world: World) -> None:
    _client, worker, run_id = begin(world, [say("Hi.")])
    worker.rt.drain.set()
    before = world.snapshot()
    with pytest.raises(Stopping):
        slot.work(worker.rt, run_id)
    assert world.snapshot() == before


@pytest.mark.parametrize("state", ["ready", "reclaimable"])
def test_a_claim_that_slips_into_a_drain_goes_back_as_it_was(world: World, state: str) -> None:
    _client, worker, run_id = begin(world, [say("Hi.")])
    if state == "reclaimable":
        world.worker().lose_at("model.before", run_id)
    before = world.run(run_id)
    with at("claim.after_commit", worker.rt.drain.set):
        assert slot.claim_named(worker.rt, run_id) is None
    after = world.run(run_id)
    same = (
        "state",
        "instruction",
        "queue_class",
        "reclaim_count",
        "reclaim_total",
        "started_at",
        "history_upto",
    )
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert after["revision"] == before["revision"] + 2
    assert world.worker().work(run_id)["state"] == "completed"


def test_any_number_of_hand_offs_delays_nothing_and_counts_nothing(world: World) -> None:
    def script(request: ModelRequest) -> Any:
        return say("Done.") if request.step == 6 else turn(call("find", order=str(request.step)))

    _client, _worker, run_id = begin(world, script)
    for _ in range(6):
        worker = world.worker()
        with at("tool.after_handler", worker.rt.drain.set):
            run = worker.work(run_id)
        assert (run["state"], run["reclaim_count"], run["wait_reason"]) == ("reclaimable", 0, None)
        assert run["not_before"] - run["state_since"] < timedelta(seconds=0.1)
    assert world.worker().work(run_id)["state"] == "completed"
    assert [effect.arguments["order"] for effect in world.effects] == ["0", "1", "2", "3", "4", "5"]
    assert world.run(run_id)["reclaim_total"] == 0


@pytest.mark.parametrize("probe", ["hand_off.before_commit", "hand_off.after_commit"])
def test_a_worker_that_dies_while_it_hands_off_loses_nothing(world: World, probe: str) -> None:
    _client, worker, run_id = begin(world, [turn(call("ship", order="1")), say("Done.")])
    world.model._decide = _once(worker, world.model._decide)
    worker.die_at(probe, run_id)
    if probe == "hand_off.before_commit":
        worker.lapse(run_id)
    assert world.worker().work(run_id)["state"] == "completed"
    assert len(world.effects) == 1


def _once(worker: Worker, script: Any) -> Any:
    def answer(request: ModelRequest) -> Any:
        worker.rt.drain.set()
        return script(request)

    return answer


def test_what_a_tool_returns_after_its_run_was_handed_off_from_outside_is_evidence_only(world: World) -> None:
    """The watchdog hands off while a tool ignores the drain."""
    from cortex_workers.store import leases

    entered, go = threading.Event(), threading.Event()

    @world.host.tool
    def stubborn(ctx: ToolContext) -> str:
        """Ignore everything."""
        entered.set()
        go.wait(30)
        return world.act("stubborn", ctx)

    client, worker, run_id = begin(world, [turn(call("stubborn")), say()])
    claimed = worker.claim(run_id)
    thread = threading.Thread(target=worker.go_on, args=(claimed,))
    thread.start()
    assert entered.wait(10)
    terms = worker.rt.keeper.trip()
    world.database.run(lambda unit: leases.hand_off_all(unit, worker.name, terms, worker.name))
    assert world.run(run_id)["handed_off"]
    go.set()
    thread.join(10)
    row = world.call(run_id)
    assert (row["state"], row["late_result"]) == ("started", "stubborn done")
    assert world.worker().work(run_id)["state"] == "paused"
    assert only(client.checkpoints()).pending[0].late_result == "stubborn done"
    assert len(world.effects) == 1


def test_a_model_call_is_not_cut_short_by_a_drain(world: World) -> None:
    cut: list[str] = []

    class Model:
        async def complete(self, request: ModelRequest) -> ModelReply:
            worker.rt.drain.set()
            try:
                for _ in range(50):
                    await asyncio.sleep(0)
            except asyncio.CancelledError:
                cut.append("cut")
                raise
            return ModelReply(content="Hi.")

        def stream(self, request: ModelRequest) -> Any:
            raise NotImplementedError  # nobody streams here

    world.host = Host()
    world.host.agent("support", model=Model())
    worker, client = world.worker(), world.client()
    assert worker.work(client.enqueue("support", "Go").id)["output"] == "Hi."
    assert cut == []

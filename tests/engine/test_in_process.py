"""Running in the caller's own process: the same door, lease and loop as a worker's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cortex_workers import Client, EffectUncertain, Host, ToolContext
from cortex_workers.engine import slot
from cortex_workers.errors import (
    AgentNotFound,
    CortexError,
    InvalidArgument,
    NotContinuable,
    RunAlreadyDone,
    RunIdReused,
    RunInterrupted,
    RunLeased,
    RunNotFound,
)
from cortex_workers.schemas.ids import RUN, new_id
from cortex_workers.schemas.llm import ModelRequest
from cortex_workers.store import tables
from tests.engine.world import TTL_S, World, at, call, commits, contents, only, say, turn
from tests.waiting import wait_until

SHIP = [turn(call("ship", order="17")), say()]


def host_client(world: World, script: Any = None, **options: Any) -> Client:
    world.shop(script or SHIP, **options)
    return world.client(host=world.host)


def test_a_run_in_process_ends_here_and_was_leased_all_along(world: World) -> None:
    leased: list[Any] = []

    def script(request: ModelRequest) -> Any:
        leased.append(world.run(request.run_id))
        return say("Hi.")

    client = host_client(world, script)
    run = client.run("support", "Go", metadata={"a": 1})
    assert (run.state, run.output) == ("completed", "Hi.")
    (held,) = leased
    assert (held["state"], held["lease_owner"]) == ("running", client.runtime.worker_id)
    assert held["lease_expires_at"] is not None
    assert held["started_at"] is not None
    assert client.runtime.keeper.terms() == []


def test_the_fleet_is_told_nothing_of_a_run_that_is_done_here(world: World) -> None:
    client = host_client(world)
    run = client.run("support", "Go")
    assert world.notified(run.id) == ["RunCompleted"]


def test_a_process_that_runs_agents_itself_serves_nobody_else(world: World) -> None:
    client = host_client(world)
    client.run("support", "Go")
    (worker,) = world.rows(tables.workers)
    assert worker["slots"] == 0
    assert client.runtime.slots.total == 0
    # Nor does it tell the fleet what the agent is now.
    assert world.rows(tables.agents) == []
    with pytest.raises(AgentNotFound):
        client.enqueue("support", "Go")


def test_a_run_that_pauses_is_returned_paused(world: World) -> None:
    client = host_client(world, [turn(call("pay", amount=5)), say("Done.")])
    run = client.run("support", "Go")
    assert (run.state, run.step_count) == ("paused", 1)
    run = client.resolve(only(client.checkpoints()).id, approved=True)
    assert (run.state, len(world.effects)) == ("completed", 1)


def test_a_run_goes_on_here_through_its_slices(world: World) -> None:
    world.shop(
        lambda request: say("Done.") if request.step == 5 else turn(call("find", order=str(request.step)))
    )
    client = world.client(host=world.host, settings={"slice_steps": 2})
    run = client.run("support", "Go")
    assert (run.state, run.step_count, run.reclaim_total) == ("completed", 6, 0)
    assert [event["kind"] for event in world.events(run.id)].count("run.slice_end") == 2


def test_transactions_of_a_run_in_process(world: World) -> None:
    client = host_client(world, [say("Hi.")])
    client.run("support", "warm up")
    with commits(client.runtime) as made:
        client.run("support", "Go")
    # Storing and claiming are one, the end is the other.
    assert len(made) == 2


def test_the_same_run_again_is_returned_and_nothing_is_called(world: World) -> None:
    client = host_client(world)
    run_id = new_id(RUN)
    first = client.run("support", "Go", run_id=run_id)
    again = client.run("support", "Go", run_id=run_id)
    assert again == first
    assert (len(world.model.requests), len(world.effects)) == (2, 1)
    with pytest.raises(RunIdReused):
        client.run("support", "Other", run_id=run_id)


def test_two_clients_that_run_one_id_at_one_instant_run_it_once(world: World) -> None:
    world.shop(SHIP)
    clients = [world.client(host=world.host), world.client(host=world.host)]
    for client in clients:
        client.run("support", "warm up")
    world.effects.clear()
    run_id, start = new_id(RUN), threading.Barrier(2)

    def run(client: Client) -> Any:
        start.wait()
        return client.run("support", "Go", run_id=run_id)

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(run, clients)
    assert one == two
    assert one.state == "completed"
    assert len(world.effects) == 1


@pytest.mark.invariant("I1")
def test_of_many_that_continue_one_run_at_one_instant_one_does(world: World) -> None:
    client = host_client(world, [turn(call("pay", amount=5)), say("Done.")])
    run = client.run("support", "Go")
    others = [world.client(host=world.host) for _ in range(4)]
    for other in others:
        other._start()
    client.decide(only(client.checkpoints()).id, approved=True)
    start = threading.Barrier(len(others))

    def go_on(other: Client) -> Any:
        start.wait()
        try:
            return other.continue_run(run.id)
        except NotContinuable as error:
            return error

    with ThreadPoolExecutor(len(others)) as pool:
        found = list(pool.map(go_on, others))
    assert sum(not isinstance(item, CortexError) for item in found) == 1
    # The others came before it was in, or after: nobody else got it.
    assert all(isinstance(item, NotContinuable) for item in found if isinstance(item, CortexError))
    assert len(world.effects) == 1


def test_a_run_that_has_ended_is_returned_with_the_refusal(world: World) -> None:
    client = host_client(world)
    run = client.run("support", "Go")
    with pytest.raises(RunAlreadyDone) as refused:
        client.continue_run(run.id)
    assert isinstance(refused.value, NotContinuable)
    assert refused.value.data["run"] == run


def test_a_run_that_somebody_holds_is_refused(world: World) -> None:
    client = host_client(world)
    worker = world.worker()
    run_id = client.enqueue("support", "Go").id
    worker.claim(run_id)
    with pytest.raises(RunLeased) as refused:
        client.continue_run(run_id)
    assert refused.value.data["owner"] == worker.name


def test_a_run_whose_worker_is_silent_is_taken_from_it_without_a_sweep(world: World) -> None:
    client = host_client(world)
    worker = world.worker()
    run_id = client.enqueue("support", "Go").id
    worker.die_at("model.before", run_id)
    world.later(TTL_S + 1)
    run = client.continue_run(run_id)
    assert (run.state, run.reclaim_total) == ("completed", 1)
    kinds = [event["kind"] for event in world.events(run_id)]
    assert kinds == ["run.enqueue", "run.claim", "run.lapse", "run.claim", "run.complete"]


def test_a_run_in_process_goes_on_with_what_a_dead_worker_left(world: World) -> None:
    client = host_client(world, [turn(call("find", order="1")), say("Done.")])
    world.worker()
    worker = world.worker()
    run_id = new_id(RUN)
    client.enqueue("support", "Go", run_id=run_id)
    worker.die_at("turn.after_commit", run_id)
    world.later(TTL_S + 1)
    run = client.run("support", "Go", run_id=run_id)
    assert (run.state, run.reclaim_total, len(world.model.requests)) == ("completed", 1, 2)


@pytest.mark.parametrize("policy", ["ask", "fail"])
def test_whoever_continues_a_run_is_told_of_an_uncertain_effect(world: World, policy: Any) -> None:
    """Decision R13: by an exception, whatever becomes of the run."""
    client = host_client(world, on_uncertain_effect=policy)
    worker = world.worker()
    run_id = client.enqueue("support", "Go").id
    worker.lose_at("tool.after_handler", run_id)
    with pytest.raises(EffectUncertain) as told:
        client.continue_run(run_id)
    assert told.value.data["run"].state == ("paused" if policy == "ask" else "failed")
    if policy == "ask":
        assert told.value.data["checkpoint_id"] == only(client.checkpoints()).id


def test_a_run_that_is_not_there_is_not_continued(world: World) -> None:
    client = host_client(world)
    with pytest.raises(RunNotFound):
        client.continue_run(new_id(RUN))


def test_a_process_without_the_agent_says_what_it_lacks(world: World) -> None:
    client = host_client(world)
    world.worker()
    run_id = client.enqueue("support", "Go").id
    other = Host()
    other.agent("other", model=world.model)
    with pytest.raises(NotContinuable, match="agent support"):
        world.client(host=other).continue_run(run_id)
    with pytest.raises(AgentNotFound):
        world.client(host=other).run("support", "Go")


def test_a_run_waits_here_for_its_turn(world: World) -> None:
    client = host_client(world, [say("Hi.")])
    worker = world.worker()
    first = worker.claim(client.enqueue("support", "1", session="chat").id)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(client.run, "support", "2", session="chat")
        wait_until(
            lambda: len(client.runs(session=first.row["session_id"])) == 2, "the second run to be stored"
        )
        assert not second.done()
        worker.go_on(first)
        assert second.result(20).state == "completed"
    assert contents(world.model.requests[-1]) == ["1", "Hi.", "2"]


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("probe", ["model.before", "turn.after_commit", "tool.after_start_record"])
def test_an_interrupted_run_is_handed_to_the_fleet(world: World, probe: str) -> None:
    client = host_client(world)
    worker = world.worker()
    run_id = new_id(RUN)
    with at(probe, interrupt), pytest.raises(KeyboardInterrupt):
        client.run("support", "Go", run_id=run_id)
    run = world.run(run_id)
    assert (run["state"], run["handed_off"], run["reclaim_count"]) == ("reclaimable", True, 0)
    assert world.notified(run_id)[-1] == "RunReclaimable"
    assert client.runtime.keeper.terms() == []
    run = worker.work(run_id)
    if probe != "model.before":
        # The start record is in; that the handler was not entered, nobody can prove any more.
        assert run["state"] == "paused"
        client.settle(only(client.checkpoints()).id, "did_not_happen", now=True)
        run = worker.work(run_id)
    assert (run["state"], len(world.effects)) == ("completed", 1)


@pytest.mark.parametrize("probe", ["model.before", "turn.after_commit", "tool.after_start_record"])
def test_an_interrupted_run_may_be_cancelled_instead(world: World, probe: str) -> None:
    client = host_client(world)
    run_id = new_id(RUN)
    with at(probe, interrupt), pytest.raises(KeyboardInterrupt):
        client.run("support", "Go", run_id=run_id, on_exit="cancel")
    run = world.run(run_id)
    assert (run["state"], run["error_text"]) == ("cancelled", "the caller was interrupted")
    assert world.effects == []


def test_a_tool_that_is_interrupted_leaves_its_call_uncertain(world: World) -> None:
    @world.host.tool
    def stop(ctx: ToolContext) -> str:
        """Press Ctrl-C."""
        world.act("stop", ctx)
        raise KeyboardInterrupt

    client = host_client(world, [turn(call("stop")), say()])
    worker = world.worker()
    run_id = new_id(RUN)
    with pytest.raises(KeyboardInterrupt):
        client.run("support", "Go", run_id=run_id)
    assert world.run(run_id)["handed_off"]
    assert worker.work(run_id)["state"] == "paused"
    assert only(client.checkpoints()).kind == "uncertain_effect"


def test_a_wish_for_the_exit_that_is_none_is_refused(world: World) -> None:
    client = host_client(world)
    with pytest.raises(InvalidArgument):
        client.run("support", "Go", on_exit="shrug")
    assert world.rows(tables.runs) == []


def test_a_run_whose_process_begins_to_drain_goes_on_elsewhere_and_its_caller_is_told(world: World) -> None:
    client = host_client(world, [turn(call("find", order="1")), say("Done.")])
    worker = world.worker()
    run_id = new_id(RUN)
    with at("tool.after_handler", client.runtime.drain.set), pytest.raises(RunInterrupted) as told:
        client.run("support", "Go", run_id=run_id)
    assert told.value.data["run_id"] == run_id
    assert world.run(run_id)["handed_off"]
    assert worker.work(run_id)["state"] == "completed"
    assert len(world.effects) == 1


def test_a_run_that_is_cancelled_elsewhere_is_returned_cancelled(world: World) -> None:
    world.shop(SHIP)
    client, other = world.client(host=world.host), world.client()
    run_id = new_id(RUN)

    def cancel() -> None:
        other.cancel(run_id)
        assert client.runtime.keeper.kick(10)

    with at("tool.after_start_record", cancel):
        run = client.run("support", "Go", run_id=run_id)
    assert (run.state, world.effects) == ("cancelled", [])


# --- Waiting for the fleet -------------------------------------------------------------------------------------------


def test_wait_returns_the_run_when_it_has_ended(world: World) -> None:
    from cortex_workers.errors import WaitTimeout

    world.shop([turn(call("pay", amount=5)), say("Done.")])
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Go").id
    with pytest.raises(WaitTimeout, match="ready"):
        client.wait(run_id, timeout_s=0.05)
    worker.work(run_id)
    assert client.wait(run_id, until_paused=True, timeout_s=5).state == "paused"
    client.decide(only(client.checkpoints()).id, approved=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait, run_id, timeout_s=20)
        slot.work(worker.rt, run_id, "begun")
        assert waiting.result(20).state == "completed"


def test_lists_go_by_pages_and_refuse_what_makes_no_sense(world: World) -> None:
    from cortex_workers.errors import InvalidId

    world.shop([say("Hi.")])
    worker, client = world.worker(), world.client()
    made = [client.enqueue("support", f"{number}").id for number in range(5)]
    worker.work(made[0])
    assert [run.id for run in client.runs()] == list(reversed(made))
    first = client.runs(limit=2)
    assert [run.id for run in client.runs(limit=2, before=first[-1].id)] == [made[2], made[1]]
    assert [run.id for run in client.runs(state="completed")] == [made[0]]
    assert client.runs(agent="other") == []
    wrong: list[tuple[Callable[[], Any], type[CortexError]]] = [
        (lambda: client.runs(limit=0), InvalidArgument),
        (lambda: client.runs(limit=1001), InvalidArgument),
        (lambda: client.runs(state="done"), InvalidArgument),
        (lambda: client.runs(before="17"), InvalidId),
        (lambda: client.checkpoints(limit=0), InvalidArgument),
        (lambda: client.checkpoints(after="17"), InvalidId),
        (lambda: client.checkpoints(run_id="17"), InvalidId),
        (lambda: client.sessions(before="17"), InvalidId),
        (lambda: client.get("17"), InvalidId),
    ]
    for verb, error in wrong:
        with pytest.raises(error):
            verb()

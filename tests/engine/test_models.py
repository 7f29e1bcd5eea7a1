"""Model calls: what is tried again within a step, what waits, what fails the run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from cortex_workers import Host, ModelFailed, ModelUnavailable, RunOverrides
from cortex_workers.schemas.llm import Message, ModelDelta, ModelReply, ModelRequest, ToolCall
from tests.engine.world import World, call, contents, only, say, turn
from tests.waiting import wait_until

QUICK = {"model_backoff_s": 0.0}


class Model:
    """A client of a host's own, that does what the test says for each of its calls."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.requests: list[ModelRequest] = []

    def complete(self, request: ModelRequest) -> Any:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer(request) if callable(answer) else answer

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        self.requests.append(request)
        for delta in self.answers.pop(0):
            yield delta


def agent(world: World, model: Any, **options: Any) -> None:
    world._tools(world.host)
    world.host.agent("support", model=model, tools=sorted(world.host.tools), **options)


def kinds(world: World, run_id: str) -> list[str]:
    return [event["kind"] for event in world.events(run_id)]


def test_an_unavailable_model_is_asked_again_within_the_step(world: World) -> None:
    world.shop([say("Hi.") | {"fail": "unavailable", "times": 2}])
    run = world.worker(**QUICK).work(_enqueue(world))
    assert (run["state"], run["output"], run["step_count"]) == ("completed", "Hi.", 1)
    first, second, third = world.model.requests
    assert first == second == third


def _enqueue(world: World, **more: Any) -> str:
    world.worker()
    return world.client().enqueue("support", "Go", **more).id


def test_a_model_that_stays_unavailable_fails_the_run(world: World) -> None:
    world.shop([{"fail": "unavailable"}])
    run = world.worker(**QUICK, model_attempts=3).work(_enqueue(world))
    assert (run["state"], run["error_code"]) == ("failed", "model_failed")
    assert "3 tries" in run["error_text"]
    assert len(world.model.requests) == 3


def test_an_agent_may_have_its_own_number_of_tries(world: World) -> None:
    world.shop([{"fail": "unavailable"}], model_attempts=2)
    world.worker(**QUICK).work(_enqueue(world))
    assert len(world.model.requests) == 2


def test_a_model_that_refuses_fails_the_run_at_once(world: World) -> None:
    world.shop([{"fail": "failed"}])
    run = world.worker().work(_enqueue(world))
    assert (run["state"], run["error_code"], run["error_text"]) == (
        "failed",
        "model_failed",
        "the script says: failed",
    )
    assert len(world.model.requests) == 1


def test_a_bug_in_a_model_client_is_not_cured_by_asking_again(world: World) -> None:
    model = Model(ZeroDivisionError("secret"))
    agent(world, model)
    run = world.worker().work(_enqueue(world))
    assert (run["state"], run["error_code"]) == ("failed", "model_failed")
    assert "ZeroDivisionError" in run["error_text"]
    assert "secret" not in run["error_text"]
    assert len(model.requests) == 1


def test_a_failure_text_that_cannot_be_stored_fails_the_run_all_the_same(world: World) -> None:
    agent(world, Model(ModelFailed("bad \x00 and \ud800 text")))
    run = world.worker().work(_enqueue(world))
    assert (run["state"], run["error_text"]) == ("failed", "bad \ufffd and \ufffd text")


def test_a_short_retry_after_is_waited_for_within_the_step(world: World) -> None:
    world.shop([say("Hi.") | {"fail": "unavailable", "times": 1, "retry_after_s": 0.2}])
    run = world.worker(model_backoff_s=60.0).work(_enqueue(world))
    assert run["output"] == "Hi."


def test_a_long_retry_after_gives_an_unbegun_run_back_untouched(world: World) -> None:
    world.shop([say("Hi.") | {"fail": "unavailable", "times": 1, "retry_after_s": 120}])
    worker = world.worker()
    run_id = _enqueue(world)
    run = worker.work(run_id)
    assert (run["state"], run["wait_reason"], run["instruction"]) == ("ready", "later", "start")
    assert (run["not_before"] - run["state_since"]).total_seconds() == pytest.approx(120, abs=0.1)
    assert (run["step_count"], run["started_at"], run["history_upto"]) == (0, None, None)
    assert kinds(world, run_id)[-1] == "run.hand_back"
    world.later(121)
    world.wake()
    assert worker.work(run_id)["output"] == "Hi."


def test_a_long_retry_after_keeps_what_the_term_has_done(world: World) -> None:
    world.shop(
        [turn(call("find", order="1")), say() | {"fail": "unavailable", "times": 1, "retry_after_s": 120}]
    )
    worker = world.worker()
    run_id = _enqueue(world)
    run = worker.work(run_id)
    assert (run["state"], run["instruction"], run["queue_class"]) == ("ready", "go_on", "begun")
    assert (run["not_before"] - run["state_since"]).total_seconds() == pytest.approx(120, abs=0.1)
    assert world.call(run_id)["state"] == "completed"
    world.later(121)
    world.wake()
    assert worker.work(run_id)["state"] == "completed"
    assert len(world.effects) == 1


def test_a_retry_after_of_days_is_waited_for_in_portions(world: World) -> None:
    world.shop([say("Hi.") | {"fail": "unavailable", "times": 1, "retry_after_s": 1e6}])
    run = world.worker().work(_enqueue(world))
    assert (run["not_before"] - run["state_since"]).total_seconds() == pytest.approx(300, abs=0.1)


def test_the_pause_between_two_tries_ends_with_the_lease(world: World) -> None:
    world.shop([say("Hi.") | {"fail": "unavailable", "times": 1, "retry_after_s": 30}])
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Go").id
    claimed = worker.claim(run_id)
    done = threading.Thread(target=worker.go_on, args=(claimed,))
    done.start()
    wait_until(lambda: world.model.requests, "the first try")
    client.cancel(run_id)
    worker.rt.keeper.kick(5)
    done.join(10)
    assert not done.is_alive()
    assert (world.run(run_id)["state"], len(world.model.requests)) == ("cancelled", 1)


def test_the_pause_between_two_tries_ends_with_a_drain(world: World) -> None:
    world.shop([say("Hi.") | {"fail": "unavailable", "times": 1, "retry_after_s": 30}])
    worker = world.worker()
    claimed = worker.claim(_enqueue(world))
    done = threading.Thread(target=worker.go_on, args=(claimed,))
    done.start()
    wait_until(lambda: world.model.requests, "the first try")
    worker.rt.drain.set()
    done.join(10)
    run = world.run(claimed.row["id"])
    assert (run["state"], run["handed_off"]) == ("reclaimable", True)


def test_an_async_model_is_awaited(world: World) -> None:
    async def answer(request: ModelRequest) -> ModelReply:
        await asyncio.sleep(0)
        return ModelReply(content="Hi.")

    agent(world, Model(answer))
    assert world.worker().work(_enqueue(world))["output"] == "Hi."


def test_an_async_model_that_takes_too_long_is_asked_again(world: World) -> None:
    async def hang(request: ModelRequest) -> ModelReply:
        await asyncio.Event().wait()
        raise AssertionError

    model = Model(hang, ModelReply(content="Hi."))
    agent(world, model, model_timeout=timedelta(seconds=0.3))
    assert world.worker(**QUICK).work(_enqueue(world))["output"] == "Hi."
    assert len(model.requests) == 2


def test_a_streaming_agent_gets_the_whole_reply(world: World) -> None:
    world.shop([{"stream": ["H", "i", "."]}], stream=True)
    assert world.worker().work(_enqueue(world))["output"] == "Hi."


def test_a_stream_that_breaks_off_is_asked_for_again(world: World) -> None:
    model = Model(
        [ModelDelta(content="H")], [ModelDelta(content="Hi."), ModelDelta(reply=ModelReply(content="Hi."))]
    )
    agent(world, model, stream=True)
    assert world.worker(**QUICK).work(_enqueue(world))["output"] == "Hi."
    assert len(model.requests) == 2


@pytest.mark.parametrize("how", ["cancelled", "lapsed"])
def test_a_model_call_is_cut_short_when_the_run_is_taken_away(world: World, how: str) -> None:
    entered, left = threading.Event(), threading.Event()

    async def hang(request: ModelRequest) -> ModelReply:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        raise AssertionError

    agent(world, Model(hang, ModelReply(content="Hi.")))
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Go").id
    claimed = worker.claim(run_id)
    done = threading.Thread(target=worker.go_on, args=(claimed,))
    done.start()
    assert entered.wait(10)
    if how == "cancelled":
        client.cancel(run_id)
    else:
        world.sql("update runs set lease_expires_at = now() - interval '1 s'")
        worker.lapse(run_id)
    worker.rt.keeper.kick(5)
    done.join(10)
    assert not done.is_alive()
    assert left.wait(10)
    run = world.run(run_id)
    assert (run["state"], world.steps(run_id)) == ("cancelled" if how == "cancelled" else "reclaimable", [])


def test_a_stop_request_cuts_a_model_call_short_and_hands_the_run_off(world: World) -> None:
    entered = threading.Event()

    async def hang(request: ModelRequest) -> ModelReply:
        entered.set()
        await asyncio.Event().wait()
        raise AssertionError

    agent(world, Model(hang, ModelReply(content="Hi.")))
    worker = world.worker()
    claimed = worker.claim(_enqueue(world))
    done = threading.Thread(target=worker.go_on, args=(claimed,))
    done.start()
    assert entered.wait(10)
    world.sql("update runs set stop_requested_at = now(), stop_requested_reason = 'gate'")
    worker.rt.keeper.kick(5)
    done.join(10)
    run = world.run(claimed.row["id"])
    assert (run["state"], run["handed_off"], run["interrupted_reason"]) == ("reclaimable", True, "gate")
    assert run["stop_requested_reason"] is None


def test_no_connection_is_held_while_the_model_thinks(world: World) -> None:
    free: list[int] = []
    worker: Any = None

    def look(request: ModelRequest) -> dict[str, Any]:
        free.append(worker.rt.database.engine.pool.checkedout())
        return say("Hi.")

    world.shop(look)
    worker = world.worker()
    worker.work(_enqueue(world))
    assert free == [0]


def test_opaque_items_come_back_as_they_were_given(world: World) -> None:
    raw = {"v": 1, "provider": "x", "parts": [{"kind": "thinking", "signature": "Zm9v", "content": "ü"}]}
    reply = ModelReply(tool_calls=(ToolCall(id="1", name="find", arguments='{"order":"1"}'),), raw=raw)
    model = Model(reply, ModelReply(content="Hi."))
    agent(world, model)
    worker = world.worker(slice_steps=1)
    worker.finish(_enqueue(world))
    assert model.requests[-1].messages[1].raw == raw


def test_opaque_items_that_cannot_be_stored_do_not_stop_the_run(world: World) -> None:
    raw = {"v": 1, "note": "a\x00b\ud800c"}
    reply = ModelReply(tool_calls=(ToolCall(id="1", name="find", arguments='{"order":"1"}'),), raw=raw)
    model = Model(reply, ModelReply(content="Hi."))
    agent(world, model)
    run = world.worker(slice_steps=1).finish(_enqueue(world))
    assert run["state"] == "completed"


def test_text_that_cannot_be_stored_is_replaced_and_marked(world: World) -> None:
    """Bug case C30."""
    names = ToolCall(id="i\x00d", name="fi\x00nd", arguments='{"order": "\x00"}')
    model = Model(
        ModelReply(content="a\x00b\ud800", tool_calls=(names,), model="m\x00", finish_reason="f\x00"),
        ModelReply(content="Hi\x00."),
    )
    agent(world, model)
    run = world.worker().work(_enqueue(world))
    assert (run["state"], run["output"]) == ("completed", "Hi\ufffd.")
    first = world.messages(run["id"])[0]
    assert first.content == "a\ufffdb\ufffd"
    assert (first.tool_calls[0].id, first.tool_calls[0].name) == ("i\ufffdd", "fi\ufffdnd")
    assert [row["model"] for row in world.steps(run["id"])] == ["m\ufffd", "host:support"]
    from cortex_workers.store import tables

    marked = {row["seq"]: row["marked"] for row in world.rows(tables.messages, order=tables.messages.c.seq)}
    assert next(iter(marked.values())) is True
    assert list(marked.values())[-1] is True


def test_a_nul_written_as_an_escape_in_arguments_is_replaced_too(world: World) -> None:
    """Bug case C30: what an approver sees is stored as JSON, which holds no NUL."""
    arguments = '{"order": "a\\u0000b\\ud800c\\\\u0000"}'
    seen: list[str] = []

    @world.host.tool(needs_approval=True)
    def note(order: str) -> str:
        """Take a note."""
        seen.append(order)
        return "noted"

    model = Model(
        ModelReply(tool_calls=(ToolCall(id="1", name="note", arguments=arguments),)),
        ModelReply(content="Hi."),
    )
    agent(world, model)
    worker, client = world.worker(), world.client()
    run_id = _enqueue(world)
    assert worker.work(run_id)["state"] == "paused"
    client.decide(only(client.checkpoints()).id, approved=True)
    assert worker.work(run_id)["state"] == "completed"
    assert seen == ["a\ufffdb\ufffdc\\u0000"]


def test_a_run_may_ask_another_model_of_its_host(world: World) -> None:
    one, two = Model(ModelReply(content="one")), Model(ModelReply(content="two"))
    world.host = Host(models={"one": one, "two": two})
    world.host.agent("support", model="one")
    worker = world.worker()
    assert worker.work(_enqueue(world))["output"] == "one"
    assert worker.work(_enqueue(world, overrides=RunOverrides(model="two")))["output"] == "two"


def test_a_model_that_does_not_exist_fails_the_run_with_its_name(world: World) -> None:
    world.shop([say("Hi.")])
    run = world.worker().work(_enqueue(world, overrides=RunOverrides(model="acme:large")))
    assert (run["state"], run["error_code"]) == ("failed", "unknown_model")
    assert "acme" in run["error_text"]


def test_a_model_is_told_its_run_and_step(world: World) -> None:
    world.shop([turn(call("find", order="1")), say("Hi.")], model_timeout=timedelta(seconds=7))
    run_id = _enqueue(world)
    world.worker().work(run_id)
    assert [(r.run_id, r.step, r.timeout_s) for r in world.model.requests] == [
        (run_id, 0, 7.0),
        (run_id, 1, 7.0),
    ]
    assert contents(world.model.requests[1], "tool") == ['{"order":"1"}']


def test_the_message_a_strict_provider_refuses_never_comes_up(world: World) -> None:
    """The scripted model is strict: each call has exactly one result, and nothing is repeated."""
    same = [{"tool": "find", "args": {"order": "1"}, "id": "x"}]
    world.shop([{"call": same}, {"call": same}, say("Hi.")])
    worker = world.worker(slice_steps=1)
    assert worker.finish(_enqueue(world))["state"] == "completed"
    ids = [message.tool_call_id for message in world.model.requests[-1].messages if message.role == "tool"]
    assert len(set(ids)) == 2


def test_an_unavailable_error_of_a_subclass_is_tried_again(world: World) -> None:
    class Busy(ModelUnavailable):
        """Busy."""

    model = Model(Busy(), ModelReply(content="Hi."))
    agent(world, model)
    assert world.worker(**QUICK).work(_enqueue(world))["output"] == "Hi."


def test_a_conversation_is_made_of_our_own_types(world: World) -> None:
    world.shop([say("Hi.")])
    world.worker().work(_enqueue(world))
    assert world.model.requests[0].messages == (Message(role="user", content="Go"),)

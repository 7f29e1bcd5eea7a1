"""Batch pricing through the real openai client, against a local server: submitted, asked for, read, days later."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest

from cortex_workers.engine import expire
from cortex_workers.errors import (
    DeferredModelCall,
    Misconfiguration,
    ModelFailed,
    ModelUnavailable,
    RefusedForNow,
    UnknownModel,
)
from cortex_workers.llm.batch import BatchModel, Handle
from cortex_workers.llm.spend_gate import SpendGate
from cortex_workers.schemas.llm import Deferral, Message, ModelReply, ModelRequest, ToolDefinition
from cortex_workers.testing.openai_server import OpenAIServer
from tests.engine.world import World, looking_at, only
from tests.llm.conftest import request, said, user

SECRET = "the prompt nobody may read in a log"
NAME = "openai:gpt-5-mini"
REFUND = ToolDefinition(
    name="refund", parameters={"type": "object", "properties": {"order": {"type": "string"}}}
)
T = TypeVar("T")


class Provider:
    """The local server, and a new worker for each call: another client on another event loop."""

    def __init__(self, answers: list[Any]) -> None:
        self.server = OpenAIServer(answers)

    def ask(self, asked: ModelRequest, **options: Any) -> ModelReply:
        async def work(client: BatchModel) -> ModelReply:
            return await client.complete(asked)

        return in_new_worker(work, **options)

    def put_off(self, asked: ModelRequest, **options: Any) -> DeferredModelCall:
        with pytest.raises(DeferredModelCall) as caught:
            self.ask(asked, **options)
        assert caught.value.kind == "batch"
        return caught.value

    @property
    def calls(self) -> list[str]:
        return self.server.batches.calls


def in_new_worker(work: Callable[[BatchModel], Awaitable[T]], **options: Any) -> T:
    async def with_client() -> T:
        client = BatchModel(NAME, **options)
        try:
            return await work(client)
        finally:
            await client.aclose()

    return asyncio.run(with_client())


def again(asked: ModelRequest, deferred: DeferredModelCall | str) -> ModelRequest:
    """The same call as the engine makes it when the look is due."""
    ref = deferred if isinstance(deferred, str) else deferred.ref
    return asked.model_copy(update={"deferral": Deferral(kind="batch", ref=ref)})


@pytest.fixture
def provide(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Provider]]:
    made: list[Provider] = []

    def start(*answers: Any) -> Provider:
        provider = Provider(list(answers))
        provider.server.__enter__()
        made.append(provider)
        monkeypatch.setenv("OPENAI_BASE_URL", provider.server.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
        return provider

    yield start
    for each in made:
        each.server.__exit__()


Provide = Callable[..., Provider]


# --- Submitted, asked for, read -----------------------------------------------------------------------------------


def test_a_call_is_submitted_and_put_off(provide: Provide) -> None:
    provider = provide({"say": "Hi."})
    asked = request(
        user("hello"),
        system="Be brief.",
        max_tokens=77,
        timeout_s=30.0,
        tools=(REFUND,),
        run_id="arun_1",
        step=3,
    )
    deferred = provider.put_off(asked, poll_after=timedelta(minutes=2))
    assert provider.calls == ["POST /v1/files", "POST /v1/batches"]
    assert provider.server.requests == []
    (line,) = provider.server.batches.lines
    assert (line["custom_id"], line["url"]) == ("arun_1-3", "/v1/responses")
    assert (line["body"]["model"], line["body"]["max_output_tokens"]) == ("gpt-5-mini", 77)
    assert line["body"]["instructions"] == "Be brief."
    assert "hello" in str(line["body"]["input"])
    assert line["body"]["tools"][0]["name"] == "refund"
    assert deferred.poll_after == timedelta(minutes=2)
    assert deferred.ttl > timedelta(hours=48)


def test_the_handle_is_a_document_of_ours_without_secrets(provide: Provide) -> None:
    deferred = provide().put_off(request(user(SECRET)))
    handle = Handle.model_validate_json(deferred.ref)
    assert (handle.v, handle.provider, handle.model, handle.submissions) == (1, "openai", "gpt-5-mini", 1)
    assert handle.id == "batch_2"
    assert "sk-very-secret" not in deferred.ref and SECRET not in deferred.ref
    assert SECRET not in f"{deferred.message} {deferred.reason}"


def test_while_the_batch_runs_the_call_is_put_off_under_the_same_handle(provide: Provide) -> None:
    provider, asked = provide({"say": "Hi."}), request(run_id="arun_1")
    deferred = provider.put_off(asked)
    for _ in range(3):
        assert provider.put_off(again(asked, deferred)).ref == deferred.ref
    assert provider.calls[2:] == ["GET /v1/batches/batch_2"] * 3
    assert provider.server.requests == []


def test_another_worker_reads_the_result(provide: Provide) -> None:
    provider, asked = provide({"say": "Hi.", "usage": (30, 4), "cached_tokens": 10}), request(run_id="arun_1")
    deferred = provider.put_off(asked)
    provider.server.batches.end()
    reply = provider.ask(again(asked, deferred))
    assert (reply.content, reply.tool_calls, reply.finish_reason) == ("Hi.", (), "stop")
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.requests) == (30, 4, 1)
    assert reply.usage.cache_read_tokens == 10
    assert reply.model == "fake-1"
    # A result can be read as often as it takes: a worker may die right after it read it.
    assert provider.ask(again(asked, deferred)) == reply
    assert len(provider.server.requests) == 1


def test_a_tool_call_goes_round_with_the_provider_s_own_items(provide: Provide) -> None:
    provider = provide(
        {"reasoning": "gAAAA-opaque", "call": [{"tool": "refund", "args": '{ "order" :"17"}'}]},
        {"say": "Done."},
    )
    asked = request(user("refund 17"), tools=(REFUND,), run_id="arun_1")
    deferred = provider.put_off(asked)
    provider.server.batches.end()
    first = provider.ask(again(asked, deferred))
    assert (first.tool_calls[0].name, first.tool_calls[0].arguments) == ("refund", '{ "order" :"17"}')
    ours = first.tool_calls[0].model_copy(update={"id": "call_1~2"})
    result = Message(role="tool", content="refunded", tool_call_id="call_1~2", tool_name="refund")
    following = request(
        user("refund 17"), said(first, tool_calls=(ours,)), result, tools=(REFUND,), run_id="arun_1", step=1
    )
    second = provider.put_off(following)
    provider.server.batches.end()
    assert provider.ask(again(following, second)).content == "Done."
    items = provider.server.batches.lines[1]["body"]["input"]
    reasoning, call, output = items[-3:]
    assert (reasoning["encrypted_content"], call["call_id"], output["call_id"]) == (
        "gAAAA-opaque",
        first.tool_calls[0].id,
        first.tool_calls[0].id,
    )


def test_a_streaming_agent_gets_the_result_in_one_piece(provide: Provide) -> None:
    provider, asked = provide({"say": "Hi."}), request(run_id="arun_1")

    async def stream(client: BatchModel, given: ModelRequest) -> list[Any]:
        return [delta async for delta in client.stream(given)]

    with pytest.raises(DeferredModelCall) as caught:
        in_new_worker(lambda client: stream(client, asked))
    provider.server.batches.end()
    (delta,) = in_new_worker(lambda client: stream(client, again(asked, caught.value)))
    assert (delta.content, delta.reply.content) == ("", "Hi.")


def test_a_call_that_somebody_else_put_off_is_submitted(provide: Provide) -> None:
    provider = provide()
    approved = request().model_copy(update={"deferral": Deferral(kind="spend", approved=True)})
    provider.put_off(approved)
    assert provider.calls == ["POST /v1/files", "POST /v1/batches"]


def test_a_gate_before_it_asks_once_and_not_at_every_look(provide: Provide) -> None:
    provider, asked = provide({"say": "Hi."}), request(user("x" * 4000), run_id="arun_1")

    def through_gate(given: ModelRequest) -> ModelReply:
        async def work(client: BatchModel) -> ModelReply:
            reply: ModelReply = await SpendGate(client, max_tokens=100).complete(given)
            return reply

        return in_new_worker(work)

    with pytest.raises(DeferredModelCall) as caught:
        through_gate(asked)
    assert (caught.value.kind, provider.calls) == ("spend", [])
    with pytest.raises(DeferredModelCall) as caught:
        through_gate(asked.model_copy(update={"deferral": Deferral(kind="spend", approved=True)}))
    assert caught.value.kind == "batch"
    provider.server.batches.end()
    assert through_gate(again(asked, caught.value)).content == "Hi."


# --- When to look -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waited", "pause"),
    [
        (timedelta(0), timedelta(minutes=1)),
        (timedelta(minutes=4), timedelta(minutes=1)),
        (timedelta(minutes=20), timedelta(minutes=5)),
        (timedelta(hours=20), timedelta(minutes=10)),
    ],
    ids=str,
)
def test_looks_come_less_often_the_longer_a_batch_takes(
    provide: Provide, waited: timedelta, pause: timedelta
) -> None:
    provider, asked = provide(), request()
    ref = older(provider.put_off(asked), waited)
    assert provider.put_off(again(asked, ref)).poll_after == pytest.approx(pause, abs=timedelta(seconds=30))


def older(deferred: DeferredModelCall, by: timedelta) -> str:
    handle = Handle.model_validate_json(deferred.ref)
    return handle.model_copy(update={"submitted_at": datetime.now(UTC) - by}).model_dump_json()


def test_a_batch_that_never_ends_is_given_up(provide: Provide) -> None:
    provider, asked = provide(), request()
    ref = older(provider.put_off(asked), timedelta(hours=49))
    with pytest.raises(ModelFailed, match="no result within 2 days"):
        provider.ask(again(asked, ref))
    # A result that is there all the same is taken.
    provider = provide({"say": "Late."})
    ref = older(provider.put_off(asked), timedelta(hours=49))
    provider.server.batches.end()
    assert provider.ask(again(asked, ref)).content == "Late."


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_look_that_fails_says_nothing_about_the_batch(provide: Provide, status: int) -> None:
    provider, asked = provide({"say": "Hi."}), request()
    deferred = provider.put_off(asked)
    provider.server.batches.trouble("GET /v1/batches", status, retry_after="900")
    later = provider.put_off(again(asked, deferred))
    assert (later.ref, later.poll_after) == (deferred.ref, timedelta(seconds=900))
    # It was asked once: nobody sleeps in a worker until the provider feels better.
    assert provider.calls.count("GET /v1/batches/batch_2") == 1
    provider.server.batches.end()
    assert provider.ask(again(asked, deferred)).content == "Hi."


def test_a_provider_that_is_not_there_is_asked_later(
    provide: Provide, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}/v1"
        provider, asked = provide(), request()
        deferred = provider.put_off(asked)
        handle = json.loads(deferred.ref)
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        handle["group"] = json.loads(handle["group"])
        handle["group"]["endpoint"] = endpoint_of(url)
        handle["group"] = json.dumps(handle["group"])
        assert provider.put_off(again(asked, json.dumps(handle))).ref is not None


def endpoint_of(url: str) -> str:
    import hashlib

    return hashlib.sha256(f"{url}/".encode()).hexdigest()


# --- What fails ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["POST /v1/files", "POST /v1/batches"])
@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_call_that_could_not_be_submitted_is_worth_another_try(
    provide: Provide, path: str, status: int
) -> None:
    provider = provide()
    provider.server.batches.trouble(path, status, retry_after="7")
    with pytest.raises(ModelUnavailable, match=str(status)) as caught:
        provider.ask(request(user(SECRET)))
    assert caught.value.retry_after_s == 7
    assert SECRET not in str(caught.value)
    assert provider.calls.count(path) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_a_call_that_is_refused_fails(provide: Provide, status: int) -> None:
    provider = provide()
    provider.server.batches.trouble("POST /v1/batches", status)
    with pytest.raises(ModelFailed, match=str(status)):
        provider.ask(request(user(SECRET)))
    assert provider.server.batches.files == []


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_call_that_failed_in_its_batch_fails_without_showing_the_prompt(
    provide: Provide, status: int
) -> None:
    answer = {"status": status, "message": f"bad: {SECRET}", "code": "some_code"}
    provider, asked = provide(answer), request(user(SECRET))
    deferred = provider.put_off(asked)
    provider.server.batches.end()
    with pytest.raises(ModelFailed, match=str(status)) as caught:
        provider.ask(again(asked, deferred))
    assert SECRET not in str(caught.value)
    assert len(provider.server.batches.lines) == 1


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_call_that_failed_as_at_any_busy_moment_is_submitted_again(provide: Provide, status: int) -> None:
    provider, asked = provide({"status": status}, {"say": "Hi."}), request(run_id="arun_1")
    first = provider.put_off(asked)
    provider.server.batches.end()
    second = provider.put_off(again(asked, first))
    assert second.ref != first.ref
    assert Handle.model_validate_json(second.ref).submissions == 2
    provider.server.batches.end()
    assert provider.ask(again(asked, second)).content == "Hi."
    assert len(provider.server.batches.lines) == 2


def test_what_expires_is_submitted_again_so_often_and_no_more(provide: Provide) -> None:
    provider, asked = provide(), request(run_id="arun_1")
    deferred = provider.put_off(asked)
    for _ in range(2):
        provider.server.batches.end("expired")
        deferred = provider.put_off(again(asked, deferred))
    provider.server.batches.end("expired")
    with pytest.raises(ModelFailed, match=r"failed 3 times.*expired"):
        provider.ask(again(asked, deferred))
    assert len(provider.server.batches.lines) == 3


def test_nothing_is_submitted_again_where_that_is_not_wanted(provide: Provide) -> None:
    provider, asked = provide(), request()
    deferred = provider.put_off(asked)
    provider.server.batches.end("expired")
    with pytest.raises(ModelFailed, match="failed 1 times"):
        provider.ask(again(asked, deferred), resubmissions=0)


def test_a_batch_that_was_cancelled_at_the_provider_fails(provide: Provide) -> None:
    provider, asked = provide(), request()
    deferred = provider.put_off(asked)
    provider.server.batches.end("cancelled")
    with pytest.raises(ModelFailed, match="cancelled"):
        provider.ask(again(asked, deferred))


def test_a_batch_that_the_provider_did_not_accept_fails(provide: Provide) -> None:
    provider, asked = provide(), request()
    deferred = provider.put_off(asked)
    provider.server.batches.end("failed")
    with pytest.raises(ModelFailed, match="400"):
        provider.ask(again(asked, deferred))


def test_a_batch_that_the_provider_does_not_know_any_more_fails(provide: Provide) -> None:
    provider, asked = provide(), request()
    deferred = provider.put_off(asked)
    provider.server.batches.forget()
    with pytest.raises(ModelFailed, match="404"):
        provider.ask(again(asked, deferred))


def test_results_that_do_not_come_are_asked_for_a_few_times_before_the_call_is_submitted_again(
    provide: Provide,
) -> None:
    provider, asked = provide({"say": "Hi."}, {"say": "Hi again."}), request(run_id="arun_1")
    deferred = provider.put_off(asked)
    provider.server.batches.end()
    provider.server.batches.trouble("GET /v1/files", 503, times=5)
    for failed in range(1, 5):
        deferred = provider.put_off(again(asked, deferred))
        handle = Handle.model_validate_json(deferred.ref)
        assert (handle.failed_reads, handle.submissions) == (failed, 1)
    deferred = provider.put_off(again(asked, deferred))
    handle = Handle.model_validate_json(deferred.ref)
    assert (handle.failed_reads, handle.submissions) == (0, 2)
    provider.server.batches.end()
    assert provider.ask(again(asked, deferred)).content == "Hi again."


def test_a_filtered_answer_fails(provide: Provide) -> None:
    provider, asked = provide({"say": "So you", "finish": "content_filter"}), request()
    deferred = provider.put_off(asked)
    provider.server.batches.end()
    with pytest.raises(ModelFailed, match="filter"):
        provider.ask(again(asked, deferred))


def test_the_handle_of_a_newer_worker_is_left_to_it(provide: Provide) -> None:
    provider, asked = provide(), request()
    handle = Handle.model_validate_json(provider.put_off(asked).ref)
    newer = handle.model_copy(update={"v": 2}).model_dump_json()
    with pytest.raises(RefusedForNow):
        provider.ask(again(asked, newer))
    assert len(provider.calls) == 2


@pytest.mark.parametrize("ref", ["", "{}", "batch_2", '{"v": 1}'])
def test_a_handle_that_cannot_be_read_fails(provide: Provide, ref: str) -> None:
    with pytest.raises(ModelFailed, match="cannot be read"):
        provide().ask(again(request(), ref))


def test_the_batch_of_another_model_or_account_is_not_asked_for(provide: Provide) -> None:
    provider, asked = provide(), request()
    handle = json.loads(provider.put_off(asked).ref)
    handle["group"] = json.dumps({**json.loads(handle["group"]), "model": "gpt-9"})
    with pytest.raises(ModelFailed):
        provider.ask(again(asked, json.dumps(handle)))
    assert len(provider.calls) == 2


# --- What is no batch model ---------------------------------------------------------------------------------------


def test_a_model_without_a_batch_api_is_refused_at_once(
    provide: Provide, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    provide()
    with pytest.raises(Misconfiguration, match="no batch API"):
        BatchModel("openai-chat:gpt-5-mini")
    script = tmp_path / "script.json"
    script.write_text('[{"say": "x"}]')
    with pytest.raises(Misconfiguration, match="no batch API"):
        BatchModel(f"scripted:{script}")
    with pytest.raises(UnknownModel):
        BatchModel("nobody:gpt-5")


@pytest.mark.parametrize(
    "options",
    [
        {"poll_after": timedelta(0)},
        {"poll_after": timedelta(hours=1)},
        {"poll_at_most": timedelta(days=3)},
        {"resubmissions": -1},
    ],
    ids=str,
)
def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(Misconfiguration):
        BatchModel(NAME, **options)


# --- In a run -----------------------------------------------------------------------------------------------------


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    with looking_at(database_url) as onlooker:
        made = World(onlooker)
        try:
            yield made
        finally:
            made.close()


def test_a_run_waits_for_its_batches_and_holds_no_worker(world: World, provide: Provide) -> None:
    provider = provide({"call": [{"tool": "ship", "args": {"order": "17"}}]}, {"say": "Shipped."})
    world._tools(world.host)
    world.host.agent("support", model=lambda: BatchModel(NAME), instructions="Help.", tools=["ship"])
    worker = world.worker()
    run_id = world.client().enqueue("support", "Ship 17").id
    for step in range(2):
        run = world.worker().work(run_id)
        assert (run["state"], run["lease_owner"], run["next_step"]) == ("paused", None, step)
        pause = world.pauses(run_id)[-1]
        assert (pause["reason"], pause["deferral_kind"]) == ("external_tool", "batch")
        assert pause["next_poll_at"] < pause["expires_at"]
        # A look that comes too early changes nothing but the pause.
        assert expire.poll(worker.rt, pause["id"])
        assert world.worker().work(run_id)["state"] == "paused"
        assert world.pauses(run_id)[-1]["deferral_ref"] == pause["deferral_ref"]
        provider.server.batches.end()
        assert expire.poll(worker.rt, world.pauses(run_id)[-1]["id"])
    assert world.worker().work(run_id)["output"] == "Shipped."
    assert [effect.tool for effect in world.effects] == ["ship"]
    assert [row["step_index"] for row in world.steps(run_id)] == [0, 1]
    assert len(provider.server.batches.lines) == 2
    assert world.client().checkpoints(pending_only=False) == []


def test_a_worker_that_dies_with_the_result_in_hand_loses_nothing(world: World, provide: Provide) -> None:
    provider = provide({"say": "Hi."})
    world.host.agent("support", model=lambda: BatchModel(NAME))
    worker = world.worker()
    run_id = world.client().enqueue("support", "Go").id
    worker.work(run_id)
    provider.server.batches.end()
    assert expire.poll(worker.rt, world.pauses(run_id)[-1]["id"])
    worker.lose_at("model.after", run_id)
    assert world.worker().work(run_id)["output"] == "Hi."
    assert len(provider.server.batches.lines) == 1


def test_a_failed_batch_fails_its_run_with_the_reason(world: World, provide: Provide) -> None:
    provider = provide({"status": 400, "code": "context_length_exceeded"})
    world.host.agent("support", model=lambda: BatchModel(NAME))
    worker = world.worker()
    run_id = world.client().enqueue("support", "Go").id
    worker.work(run_id)
    provider.server.batches.end()
    expire.poll(worker.rt, world.pauses(run_id)[-1]["id"])
    run = world.worker().work(run_id)
    assert (run["state"], run["error_code"]) == ("failed", "model_failed")
    assert "context_length_exceeded" in run["error_text"]


def test_an_expensive_batch_asks_a_person_first(world: World, provide: Provide) -> None:
    provider = provide({"say": "Hi."})
    world.host.agent("support", model=lambda: SpendGate(BatchModel(NAME), max_tokens=10))
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "x" * 400).id
    worker.work(run_id)
    asked = only(client.checkpoints())
    assert (asked.kind, asked.metadata["deferral_kind"]) == ("deferred_model_call", "spend")
    assert provider.calls == []
    client.decide(asked.id, approved=True)
    worker.work(run_id)
    provider.server.batches.end()
    assert expire.poll(worker.rt, world.pauses(run_id)[-1]["id"])
    assert world.worker().work(run_id)["output"] == "Hi."
    assert client.checkpoints() == []

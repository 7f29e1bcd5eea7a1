"""The adapter through the real openai client, against a local server that speaks both protocols."""

from __future__ import annotations

import asyncio
import datetime as dt
import socket
import time
from email.utils import format_datetime
from typing import Any

import pytest

from cortex_workers.errors import ModelFailed, ModelUnavailable, RefusedForNow
from cortex_workers.llm.pydantic_ai import PydanticAIClient
from cortex_workers.schemas.llm import Message, ModelDelta, ToolDefinition
from cortex_workers.testing.openai_server import OpenAIServer
from tests.llm.conftest import request, said, user

SECRET = "the prompt nobody may read in a log"
REFUND = ToolDefinition(
    name="refund",
    description="Refund an order.",
    parameters={"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]},
)


def complete(*args: Any, **fields: Any) -> Any:
    async def ask(client: PydanticAIClient, _server: OpenAIServer) -> Any:
        return await client.complete(request(*args, **fields))

    return ask


def stream(*args: Any, **fields: Any) -> Any:
    async def ask(client: PydanticAIClient, _server: OpenAIServer) -> list[ModelDelta]:
        return [delta async for delta in client.stream(request(*args, **fields))]

    return ask


def sent_texts(body: dict[str, Any]) -> str:
    return str(body.get("input", body.get("messages")))


def test_a_plain_answer_comes_with_its_usage(talk: Any, provider: str) -> None:
    reply, server = talk(
        [{"say": "Hi there.", "usage": (30, 4), "cached_tokens": 10}], complete(system="Be brief.")
    )
    assert (reply.content, reply.tool_calls, reply.finish_reason) == ("Hi there.", (), "stop")
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (30, 4)
    assert (reply.usage.cache_read_tokens, reply.usage.requests) == (10, 1)
    assert reply.model == "fake-1"
    (received,) = server.requests
    assert received.path == {"openai": "/v1/responses", "openai-chat": "/v1/chat/completions"}[provider]
    assert received.body["model"] == "gpt-5-mini"
    assert "Be brief." in str(received.body)
    assert "hello" in sent_texts(received.body)


def test_limits_and_settings_reach_the_provider(talk: Any, provider: str) -> None:
    asked = complete(max_tokens=77, settings={"parallel_tool_calls": False}, tools=(REFUND,))
    _, server = talk([{"say": "ok"}], asked)
    body = server.requests[0].body
    assert 77 in (body.get("max_output_tokens"), body.get("max_completion_tokens"))
    assert body["parallel_tool_calls"] is False
    assert "Refund an order." in str(body["tools"])


def test_a_tool_call_goes_round_with_the_provider_s_own_ids(talk: Any, provider: str) -> None:
    answers = [{"say": "Looking.", "call": [{"tool": "refund", "args": {"order": "17"}}]}, {"say": "Done."}]

    async def ask(client: PydanticAIClient, _server: OpenAIServer) -> Any:
        first = await client.complete(request(user("refund 17"), tools=(REFUND,)))
        ours = first.tool_calls[0].model_copy(update={"id": "call_1~2"})
        result = Message(role="tool", content="refunded", tool_call_id="call_1~2", tool_name="refund")
        second = await client.complete(
            request(user("refund 17"), said(first, tool_calls=(ours,)), result, tools=(REFUND,))
        )
        return first, second

    (first, second), server = talk(answers, ask)
    assert first.content == "Looking."
    assert (first.tool_calls[0].name, first.tool_calls[0].arguments) == ("refund", '{"order": "17"}')
    assert (first.finish_reason, second.content) == ("tool_calls", "Done.")
    again = server.requests[1].body
    if provider == "openai":
        call = next(item for item in again["input"] if item.get("type") == "function_call")
        output = next(item for item in again["input"] if item.get("type") == "function_call_output")
        assert (call["call_id"], call["id"], output["call_id"]) == ("call_1_0", "fc_1_0", "call_1_0")
        assert output["output"] == "refunded"
    else:
        call = next(message for message in again["messages"] if message.get("tool_calls"))["tool_calls"][0]
        output = next(message for message in again["messages"] if message["role"] == "tool")
        assert call["id"] == output["tool_call_id"]
        assert output["content"] == "refunded"


def test_a_document_of_another_provider_is_dropped(talk: Any, provider: str) -> None:
    async def ask(client: PydanticAIClient, _server: OpenAIServer) -> Any:
        first = await client.complete(request(user("refund 17"), tools=(REFUND,)))
        raw = {
            "v": 99,
            "provider": "anthropic",
            "parts": [{"kind": "thinking", "signature": "sig-of-another"}],
        }
        call = first.tool_calls[0].model_copy(update={"id": "ours"})
        result = Message(role="tool", content="refunded", tool_call_id="ours")
        return await client.complete(request(user("x"), said(first, tool_calls=(call,), raw=raw), result))

    answers = [{"call": [{"tool": "refund", "args": {}}]}, {"say": "Done."}]
    reply, server = talk(answers, ask)
    assert reply.content == "Done."
    assert "sig-of-another" not in str(server.requests[1].body)
    assert "fc_1_0" not in str(server.requests[1].body)
    assert "ours" in str(server.requests[1].body)


def test_a_document_of_a_newer_version_is_left_to_a_newer_worker(talk: Any, provider: str) -> None:
    newer = Message(role="assistant", content="hi", raw={"v": 2, "provider": provider, "parts": "whatever"})
    with pytest.raises(RefusedForNow):
        talk([{"say": "ok"}], complete(user("x"), newer, user("y")))


@pytest.mark.parametrize("provider", ["openai"], indirect=True)
def test_encrypted_reasoning_is_sent_back_word_for_word(talk: Any, provider: str) -> None:
    async def ask(client: PydanticAIClient, _server: OpenAIServer) -> Any:
        first = await client.complete(request(user("think"), tools=(REFUND,)))
        result = Message(role="tool", content="ok", tool_call_id=first.tool_calls[0].id)
        await client.complete(request(user("think"), said(first), result, tools=(REFUND,)))
        return first

    answers = [{"reasoning": "gAAAA-opaque", "call": [{"tool": "refund", "args": {}}]}, {"say": "Done."}]
    first, server = talk(answers, ask)
    assert first.content == ""
    kinds = [item.get("type") for item in server.requests[1].body["input"]]
    assert kinds[-3:] == ["reasoning", "function_call", "function_call_output"]
    reasoning = server.requests[1].body["input"][-3]
    assert (reasoning["id"], reasoning["encrypted_content"]) == ("rs_1", "gAAAA-opaque")


def test_a_streamed_answer_comes_in_pieces_and_whole(talk: Any) -> None:
    deltas, server = talk([{"pieces": ["One, ", "two, ", "three."]}], stream())
    assert [delta.content for delta in deltas if delta.content] == ["One, ", "two, ", "three."]
    assert [delta.reply is not None for delta in deltas] == [False, False, False, True]
    reply = deltas[-1].reply
    assert (reply.content, reply.finish_reason, reply.usage.input_tokens) == ("One, two, three.", "stop", 12)
    assert server.requests[0].body["stream"] is True


def test_a_streamed_tool_call_is_put_together(talk: Any) -> None:
    calls = [{"tool": "refund", "args": {"order": "1"}}, {"tool": "refund", "args": {"order": "2"}}]
    deltas, _ = talk([{"say": "Both.", "call": calls}], stream(tools=(REFUND,)))
    reply = deltas[-1].reply
    assert [call.arguments for call in reply.tool_calls] == ['{"order": "1"}', '{"order": "2"}']
    assert len({call.id for call in reply.tool_calls}) == 2
    assert (reply.content, reply.finish_reason) == ("Both.", "tool_calls")


@pytest.mark.parametrize("ask", [complete, stream])
def test_a_rate_limit_says_when_to_try_again_and_is_not_retried_below(talk: Any, ask: Any) -> None:
    async def catch(client: PydanticAIClient, _server: OpenAIServer) -> ModelUnavailable:
        with pytest.raises(ModelUnavailable) as caught:
            await ask(user(SECRET))(client, _server)
        return caught.value

    error, server = talk(
        [{"status": 429, "retry_after": "7", "code": "rate_limit_exceeded"}, {"say": "no"}], catch
    )
    assert error.retry_after_s == 7
    assert "429" in error.message and "rate_limit_exceeded" in error.message
    assert len(server.requests) == 1


def test_retry_after_may_be_a_date(talk: Any) -> None:
    when = format_datetime(dt.datetime.now(dt.UTC) + dt.timedelta(seconds=90), usegmt=True)

    async def catch(client: PydanticAIClient, _server: OpenAIServer) -> ModelUnavailable:
        with pytest.raises(ModelUnavailable) as caught:
            await client.complete(request())
        return caught.value

    error, _ = talk([{"status": 503, "retry_after": when}], catch)
    assert error.retry_after_s is not None
    assert 80 <= error.retry_after_s <= 90


def test_a_quota_that_is_used_up_is_no_rate_limit(talk: Any) -> None:
    with pytest.raises(ModelFailed, match="insufficient_quota"):
        talk([{"status": 429, "code": "insufficient_quota"}], complete())


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504, 529])
def test_what_another_try_may_cure(talk: Any, status: int) -> None:
    with pytest.raises(ModelUnavailable, match=str(status)):
        talk([{"status": status, "message": SECRET}], complete(user(SECRET)))


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 422])
def test_what_no_other_try_cures_fails_without_showing_the_prompt(talk: Any, status: int) -> None:
    with pytest.raises(ModelFailed, match=str(status)) as caught:
        talk([{"status": status, "message": f"bad: {SECRET}", "code": "some_code"}], complete(user(SECRET)))
    assert SECRET not in str(caught.value)
    assert "some_code" in str(caught.value)


@pytest.mark.parametrize("ask", [complete, stream])
@pytest.mark.parametrize("cut", ["before", "mid"])
def test_a_cut_connection_is_worth_another_try(talk: Any, ask: Any, cut: str) -> None:
    with pytest.raises(ModelUnavailable):
        talk([{"pieces": ["some ", "text ", "here"], "cut": cut}], ask())


def test_a_server_that_is_not_there_is_worth_another_try(talk: Any) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}/v1"
        with pytest.raises(ModelUnavailable):
            talk([], complete(), base_url=url)


@pytest.mark.parametrize("ask", [complete, stream])
def test_a_slow_answer_runs_into_the_timeout(talk: Any, ask: Any) -> None:
    began = time.monotonic()
    with pytest.raises(ModelUnavailable):
        talk([{"say": "late", "slow_s": 30}], ask(timeout_s=0.3))
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("ask", [complete, stream])
def test_a_cancelled_call_hangs_up(talk: Any, ask: Any) -> None:
    async def cancel(client: PydanticAIClient, server: OpenAIServer) -> None:
        task = asyncio.ensure_future(ask()(client, server))
        assert await asyncio.to_thread(server.arrived.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.hung_up.wait, 10)

    talk([{"say": "late", "slow_s": 30}], cancel)


@pytest.mark.parametrize("body", ["this is no JSON", "", "{}", '{"choices": []}', "[1]", "null"])
def test_an_answer_that_cannot_be_read_is_worth_another_try(talk: Any, body: str) -> None:
    with pytest.raises(ModelUnavailable):
        talk([{"body": body}], complete())


@pytest.mark.parametrize("ask", [complete, stream])
def test_a_filtered_answer_fails(talk: Any, ask: Any) -> None:
    with pytest.raises(ModelFailed, match="filter"):
        talk([{"say": "So you", "finish": "content_filter"}], ask())


def test_an_answer_at_the_limit_says_so(talk: Any) -> None:
    reply, _ = talk([{"say": "So you", "finish": "length"}], complete())
    assert (reply.content, reply.finish_reason) == ("So you", "length")


def test_arguments_are_kept_byte_for_byte(talk: Any) -> None:
    odd = '{ "order" :"17",\n"order":"18"} '
    reply, _ = talk([{"call": [{"tool": "refund", "args": odd}]}], complete(tools=(REFUND,)))
    assert reply.tool_calls[0].arguments == odd


def test_an_unanswered_call_is_refused_by_the_server_as_by_the_real_one(talk: Any) -> None:
    async def ask(client: PydanticAIClient, _server: OpenAIServer) -> Any:
        first = await client.complete(request(user("x"), tools=(REFUND,)))
        await client.complete(request(user("x"), said(first), user("and?"), tools=(REFUND,)))

    with pytest.raises(ModelFailed, match="400"):
        talk([{"call": [{"tool": "refund", "args": {}}]}, {"say": "no"}], ask)

"""The contract with pydantic-ai, both ways, against its FunctionModel: nothing is lost, nothing is added."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_ai import messages as theirs
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel

from cortex_workers.errors import ModelFailed, ModelUnavailable
from cortex_workers.llm.pydantic_ai import PydanticAIClient, to_messages, to_reply
from cortex_workers.schemas.llm import Message, ModelReply, ModelRequest, ToolCall, ToolDefinition
from tests.llm.conftest import request, said, user

PROVIDER = "function"
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=30)
names = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)
arguments = st.dictionaries(texts, st.none() | st.booleans() | st.integers() | texts, max_size=3).map(
    json.dumps
)
calls = st.builds(ToolCall, id=st.uuids().map(str), name=names, arguments=arguments)
details = st.none() | st.dictionaries(names, texts, min_size=1, max_size=2)


@st.composite
def their_parts(draw: st.DrawFn) -> list[theirs.ModelResponsePart]:
    """A response as a provider may give it: any mixture, any order."""
    bare: dict[str, Any] = {"provider_name": None, "id": None, "provider_details": None}
    by: dict[str, Any] = {"provider_name": PROVIDER, "provider_details": draw(details)}
    part: st.SearchStrategy[Any] = st.one_of(
        st.builds(theirs.TextPart, texts, **{key: st.just(value) for key, value in bare.items()}),
        st.builds(
            theirs.TextPart, texts, id=st.none() | texts, **{key: st.just(value) for key, value in by.items()}
        ),
        st.builds(
            theirs.ThinkingPart, texts, signature=st.none() | texts, id=texts, provider_name=st.just(PROVIDER)
        ),
        st.builds(theirs.ToolCallPart, names, arguments, st.uuids().map(str), id=st.none() | texts),
    )
    return draw(st.lists(part, min_size=1, max_size=5))


def answer_with(function: Any, asked: ModelRequest) -> ModelReply:
    return asyncio.run(PydanticAIClient(lambda: FunctionModel(function), PROVIDER).complete(asked))


@given(content=st.just("") | texts, made=st.lists(calls, max_size=3, unique_by=lambda call: call.id))
def test_our_assistant_message_goes_there_and_back_unchanged(content: str, made: list[ToolCall]) -> None:
    """The function answers with the very response that the history holds."""
    before = Message(role="assistant", content=content, tool_calls=tuple(made))
    results = [Message(role="tool", content="r", tool_call_id=call.id, tool_name=call.name) for call in made]

    def echo(messages: list[theirs.ModelMessage], _info: AgentInfo) -> theirs.ModelResponse:
        (response,) = [message for message in messages if isinstance(message, theirs.ModelResponse)]
        return theirs.ModelResponse(parts=response.parts)

    reply = answer_with(echo, request(user("q"), before, *results, user("again")))
    assert said(reply) == before


@given(parts=their_parts())
def test_their_response_goes_through_our_row_and_back_unchanged(
    parts: list[theirs.ModelResponsePart],
) -> None:
    reply = answer_with(
        lambda *_: theirs.ModelResponse(parts=parts, provider_name=PROVIDER), request(user("q"))
    )
    stored = Message.model_validate_json(said(reply).model_dump_json())
    _, restored = to_messages(request(user("q"), stored), PROVIDER)
    assert isinstance(restored, theirs.ModelResponse)
    assert list(restored.parts) == parts
    again = to_reply(restored, PROVIDER)
    assert (again.content, again.tool_calls, again.raw) == (reply.content, reply.tool_calls, reply.raw)


@given(parts=their_parts())
def test_another_provider_gets_text_and_calls_only(parts: list[theirs.ModelResponsePart]) -> None:
    reply = to_reply(theirs.ModelResponse(parts=parts, provider_name=PROVIDER), PROVIDER)
    _, *restored = to_messages(request(user("q"), said(reply)), "another")
    (response,) = restored
    assert isinstance(response, theirs.ModelResponse)
    kinds = {type(part) for part in response.parts}
    assert kinds <= {theirs.TextPart, theirs.ToolCallPart}
    for part in response.parts:
        assert (getattr(part, "id", None), part.provider_name, part.provider_details) == (None, None, None)
    assert to_reply(response, "another").content == reply.content


def test_the_conversation_arrives_in_their_types() -> None:
    seen: list[Any] = []

    def look(messages: list[theirs.ModelMessage], info: AgentInfo) -> theirs.ModelResponse:
        seen.extend([messages, info])
        return theirs.ModelResponse(parts=[theirs.TextPart("ok")])

    calls = (ToolCall(id="a", name="one", arguments='{"x":1}'), ToolCall(id="b", name="two"))
    asked = request(
        user("first"),
        Message(role="assistant", content="both", tool_calls=calls),
        Message(role="tool", content="fine", tool_call_id="a"),
        Message(role="tool", content="broke", tool_call_id="b", is_error=True),
        user("and now?"),
        system="Be brief.",
        tools=(
            ToolDefinition(name="one", description="One.", parameters={"type": "object", "properties": {}}),
        ),
        temperature=0.5,
        settings={"temperature": 0.9, "max_retries": 5, "seed": 3},
    )
    assert answer_with(look, asked).content == "ok"
    (first, assistant, newest), info = seen
    assert [part.content for part in first.parts] == ["first"]
    assert [(part.tool_name, part.args, part.tool_call_id) for part in assistant.parts[1:]] == [
        ("one", '{"x":1}', "a"),
        ("two", "{}", "b"),
    ]
    one, two, again = newest.parts
    assert (one.tool_name, one.content, one.tool_call_id, one.outcome) == ("one", "fine", "a", "success")
    assert (two.tool_name, two.content, two.outcome) == ("two", "broke", "failed")
    assert again.content == "and now?"
    assert info.instructions == "Be brief."
    assert [(tool.name, tool.description) for tool in info.function_tools] == [("one", "One.")]
    # The request goes before the agent's settings, and nobody below us retries.
    assert (info.model_settings["temperature"], info.model_settings["seed"]) == (0.5, 3)
    assert info.model_settings["max_retries"] == 0


def test_an_edited_message_loses_its_document() -> None:
    """A text that no longer is what the provider signed must not be sent under the provider's own id."""
    part = theirs.TextPart("secret", id="msg_1", provider_name=PROVIDER)
    reply = to_reply(theirs.ModelResponse(parts=[part], provider_name=PROVIDER), PROVIDER)
    _, response = to_messages(request(user("q"), said(reply, content="redacted!")), PROVIDER)
    assert [(item.content, item.id) for item in response.parts] == [("redacted!", None)]  # type: ignore[union-attr]


def test_a_plain_answer_needs_no_document() -> None:
    reply = to_reply(theirs.ModelResponse(parts=[theirs.TextPart("hi")]), PROVIDER)
    assert reply.raw is None


def test_what_no_row_can_hold_is_cleaned_in_the_document() -> None:
    part = theirs.ThinkingPart("nul \x00 and half \ud800", signature="s", id="t", provider_name=PROVIDER)
    reply = to_reply(theirs.ModelResponse(parts=[part]), PROVIDER)
    assert reply.raw is not None
    assert reply.raw["parts"][0]["content"] == "nul \ufffd and half \ufffd"
    json.dumps(reply.raw, ensure_ascii=False).encode()


def test_a_stream_gives_the_pieces_and_the_calls() -> None:
    async def pieces(_messages: list[theirs.ModelMessage], _info: AgentInfo) -> Any:
        yield "Hello "
        yield "there."
        yield {1: DeltaToolCall(name="refund", json_args='{"order"', tool_call_id="c1")}
        yield {1: DeltaToolCall(json_args=':"17"}')}

    async def listen() -> list[Any]:
        client = PydanticAIClient(lambda: FunctionModel(stream_function=pieces), PROVIDER)
        return [delta async for delta in client.stream(request(user("q")))]

    *texts, last = asyncio.run(listen())
    assert "".join(delta.content for delta in texts) == "Hello there."
    assert last.reply.tool_calls == (ToolCall(id="c1", name="refund", arguments='{"order":"17"}'),)
    assert last.reply.content == "Hello there."


@pytest.mark.parametrize(("reason", "error"), [("content_filter", ModelFailed), ("error", ModelUnavailable)])
def test_an_end_that_is_no_answer_is_an_error(reason: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        to_reply(theirs.ModelResponse(parts=[theirs.TextPart("par")], finish_reason=reason), PROVIDER)


def test_what_the_library_stumbles_over_is_sorted() -> None:
    def stumble(*_: Any) -> theirs.ModelResponse:
        raise KeyError("choices")

    with pytest.raises(ModelUnavailable) as caught:
        answer_with(stumble, request(user("q")))
    assert "choices" not in caught.value.message
    assert isinstance(caught.value.__cause__, KeyError)

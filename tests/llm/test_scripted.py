"""ScriptedModel: decided by the request alone, strict, cancellable, and deadly where the script says so."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cortex_workers.errors import Misconfiguration, ModelFailed, ModelUnavailable
from cortex_workers.ports import ModelClient
from cortex_workers.schemas.llm import Message, ModelReply, ModelRequest, ToolCall, Usage
from cortex_workers.testing.model import ScriptedModel, check_conversation
from tests.llm.conftest import request, said, user

REFUND: list[Any] = [
    {"say": "Let me see.", "call": [{"tool": "refund", "args": {"order": "{input}", "n": 1}}]},
    {"say": "It said: {last_result}"},
]


def answer(model: ScriptedModel, asked: ModelRequest) -> ModelReply:
    reply = model.complete(asked)
    assert isinstance(reply, ModelReply)
    return reply


def result(call: ToolCall, text: str = "done") -> Message:
    return Message(role="tool", content=text, tool_call_id=call.id, tool_name=call.name)


def test_it_is_a_model_client() -> None:
    assert isinstance(ScriptedModel([{"say": "hi"}]), ModelClient)


def test_turns_follow_the_conversation_also_in_another_process() -> None:
    first = answer(ScriptedModel(REFUND), request(user("17")))
    assert (first.content, first.finish_reason) == ("Let me see.", "tool_calls")
    assert json.loads(first.tool_calls[0].arguments) == {"order": "17", "n": 1}
    history = [user("17"), said(first), result(first.tool_calls[0], "refunded {input}")]
    second = answer(ScriptedModel(REFUND), request(*history))
    assert (second.content, second.finish_reason) == ("It said: refunded {input}", "stop")


def test_a_new_user_message_begins_the_script_again() -> None:
    model = ScriptedModel([{"say": "one {input}"}])
    asked = request(user("a"), Message(role="assistant", content="one a"), user("b"))
    assert answer(model, asked).content == "one b"


def test_running_out_of_turns_fails() -> None:
    asked = request(
        user("a"),
        said(ModelReply(tool_calls=(ToolCall(id="1", name="t"),))),
        result(ToolCall(id="1", name="t")),
    )
    with pytest.raises(ModelFailed, match="no turn 1"):
        ScriptedModel([{"say": "only one"}]).complete(asked)


def test_cases_are_chosen_by_input() -> None:
    script = {
        "match": [
            {"input_contains": "order 17", "turns": [{"say": "seventeen"}]},
            {"default": True, "turns": [{"say": "other"}]},
        ]
    }
    model = ScriptedModel(script)
    assert answer(model, request(user("Refund order 17 please"))).content == "seventeen"
    assert answer(model, request(user("Hello"))).content == "other"
    with pytest.raises(ModelFailed, match="no turn 0"):
        ScriptedModel({"match": script["match"][:1]}).complete(request(user("Hello")))


def test_a_function_may_decide() -> None:
    model = ScriptedModel(lambda asked: {"say": f"{len(asked.messages)} messages"})
    assert answer(model, request(user("a"))).content == "1 messages"


def test_requests_are_recorded_and_may_be_bounded() -> None:
    model = ScriptedModel([{"say": "x"}], keep_requests=2)
    for step in range(5):
        model.complete(request(step=step))
    assert [asked.step for asked in model.requests] == [3, 4]


def test_usage_is_the_same_everywhere_unless_given() -> None:
    one = answer(ScriptedModel([{"say": "12345678"}]), request(user("1234"), system="12345678"))
    assert one.usage == Usage(input_tokens=3, output_tokens=2, requests=1)
    given = answer(ScriptedModel([{"say": "x", "usage": {"input_tokens": 9}}]), request())
    assert given.usage.input_tokens == 9


def test_arguments_given_as_text_are_sent_as_they_are() -> None:
    model = ScriptedModel([{"call": [{"tool": "t", "args": "{not json", "id": "mine"}]}])
    assert answer(model, request()).tool_calls == (ToolCall(id="mine", name="t", arguments="{not json"),)


def test_a_failure_may_pass_after_some_tries() -> None:
    model = ScriptedModel([{"fail": "unavailable", "times": 2, "retry_after_s": 3, "say": "at last"}])
    for _ in range(2):
        with pytest.raises(ModelUnavailable) as caught:
            model.complete(request(run_id="r1"))
        assert caught.value.retry_after_s == 3
    assert answer(model, request(run_id="r1")).content == "at last"
    with pytest.raises(ModelUnavailable):
        model.complete(request(run_id="r2"))


def test_a_failure_may_last() -> None:
    model = ScriptedModel([{"fail": "failed"}])
    for _ in range(3):
        with pytest.raises(ModelFailed):
            model.complete(request())


def test_a_stall_is_awaited_and_can_be_cancelled() -> None:
    async def cancel() -> None:
        reply = ScriptedModel([{"stall_s": 60, "say": "late"}]).complete(request())
        assert not isinstance(reply, ModelReply)
        task = asyncio.ensure_future(reply)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    began = time.monotonic()
    asyncio.run(cancel())
    assert time.monotonic() - began < 10


def test_a_stall_ends() -> None:
    async def wait() -> Any:
        return await ScriptedModel([{"stall_s": 0.01, "say": "late"}]).complete(request())  # type: ignore[misc]

    assert asyncio.run(wait()).content == "late"


def test_it_streams_its_pieces_and_then_the_whole_reply() -> None:
    async def listen(model: ScriptedModel) -> list[Any]:
        return [delta async for delta in model.stream(request(user("17")))]

    deltas = asyncio.run(listen(ScriptedModel([{"stream": ["for ", "{input}"]}])))
    assert [delta.content for delta in deltas] == ["for ", "17", ""]
    assert deltas[-1].reply.content == "for 17"


def test_a_stream_may_break_off() -> None:
    async def listen() -> list[str]:
        seen: list[str] = []
        with pytest.raises(ModelUnavailable):
            async for delta in ScriptedModel([{"stream": ["a", "b"], "fail": "unavailable"}]).stream(
                request()
            ):
                seen.append(delta.content)
        return seen

    assert asyncio.run(listen()) == ["a", "b"]


def test_it_kills_its_process_once_where_the_script_names_a_file(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"kill": "killed", "say": "still here"}]))
    code = (
        "import sys; from cortex_workers.testing.model import ScriptedModel;"
        "from cortex_workers.schemas.llm import Message, ModelRequest;"
        "asked = ModelRequest(model='m', messages=(Message(role='user', content='x'),));"
        "print(ScriptedModel.from_file(sys.argv[1]).complete(asked).content)"
    )
    command = [sys.executable, "-c", code, str(script)]
    first = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert first.returncode == -signal.SIGKILL
    assert (tmp_path / "killed").exists()
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (second.returncode, second.stdout) == (0, "still here\n")


CALLS = Message(role="assistant", tool_calls=(ToolCall(id="a", name="t"), ToolCall(id="b", name="t")))
A, B = (Message(role="tool", content="r", tool_call_id=name) for name in "ab")


@pytest.mark.parametrize(
    ("messages", "wrong"),
    [
        ([], "nothing to answer"),
        ([user("x"), Message(role="assistant", content="y")], "nothing to answer"),
        ([user("x"), CALLS], "2 calls have no result"),
        ([user("x"), CALLS, A], "1 calls have no result"),
        ([user("x"), CALLS, A, user("y")], "1 calls before it have no result"),
        ([user("x"), CALLS, A, A, B], "a result without an open call"),
        ([user("x"), A], "a result without an open call"),
        ([user("x"), CALLS, A, B, A], "a result without an open call"),
        ([user("x"), Message(role="tool", content="r")], "a result without an open call"),
        ([CALLS.model_copy(update={"role": "user"}), A, B], "not the assistant's"),
        ([CALLS.model_copy(update={"tool_calls": (CALLS.tool_calls[0],) * 2}), A], "two calls with one id"),
    ],
)
def test_a_malformed_conversation_is_refused(messages: list[Message], wrong: str) -> None:
    with pytest.raises(ModelFailed, match=wrong):
        ScriptedModel([{"say": "x"}]).complete(ModelRequest(model="m", messages=tuple(messages)))
    lenient = ScriptedModel(lambda _: {"say": "x"}, strict=False)
    assert answer(lenient, ModelRequest(model="m", messages=tuple(messages))).content == "x"


def test_a_well_formed_conversation_is_accepted() -> None:
    check_conversation(
        [user("x"), CALLS, B, A, Message(role="assistant", content="y"), user("z"), user("and")]
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[{"say" "x"}]', "line 1 column 9"),
        ('[\n {"sya": "x"}]', "at 0.sya: Extra inputs"),
        ("[{}]", "at 0: Value error, a turn needs say"),
        ('[{"call": [{"args": {}}]}]', "at 0.call.0.tool: Field required"),
        ('[{"say": "x", "times": 2}]', "times counts failures"),
        ('[{"fail": "unavailable", "times": 2}]', "for the time after"),
        ('[{"say": "x", "stall_s": -1}]', "at 0.stall_s"),
        ('[{"say": "x", "stream": ["y"]}]', "say and stream differ"),
        ('{"match": [{"turns": [{"say": "x"}]}]}', "input_contains or default"),
        ('{"match": [{"default": true, "turns": []}]}', "at match.0.turns"),
        ('{"match": []}', "at match"),
        ('"hello"', "a list of turns"),
        ("", "line 1 column 1"),
    ],
)
def test_a_bad_script_says_where(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "script.json"
    file.write_text(text)
    with pytest.raises(Misconfiguration) as caught:
        ScriptedModel.from_file(file)
    assert told in str(caught.value)
    assert "script.json" in str(caught.value)


def test_a_script_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(Misconfiguration, match="No such file"):
        ScriptedModel.from_file(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Misconfiguration, match="binary"):
        ScriptedModel.from_file(tmp_path / "binary")


def test_a_default_in_the_middle_would_hide_the_rest() -> None:
    turns = [{"say": "x"}]
    with pytest.raises(Misconfiguration, match="comes last"):
        ScriptedModel({"match": [{"default": True, "turns": turns}, {"input_contains": "y", "turns": turns}]})


def test_it_answers_in_microseconds() -> None:
    model = ScriptedModel(REFUND, keep_requests=1)
    asked = request(user("17"))
    best = min(_timed(model, asked) for _ in range(200))
    assert best < 0.001


def _timed(model: ScriptedModel, asked: ModelRequest) -> float:
    began = time.perf_counter()
    model.complete(asked)
    return time.perf_counter() - began

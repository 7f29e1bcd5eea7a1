"""ScriptedModel: a model that answers from a script, in microseconds, the same way in every process."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio

from cortex_workers.errors import ModelFailed, ModelUnavailable
from cortex_workers.llm.script import Script, Turn, fill, load_script, read_script
from cortex_workers.schemas.llm import Message, ModelDelta, ModelReply, ModelRequest, ToolCall, Usage

Decide = Callable[[ModelRequest], Turn | dict[str, Any]]


class ScriptedModel:
    """Answers from a list of turns, cases by input, or a function of the request.

    Which turn is due is read from the request alone: it is the number of assistant messages since the last user
    message. So it answers the same after a crash, in another process, or days later. ``strict`` refuses a malformed
    conversation as a real provider would. ``requests`` are the newest ones of this process.
    """

    def __init__(
        self,
        script: Sequence[Any] | dict[str, Any] | Script | Decide,
        *,
        strict: bool = True,
        keep_requests: int | None = None,
        directory: Path | None = None,
    ) -> None:
        self._decide: Decide
        if isinstance(script, Script):
            self._decide = _follow(script)
        elif callable(script):
            self._decide = script
        else:
            self._decide = _follow(read_script(script))
        self._strict = strict
        self._directory = directory or Path()
        self._lock = threading.Lock()
        self._requests: deque[ModelRequest] = deque(maxlen=keep_requests)
        self._failed: dict[tuple[str, int, int], int] = {}

    @classmethod
    def from_file(cls, path: str | Path) -> ScriptedModel:
        """Build one from a JSON file; file names in it are relative to it.

        Raises: Misconfiguration with the position of what is wrong.
        """
        file = Path(path)
        return cls(load_script(file), keep_requests=100, directory=file.parent)

    @property
    def requests(self) -> list[ModelRequest]:
        """The requests so far, oldest first."""
        with self._lock:
            return list(self._requests)

    def complete(self, request: ModelRequest) -> ModelReply | Awaitable[ModelReply]:
        """Answer one request; only a stalling turn gives an awaitable.

        Raises: ModelUnavailable, ModelFailed.
        """
        turn = self._turn(request)
        if turn.stall_s:
            return self._after_stall(turn, request)
        self._before(turn, request)
        return _reply(turn, request)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """Answer one request in the pieces of its turn; a failing turn fails after them.

        Raises: ModelUnavailable, ModelFailed.
        """
        turn = self._turn(request)
        if turn.stall_s:
            await anyio.sleep(turn.stall_s)
        texts = _texts(request)
        for piece in turn.pieces:
            yield ModelDelta(content=fill(piece, texts))
        self._before(turn, request)
        yield ModelDelta(reply=_reply(turn, request))

    async def _after_stall(self, turn: Turn, request: ModelRequest) -> ModelReply:
        await anyio.sleep(turn.stall_s)
        self._before(turn, request)
        return _reply(turn, request)

    def _turn(self, request: ModelRequest) -> Turn:
        with self._lock:
            self._requests.append(request)
        if self._strict:
            check_conversation(request.messages)
        turn = self._decide(request)
        return turn if isinstance(turn, Turn) else Turn.model_validate(turn)

    def _before(self, turn: Turn, request: ModelRequest) -> None:
        """Kill or fail, where the turn says so."""
        if turn.kill and self._may_kill(turn.kill):
            os.kill(os.getpid(), signal.SIGKILL)
        if turn.fail is None or self._failed_enough(turn, request):
            return
        if turn.fail == "unavailable":
            raise ModelUnavailable("the script says: unavailable", retry_after_s=turn.retry_after_s)
        raise ModelFailed("the script says: failed")

    def _may_kill(self, kill: bool | str) -> bool:
        if isinstance(kill, bool):
            return True
        try:
            (self._directory / kill).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _failed_enough(self, turn: Turn, request: ModelRequest) -> bool:
        if turn.times is None:
            return False
        key = (request.run_id, request.step, turn_index(request.messages))
        with self._lock:
            count = self._failed.get(key, 0)
            if count >= turn.times:
                self._failed.pop(key)
                return True
            self._failed[key] = count + 1
            return False


def turn_index(messages: Sequence[Message]) -> int:
    """How many times the model has answered since the last user message."""
    count = 0
    for message in reversed(messages):
        if message.role == "user":
            break
        count += message.role == "assistant"
    return count


def check_conversation(messages: Sequence[Message]) -> None:
    """Refuse what a strict provider refuses: a call without exactly one result, a result without its call.

    Raises: ModelFailed.
    """
    open_calls: set[str] = set()
    for position, message in enumerate(messages):
        if message.role == "tool":
            if message.tool_call_id not in open_calls:
                raise _malformed(position, "a result without an open call")
            open_calls.discard(message.tool_call_id)
            continue
        if open_calls:
            raise _malformed(position, f"{len(open_calls)} calls before it have no result")
        open_calls = {call.id for call in message.tool_calls}
        if len(open_calls) < len(message.tool_calls):
            raise _malformed(position, "two calls with one id")
        if open_calls and message.role != "assistant":
            raise _malformed(position, "calls in a message that is not the assistant's")
    if open_calls:
        raise _malformed(len(messages), f"{len(open_calls)} calls have no result")
    if not messages or messages[-1].role == "assistant":
        raise _malformed(len(messages), "nothing to answer")


def _malformed(position: int, why: str) -> ModelFailed:
    return ModelFailed(f"malformed conversation at message {position}: {why}")


def _follow(script: Script) -> Decide:
    def decide(request: ModelRequest) -> Turn:
        turns = script.turns_for(_texts(request)["input"])
        index = turn_index(request.messages)
        if index >= len(turns):
            raise ModelFailed(f"the script has no turn {index} for this input")
        return turns[index]

    return decide


def _texts(request: ModelRequest) -> dict[str, str]:
    newest = reversed(request.messages)
    texts = {"last_result": "", "input": ""}
    for message in newest:
        if message.role == "tool" and not texts["last_result"]:
            texts["last_result"] = message.content
        if message.role == "user":
            texts["input"] = message.content
            break
    return texts


def _reply(turn: Turn, request: ModelRequest) -> ModelReply:
    texts = _texts(request)
    index = turn_index(request.messages)
    content = fill("".join(turn.pieces), texts)
    calls = tuple(
        ToolCall(
            id=call.id or f"call_{index}_{position}",
            name=call.tool,
            arguments=call.args if isinstance(call.args, str) else json.dumps(fill(call.args, texts)),
        )
        for position, call in enumerate(turn.call)
    )
    return ModelReply(
        content=content,
        tool_calls=calls,
        usage=turn.usage or _usage(request, content, calls),
        finish_reason="tool_calls" if calls else "stop",
        model=request.model,
    )


def _usage(request: ModelRequest, content: str, calls: Sequence[ToolCall]) -> Usage:
    """Four characters a token: plausible and the same everywhere."""
    read = len(request.system) + sum(len(message.content) for message in request.messages)
    written = len(content) + sum(len(call.arguments) for call in calls)
    return Usage(input_tokens=-(-read // 4), output_tokens=-(-written // 4), requests=1)

"""The two OpenAI protocols as bodies and event streams: chat completions and Responses.

Source: the public API reference of OpenAI; only what an agent's turn needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

CREATED = 1_700_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of the server. Without ``status`` it is a good one: text, tool calls, or both.

    ``call``: dicts with ``tool``, ``args`` (a dict, or the text itself) and optionally ``id``. ``pieces``: the text as
    it is streamed. ``status``: an error of that HTTP status, with ``code``, ``message`` and ``retry_after`` (the
    header as it is). ``cut``: the connection breaks before the answer or in the middle of it. ``slow_s`` waits first.
    ``body``: sent as it is, whatever it is. ``reasoning``: an encrypted reasoning item (Responses only).
    """

    say: str = ""
    call: tuple[dict[str, Any], ...] = ()
    pieces: tuple[str, ...] = ()
    finish: str | None = None
    usage: tuple[int, int] = (12, 5)
    cached_tokens: int = 0
    reasoning: str = ""
    status: int = 200
    code: str = ""
    message: str = "no"
    retry_after: str = ""
    cut: Literal["", "before", "mid"] = ""
    slow_s: float = 0
    body: str | None = None
    served_model: str = field(default="fake-1")

    @property
    def text(self) -> str:
        """The whole text."""
        return self.say or "".join(self.pieces)

    @property
    def streamed(self) -> tuple[str, ...]:
        """The text in pieces."""
        return self.pieces or ((self.say,) if self.say else ())

    def calls(self, number: int) -> list[tuple[str, str, str]]:
        """Id, name and argument text of each call; ``number`` is the request's, for ids that do not repeat."""
        return [
            (
                str(call.get("id") or f"call_{number}_{index}"),
                str(call["tool"]),
                call["args"] if isinstance(call.get("args"), str) else json.dumps(call.get("args", {})),
            )
            for index, call in enumerate(self.call)
        ]


def error_body(answer: Answer) -> dict[str, Any]:
    """The body of an error."""
    kind = "server_error" if answer.status >= 500 else "invalid_request_error"
    return {"error": {"message": answer.message, "type": kind, "param": None, "code": answer.code or None}}


def malformed(protocol: str, body: dict[str, Any]) -> str:
    """What is wrong with a conversation, as the real API checks it; empty if nothing is."""
    open_calls: set[str] = set()
    for kind, ids in _events(protocol, body):
        if kind == "result":
            if not ids <= open_calls:
                return "a tool result without its call"
            open_calls -= ids
        elif kind == "calls":
            open_calls |= ids
        elif open_calls:
            return f"no tool output for {sorted(open_calls)[0]}"
    return f"no tool output for {sorted(open_calls)[0]}" if open_calls else ""


def _events(protocol: str, body: dict[str, Any]) -> Iterator[tuple[str, set[str]]]:
    if protocol == "responses":
        items = body.get("input")
        for item in items if isinstance(items, list) else []:
            if item.get("type") == "function_call":
                yield "calls", {item["call_id"]}
            elif item.get("type") == "function_call_output":
                yield "result", {item["call_id"]}
            elif item.get("role"):
                yield item["role"], set()
        return
    for message in body.get("messages", []):
        if message.get("tool_calls"):
            yield "assistant", set()
            yield "calls", {call["id"] for call in message["tool_calls"]}
        elif message["role"] == "tool":
            yield "result", {message["tool_call_id"]}
        else:
            yield message["role"], set()


# --- chat completions ------------------------------------------------------------------------------------------


def chat_body(answer: Answer, number: int) -> dict[str, Any]:
    """A whole chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None, "refusal": None}
    if answer.call:
        message["tool_calls"] = [_chat_call(*call) for call in answer.calls(number)]
    choice = {"index": 0, "message": message, "finish_reason": _finish(answer), "logprobs": None}
    return {
        **_chat_head(answer, number, "chat.completion"),
        "choices": [choice],
        "usage": _chat_usage(answer),
    }


def chat_events(answer: Answer, number: int, *, with_usage: bool) -> Iterator[str]:
    """The data lines of a streamed chat completion."""
    head = _chat_head(answer, number, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return json.dumps({**head, "choices": [choice], "usage": None})

    yield chunk({"role": "assistant", "content": ""})
    for piece in answer.streamed:
        yield chunk({"content": piece})
    for index, (call_id, name, arguments) in enumerate(answer.calls(number)):
        named = {"name": name, "arguments": ""}
        yield chunk({"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": named}]})
        for half in _halves(arguments):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": half}}]})
    yield chunk({}, _finish(answer))
    if with_usage:
        yield json.dumps({**head, "choices": [], "usage": _chat_usage(answer)})
    yield "[DONE]"


def _chat_head(answer: Answer, number: int, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": CREATED, "model": answer.served_model}


def _chat_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _chat_usage(answer: Answer) -> dict[str, Any]:
    read, written = answer.usage
    details = {"cached_tokens": answer.cached_tokens}
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": details,
    }


def _finish(answer: Answer) -> str:
    return answer.finish or ("tool_calls" if answer.call else "stop")


def _halves(text: str) -> list[str]:
    middle = len(text) // 2
    return [part for part in (text[:middle], text[middle:]) if part]


# --- Responses -------------------------------------------------------------------------------------------------


def response_body(answer: Answer, number: int, *, status: str = "", output: bool = True) -> dict[str, Any]:
    """A whole response object."""
    read, written = answer.usage
    incomplete = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(answer.finish or "")
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": CREATED,
        "model": answer.served_model,
        "status": status or ("incomplete" if incomplete else "completed"),
        "incomplete_details": {"reason": incomplete} if incomplete else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "output": output_items(answer, number) if output else [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": 1.0,
        "top_p": 1.0,
        "usage": {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        }
        if output
        else None,
    }


def output_items(answer: Answer, number: int) -> list[dict[str, Any]]:
    """Reasoning, message and calls, each an item with its own id."""
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        known = {"type": "reasoning", "id": f"rs_{number}", "summary": []}
        items.append({**known, "encrypted_content": answer.reasoning})
    if answer.text:
        content = [_output_text(answer.text)]
        items.append(
            {
                "type": "message",
                "id": f"msg_{number}",
                "role": "assistant",
                "status": "completed",
                "content": content,
            }
        )
    for index, (call_id, name, arguments) in enumerate(answer.calls(number)):
        known = {"type": "function_call", "id": f"fc_{number}_{index}", "call_id": call_id, "name": name}
        items.append({**known, "arguments": arguments, "status": "completed"})
    return items


def response_events(answer: Answer, number: int) -> Iterator[str]:
    """The data lines of a streamed response."""
    sequence = iter(range(1_000_000))

    def event(kind: str, **fields: Any) -> str:
        return json.dumps({"type": kind, "sequence_number": next(sequence), **fields})

    started = response_body(answer, number, status="in_progress", output=False)
    yield event("response.created", response=started)
    yield event("response.in_progress", response=started)
    for index, item in enumerate(output_items(answer, number)):
        where = {"output_index": index, "item_id": item["id"]}
        match item["type"]:
            case "message":
                yield event("response.output_item.added", output_index=index, item={**item, "content": []})
                yield from (event(kind, **where, **fields) for kind, fields in _text_events(answer))
            case "function_call":
                yield event("response.output_item.added", output_index=index, item={**item, "arguments": ""})
                for half in _halves(item["arguments"]):
                    yield event("response.function_call_arguments.delta", **where, delta=half)
                done = {"name": item["name"], "arguments": item["arguments"]}
                yield event("response.function_call_arguments.done", **where, **done)
            case _:
                yield event("response.output_item.added", output_index=index, item=item)
        yield event("response.output_item.done", output_index=index, item=item)
    kind = "response.incomplete" if answer.finish in ("length", "content_filter") else "response.completed"
    yield event(kind, response=response_body(answer, number))


def _text_events(answer: Answer) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "response.content_part.added", {"content_index": 0, "part": _output_text("")}
    for piece in answer.streamed:
        yield "response.output_text.delta", {"content_index": 0, "delta": piece, "logprobs": []}
    yield "response.output_text.done", {"content_index": 0, "text": answer.text, "logprobs": []}
    yield "response.content_part.done", {"content_index": 0, "part": _output_text(answer.text)}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

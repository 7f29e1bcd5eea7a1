"""``raw``: what a provider needs back word for word, in a document of our own.

::

    {"v": 1, "provider": "anthropic", "response": {...}, "parts": [
        {"kind": "thinking", "content": "…", "signature": "…", "by": "anthropic"},
        {"kind": "text", "chars": 12},
        {"kind": "call", "call": 0, "call_id": "toolu_1"}]}

Text, names and arguments are not repeated: they live in the message. A document of another provider is dropped; one
of a newer version is left to a newer worker. Source: decision S6, rulings 42, 57, 59.
"""

from __future__ import annotations

from typing import Any

from pydantic_ai import messages as theirs
from pydantic_core import PydanticSerializationError, to_jsonable_python

from cortex_workers.errors import RefusedForNow
from cortex_workers.host import clean_text
from cortex_workers.schemas.llm import Message

VERSION = 1
_RESPONSE = {
    "id": "provider_response_id",
    "by": "provider_name",
    "url": "provider_url",
    "system": "canonical_system",
}
_PART = {"id": "id", "signature": "signature", "by": "provider_name", "details": "provider_details"}


def write_raw(response: theirs.ModelResponse, provider: str) -> dict[str, Any] | None:
    """The opaque fields of a response, or None where there are none."""
    parts: list[dict[str, Any]] = []
    calls = 0
    for part in response.parts:
        match part:
            case theirs.TextPart():
                parts.append({"kind": "text", "chars": len(part.content), **_opaque(part, _PART)})
            case theirs.ToolCallPart():
                known = {"kind": "call", "call": calls, "call_id": part.tool_call_id}
                parts.append({**known, **_opaque(part, _PART)})
                calls += 1
            case theirs.ThinkingPart():
                parts.append({"kind": "thinking", "content": part.content, **_opaque(part, _PART)})
            case theirs.CompactionPart():
                parts.append({"kind": "compaction", "content": part.content, **_opaque(part, _PART)})
            case _:
                continue  # files, speech and provider-side tools are never asked for
    about = _opaque(response, _RESPONSE)
    if "id" not in about and _says_nothing(parts):
        return None
    document: dict[str, Any] = _clean({"v": VERSION, "provider": provider, "response": about, "parts": parts})
    return document


def _says_nothing(parts: list[dict[str, Any]]) -> bool:
    """Tell whether the message alone gives the same parts in the same order: one text, then the calls."""
    kinds = [part["kind"] for part in parts]
    texts = kinds.count("text")
    plain = all(part.keys() <= {"kind", "chars", "call", "call_id"} for part in parts)
    return plain and texts <= 1 and kinds == ["text"] * texts + ["call"] * (len(kinds) - texts)


def restore_parts(message: Message, provider: str) -> theirs.ModelResponse | None:
    """The response as the provider gave it; None if there is no document, it is another's, or it does not fit."""
    raw = _own(message, provider)
    if raw is None:
        return None
    parts: list[theirs.ModelResponsePart] = []
    read = 0
    for part in raw["parts"]:
        opaque = {name: part[key] for key, name in _PART.items() if part.get(key) is not None}
        match part["kind"]:
            case "text":
                text = message.content[read : read + part["chars"]]
                read += part["chars"]
                opaque.pop("signature", None)
                parts.append(theirs.TextPart(text, **opaque))
            case "call":
                call = message.tool_calls[part["call"]]
                opaque.pop("signature", None)
                parts.append(theirs.ToolCallPart(call.name, call.arguments, part["call_id"], **opaque))
            case "thinking":
                parts.append(theirs.ThinkingPart(part["content"], **opaque))
            case "compaction":
                opaque.pop("signature", None)
                parts.append(theirs.CompactionPart(part["content"], **opaque))
            case _:
                continue
    about = {name: raw["response"].get(key) for key, name in _RESPONSE.items()}
    return theirs.ModelResponse(parts=parts, **about)


def restored_call_ids(message: Message, provider: str) -> dict[str, str]:
    """Our call ids of a message and what the provider calls them; empty where it is told ours."""
    raw = _own(message, provider)
    if raw is None:
        return {}
    return {
        message.tool_calls[part["call"]].id: part["call_id"]
        for part in raw["parts"]
        if part["kind"] == "call"
    }


def _own(message: Message, provider: str) -> dict[str, Any] | None:
    """The document, if this provider wrote it and it still fits its message.

    Raises: RefusedForNow for a newer version: a newer worker can send it.
    """
    raw = message.raw
    if raw is None or raw.get("provider") != provider:
        return None
    if raw.get("v") != VERSION:
        raise RefusedForNow("a message was written by a newer worker", reason="reader", retry_in_s=60.0)
    chars = sum(part["chars"] for part in raw["parts"] if part["kind"] == "text")
    calls = [part["call"] for part in raw["parts"] if part["kind"] == "call"]
    fits = chars == len(message.content) and calls == list(range(len(message.tool_calls)))
    return raw if fits else None


def _opaque(source: Any, names: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, name in names.items():
        value = getattr(source, name, None)
        if value is None:
            continue
        try:
            found[key] = to_jsonable_python(value)
        except PydanticSerializationError:
            continue  # what is no JSON cannot be sent back either
    return found


def _clean(value: Any) -> Any:
    """Make every text storable."""
    if isinstance(value, str):
        return clean_text(value)[0]
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {clean_text(key)[0]: _clean(item) for key, item in value.items()}
    return value

"""What a tool returned, as the text that the model reads and the row keeps.

Text stays text. Everything else becomes JSON that says the same as the value, or is refused: a result that
would only look right (a set in any order, a dict whose keys changed their type, the ``repr`` of an object) is
worse than an error. Source: decisions R16, R17; bug case C37.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import math
import re
import uuid
from collections.abc import Mapping
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any, ClassVar

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

MAX_DEPTH = 100
REPLACEMENT = "\ufffd"
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_HINTS: dict[type, str] = {
    set: "return a sorted list",
    frozenset: "return a sorted list",
    bytes: "decode it, or encode it as base64 text",
    bytearray: "decode it, or encode it as base64 text",
}


class ResultNotEncodable(ValueError):
    """The tool ran, but what it returned cannot be stored as text or JSON without changing it."""

    code: ClassVar[str] = "result_not_encodable"


def encode_result(value: Any) -> str:
    """Encode what a tool returned: text as it is, everything else as JSON.

    JSON keeps: None, bool, finite numbers, text, lists, tuples (as lists), dicts with text keys; dataclasses,
    named tuples and pydantic models (as objects); dates and times (ISO 8601), Decimal, UUID, paths (as text),
    enums (their value).
    Raises: ResultNotEncodable for anything else, naming the place.
    """
    try:
        if isinstance(value, str) and not isinstance(value, Enum):
            return str(value)
        plain = _plain(value, "$", 0)
        return json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ResultNotEncodable:
        raise
    except (TypeError, ValueError) as error:
        raise ResultNotEncodable(f"the tool ran, but its result is no JSON: {error}") from error
    except Exception as error:  # foreign code: fields, serializers and __str__ of what a tool returned
        raise ResultNotEncodable(
            f"the tool ran, but its result cannot be read: it raised {type(error).__name__}"
        ) from error


def clean_text(text: str) -> tuple[str, bool]:
    """Replace what Postgres cannot store (NUL, lone surrogates) by U+FFFD; the flag says whether it did."""
    cleaned, count = _UNSTORABLE.subn(REPLACEMENT, text)
    return (cleaned, True) if count else (text, False)


def cut_result(text: str, limit_bytes: int) -> str:
    """Shorten a result to at most ``limit_bytes`` of UTF-8, on a character boundary, with a notice in it."""
    if len(text) * 4 <= limit_bytes:
        return text
    data = text.encode("utf-8", "replace")
    if len(data) <= limit_bytes:
        return text
    notice = (
        f"\n[cut: this result has {len(data)} bytes, the limit is {limit_bytes}; ask for less of it]".encode()
    )
    kept = data[: max(0, limit_bytes - len(notice))]
    return (kept.decode("utf-8", "ignore") + notice.decode())[:limit_bytes]


def _refuse(value: Any, path: str, why: str = "") -> ResultNotEncodable:
    hint = why or _HINTS.get(
        type(value), "return text, numbers, lists, dicts, dataclasses or pydantic models"
    )
    kind = type(value).__name__
    return ResultNotEncodable(
        f"the tool ran, but its result cannot be stored: a {kind} at {path[:200]}; {hint}"
    )


def _plain(value: Any, path: str, depth: int) -> Any:
    """The value in JSON's own types."""
    if depth > MAX_DEPTH:
        raise _refuse(value, path, f"it is nested deeper than {MAX_DEPTH} levels or contains itself")
    if isinstance(value, Enum):
        return _plain(value.value, path, depth + 1)
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float | Decimal):
        if not math.isfinite(value):
            raise _refuse(value, path, "JSON has no NaN and no infinity")
        return value if isinstance(value, float) else str(value)
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, uuid.UUID | PurePath):
        return str(value)
    return _plain_container(value, path, depth)


def _plain_container(value: Any, path: str, depth: int) -> Any:
    if isinstance(value, BaseModel):
        try:
            return _plain(value.model_dump(mode="json", by_alias=True), path, depth + 1)
        except PydanticSerializationError as error:
            raise _refuse(value, path, str(error)[:200]) from error
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _plain_mapping(fields, path, depth)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain_mapping(value._asdict(), path, depth)
    if isinstance(value, Mapping):
        return _plain_mapping(value, path, depth)
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise _refuse(value, path)


def _plain_mapping(value: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise _refuse(value, path, f"its keys must be text, one is a {type(key).__name__}")
        plain[str(key)] = _plain(item, f"{path}.{key}", depth + 1)
    return plain

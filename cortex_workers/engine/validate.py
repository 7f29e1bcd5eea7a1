"""What callers send, checked before anything is written.

Source: decisions R16, R17; runs.md 2.2; ruling 35.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from cortex_workers.errors import (
    InputTooLarge,
    InvalidArgument,
    InvalidId,
    InvalidScope,
    NoScope,
    UnstorableText,
)
from cortex_workers.schemas.base import canonical_json
from cortex_workers.schemas.ids import PREFIXES, SESSION, is_id
from cortex_workers.schemas.run import LATEST_START_S, RunOverrides
from cortex_workers.schemas.scope import Scope, ScopeError

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
METADATA_BYTES = 65_536
MAX_DEPTH = 100


def checked_scope(text: str | None) -> Scope:
    """A scope, well formed.

    Raises: NoScope when there is none, InvalidScope otherwise.
    """
    if not text:
        raise NoScope()
    if not isinstance(text, str):
        raise InvalidScope(f"a scope is text like tenant=acme, not {type(text).__name__}")
    try:
        return Scope.parse(text)
    except ScopeError as error:
        raise InvalidScope(str(error)) from None


def checked_text(what: str, text: str) -> str:
    """A text that Postgres can store.

    Raises: UnstorableText for NUL or a lone surrogate, InvalidArgument for what is no text.
    """
    if not isinstance(text, str):
        raise InvalidArgument(f"{what} must be text, not {type(text).__name__}")
    if _UNSTORABLE.search(text):
        raise UnstorableText(f"{what} holds a NUL character or a lone surrogate; it cannot be stored")
    return text


def checked_input(text: str, limit_bytes: int) -> str:
    """A run's input.

    Raises: InputTooLarge above the limit (bytes of UTF-8), UnstorableText.
    """
    checked_text("the input", text)
    if len(text) > limit_bytes or len(text.encode()) > limit_bytes:
        raise InputTooLarge(f"the input has {len(text.encode())} bytes, the limit is {limit_bytes}")
    return text


def checked_metadata(metadata: dict[str, Any] | None) -> None:
    """A run's metadata: a small JSON object.

    Raises: InvalidArgument, UnstorableText, InputTooLarge.
    """
    if metadata is None:
        return
    text = checked_object("metadata", metadata)
    if len(text.encode("utf-8", "replace")) > METADATA_BYTES:
        raise InputTooLarge(f"metadata is larger than {METADATA_BYTES} bytes")


def checked_object(what: str, value: Any) -> str:
    """A JSON object that Postgres can store; returns its canonical text.

    Raises: InvalidArgument, UnstorableText.
    """
    if not isinstance(value, dict):
        raise InvalidArgument(f"{what} must be a JSON object, not {type(value).__name__}")
    checked_json(value, what)
    try:
        return canonical_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{what} must be a JSON object: {error}") from None


def checked_json(value: Any, what: str, depth: int = 0) -> None:
    """A JSON value without text that Postgres cannot store, at any depth, keys included.

    Raises: UnstorableText, InvalidArgument for a key that is no text, or a value nested too deep.
    """
    if depth > MAX_DEPTH:
        raise InvalidArgument(f"{what} is nested deeper than {MAX_DEPTH} levels, or holds itself")
    if isinstance(value, str):
        checked_text(what, value)
    elif isinstance(value, dict):
        for key, item in value.items():
            checked_text(f"a key of {what}", key)
            checked_json(item, what, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            checked_json(item, what, depth + 1)


def checked_label(what: str, text: str | None, most: int = 200) -> None:
    """A short text that is not empty, where there is one.

    Raises: InvalidArgument, UnstorableText.
    """
    if text is None:
        return
    checked_text(what, text)
    if not 1 <= len(text) <= most:
        raise InvalidArgument(f"{what} has 1 to {most} characters")


def checked_delay(what: str, value: timedelta | None) -> float | None:
    """A time from now, in seconds.

    Raises: InvalidArgument unless it is to come, and within what the database reckons with.
    """
    if value is None:
        return None
    if not isinstance(value, timedelta):
        raise InvalidArgument(f"{what} is a timedelta from now, not {type(value).__name__}")
    if not timedelta(0) < value <= timedelta(seconds=LATEST_START_S):
        raise InvalidArgument(f"{what} must be more than zero and at most {LATEST_START_S // 86_400} days")
    return value.total_seconds()


def checked_overrides(overrides: RunOverrides | None) -> None:
    """What a run changes of its agent.

    Raises: InvalidArgument, UnstorableText.
    """
    if overrides is None:
        return
    if not isinstance(overrides, RunOverrides):
        raise InvalidArgument(f"overrides are RunOverrides(…), not {type(overrides).__name__}")
    checked_json(overrides.model_dump(mode="json"), "overrides")


def checked_session(session: str | None) -> None:
    """A session argument: an id, or a caller's key of 1 to 200 characters.

    Raises: InvalidId, InvalidArgument, UnstorableText.
    """
    if session is None:
        return
    checked_label("the session", session)
    if session.startswith(f"{SESSION}_") and not is_id(SESSION, session):
        raise InvalidId(f"a session id looks like {SESSION}_01h… ({session[:60]!r} does not)")


def checked_id(prefix: str, text: str) -> str:
    """An id of one kind.

    Raises: InvalidId, naming the kind that was expected and, where it can be told, the one that was given.
    """
    if is_id(prefix, text):
        return text
    given = str(text).split("_", 1)[0]
    other = PREFIXES.get(given)
    hint = f"; this looks like a {other} id" if other and given != prefix else ""
    raise InvalidId(f"a {PREFIXES[prefix]} id looks like {prefix}_01h… ({str(text)[:60]!r} does not){hint}")

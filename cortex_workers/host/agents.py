"""Agents as a host declares them, checked field by field."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pydantic import ValidationError

from cortex_workers.errors import Misconfiguration
from cortex_workers.schemas.agent import AgentDefinition
from cortex_workers.schemas.base import canonical_json

ToolReference = str | Callable[..., Any]
MAX_NAME = 100
# A pool becomes part of queue names.
_POOL = re.compile(r"[a-zA-Z0-9_-]{1,50}")
_DURATIONS = {
    "model_timeout": False,
    "suspension_ttl": True,
    "budget": False,
    "reply_by": False,
}  # name -> may be zero


@dataclass(frozen=True, slots=True)
class AgentEntry:
    """One registered agent: its definition without tools, and what it calls its tools."""

    definition: AgentDefinition
    tools: tuple[ToolReference, ...]


def make_agent(name: str, model: str, tools: Sequence[ToolReference], options: dict[str, Any]) -> AgentEntry:
    """Check and freeze one agent; ``options`` are the other keyword arguments of ``Host.agent``.

    Raises: Misconfiguration, naming the agent and the option.
    """
    _check_name(name)
    _check_text(name, "model", model, empty=False)
    _check_text(name, "instructions", options["instructions"], empty=True)
    if isinstance(tools, str):
        raise Misconfiguration(f"agent {name!r}: tools is a list of names, not the text {tools[:80]!r}")
    if not _POOL.fullmatch(str(options["pool"])):
        raise Misconfiguration(f"agent {name!r}: pool is 1 to 50 letters, digits, '_' and '-'")
    fields = dict(options)
    for what, zero in _DURATIONS.items():
        fields[f"{what}_s"] = _seconds(name, what, fields.pop(what), zero=zero)
    fields["model_settings"] = _settings(name, fields["model_settings"])
    _check_numbers(name, fields)
    try:
        definition = AgentDefinition(name=name, model=model, **fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Misconfiguration(f"agent {name!r}: {where}: {first['msg']}") from None
    return AgentEntry(definition, tuple(tools))


def _check_name(name: Any) -> None:
    if (
        not isinstance(name, str)
        or not 1 <= len(name) <= MAX_NAME
        or not name.isprintable()
        or name != name.strip()
    ):
        raise Misconfiguration(f"an agent's name is 1 to {MAX_NAME} printable characters, not {name!r:.120}")


def _check_text(agent: str, what: str, text: Any, *, empty: bool) -> None:
    if not isinstance(text, str) or (not text.strip() and not empty):
        raise Misconfiguration(f"agent {agent!r}: {what} is a text{'' if empty else ' that is not empty'}")
    if "\x00" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise Misconfiguration(f"agent {agent!r}: {what} holds a NUL character or a lone surrogate")


def _check_numbers(agent: str, fields: dict[str, Any]) -> None:
    for what, least in (("max_steps", 1), ("max_tokens", 1), ("model_attempts", 1), ("history_window", 0)):
        value = fields[what]
        if value is None and what != "max_steps":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise Misconfiguration(
                f"agent {agent!r}: {what} is a whole number of at least {least}, not {value!r:.80}"
            )
    temperature = fields["temperature"]
    if temperature is not None and not (isinstance(temperature, int | float) and 0 <= temperature <= 10):
        raise Misconfiguration(f"agent {agent!r}: temperature is a number from 0 on, not {temperature!r:.80}")


def _seconds(agent: str, what: str, value: Any, *, zero: bool) -> float | None:
    if value is None:
        return None
    if not isinstance(value, timedelta):
        raise Misconfiguration(f"agent {agent!r}: {what} is a timedelta, not {value!r:.80}")
    seconds = value.total_seconds()
    if seconds < 0 or (seconds == 0 and not zero):
        least = "zero (no deadline) or more" if zero else "more than zero"
        raise Misconfiguration(f"agent {agent!r}: {what} must be {least}, not {value}")
    return seconds


def _settings(agent: str, given: Any) -> dict[str, Any]:
    try:
        settings = dict(given or {})
        canonical_json(settings)
    except (TypeError, ValueError, RecursionError) as error:
        raise Misconfiguration(
            f"agent {agent!r}: model_settings must be a dict of JSON values: {error}"
        ) from error
    return settings

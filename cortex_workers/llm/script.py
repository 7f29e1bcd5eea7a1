"""The script of a ScriptedModel: what it says, turn by turn, and for which input.

A file is JSON: a list of turns, or cases by input::

    {"match": [{"input_contains": "order 17", "turns": [{"call": [{"tool": "refund", "args": {"id": "17"}}]},
                                                        {"say": "Refunded: {last_result}"}]},
               {"default": true, "turns": [{"say": "You said: {input}"}]}]}
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from cortex_workers.errors import Misconfiguration
from cortex_workers.schemas.base import Model
from cortex_workers.schemas.llm import Usage

_PLACE = re.compile(r"\{(last_result|input)\}")


class ScriptedCall(Model):
    """A tool call of a turn. ``args`` given as text is sent as it is, well formed or not."""

    tool: str = Field(min_length=1)
    args: dict[str, Any] | str = Field(default_factory=dict)
    id: str | None = None


class Turn(Model):
    """One model call's answer, and what happens before it is given.

    ``say`` and ``call`` may come together. ``stream`` are the pieces of the text when it is streamed. ``stall_s``
    waits first (and can be cancelled). ``kill`` ends this process with SIGKILL; given a file name only if that
    file does not exist yet, so that the next worker goes on. ``fail`` raises; with ``times`` only for the first so
    many attempts at this turn in this process. Texts and text arguments may hold ``{input}`` and ``{last_result}``.
    """

    say: str | None = None
    call: tuple[ScriptedCall, ...] = ()
    stream: tuple[str, ...] = ()
    usage: Usage | None = None
    stall_s: float = Field(default=0, ge=0, allow_inf_nan=False)
    kill: bool | str = False
    fail: Literal["unavailable", "failed"] | None = None
    times: int | None = Field(default=None, ge=1)
    retry_after_s: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _says_something(self) -> Turn:
        speaks = self.say is not None or self.call or self.stream
        if not speaks and not self.fail and self.kill is not True:
            raise ValueError("a turn needs say, call, stream, fail or kill")
        if self.fail and self.times is not None and not speaks:
            raise ValueError("a turn that fails only some times needs say, call or stream for the time after")
        if self.times is not None and not self.fail:
            raise ValueError("times counts failures; it needs fail")
        if self.say is not None and self.stream and self.say != "".join(self.stream):
            raise ValueError("say and stream differ")
        return self

    @property
    def pieces(self) -> tuple[str, ...]:
        """The text as it is streamed."""
        return self.stream or ((self.say,) if self.say else ())


class Case(Model):
    """Turns for the inputs that contain a text, or for all that no other case takes."""

    input_contains: str | None = None
    default: bool = False
    turns: tuple[Turn, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _applies(self) -> Case:
        if (self.input_contains is None) is not self.default:
            raise ValueError("a case has either input_contains or default: true")
        return self

    def takes(self, text: str) -> bool:
        """Tell whether this case answers the input."""
        return self.input_contains is None or self.input_contains in text


class Script(Model):
    """Cases in order; the first that takes the input answers it, the default comes last."""

    match: tuple[Case, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _one_default(self) -> Script:
        if any(case.default for case in self.match[:-1]):
            raise ValueError("the default case comes last")
        return self

    def turns_for(self, text: str) -> tuple[Turn, ...]:
        """The turns for an input; none if no case takes it."""
        return next((case.turns for case in self.match if case.takes(text)), ())


_TURNS: TypeAdapter[tuple[Turn, ...]] = TypeAdapter(tuple[Turn, ...])


def read_script(data: Any, where: str = "script") -> Script:
    """Check a list of turns or a mapping with ``match``.

    Raises: Misconfiguration, naming the place in it.
    """
    try:
        if isinstance(data, dict):
            return Script.model_validate(data)
        if not isinstance(data, list | tuple):
            raise Misconfiguration(f"{where}: a script is a list of turns or an object with match")
        return Script(match=(Case(default=True, turns=_TURNS.validate_python(data)),))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the top"
        raise Misconfiguration(f"{where}: at {place}: {first['msg']}") from None


def load_script(path: Path) -> Script:
    """Read a script file.

    Raises: Misconfiguration with the position of what is wrong.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Misconfiguration(f"script {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise Misconfiguration(
            f"script {path}: line {error.lineno} column {error.colno}: {error.msg}"
        ) from error
    except ValueError as error:
        raise Misconfiguration(f"script {path}: {error}") from error
    return read_script(data, f"script {path}")


def fill(value: Any, texts: dict[str, str]) -> Any:
    """Put the texts into ``{input}`` and ``{last_result}``, in text and in lists and dicts of it."""
    if isinstance(value, str):
        return _PLACE.sub(lambda found: texts[found[1]], value) if "{" in value else value
    if isinstance(value, list):
        return [fill(item, texts) for item in value]
    if isinstance(value, dict):
        return {key: fill(item, texts) for key, item in value.items()}
    return value

"""A registered tool: its schema, its checks, its handler, and the lookup that tells if it took effect."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from cortex_workers.errors import DuplicateTool, InvalidTool
from cortex_workers.host.arguments import (
    ParsedArguments,
    Signature,
    description_of,
    is_context,
    read_signature,
)
from cortex_workers.host.context import ToolContext
from cortex_workers.schemas.agent import Effects, ToolClass, ToolSpec

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Happened:
    """A lookup's answer: the effect took place, and this is what the tool would have returned."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class DidNotHappen:
    """A lookup's answer: the effect did not take place and will not; the call may run again."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A lookup's answer: it cannot tell; a person is asked."""


LookupAnswer = Happened | DidNotHappen | Unknown


class Tool:
    """One tool of the host. ``spec`` is what agents publish; the rest is this process's own."""

    def __init__(self, function: Callable[..., Any], spec: ToolSpec, signature: Signature) -> None:
        self.function = function
        self.spec = spec
        self.is_async = is_async(function)
        self._signature = signature
        self._lookup: _Lookup | None = None

    @property
    def name(self) -> str:
        """The name the model calls it by."""
        return self.spec.name

    @property
    def lookup_is_async(self) -> bool:
        """Whether the lookup must be awaited (``lookup_call_async``)."""
        return self._lookup is not None and self._lookup.is_async

    def validate(self, arguments_json: str) -> ParsedArguments:
        """Check the model's JSON text against the signature.

        Raises: BadArguments, whose text is meant for the model.
        """
        return self._signature.parse(self.name, arguments_json)

    def canonical(self, arguments: ParsedArguments) -> dict[str, Any]:
        """The arguments that will run, in JSON's types: what the approver sees and the authorizer gets."""
        return arguments.canonical

    def call(self, arguments: ParsedArguments, ctx: ToolContext) -> Any:
        """Run a plain tool in this thread and return what it returned. Its exceptions pass through."""
        if self.is_async:
            raise TypeError(f"tool {self.name!r} is async; await call_async")
        return self.function(**self._given(arguments, ctx))

    async def call_async(self, arguments: ParsedArguments, ctx: ToolContext) -> Any:
        """Run an async tool on the caller's loop. Its exceptions pass through."""
        if not self.is_async:
            raise TypeError(f"tool {self.name!r} is not async; use call")
        return await self.function(**self._given(arguments, ctx))

    def lookup_call(self, arguments: ParsedArguments, ctx: ToolContext) -> LookupAnswer:
        """Ask a plain lookup whether the call took effect.

        Raises: TypeError for an answer that is none of the three; whatever the lookup raises.
        """
        lookup = self._known_lookup()
        if lookup.is_async:
            raise TypeError(f"the lookup of {self.name!r} is async; await lookup_call_async")
        return self._answer(lookup.function(**lookup.given(arguments, ctx)))

    async def lookup_call_async(self, arguments: ParsedArguments, ctx: ToolContext) -> LookupAnswer:
        """Ask an async lookup whether the call took effect; as ``lookup_call``."""
        lookup = self._known_lookup()
        if not lookup.is_async:
            raise TypeError(f"the lookup of {self.name!r} is not async; use lookup_call")
        return self._answer(await lookup.function(**lookup.given(arguments, ctx)))

    def set_lookup(self, function: Callable[..., Any]) -> None:
        """Register the lookup.

        Raises: DuplicateTool for a second one, InvalidTool for a parameter that the tool does not have.
        """
        if self._lookup is not None:
            raise DuplicateTool(f"tool {self.name!r} has a lookup already")
        self._lookup = _read_lookup(self.name, function, self._signature.names)
        self.spec = self.spec.model_copy(update={"has_lookup": True})

    def set_external(self, ttl: timedelta | None) -> None:
        """Say that it runs outside; a call waits so long for its result.

        Raises: InvalidTool for a negative time.
        """
        changes = {"tool_class": "external", "external_ttl_s": _seconds(self.name, "ttl", ttl, zero=True)}
        self.spec = self.spec.model_copy(update=changes)

    def set_class(self, tool_class: ToolClass, effects: Effects) -> None:
        """Say that it is one of the engine's own: it waits for another agent, or acts in one transaction."""
        self.spec = self.spec.model_copy(update={"tool_class": tool_class, "effects": effects})

    def set_retry_safe(self) -> None:
        """Say that a started call may simply run again."""
        self.spec = self.spec.model_copy(update={"tool_class": "retry_safe"})

    def _given(self, arguments: ParsedArguments, ctx: ToolContext) -> dict[str, Any]:
        return {**arguments.values, **dict.fromkeys(self._signature.context_names, ctx)}

    def _known_lookup(self) -> _Lookup:
        if self._lookup is None:
            raise TypeError(f"tool {self.name!r} has no lookup")
        return self._lookup

    def _answer(self, answer: Any) -> LookupAnswer:
        if isinstance(answer, Happened | DidNotHappen | Unknown):
            return answer
        raise TypeError(
            f"the lookup of {self.name!r} returned a {type(answer).__name__}; "
            "it returns Happened(result), DidNotHappen() or Unknown()"
        )


@dataclass(frozen=True, slots=True)
class _Lookup:
    function: Callable[..., Any]
    is_async: bool
    names: tuple[str, ...]
    context_names: tuple[str, ...]

    def given(self, arguments: ParsedArguments, ctx: ToolContext) -> dict[str, Any]:
        wanted = {name: arguments.values[name] for name in self.names}
        return {**wanted, **dict.fromkeys(self.context_names, ctx)}


class LookupHook:
    """``@refund.lookup``: hangs on a tool's function and registers a lookup with each host of the tool."""

    def __init__(self) -> None:
        self._tools: list[Tool] = []

    def add(self, tool: Tool) -> None:
        """Serve one more host's tool of the same function."""
        self._tools.append(tool)

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Register the lookup and return it unchanged."""
        for tool in self._tools:
            tool.set_lookup(function)
        return function


def make_tool(function: Callable[..., Any], name: str | None, **options: Any) -> Tool:
    """Read a function into a tool; ``options`` are the keyword arguments of ``Host.tool``.

    Raises: InvalidTool.
    """
    if inspect.isclass(function) or not callable(function):
        raise InvalidTool(f"a tool is a function, not {function!r:.80}")
    chosen = name if name is not None else getattr(function, "__name__", "")
    if not isinstance(chosen, str) or not NAME.fullmatch(chosen):
        raise InvalidTool(f"tool name {str(chosen)[:80]!r}: 1 to 64 letters, digits, '_' and '-'; pass name=")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidTool(f"tool {chosen!r} is a generator; a tool returns one result")
    signature = read_signature(chosen, function)
    spec = ToolSpec(
        name=chosen,
        description=description_of(function),
        parameters=signature.json_schema(),
        **_facts(chosen, **options),
    )
    return Tool(function, spec, signature)


def is_async(function: Callable[..., Any]) -> bool:
    """Tell whether calling it gives a coroutine (functions, partials, objects with an async ``__call__``)."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _facts(
    name: str,
    *,
    retry_safe: bool,
    effects: str,
    needs_approval: bool,
    approval_ttl: timedelta | None,
    timeout: timedelta | None,
    on_expiry: str | None,
) -> dict[str, Any]:
    if effects not in ("none", "mutating"):
        raise InvalidTool(f"tool {name!r}: effects is 'none' or 'mutating', not {effects!r}")
    if on_expiry not in (None, "fail", "return_to_model"):
        raise InvalidTool(f"tool {name!r}: on_expiry is 'fail' or 'return_to_model', not {on_expiry!r}")
    return {
        "tool_class": "retry_safe" if retry_safe else "mutating",
        "effects": effects,
        "needs_approval": bool(needs_approval),
        "approval_ttl_s": _seconds(name, "approval_ttl", approval_ttl, zero=True),
        "timeout_s": _seconds(name, "timeout", timeout, zero=False),
        "on_expiry": on_expiry,
    }


def _seconds(tool: str, what: str, value: timedelta | None, *, zero: bool) -> float | None:
    if value is None:
        return None
    if not isinstance(value, timedelta):
        raise InvalidTool(f"tool {tool!r}: {what} is a timedelta, not {value!r:.80}")
    seconds = value.total_seconds()
    if seconds < 0 or (seconds == 0 and not zero):
        raise InvalidTool(
            f"tool {tool!r}: {what} must be {'zero or more' if zero else 'more than zero'}, not {value}"
        )
    return seconds


def _read_lookup(tool: str, function: Callable[..., Any], names: tuple[str, ...]) -> _Lookup:
    """Accept a lookup that takes some of the tool's parameters by name, and the context."""
    contexts: list[str] = []
    taken: list[str] = []
    hints = inspect.get_annotations(function, eval_str=False)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise InvalidTool(f"the lookup of {tool!r}: parameter {parameter} cannot be passed by name")
        hint = hints.get(parameter.name)
        if parameter.name in names:
            taken.append(parameter.name)
        elif is_context(hint) or (isinstance(hint, str) and "ToolContext" in hint):
            contexts.append(parameter.name)
        elif parameter.default is inspect.Parameter.empty:
            raise InvalidTool(
                f"the lookup of {tool!r}: {parameter.name!r} is no parameter of the tool; "
                "a lookup takes the tool's own parameters and a ToolContext"
            )
    return _Lookup(function, is_async(function), tuple(taken), tuple(contexts))

"""Arguments of tools: the JSON schema of a signature, and the model's JSON text checked against it."""

from __future__ import annotations

import inspect
import math
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import CoreSchema, PydanticSerializationError, from_json

from cortex_workers.errors import InvalidTool
from cortex_workers.host.context import ToolContext

MAX_PROBLEMS = 5
MAX_NAME = 64
MAX_REASON = 200


class BadArguments(ValueError):
    """The arguments do not fit the tool; the text is short and meant for the model."""

    code: ClassVar[str] = "bad_arguments"


@dataclass(frozen=True, slots=True)
class ParsedArguments:
    """Arguments that passed: ``values`` as the function takes them, ``canonical`` as JSON holds them.

    ``canonical`` has every parameter, defaults too: it is what really runs, and so what an approver must see.
    """

    values: dict[str, Any]
    canonical: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Signature:
    """What a tool takes: the parameters the model fills, and the names into which the context is put."""

    model: type[BaseModel]
    names: tuple[str, ...]
    context_names: tuple[str, ...]

    def json_schema(self) -> dict[str, Any]:
        """The JSON schema of an object with the parameters, without generated titles."""
        return self.model.model_json_schema(schema_generator=_Untitled)

    def parse(self, tool: str, text: str) -> ParsedArguments:
        """Check the model's JSON text.

        An empty text counts as an empty object: some models send it for a tool without parameters.
        Raises: BadArguments.
        """
        text = text if text.strip() else "{}"
        try:
            given = from_json(text, allow_inf_nan=False)
        except ValueError as error:
            raise BadArguments(
                f"Bad arguments for {tool}: this is not valid JSON ({str(error)[:MAX_REASON]})."
            ) from None
        if not isinstance(given, dict):
            raise BadArguments(f"Bad arguments for {tool}: a JSON object is needed, not {_json_kind(given)}.")
        _refuse_endless(tool, given)
        try:
            parsed = self.model.model_validate_json(text)
            canonical = parsed.model_dump(mode="json", by_alias=True)
        except ValidationError as error:
            raise BadArguments(_problems(tool, error)) from None
        except PydanticSerializationError as error:
            raise BadArguments(f"Bad arguments for {tool}: {str(error)[:MAX_REASON]}.") from error
        _refuse_endless(tool, canonical)
        values = {
            name: getattr(parsed, field)
            for field, name in zip(self.model.model_fields, self.names, strict=True)
        }
        return ParsedArguments(values=values, canonical=canonical)


class _Untitled(GenerateJsonSchema):
    """Titles repeat names; the model pays for each of them."""

    def emit_warning(self, kind: Any, detail: str) -> None:
        """Say nothing: a default that is no JSON is refused by ``_model``."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def generate(self, schema: CoreSchema, mode: Any = "validation") -> dict[str, Any]:
        document = super().generate(schema, mode)
        for part in [document, *document.get("$defs", {}).values()]:
            part.pop("title", None)
        return document


def read_signature(tool: str, function: Callable[..., Any]) -> Signature:
    """Read the parameters of a function from its type hints and the ``Args:`` of its docstring.

    Raises: InvalidTool, naming the parameter.
    """
    hints = _hints(tool, function)
    told = argument_descriptions(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    names: list[str] = []
    contexts: list[str] = []
    for parameter in _parameters(tool, function):
        if parameter.name not in hints:
            raise InvalidTool(f"tool {tool!r}: parameter {parameter.name!r} has no type annotation")
        if is_context(hints[parameter.name]):
            contexts.append(parameter.name)
            continue
        # Own field names: a parameter may be called "json", "copy" or "_private", a field of a model may not.
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        about: dict[str, Any] = {"alias": parameter.name}
        if parameter.name in told:  # None would hide a description of the annotation's own
            about["description"] = told[parameter.name]
        field = Field(default, **about)
        fields[f"argument_{len(names)}"] = (hints[parameter.name], field)
        names.append(parameter.name)
    return Signature(_model(tool, fields), tuple(names), tuple(contexts))


def is_context(hint: Any) -> bool:
    """Tell whether a parameter of this type gets the context."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return any(is_context(part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Annotated:
        return is_context(typing.get_args(hint)[0])
    return hint is ToolContext


def description_of(function: Callable[..., Any]) -> str:
    """The first paragraph of a docstring, on one line."""
    first = (inspect.getdoc(function) or "").split("\n\n", 1)[0] if function.__doc__ else ""
    return " ".join(first.split())


def argument_descriptions(docstring: str) -> dict[str, str]:
    """The texts of a Google-style ``Args:`` section by parameter name; continued lines are joined."""
    found: dict[str, str] = {}
    name = ""
    indent = -1
    lines = iter(docstring.splitlines())
    for line in lines:
        if line.strip() in ("Args:", "Arguments:", "Parameters:"):
            break
    for line in lines:
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        if depth == 0:
            break
        indent = depth if indent < 0 else indent
        entry = re.match(r"\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)", line) if depth == indent else None
        if entry:
            name = entry[1]
            found[name] = entry[2].strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return {key: text for key, text in found.items() if text}


def _parameters(tool: str, function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise InvalidTool(f"tool {tool!r}: its signature cannot be read: {error}") from error
    for parameter in parameters:
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise InvalidTool(f"tool {tool!r}: parameter {parameter} is open-ended; name each parameter")
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise InvalidTool(
                f"tool {tool!r}: parameter {parameter.name!r} is positional-only; tools are called by name"
            )
    return parameters


def _hints(tool: str, function: Callable[..., Any]) -> dict[str, Any]:
    target = function if inspect.isroutine(function) else getattr(function, "func", type(function).__call__)
    try:
        return typing.get_type_hints(target, include_extras=True)
    except NameError as error:
        raise InvalidTool(
            f"tool {tool!r}: {error}; annotations are read at run time, so import what they name "
            "at module level and not under TYPE_CHECKING"
        ) from error
    except TypeError as error:
        raise InvalidTool(f"tool {tool!r}: its annotations cannot be read: {error}") from error


def _model(tool: str, fields: dict[str, Any]) -> type[BaseModel]:
    config = ConfigDict(extra="forbid", allow_inf_nan=False)
    for name, (_hint, field) in fields.items():
        try:
            # One at a time, so that the error can name the parameter.
            model = create_model(tool, __config__=config, **{name: fields[name]})
            model.model_json_schema(schema_generator=_Untitled)
        except (PydanticUserError, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0][:MAX_REASON]
            raise InvalidTool(f"tool {tool!r}: parameter {field.alias!r} cannot be JSON: {reason}") from error
        try:
            if not field.is_required():
                model().model_dump(mode="json", warnings="error")
        except (PydanticSerializationError, ValueError) as error:
            raise InvalidTool(
                f"tool {tool!r}: the default of parameter {field.alias!r} does not fit its type, or is no JSON"
            ) from error
    return create_model(tool, __config__=config, **fields)


def _refuse_endless(tool: str, value: Any) -> None:
    """No number of a call is infinite: ``1e999`` is read as one, and JSON, which the approver reads, has none."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, float) and not math.isfinite(item):
            raise BadArguments(f"Bad arguments for {tool}: a number is too large.")
        if isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list | tuple):
            waiting.extend(item)


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list"}
    return names.get(type(value), "something else")


def _problems(tool: str, error: ValidationError) -> str:
    """The first problems, one after the other; names and reasons only, never the values."""
    all_problems = error.errors(include_url=False, include_context=False, include_input=False)
    texts = []
    for problem in all_problems[:MAX_PROBLEMS]:
        where = ".".join(str(part)[:MAX_NAME] for part in problem["loc"][:6])
        if problem["type"] == "missing":
            texts.append(f"{where} is missing")
        elif problem["type"] == "extra_forbidden":
            texts.append(f"{where} is not a parameter")
        else:
            texts.append(f"{where}: {problem['msg'][:MAX_REASON]}")
    more = len(all_problems) - len(texts)
    ending = f"; and {more} more" if more > 0 else ""
    return f"Bad arguments for {tool}: {'; '.join(texts)}{ending}."

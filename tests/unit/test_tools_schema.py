"""What a function tells the model: names, types, descriptions; and what cannot be a tool."""

from __future__ import annotations

import datetime as dt
import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from cortex_workers.errors import DuplicateTool, InvalidTool, UnknownTool
from cortex_workers.host import Host, ToolContext
from cortex_workers.schemas.agent import ToolSpec


class Colour(enum.Enum):
    RED = "red"


class Line(BaseModel):
    title: str
    count: int = 1


class Where(TypedDict):
    city: str


@dataclass
class Point:
    x: int


def spec_of(function: Callable[..., Any], **options: Any) -> ToolSpec:
    host = Host()
    host.tool(**options)(function)
    (tool,) = host.tools.values()
    return tool.spec


def test_a_docstring_describes_the_tool_and_its_arguments() -> None:
    def find_order(order_id: str, limit: int = 10, *, ctx: ToolContext) -> dict[str, Any]:
        """Find an order
        of a customer.

        Only the newest are looked at.

        Args:
            order_id: As printed on the
                invoice: "A-17".
            limit (int): How many.
            ctx: Not for the model.

        Returns:
            limit: not this one.
        """
        return {}

    spec = spec_of(find_order)
    assert (spec.name, spec.description) == ("find_order", "Find an order of a customer.")
    assert spec.parameters == {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "order_id": {"type": "string", "description": 'As printed on the invoice: "A-17".'},
            "limit": {"type": "integer", "default": 10, "description": "How many."},
        },
        "required": ["order_id"],
    }


def test_a_tool_without_docstring_or_parameters_is_a_tool() -> None:
    def ping() -> None: ...

    spec = spec_of(ping)
    assert spec.description == ""
    assert spec.parameters == {"type": "object", "properties": {}, "additionalProperties": False}


def test_types_become_schemas_that_hold() -> None:
    def f(
        a: list[Line],
        b: Colour,
        c: Literal["x", "y"],
        d: Where,
        e: Point,
        f: dt.datetime,
        g: Annotated[int, Field(ge=0, description="own words")],
        h: float | None = None,
        i: dict[str, int] | None = None,
    ) -> None: ...

    schema = spec_of(f).parameters
    jsonschema.Draft202012Validator.check_schema(schema)
    good = {
        "a": [{"title": "t"}],
        "b": "red",
        "c": "x",
        "d": {"city": "Oslo"},
        "e": {"x": 1},
        "f": "2026-01-01T00:00:00Z",
        "g": 0,
    }
    jsonschema.validate(good, schema)
    assert schema["properties"]["g"]["description"] == "own words"
    for broken in ({**good, "b": "blue"}, {**good, "g": -1}, {**good, "extra": 1}, {**good, "a": [{}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema)


def test_parameters_may_have_names_that_models_use_themselves() -> None:
    def f(
        json: str, copy: int, model_config: bool, _hidden: str, title: str = "t", self: int = 1
    ) -> None: ...

    schema = spec_of(f).parameters
    assert list(schema["properties"]) == ["json", "copy", "model_config", "_hidden", "title", "self"]
    assert all("title" not in part for part in schema["properties"].values())


def test_the_context_is_injected_under_any_name_and_not_told() -> None:
    def f(anything: ToolContext, also: ToolContext | None = None, *, order: str) -> None: ...

    assert list(spec_of(f).parameters["properties"]) == ["order"]


def test_options_become_the_spec() -> None:
    def f() -> None: ...

    options = {
        "name": "other-name",
        "retry_safe": True,
        "effects": "none",
        "needs_approval": True,
        "approval_ttl": timedelta(hours=4),
        "timeout": timedelta(seconds=1.5),
        "on_expiry": "return_to_model",
    }
    spec = spec_of(f, **options)
    assert (spec.name, spec.tool_class, spec.retry_safe, spec.effects) == (
        "other-name",
        "retry_safe",
        True,
        "none",
    )
    assert (spec.needs_approval, spec.approval_ttl_s, spec.timeout_s) == (True, 14400, 1.5)
    assert spec.on_expiry == "return_to_model"
    plain = spec_of(f)
    assert (plain.tool_class, plain.effects, plain.timeout_s, plain.has_lookup) == (
        "mutating",
        "mutating",
        None,
        False,
    )


def test_the_function_stays_a_function() -> None:
    host = Host()

    @host.tool
    def double(n: int) -> int:
        return 2 * n

    assert double(n=2) == double(2) == 4
    assert double.__name__ == "double"  # type: ignore[attr-defined]


def test_bound_methods_partials_and_callable_objects_are_tools() -> None:
    class Shop:
        def find(self, order: str) -> str:
            """Find it."""
            return order

        async def __call__(self, order: str) -> str:
            return order

    host = Host()
    shop = Shop()
    host.tool(shop.find)
    host.tool(name="called")(shop)
    host.tool(name="part")(functools.partial(shop.find))
    assert [tool.spec.name for tool in host.tools.values()] == ["find", "called", "part"]
    assert [tool.is_async for tool in host.tools.values()] == [False, True, False]
    assert all(list(tool.spec.parameters["properties"]) == ["order"] for tool in host.tools.values())


def no_annotation(order, ctx: ToolContext) -> None: ...  # type: ignore[no-untyped-def]
def open_ended(*orders: str) -> None: ...
def open_keywords(**orders: str) -> None: ...
def positional(order: str, /) -> None: ...
def unknown_type(order: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def a_callable(order: Callable[[], None]) -> None: ...
def an_object(order: Host) -> None: ...
def bad_default(order: Any = object()) -> None: ...  # noqa: B008
def wrong_default(order: int = "x") -> None: ...  # type: ignore[assignment]
def numbers() -> Any:
    yield 1


async def letters() -> Any:
    yield "a"


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (no_annotation, "'order' has no type annotation"),
        (open_ended, r"\*orders"),
        (open_keywords, r"\*\*orders"),
        (positional, "'order' is positional-only"),
        (unknown_type, "'Missing' is not defined.*TYPE_CHECKING"),
        (a_callable, "'order' cannot be JSON"),
        (an_object, "'order' cannot be JSON"),
        (bad_default, "default of parameter 'order'"),
        (wrong_default, "default of parameter 'order'"),
        (numbers, "generator"),
        (letters, "generator"),
        (Line, "a tool is a function"),
        ("text", "a tool is a function"),
        (lambda: None, "tool name '<lambda>'"),
    ],
)
def test_what_cannot_be_a_tool_says_why(function: Any, told: str) -> None:
    with pytest.raises(InvalidTool, match=told):
        Host().tool(function)


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 65, "a.b", "a\n", 7])
def test_a_tool_s_name_is_one_that_providers_take(name: Any) -> None:
    with pytest.raises(InvalidTool, match="tool name"):
        spec_of(lambda: None, name=name)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("approval_ttl", timedelta(seconds=-1)),
        ("approval_ttl", timedelta.max),
        ("timeout", timedelta(seconds=-1)),
        ("timeout", timedelta(0)),
        ("timeout", 5),
        ("effects", "some"),
        ("on_expiry", "ask"),
    ],
)
def test_an_option_out_of_range_is_named(option: str, value: Any) -> None:
    with pytest.raises(InvalidTool, match=option):
        spec_of(lambda: None, name="t", **{option: value})


def test_an_approval_may_have_no_deadline() -> None:
    assert spec_of(lambda: None, name="t", approval_ttl=timedelta(0)).approval_ttl_s == 0


def test_a_name_is_taken_once() -> None:
    host = Host()

    @host.tool
    def find() -> None: ...

    with pytest.raises(DuplicateTool, match="'find'"):
        host.tool(find)


def test_tools_are_marked_retry_safe_by_name_in_any_order() -> None:
    host = Host()
    host.mark_retry_safe("find")

    @host.tool
    def find() -> None: ...

    host.check()
    assert host.tools["find"].spec.retry_safe
    host.mark_retry_safe("nobody")
    with pytest.raises(UnknownTool, match="'nobody'"):
        host.check()

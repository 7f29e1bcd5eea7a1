"""Calls: the model's JSON is checked, the handler is called, lookups answer."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from cortex_workers.errors import DuplicateTool, InvalidTool, RunInterrupted, UnknownTool
from cortex_workers.host import BadArguments, DidNotHappen, Happened, Host, Tool, ToolContext, Unknown

CTX = ToolContext(run_id="run_1", step=3, call_id="call_2", agent="support")


class Line(BaseModel):
    title: str
    count: int = 1


def tool_of(function: Callable[..., Any], **options: Any) -> Tool:
    host = Host()
    host.tool(**options)(function)
    (tool,) = host.tools.values()
    return tool


def refund(
    order: str, cents: int, lines: list[Line], mode: Literal["a", "b"] = "a", *, when: dt.date | None = None
) -> Any:
    return order, cents, lines, mode, when


REFUND = tool_of(refund)


def test_arguments_reach_the_handler_as_its_types() -> None:
    parsed = REFUND.validate('{"order": "17", "cents": "5", "lines": [{"title": "x"}], "when": "2026-01-02"}')
    assert REFUND.call(parsed, CTX) == ("17", 5, [Line(title="x", count=1)], "a", dt.date(2026, 1, 2))
    assert REFUND.canonical(parsed) == {
        "order": "17",
        "cents": 5,
        "lines": [{"title": "x", "count": 1}],
        "mode": "a",
        "when": "2026-01-02",
    }


def test_what_the_approver_sees_is_what_runs_again() -> None:
    """The canonical form is a fixed point: checked again, it is the same call."""
    import json

    parsed = REFUND.validate('{"order":"17","cents":5,"lines":[]}')
    again = REFUND.validate(json.dumps(REFUND.canonical(parsed)))
    assert again == parsed


@pytest.mark.parametrize("text", ["", "  ", "{}"])
def test_no_arguments_are_an_empty_object(text: str) -> None:
    assert tool_of(lambda: "ok", name="t").validate(text).canonical == {}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not valid JSON"),
        ("nonsense", "not valid JSON"),
        ('{"order": NaN}', "not valid JSON"),
        ('{"order": "\\ud800"}', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "a JSON object is needed, not a list"),
        ("null", "a JSON object is needed, not null"),
        ('"text"', "a JSON object is needed, not a text"),
        ("{}", "order is missing; cents is missing; lines is missing"),
        ('{"order":"1","cents":1,"lines":[],"colour":1}', "colour is not a parameter"),
        ('{"order":1,"cents":1,"lines":[]}', "order: Input should be a valid string"),
        ('{"order":"1","cents":1.5,"lines":[]}', "cents: Input should be a valid integer"),
        ('{"order":"1","cents":1,"lines":[{"title":"x"},{}]}', "lines.1.title is missing"),
        ('{"order":"1","cents":1,"lines":[],"mode":"c"}', "mode: Input should be 'a' or 'b'"),
    ],
)
def test_bad_arguments_are_told_to_the_model(text: str, told: str) -> None:
    with pytest.raises(BadArguments) as caught:
        REFUND.validate(text)
    assert told in str(caught.value)
    assert str(caught.value).startswith("Bad arguments for refund: ")
    assert len(str(caught.value)) < 1500


def test_a_bad_value_is_named_and_never_shown() -> None:
    secret = "s3cret" * 1000
    with pytest.raises(BadArguments) as caught:
        REFUND.validate(f'{{"order":"1","cents":"{secret}","lines":[],"mode":"{secret}","{secret}":1}}')
    assert "s3cret" * 20 not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_many_problems_are_counted() -> None:
    with pytest.raises(BadArguments, match=r"; and 15 more\.$"):
        REFUND.validate('{"order":"1","cents":1,"lines":[' + ",".join(["{}"] * 20) + "]}")


@given(st.text(max_size=200))
def test_any_text_is_arguments_or_bad_arguments(text: str) -> None:
    try:
        REFUND.validate(text)
    except BadArguments:
        return


def test_the_context_reaches_the_handler() -> None:
    def f(order: str, where: ToolContext, other: ToolContext | None = None) -> Any:
        return order, where, other

    tool = tool_of(f)
    assert tool.call(tool.validate('{"order":"1"}'), CTX) == ("1", CTX, CTX)
    with pytest.raises(BadArguments, match="where is not a parameter"):
        tool.validate('{"order":"1","where":{}}')


def test_an_async_tool_is_awaited() -> None:
    async def f(n: int) -> int:
        await asyncio.sleep(0)
        return n + 1

    tool = tool_of(f)
    parsed = tool.validate('{"n":1}')
    assert tool.is_async
    assert asyncio.run(tool.call_async(parsed, CTX)) == 2
    with pytest.raises(TypeError, match="await call_async"):
        tool.call(parsed, CTX)
    with pytest.raises(TypeError, match="use call"):
        asyncio.run(REFUND.call_async(parsed, CTX))


def test_an_exception_passes_through() -> None:
    def f() -> None:
        raise LookupError("no such order")

    with pytest.raises(LookupError, match="no such order"):
        tool_of(f, name="f").call(tool_of(f, name="f").validate(""), CTX)


def test_a_lookup_takes_what_it_needs_by_name() -> None:
    host = Host()

    @host.tool
    def refund(order: str, cents: int) -> str:
        return "done"

    assert not host.tools["refund"].spec.has_lookup

    @refund.lookup
    def found(order: str, call: ToolContext) -> Any:
        return Happened(f"{order} {call.idempotency_key}")

    tool = host.tools["refund"]
    assert tool.spec.has_lookup
    assert tool.lookup_call(tool.validate('{"order":"17","cents":5}'), CTX) == Happened("17 run_1/3/call_2")
    assert found("1", CTX) == Happened("1 run_1/3/call_2")


def test_an_async_lookup_is_awaited() -> None:
    host = Host()
    host.tool(name="t")(lambda: None)

    @host.lookup("t")
    async def found() -> Any:
        return DidNotHappen()

    tool = host.tools["t"]
    assert tool.lookup_is_async
    assert asyncio.run(tool.lookup_call_async(tool.validate(""), CTX)) == DidNotHappen()
    with pytest.raises(TypeError, match="await lookup_call_async"):
        tool.lookup_call(tool.validate(""), CTX)


@pytest.mark.parametrize("answer", [None, True, "happened", Happened])
def test_a_lookup_says_one_of_three_things(answer: Any) -> None:
    host = Host()
    host.tool(name="t")(lambda: None)
    host.lookup("t")(lambda: answer)
    with pytest.raises(TypeError, match="Happened"):
        host.tools["t"].lookup_call(host.tools["t"].validate(""), CTX)
    assert Unknown() == Unknown()


def test_a_lookup_is_checked_when_it_is_registered() -> None:
    host = Host()

    @host.tool
    def refund(order: str) -> None: ...

    def wrong(orders: str) -> None: ...
    def open_ended(**order: str) -> None: ...

    with pytest.raises(InvalidTool, match="'orders' is no parameter of the tool"):
        refund.lookup(wrong)
    with pytest.raises(InvalidTool, match=r"\*\*order"):
        refund.lookup(open_ended)
    with pytest.raises(UnknownTool, match="'nobody'"):
        host.lookup("nobody")
    refund.lookup(lambda order: Unknown())
    with pytest.raises(DuplicateTool, match="has a lookup"):
        refund.lookup(lambda order: Unknown())


def test_one_function_may_serve_two_hosts() -> None:
    one, two = Host(), Host()

    def f() -> None: ...

    one.tool(f)
    two.tool(name="g")(f)
    f.lookup(lambda: Unknown())  # type: ignore[attr-defined]
    assert one.tools["f"].spec.has_lookup
    assert two.tools["g"].spec.has_lookup


def test_the_context_knows_its_deadline_and_when_to_stop() -> None:
    assert CTX.idempotency_key == "run_1/3/call_2"
    assert CTX.seconds_left is None
    CTX.raise_if_stopping()
    late = ToolContext(run_id="r", step=0, call_id="c", agent="a", deadline=time.monotonic() - 1)
    assert late.seconds_left == 0
    soon = ToolContext(run_id="r", step=0, call_id="c", agent="a", deadline=time.monotonic() + 60)
    assert soon.seconds_left is not None
    assert 50 < soon.seconds_left <= 60
    for stopping in ({"cancelled": lambda: True}, {"draining": lambda: True}):
        with pytest.raises(RunInterrupted):
            ToolContext(run_id="r", step=0, call_id="c", agent="a", **stopping).raise_if_stopping()  # type: ignore[arg-type]

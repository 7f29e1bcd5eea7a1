"""The host: agents by name, checked when they are declared; definitions that workers publish."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from cortex_workers.errors import (
    DuplicateTool,
    InvalidArgument,
    Misconfiguration,
    PrincipalCodecRequired,
    PrincipalUndecodable,
    UnknownTool,
)
from cortex_workers.host import Host, JsonPrincipalCodec


class Authorizer:
    def visible(self, ctx: Any, tools: Any) -> Any:
        return tools

    def authorize(self, ctx: Any, tool: str, arguments: dict[str, Any], approved: bool) -> None: ...


class Person(BaseModel):
    name: str


def shop() -> Host:
    host = Host()
    host.agent("support", model="openai:gpt-5-mini", instructions="Help.", tools=["find", "refund"])

    @host.tool(retry_safe=True)
    def find(order: str) -> str:
        """Find an order."""
        return order

    @host.tool(needs_approval=True)
    def refund(order: str, cents: int) -> str:
        return "done"

    return host


def test_a_tool_that_runs_outside_is_declared_with_and_without_options() -> None:
    host = Host()

    @host.external_tool
    def scan(page: int) -> str:
        """Scan a page."""
        raise NotImplementedError  # it runs outside

    @host.external_tool()
    def call_back(phone: str) -> str:
        raise NotImplementedError  # it runs outside

    @host.external_tool(ttl=timedelta(hours=2), needs_approval=True, name="quote-it")
    def quote(item: str) -> str:
        raise NotImplementedError  # it runs outside

    def bare(item: str) -> str:
        raise NotImplementedError  # it runs outside

    assert host.external_tool(bare, ttl=timedelta(0)) is bare
    assert (scan.__name__, quote.__name__) == ("scan", "quote")
    specs = {name: tool.spec for name, tool in host.tools.items()}
    assert set(specs) == {"scan", "call_back", "quote-it", "bare"}
    assert {spec.tool_class for spec in specs.values()} == {"external"}
    assert (specs["quote-it"].needs_approval, specs["scan"].needs_approval) == (True, False)
    ttls = [specs[name].external_ttl_s for name in ("scan", "call_back", "quote-it", "bare")]
    assert ttls == [None, None, 7200.0, 0.0]
    with pytest.raises(DuplicateTool, match="quote-it"):
        host.external_tool(name="quote-it")(bare)
    host.agent("clerk", model="openai:gpt-5-mini", tools=[scan, call_back, quote, bare])
    host.check()


def test_an_agent_is_published_with_its_tools_in_any_order_of_registration() -> None:
    host = shop()
    host.check()
    definition = host.definitions()["support"]
    assert (definition.model, definition.instructions, definition.max_steps) == (
        "openai:gpt-5-mini",
        "Help.",
        25,
    )
    assert [tool.name for tool in definition.tools] == ["find", "refund"]
    assert definition.tools[0].retry_safe
    assert definition.tools[1].needs_approval
    assert (definition.turns, definition.on_expiry, definition.on_rejection) == ("serial", "fail", "fail")
    assert (definition.on_uncertain_effect, definition.suspension_ttl_s, definition.pool) == (
        "ask",
        None,
        "main",
    )


def test_the_digest_is_the_same_in_every_process_and_moves_with_what_runs() -> None:
    first, second = shop().definitions()["support"], shop().definitions()["support"]
    assert first.digest() == second.digest()
    marked = shop()
    marked.mark_retry_safe("refund")
    assert marked.definitions()["support"].digest() != first.digest()


def test_options_become_seconds() -> None:
    host = Host()
    host.agent(
        "a",
        model="scripted:x",
        model_timeout=timedelta(minutes=1),
        suspension_ttl=timedelta(0),
        budget=timedelta(hours=1),
        model_settings={"seed": 1},
        temperature=0,
        stream=True,
        turns="parallel",
        pool="gpu",
    )
    definition = host.definitions()["a"]
    assert (definition.model_timeout_s, definition.suspension_ttl_s, definition.budget_s) == (60, 0, 3600)
    assert (definition.model_settings, definition.temperature, definition.stream) == ({"seed": 1}, 0, True)
    assert (definition.turns, definition.pool) == ("parallel", "gpu")


def test_tools_may_be_given_as_functions() -> None:
    host = Host()

    @host.tool(name="other")
    def find() -> None: ...

    class Shop:
        def ship(self) -> None: ...

    host.tool(Shop.ship.__get__(Shop()))
    service = Shop()
    host.tool(name="bound")(service.ship)
    host.agent("a", model="m:x", tools=[find, service.ship])
    assert [tool.name for tool in host.definitions()["a"].tools] == ["other", "bound"]
    host.agent("b", model="m:x", tools=[print])
    with pytest.raises(UnknownTool, match="'print', which is not registered"):
        host.check()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_steps", 0),
        ("max_steps", None),
        ("max_steps", True),
        ("max_steps", "5"),
        ("max_tokens", 0),
        ("model_attempts", 0),
        ("history_window", -1),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", "warm"),
        ("model_timeout", timedelta(seconds=-1)),
        ("model_timeout", timedelta(0)),
        ("model_timeout", 5),
        ("suspension_ttl", timedelta(seconds=-1)),
        ("suspension_ttl", timedelta.max),
        ("budget", timedelta(0)),
        ("turns", "random"),
        ("on_expiry", "ask"),
        ("on_rejection", ""),
        ("on_uncertain_effect", "guess"),
        ("pool", ""),
        ("pool", "a.b"),
        ("pool", "GPU"),
        ("pool", "p" * 41),
        ("model_settings", {"a": object()}),
        ("model_settings", [1]),
        ("model", ""),
        ("model", 7),
        ("model", "a\x00b"),
        ("instructions", None),
        ("instructions", "a\x00b"),
        ("instructions", "\ud800"),
        ("tools", "find"),
        ("stream", "maybe"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(Misconfiguration, match=option) as caught:
        Host().agent("support", **{"model": "m:x", option: value})
    assert "'support'" in str(caught.value)


@pytest.mark.parametrize("name", ["", " ", "a\n", "a\x00", "x" * 101, None, 7, " padded"])
def test_an_agent_s_name_is_printable(name: Any) -> None:
    with pytest.raises(Misconfiguration, match="an agent's name"):
        Host().agent(name, model="m:x")


def test_an_agent_s_name_is_taken_once() -> None:
    host = shop()
    with pytest.raises(Misconfiguration, match="'support' is registered already"):
        host.agent("support", model="m:x")


def test_an_unknown_tool_shows_at_the_check_and_names_the_known() -> None:
    host = shop()
    host.agent("other", model="m:x", tools=["fnid"])
    with pytest.raises(UnknownTool, match=r"agent 'other' names the tool 'fnid'.*known: find, refund"):
        host.check()


def test_a_tool_is_named_once_per_agent() -> None:
    host = shop()
    host.agent("other", model="m:x", tools=["find", "find"])
    with pytest.raises(Misconfiguration, match="names the tool 'find' twice"):
        host.check()


def test_an_authorizer_needs_a_codec() -> None:
    with pytest.raises(PrincipalCodecRequired):
        Host(authorizer=Authorizer()).check()
    Host(authorizer=Authorizer(), codec=JsonPrincipalCodec()).check()


@pytest.mark.parametrize("principal", [{"user": "ä", "roles": ["a"]}, ["a", 1, None], "user-1", 7])
def test_a_json_principal_comes_back_equal(principal: Any) -> None:
    codec = JsonPrincipalCodec()
    assert codec.decode(codec.encode(principal)) == principal


@pytest.mark.parametrize("principal", [{1: "a"}, (1, 2), {"a": {1}}, float("nan"), object(), "\ud800", b"x"])
def test_a_principal_that_would_change_is_refused(principal: Any) -> None:
    with pytest.raises(InvalidArgument, match="principal"):
        JsonPrincipalCodec().encode(principal)


def test_a_principal_may_have_a_type() -> None:
    codec = JsonPrincipalCodec(Person)
    assert codec.decode(codec.encode(Person(name="Ada"))) == Person(name="Ada")
    with pytest.raises(InvalidArgument):
        codec.encode({"no": "person"})
    for data in (b'{"other": 1}', b"not json", b"\xff"):
        with pytest.raises(PrincipalUndecodable):
            codec.decode(data)
    with pytest.raises(PrincipalUndecodable):
        JsonPrincipalCodec().decode(b"not json")

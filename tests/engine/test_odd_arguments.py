"""What callers get wrong is a refusal in words, whatever they send, and writes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cortex_workers.engine import ledger
from cortex_workers.errors import InvalidArgument, InvalidDecision, WaitTimeout
from cortex_workers.schemas.admission import ToolResult
from tests.engine.outside import A, paused, result
from tests.engine.world import SCOPE, World, call, only, say, turn


@pytest.mark.parametrize("after", [None, "x", True, 1.5, -2, 2**63, 2**70], ids=repr)
def test_a_cursor_is_one_that_an_event_may_have(world: World, after: Any) -> None:
    client, _worker, run_id = paused(world)
    with pytest.raises(InvalidArgument, match="after is the cursor"):
        client.stream(run_id, after=after)
    with pytest.raises(InvalidArgument, match="after is the cursor"):
        client.astream(run_id, after=after)


def test_the_last_cursor_there_can_be_is_read_and_shows_nothing(world: World) -> None:
    client, _worker, run_id = paused(world)
    with pytest.raises(WaitTimeout):
        list(client.stream(run_id, after=2**63 - 1, timeout_s=0))


@pytest.mark.parametrize("seconds", ["x", True, float("nan"), 10**400], ids=lambda value: repr(value)[:8])
def test_a_timeout_is_a_number_of_seconds(world: World, seconds: Any) -> None:
    client, _worker, run_id = paused(world)
    with pytest.raises(InvalidArgument, match="timeout_s is a number"):
        client.stream(run_id, timeout_s=seconds)


NO_RESULT: list[Any] = [None, 5, "x", {"tool_call_id": A, "content": 1}, [ToolResult(tool_call_id=A)]]


@pytest.mark.parametrize("given", NO_RESULT, ids=lambda value: type(value).__name__)
def test_a_result_is_a_tool_result(world: World, given: Any) -> None:
    client, _worker, run_id = paused(world)
    before = world.snapshot()
    with pytest.raises(InvalidArgument, match="a result is a ToolResult"):
        client.provide_result(run_id, given)
    with pytest.raises(InvalidArgument, match="a result is a ToolResult"):
        client.provide_results(run_id, [given])
    assert world.snapshot() == before


@pytest.mark.parametrize("given", [None, 5, "x", {"a": 1}, result(A)], ids=lambda value: type(value).__name__)
def test_results_are_a_list(world: World, given: Any) -> None:
    client, _worker, run_id = paused(world)
    before = world.snapshot()
    with pytest.raises(InvalidArgument, match="results are a list of ToolResult"):
        client.provide_results(run_id, given)
    assert world.snapshot() == before


@pytest.mark.parametrize("seconds", [None, "x", float("nan"), True])
def test_patience_is_a_number_of_seconds(world: World, seconds: Any) -> None:
    client, _worker, run_id = paused(world)
    before = world.snapshot()
    with pytest.raises(InvalidArgument, match="patience_s is a number"):
        client.provide_result(run_id, result(A), patience_s=seconds)
    with pytest.raises(InvalidArgument, match="patience_s is a number"):
        client.provide_results(run_id, [result(A)], patience_s=seconds)
    assert world.snapshot() == before


@pytest.mark.parametrize("dead", [None, 5, "w-1", b"w", [5], [None], [["w-1"]], {"w-1": 1}], ids=repr)
def test_the_dead_are_a_list_of_workers(world: World, dead: Any) -> None:
    client, worker, run_id = paused(world)
    client.provide_results(run_id, [result(A)])
    worker.lose_at("model.before", run_id)
    before = world.snapshot()
    with pytest.raises(InvalidArgument, match="declared_dead is a list"):
        client.close_uncertain(run_id, dead)
    assert world.snapshot() == before


@pytest.mark.parametrize("limit", [None, 1.5, "x"])
def test_the_limit_of_a_page_is_a_whole_number(world: World, limit: Any) -> None:
    client, worker, run_id = paused(world)
    with pytest.raises(InvalidArgument, match="limit is 1 to 256"):
        client.admissions(run_id, limit=limit)
    with pytest.raises(InvalidArgument, match="limit is 1 to 256"):
        ledger.discover_replies(worker.rt, SCOPE, None, limit)


NO_DECISION: list[Any] = [
    None,
    5,
    "x",
    [],
    {},
    {"approved": "yes"},
    {"approved": True, "more": 1},
    {"approved": True, 1: 1},
]


@pytest.mark.parametrize("given", NO_DECISION, ids=repr)
def test_what_is_said_of_one_call_is_a_decision(world: World, given: Any) -> None:
    world.shop([turn(call("pay", amount=1)), say("Done.")])
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Go").id
    worker.work(run_id)
    before = world.snapshot()
    with pytest.raises(InvalidDecision, match="a call's decision has approved"):
        client.decide(only(client.checkpoints()).id, calls={A: given})
    assert world.snapshot() == before


def test_a_result_has_a_content_or_an_error(world: World) -> None:
    with pytest.raises(ValidationError, match="a content or an error, not both"):
        ToolResult(tool_call_id=A, content="12 EUR", error="late")
    client, _worker, run_id = paused(world)
    both = ToolResult.model_construct(tool_call_id=A, content="12 EUR", error="late")
    before = world.snapshot()
    with pytest.raises(InvalidArgument, match="a content or an error, not both"):
        client.provide_result(run_id, both)
    with pytest.raises(InvalidArgument, match="a content or an error, not both"):
        client.provide_results(run_id, [both])
    assert world.snapshot() == before


def test_a_tool_that_returned_nothing_has_a_result(world: World) -> None:
    client, worker, run_id = paused(world)
    assert client.provide_result(run_id, ToolResult(tool_call_id=A)) is not None
    assert worker.work(run_id)["state"] == "completed"

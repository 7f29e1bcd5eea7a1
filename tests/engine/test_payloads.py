"""What tools return and what rows hold: cut, replaced, refused, read back the same."""

from __future__ import annotations

import dataclasses
import datetime as dt
import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from cortex_workers import Client, RunOverrides
from cortex_workers.engine.continue_run import prepare
from cortex_workers.schemas.llm import ModelReply, ModelRequest, ToolCall
from cortex_workers.store import tables
from tests.engine.world import Worker, World, call, error_of, only, results, say, turn


class Plain:
    """An object of somebody's own."""


@dataclasses.dataclass
class Order:
    """What a tool may well return."""

    id: str
    lines: list[int]


def tool_of(world: World, value: Callable[[], Any], **settings: Any) -> tuple[Worker, Client, str]:
    """A run whose tool returns something."""

    @world.host.tool
    def make() -> Any:
        """Make something."""
        return value()

    world.shop([turn(call("make")), say("Done.")])
    worker, client = world.worker(**settings), world.client()
    return worker, client, client.enqueue("support", "Go").id


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "null"),
        ("text", "text"),
        ("", ""),
        (Order("17", [1, 2]), '{"id":"17","lines":[1,2]}'),
        ((1, "a", None), '[1,"a",null]'),
        (dt.datetime(2026, 1, 2, 3, tzinfo=dt.UTC), '"2026-01-02T03:00:00+00:00"'),
        (10**300, str(10**300)),
        ({"ü": "€", "emoji": "🙂"}, '{"ü":"€","emoji":"🙂"}'),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_tool_returns_is_what_the_model_reads_and_the_row_keeps(
    world: World, value: Any, told: str
) -> None:
    worker, _client, run_id = tool_of(world, lambda: value)
    assert worker.work(run_id)["state"] == "completed"
    assert results(world.model.requests[-1].messages) == [told]
    assert results(world.messages(run_id)) == [told]


@pytest.mark.parametrize(
    "value",
    [
        lambda: lambda: None,
        lambda: io.StringIO("file"),
        Plain,
        lambda: Plain(),
        lambda: {1, 2},
        lambda: b"bytes",
        lambda: float("nan"),
        lambda: {1: "a number for a key"},
        lambda: {"deep": [{"in": object()}]},
    ],
)
def test_what_would_not_come_back_equal_is_a_failure_of_that_call(
    world: World, value: Callable[[], Any]
) -> None:
    """Bug case C37."""
    worker, _client, run_id = tool_of(world, value)
    assert worker.work(run_id)["state"] == "completed"
    assert error_of(world.messages(run_id)[1]).startswith("the tool ran, but its result")
    assert world.call(run_id)["state"] == "failed"


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1, 9 << 20])
def test_a_long_result_is_cut_with_a_notice_the_model_can_read(world: World, size: int) -> None:
    """Bug case C33."""
    worker, _client, run_id = tool_of(world, lambda: "x" * size)
    assert worker.work(run_id)["state"] == "completed"
    (told,) = results(world.messages(run_id))
    assert len(told) == min(size, 1 << 20)
    assert (f"[cut: this result has {size} bytes" in told) is (size > 1 << 20)


def test_a_result_is_cut_between_characters(world: World) -> None:
    worker, _client, run_id = tool_of(world, lambda: "é" * 1000, result_bytes=256)
    worker.work(run_id)
    (told,) = results(world.messages(run_id))
    assert len(told.encode()) <= 256
    assert "\ufffd" not in told
    assert "[cut" in told


@pytest.mark.parametrize("where", ["result", "key", "error"])
def test_what_cannot_be_stored_of_a_tool_is_replaced_and_marked(world: World, where: str) -> None:
    """Bug case C30."""

    def make() -> Any:
        if where == "error":
            raise ValueError("bad \x00 \ud800 end")
        return {"a\x00b": "c"} if where == "key" else "a\x00b\ud800c"

    worker, _client, run_id = tool_of(world, make)
    assert worker.work(run_id)["state"] == "completed"
    (message,) = [item for item in world.messages(run_id) if item.role == "tool"]
    if where == "error":
        assert error_of(message) == "ValueError: bad \ufffd \ufffd end"
    elif where == "key":
        # As an escape it is no character yet, and stays what it was.
        assert json.loads(message.content) == {"a\x00b": "c"}
    else:
        assert message.content == "a\ufffdb\ufffdc"
        marked = {row["role"]: row["marked"] for row in world.rows(tables.messages)}
        assert marked["tool"] is True
    assert worker.rt.keeper.terms() == []


def test_a_rejection_whose_words_cannot_be_stored_is_refused_and_the_pause_stays(world: World) -> None:
    """Bug case C30, its client's side."""
    from cortex_workers.errors import UnstorableText

    world.shop([turn(call("pay", amount=5)), say("Done.")])
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Go").id
    worker.work(run_id)
    with pytest.raises(UnstorableText):
        client.decide(only(client.checkpoints()).id, approved=False, reason="no\x00")
    assert world.run(run_id)["state"] == "paused"


def test_everything_a_run_was_given_comes_back_as_it_was(world: World) -> None:
    world.shop([turn(call("pay", amount=5)), say("Done.")], temperature=0.7)
    worker, client = world.worker(), world.client()
    given = [
        RunOverrides(),
        RunOverrides(
            temperature=0.0, tools=("pay",), max_steps=3, max_tokens=9, instructions="", budget_s=5.5
        ),
        RunOverrides(tools=()),
    ]
    seen = []
    for overrides in given:
        claimed = worker.claim(client.enqueue("support", "Go", overrides=overrides).id)
        seen.append(prepare(worker.rt, claimed.row, claimed.held.term, claimed.held).agent)
    plain, changed, narrowed = seen
    assert (plain.temperature, len(plain.tools), plain.max_steps, plain.instructions) == (0.7, 3, 25, "Help.")
    assert (changed.temperature, [tool.name for tool in changed.tools]) == (0.0, ["pay"])
    assert (changed.max_steps, changed.max_tokens, changed.instructions, changed.budget_s) == (3, 9, "", 5.5)
    assert narrowed.tools == ()


def test_a_paused_run_comes_back_with_every_message_and_count(world: World) -> None:
    script = [turn(call("find", order="1")) | {"say": "Looking."}, turn(call("pay", amount=5)), say("Done.")]
    world.shop(script)
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Go", session="chat").id
    worker.work(run_id)
    before = world.model.requests[-1].messages
    client.decide(only(client.checkpoints()).id, approved=True)
    claimed = world.worker().claim(run_id)
    ex = prepare(worker.rt, claimed.row, claimed.held.term, claimed.held)
    assert ex.conversation()[: len(before)] == before
    run = world.run(run_id)
    assert (ex.next_step, ex.step_count, ex.usage.model_dump()) == (2, 2, run["usage"])
    assert ex.row["session_id"] == run["session_id"]


@pytest.mark.parametrize("broken", ["tool_calls = '[{'", "tool_calls = '[{\"id\": 5}]'", "raw = '{'"])
def test_what_is_stored_and_cannot_be_read_fails_the_run_at_once(world: World, broken: str) -> None:
    world.shop([turn(call("pay", amount=5)), say("Done.")])
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Go").id
    worker.work(run_id)
    client.decide(only(client.checkpoints()).id, approved=True)
    claimed = worker.claim(run_id)
    world.sql(f"update messages set {broken.replace(':', chr(92) + ':')}")
    run = worker.go_on(claimed)
    assert (run["state"], run["error_code"]) == ("failed", "invalid_continuation")
    assert world.effects == []


def test_a_stored_answer_that_does_not_fit_is_not_left_waiting(world: World) -> None:
    world.shop([turn(call("pay", amount=5)), say("I see.")])
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Go").id
    worker.work(run_id)
    client.decide(only(client.checkpoints()).id, approved=True, amended_arguments={"amount": 3})
    world.sql("update checkpoints set decision = jsonb_set(decision, '{amended_arguments}', '[1]')")
    assert worker.work(run_id)["state"] == "completed"
    assert "a JSON object is needed" in error_of(world.messages(run_id)[1])
    assert world.effects == []


def test_a_step_costs_the_same_bytes_however_long_the_run(world: World) -> None:
    """Decision C3: progress costs what is new. The exact count is the contract floor's."""

    def script(request: ModelRequest) -> Any:
        return say("Done.") if request.step == 30 else turn(call("find", order=f"{request.step:03}"))

    world.shop(script, max_steps=40)
    worker = world.worker(slice_steps=100)
    run_id = world.client().enqueue("support", "Go").id
    worker.work(run_id)
    rows = world.rows(tables.messages, tables.messages.c.run_id == run_id, order=tables.messages.c.seq)
    sizes = [len(row["content"]) + len(row["tool_calls"] or "") for row in rows]
    assert max(sizes[2:-1:2]) - min(sizes[2:-1:2]) <= 2
    assert len(rows) == 61


def test_ordinals_of_a_run_are_given_once_and_go_up(world: World) -> None:
    """Ruling 58: messages, steps, calls and events share one line of ordinals."""
    world.shop([turn(call("find", order="1"), call("ship", order="2"), call("pay", amount=5)), say("Done.")])
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Go").id
    worker.work(run_id)
    client.decide(only(client.checkpoints()).id, approved=True)
    worker.lose_at("tool.after_handler", run_id)
    worker.work(run_id)
    client.settle(only(client.checkpoints()).id, "happened", result="paid")
    worker.work(run_id)
    taken = [
        *(row["seq"] for row in world.rows(tables.messages)),
        *(row["seq"] for row in world.steps(run_id)),
        *(row["seq"] for row in world.calls(run_id)),
        *(row["run_seq"] for row in world.events(run_id)),
    ]
    assert len(taken) == len(set(taken))
    assert max(taken) < world.run(run_id)["next_seq"]
    assert sorted(taken) == list(range(min(taken), max(taken) + 1))


def test_a_model_that_asks_for_very_much_at_once_is_served(world: World) -> None:
    calls = tuple(
        ToolCall(id=f"c{n}", name="find", arguments=json.dumps({"order": str(n)})) for n in range(100)
    )

    class Model:
        def complete(self, request: ModelRequest) -> ModelReply:
            return ModelReply(content="Done.") if request.step else ModelReply(tool_calls=calls)

        def stream(self, request: ModelRequest) -> Any:
            raise NotImplementedError  # nobody streams here

    world._tools(world.host)
    world.host.agent("support", model=Model(), tools=["find"])
    worker = world.worker()
    run = worker.work(world.client().enqueue("support", "Go").id)
    assert run["state"] == "completed"
    assert [json.loads(text)["order"] for text in results(world.messages(run["id"]))] == [
        str(n) for n in range(100)
    ]

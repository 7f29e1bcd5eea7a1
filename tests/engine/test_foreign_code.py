"""What code that is not ours may do: raise anything, return anything; the run goes on or ends with a reason."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel, field_serializer
from sqlalchemy import event

from cortex_workers import Host, RequiresApproval, ToolContext
from cortex_workers.engine import slot
from cortex_workers.errors import DeferredModelCall, EffectUncertain, InputTooLarge, InvalidArgument
from cortex_workers.host import Happened, JsonPrincipalCodec
from cortex_workers.llm.scripted import ScriptedModel
from cortex_workers.schemas.llm import ModelRequest
from tests.engine.world import Worker, World, call, error_of, results, say, turn


class Odd(BaseException):
    """No Exception, and nobody's business but its own."""


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyError("no words")


class Mumbling(str):
    def __str__(self) -> str:
        raise KeyError("no words")


@dataclass
class Bomb:
    """Its field is gone when it is read."""

    part: str = "x"

    def __getattribute__(self, name: str) -> Any:
        if name == "part":
            raise AttributeError(name)
        return super().__getattribute__(name)


class Refusing(BaseModel):
    part: int = 1

    @field_serializer("part")
    def refuse(self, _part: int) -> int:
        raise LookupError("not today")


ODD = [Odd("bad"), asyncio.CancelledError(), GeneratorExit(), SystemExit(3), Mute()]
UNREADABLE = [Bomb(), Refusing(), Mumbling("x"), float("nan")]


def names(value: Any) -> str:
    return type(value).__name__


def raising(error: BaseException) -> Callable[..., Any]:
    def act(order: str) -> str:
        """Do something."""
        raise error

    return act


def shop_with(world: World, function: Callable[..., Any], **options: Any) -> tuple[Worker, str]:
    """An agent that calls one tool of its own and then answers."""
    host = Host()
    host.tool(**options)(function)
    world.shop([turn(call(function.__name__, order="7")), say()], host=host)
    worker = world.worker(host)
    return worker, world.client().enqueue("support", "Go").id


def in_a_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("safe", [True, False], ids=["safe", "unsafe"])
@pytest.mark.parametrize("error", ODD, ids=names)
def test_whatever_a_plain_tool_raises_is_something_the_model_reads(
    world: World, error: BaseException, safe: bool
) -> None:
    worker, run_id = shop_with(world, raising(error), retry_safe=safe)
    assert worker.work(run_id)["state"] == "completed"
    assert error_of(world.messages(run_id)[1]).startswith(type(error).__name__)


def test_an_interrupt_that_a_tool_raises_in_a_slot_is_its_own(world: World) -> None:
    worker, run_id = shop_with(world, raising(KeyboardInterrupt()))
    in_a_thread(lambda: worker.work(run_id))
    assert world.run(run_id)["state"] == "completed"
    assert error_of(world.messages(run_id)[1]) == "KeyboardInterrupt"


@pytest.mark.parametrize("value", UNREADABLE, ids=names)
def test_a_result_that_cannot_be_read_is_an_error_for_the_model_and_the_run_goes_on(
    world: World, value: Any
) -> None:
    def act(order: str) -> Any:
        """Do something."""
        return value

    worker, run_id = shop_with(world, act)
    assert worker.work(run_id)["state"] == "completed"
    assert error_of(world.messages(run_id)[1]).startswith("the tool ran, but its result cannot be")
    assert world.call(run_id)["state"] == "failed"


@pytest.mark.parametrize("answer", [*ODD, Happened(float("nan")), Happened(Bomb())], ids=names)
def test_a_lookup_that_fails_or_tells_the_untellable_asks_a_person(world: World, answer: Any) -> None:
    host = Host()

    @host.tool
    def act(order: str) -> str:
        """Do something."""
        raise EffectUncertain("who knows")

    @act.lookup
    def find(order: str) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    world.shop([turn(call("act", order="7")), say()], host=host)
    worker, client = world.worker(host), world.client()
    run_id = client.enqueue("support", "Go").id
    assert worker.work(run_id)["state"] == "paused"
    (asked,) = client.checkpoints(run_id=run_id)
    assert asked.kind == "uncertain_effect"


@pytest.mark.parametrize("answer", [*ODD, None, {"content": "hi"}], ids=names)
def test_whatever_a_model_client_does_ends_in_the_row_with_a_reason(world: World, answer: Any) -> None:
    class Client:
        def complete(self, request: ModelRequest) -> Any:
            if isinstance(answer, BaseException):
                raise answer
            return answer

        def stream(self, request: ModelRequest) -> Any:
            return self.complete(request)

    host = Host()
    host.agent("support", model=Client())
    worker = world.worker(host)
    run_id = world.client().enqueue("support", "Go").id
    row = worker.work(run_id)
    assert (row["state"], row["error_code"], row["reclaim_total"]) == ("failed", "model_failed", 0)
    assert type(answer).__name__ in row["error_text"]


@pytest.mark.parametrize(
    "fields",
    [
        {"ttl": 5},
        {"ttl": timedelta(seconds=-1)},
        {"poll_after": "soon"},
        {"kind": 7},
        {"reason": b"because"},
        {"ref": {"batch": 1}},
    ],
    ids=str,
)
def test_a_malformed_deferral_fails_the_run_with_a_reason(world: World, fields: dict[str, Any]) -> None:
    worker, run_id = deferring(world, **fields)
    row = worker.work(run_id)
    assert (row["state"], row["error_code"]) == ("failed", "model_failed")
    assert f"with a {next(iter(fields))} that is no" in row["error_text"]


@pytest.mark.parametrize(
    "fields", [{"ttl": timedelta.max}, {"kind": "a\0b", "reason": "\0" * 2000}, {"kind": ""}], ids=str
)
def test_an_odd_deferral_is_kept_as_well_as_it_can_be(world: World, fields: dict[str, Any]) -> None:
    worker, run_id = deferring(world, **fields)
    assert worker.work(run_id)["state"] == "paused"


def deferring(world: World, **fields: Any) -> tuple[Worker, str]:
    class Client:
        def complete(self, request: ModelRequest) -> Any:
            raise DeferredModelCall("later", **fields)

        def stream(self, request: ModelRequest) -> Any:
            return self.complete(request)

    host = Host()
    host.agent("support", model=Client())
    worker = world.worker(host)
    return worker, world.client().enqueue("support", "Go").id


class Authorizer:
    """Shows and allows what the test says."""

    def __init__(
        self,
        visible: Callable[[Sequence[str]], Any] = lambda tools: tools,
        authorize: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self._visible, self._authorize = visible, authorize

    def visible(self, ctx: ToolContext, tools: Sequence[str]) -> Any:
        return self._visible(tools)

    def authorize(self, ctx: ToolContext, tool: str, arguments: dict[str, Any], approved: bool) -> None:
        self._authorize(arguments)


def guarded(world: World, authorizer: Authorizer) -> tuple[Worker, str]:
    world.host = Host(authorizer=authorizer, codec=JsonPrincipalCodec())
    world.shop([turn(call("ship", order="7")), say()])
    return world.worker(), world.client().enqueue("support", "Go").id


@pytest.mark.parametrize("error", ODD, ids=names)
def test_whatever_an_authorizer_raises_denies_the_call(world: World, error: BaseException) -> None:
    def refuse(_arguments: dict[str, Any]) -> None:
        raise error

    worker, run_id = guarded(world, Authorizer(authorize=refuse))
    assert worker.work(run_id)["state"] == "completed"
    assert world.call(run_id)["state"] == "denied"
    assert world.effects == []


@pytest.mark.parametrize("error", [*ODD, None], ids=names)
def test_an_authorizer_that_cannot_tell_what_is_visible_is_asked_again_later(
    world: World, error: BaseException | None
) -> None:
    answers: list[Any] = [error, ("ship",), ("ship",)]

    def visible(_tools: Sequence[str]) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    worker, run_id = guarded(world, Authorizer(visible=visible))
    row = worker.work(run_id)
    assert (row["state"], row["reclaim_total"]) == ("ready", 0)
    assert world.events(run_id)[-1]["data"]["reason"].startswith("authorizer: ")
    world.later(400)
    world.wake()
    assert worker.work(run_id)["state"] == "completed"
    assert [effect.tool for effect in world.effects] == ["ship"]


def test_an_approver_sees_the_arguments_as_they_are_whatever_the_authorizer_did_to_them(world: World) -> None:
    def meddle(arguments: dict[str, Any]) -> None:
        arguments["to"].append("everybody")

    world.host = Host(authorizer=Authorizer(authorize=meddle), codec=JsonPrincipalCodec())

    @world.host.tool(needs_approval=True)
    def send(to: list[str]) -> str:
        """Send it."""
        return "sent"

    world.shop([turn(call("send", to=["ann"])), say()])
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Go").id
    worker.work(run_id)
    (asked,) = world.pending(world.run(run_id)["suspension_id"])
    assert asked["payload"] == {"to": ["ann"]}


@pytest.mark.parametrize("ttl", [5, "soon", timedelta(0), timedelta(seconds=-1)], ids=str)
def test_a_ttl_that_is_no_time_to_come_denies(world: World, ttl: Any) -> None:
    def escalate(_arguments: dict[str, Any]) -> None:
        raise RequiresApproval(ttl=ttl)

    worker, run_id = guarded(world, Authorizer(authorize=escalate))
    assert worker.work(run_id)["state"] == "completed"
    assert (world.call(run_id)["state"], world.effects) == ("denied", [])


def test_the_longest_ttl_there_is_waits_a_century(world: World) -> None:
    def escalate(_arguments: dict[str, Any]) -> None:
        raise RequiresApproval(ttl=timedelta.max)

    worker, run_id = guarded(world, Authorizer(authorize=escalate))
    row = worker.work(run_id)
    assert row["state"] == "paused"
    assert row["suspension_id"] is not None


def test_a_number_beyond_all_numbers_is_a_bad_argument(world: World) -> None:
    host = Host()
    ran: list[Any] = []

    @host.tool(needs_approval=True)
    def transfer(what: dict[str, Any]) -> str:
        """Pay."""
        ran.append(what)
        return "paid"

    world.shop([turn({"tool": "transfer", "args": '{"what": {"amount": [1e999]}}'}), say()], host=host)
    worker = world.worker(host)
    run_id = world.client().enqueue("support", "Go").id
    assert worker.work(run_id)["state"] == "completed"
    assert error_of(world.messages(run_id)[1]) == "Bad arguments for transfer: a number is too large."
    assert ran == []


def test_amended_arguments_have_a_limit(world: World) -> None:
    world.shop([turn(call("pay", amount=5)), say()])
    worker, client = world.worker(), world.client(settings={"input_bytes": 1024})
    run_id = client.enqueue("support", "Go").id
    worker.work(run_id)
    (asked,) = client.checkpoints(run_id=run_id)
    before = world.snapshot()
    with pytest.raises(InputTooLarge, match="amended arguments have"):
        client.decide(asked.id, approved=True, amended_arguments={"amount": 5, "currency": "E" * 2000})
    assert world.snapshot() == before


def test_the_model_is_shown_a_part_of_very_long_amended_arguments(world: World) -> None:
    world.shop([turn(call("pay", amount=5)), say("ok")])
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Go").id
    worker.work(run_id)
    (asked,) = client.checkpoints(run_id=run_id)
    client.decide(asked.id, approved=True, amended_arguments={"amount": 5, "currency": "E" * 200_000})
    assert worker.work(run_id)["state"] == "completed"
    (told,) = results(world.messages(run_id))
    assert told.endswith("pay done")
    assert len(told) < 20_000
    assert world.effects[0].arguments["currency"] == "E" * 200_000


@pytest.mark.parametrize("encoded", [None, "text", *ODD], ids=names)
def test_a_codec_that_cannot_encode_refuses_the_run(world: World, encoded: Any) -> None:
    class Codec:
        def encode(self, principal: Any) -> Any:
            if isinstance(encoded, BaseException):
                raise encoded
            return encoded

        def decode(self, data: bytes) -> Any:
            return data

    world.shop([say()])
    world.worker()
    client = world.client(codec=Codec())
    before = world.snapshot()
    with pytest.raises(InvalidArgument, match="codec"):
        client.enqueue("support", "Go", principal={"user": "ann"})
    assert world.snapshot() == before


def test_a_run_that_nobody_began_in_time_is_begun_by_nobody(world: World) -> None:
    world.shop([say()])
    worker = world.worker()
    run_id = world.client().enqueue("support", "Go", start_by=timedelta(seconds=60)).id
    world.later(61)
    assert slot.claim_named(worker.rt, run_id) is None
    assert world.run(run_id)["state"] == "ready"


def test_a_begun_run_outlives_its_start_by(world: World) -> None:
    world.shop([turn(call("pay", amount=5)), say()])
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Go", start_by=timedelta(seconds=60)).id
    worker.work(run_id)
    (asked,) = client.checkpoints(run_id=run_id)
    world.later(61)
    client.decide(asked.id, approved=True)
    assert worker.work(run_id)["state"] == "completed"


def test_an_async_tool_whose_loop_is_blocked_is_known_not_to_have_run(world: World) -> None:
    host = Host()
    entered, over = threading.Event(), threading.Event()

    @host.tool(retry_safe=True, timeout=timedelta(seconds=60))
    async def block(order: str) -> str:
        """Block the loop."""
        entered.set()
        over.wait(30)
        return "blocked"

    @host.tool(timeout=timedelta(seconds=0.2))
    async def transfer(order: str) -> str:
        """Pay."""
        return "paid"

    world.shop([turn(call("block", order="1")), say()], host=host, tools=["block"])
    host.agent("payer", model=ScriptedModel([turn(call("transfer", order="1")), say()]), tools=["transfer"])
    worker, client = world.worker(host), world.client()
    first, second = client.enqueue("support", "block").id, client.enqueue("payer", "Go").id
    blocked = threading.Thread(target=lambda: worker.work(first))
    blocked.start()
    try:
        assert entered.wait(30)
        assert worker.work(second)["state"] == "completed"
        assert "was not begun within 0.2 s" in error_of(world.messages(second)[1])
    finally:
        over.set()
        blocked.join()
    assert world.run(first)["state"] == "completed"


def test_reads_of_a_held_run_wait_for_postgres(world: World) -> None:
    world.shop([turn(call("pay", amount=5)), say()])
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Go").id
    worker.work(run_id)
    (asked,) = client.checkpoints(run_id=run_id)
    client.decide(asked.id, approved=True)
    left = itertools.count()

    def cut(connection: Any, _cursor: Any, sql: str, *_rest: Any) -> None:
        # The reads of what was decided and of what is stored, three times each at most.
        if sql.startswith("SELECT") and "FOR NO KEY" not in sql and next(left) in (0, 2, 3):
            pid = connection.connection.driver_connection.info.backend_pid
            world.sql("select pg_terminate_backend(:pid, 5000)", pid=pid)

    claimed = worker.claim(run_id)
    event.listen(worker.rt.database.engine, "before_cursor_execute", cut)
    row = worker.go_on(claimed)
    assert next(left) > 4, "there were no such reads"
    assert (row["state"], row["reclaim_total"], len(world.effects)) == ("completed", 0, 1)

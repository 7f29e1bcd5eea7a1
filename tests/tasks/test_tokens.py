"""Tokens through a real Valkey: sent in the background, capped, and never in anybody's way."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from cortex_workers import Client
from cortex_workers.embedded import ValkeyNode
from cortex_workers.engine import streaming
from cortex_workers.ports import Token
from cortex_workers.schemas.ids import RUN, new_id
from cortex_workers.schemas.stream import StreamKind
from cortex_workers.settings import Settings
from cortex_workers.tasks import tokens as room
from cortex_workers.tasks.tokens import CAP, KEEP_S, MOST_CHARS, QUEUE, TokenPusher, TokenReader, key_of
from tests.engine.world import SCOPE, World, call, looking_at, say
from tests.waiting import wait_until

# Remembering takes microseconds; a word of a frozen broker takes a second.
AT_ONCE_S = 0.2
Pushers = Callable[[Settings], TokenPusher]


@pytest.fixture
def pusher() -> Iterator[Pushers]:
    """Pushers that are closed afterwards."""
    made: list[TokenPusher] = []

    def make(settings: Settings) -> TokenPusher:
        made.append(TokenPusher(settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def readers() -> Iterator[Callable[[Settings], TokenReader]]:
    made: list[TokenReader] = []

    def make(settings: Settings) -> TokenReader:
        made.append(TokenReader(settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def token(run_id: str, index: int, text: str = "word ", step: int = 0) -> Token:
    return Token(run_id, step, index, text)


def read_all(reader: TokenReader, run_id: str) -> list[Token]:
    """Everything that is kept of a run, page by page."""
    found: list[Token] = []
    place: str | None = None
    while True:
        items, place = reader.read(run_id, place)
        if not items:
            return found
        found += items


def raw(url: str) -> Any:
    return redis.Redis.from_url(url, decode_responses=True)


def test_what_is_pushed_is_read_in_order_and_by_its_run(
    broker_url: str, pusher: Pushers, readers: Callable[[Settings], TokenReader]
) -> None:
    settings, (one, other) = Settings(broker_url=broker_url), (new_id(RUN), new_id(RUN))
    pushing, reading = pusher(settings), readers(settings)
    for index in range(5):
        pushing.push(token(one, index, f"{index} ünï "))
        pushing.push(token(other, index, "other", step=7))
    found = wait_until(lambda: len(items := read_all(reading, one)) == 5 and items, "five tokens")
    assert found == [token(one, index, f"{index} ünï ") for index in range(5)]
    assert [item.step for item in read_all(reading, other)] == [7] * 5


def test_a_place_is_where_reading_goes_on(
    broker_url: str, pusher: Pushers, readers: Callable[[Settings], TokenReader]
) -> None:
    settings, run_id = Settings(broker_url=broker_url), new_id(RUN)
    pushing, reading = pusher(settings), readers(settings)
    assert reading.read(run_id, None) == ([], None)
    pushing.push(token(run_id, 0))
    wait_until(lambda: reading.read(run_id, None)[0], "the first token")
    items, place = reading.read(run_id, None)
    assert reading.read(run_id, place) == ([], place)
    pushing.push(token(run_id, 1))
    after = wait_until(lambda: reading.read(run_id, place)[0], "the second token")
    assert [item.index for item in (*items, *after)] == [0, 1]


def test_a_run_keeps_its_newest_tokens_and_not_for_ever(
    broker_url: str, pusher: Pushers, readers: Callable[[Settings], TokenReader]
) -> None:
    settings, run_id = Settings(broker_url=broker_url), new_id(RUN)
    pushing, reading = pusher(settings), readers(settings)
    count = 3 * CAP
    for index in range(count):
        pushing.push(token(run_id, index))
    wait_until(lambda: read_all(reading, run_id)[-1:] == [token(run_id, count - 1)], "the last token")
    kept = read_all(reading, run_id)
    # Redis trims whole blocks of a hundred or so.
    assert CAP <= len(kept) <= CAP + 500
    assert [item.index for item in kept] == list(range(count - len(kept), count))
    with raw(broker_url) as client:
        assert 0 < client.ttl(key_of(settings, run_id)) <= KEEP_S


def test_a_piece_that_is_too_long_is_left_out_and_not_kept_in_memory(
    broker_url: str, pusher: Pushers, readers: Callable[[Settings], TokenReader]
) -> None:
    settings, run_id = Settings(broker_url=broker_url), new_id(RUN)
    pushing, reading = pusher(settings), readers(settings)
    pushing.push(token(run_id, 0, "x" * MOST_CHARS))
    pushing.push(token(run_id, 1, "x" * (MOST_CHARS + 1)))
    pushing.push(token(run_id, 2))
    wait_until(lambda: len(read_all(reading, run_id)) == 2, "two tokens")
    assert [item.index for item in read_all(reading, run_id)] == [0, 2]


def test_pushing_to_a_frozen_broker_holds_nobody_up_and_fills_no_memory(
    own_broker: ValkeyNode, pusher: Pushers
) -> None:
    settings, run_id = Settings(broker_url=own_broker.url), new_id(RUN)
    pushing = pusher(settings)
    own_broker.freeze()
    try:
        slowest = 0.0
        for index in range(QUEUE + 5000):
            began = time.monotonic()
            pushing.push(token(run_id, index))
            slowest = max(slowest, time.monotonic() - began)
        assert slowest < AT_ONCE_S
        assert QUEUE - 500 <= pushing.waiting <= QUEUE
    finally:
        own_broker.thaw()


def test_after_the_broker_is_back_tokens_come_again(
    own_broker: ValkeyNode,
    pusher: Pushers,
    readers: Callable[[Settings], TokenReader],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "_REST_S", 0.1)
    settings, run_id = Settings(broker_url=own_broker.url), new_id(RUN)
    pushing, reading = pusher(settings), readers(settings)
    pushing.push(token(run_id, 0))
    wait_until(lambda: read_all(reading, run_id), "the first token")
    own_broker.restart()

    def pushed() -> bool:
        pushing.push(token(run_id, 1))
        return bool(read_all(reading, run_id))

    wait_until(pushed, "a token after the restart")


def test_reading_from_a_broker_that_is_away_gives_nothing_and_soon(
    own_broker: ValkeyNode, readers: Callable[[Settings], TokenReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_REST_S", 600.0)
    settings, run_id = Settings(broker_url=own_broker.url), new_id(RUN)
    frozen, gone = readers(settings), readers(settings)
    own_broker.freeze()
    try:
        began = time.monotonic()
        assert frozen.read(run_id, "7-1") == ([], "7-1")
        assert time.monotonic() - began < 2.5
        began = time.monotonic()
        # It is left alone for a while: rows are shown without waiting for it.
        assert all(frozen.read(run_id, None) == ([], None) for _ in range(100))
        assert time.monotonic() - began < AT_ONCE_S
    finally:
        own_broker.thaw()
    own_broker.stop()
    assert gone.read(run_id, None) == ([], None)


def test_a_broker_that_is_no_redis_has_no_tokens(
    pusher: Pushers, readers: Callable[[Settings], TokenReader]
) -> None:
    for settings in (Settings(broker_url="amqp://guest@127.0.0.1:1//"), Settings()):
        pushing, reading = pusher(settings), readers(settings)
        pushing.push(token("r", 0))
        assert pushing.waiting == 0
        assert reading.read("r", None) == ([], None)


def test_two_prefixes_share_a_broker_and_see_nothing_of_each_other(
    broker_url: str, pusher: Pushers, readers: Callable[[Settings], TokenReader]
) -> None:
    mine, yours = (Settings(broker_url=broker_url, queue_prefix=name) for name in ("mine", "yours"))
    pusher(mine).push(token("r", 0))
    wait_until(lambda: readers(mine).read("r", None)[0], "the token")
    assert readers(yours).read("r", None) == ([], None)


def test_a_closed_pusher_takes_nothing_more(broker_url: str, pusher: Pushers) -> None:
    pushing = pusher(Settings(broker_url=broker_url))
    pushing.push(token("r", 0))
    pushing.close()
    pushing.push(token("r", 1))
    assert pushing.waiting <= 1


def test_a_forked_child_pushes_by_itself(
    broker_url: str, pusher: Pushers, readers: Callable[[Settings], TokenReader]
) -> None:
    settings, run_id = Settings(broker_url=broker_url), new_id(RUN)
    pushing, reading = pusher(settings), readers(settings)
    pushing.push(token(run_id, 0))
    wait_until(lambda: read_all(reading, run_id), "the parent's token")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            pushing.push(token(run_id, 1))
            with raw(broker_url) as client:
                wait_until(lambda: client.xlen(key_of(settings, run_id)) == 2, "the child's token")
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pushing.push(token(run_id, 2))
    wait_until(lambda: len(read_all(reading, run_id)) == 3, "the parent's second token")
    assert [item.index for item in read_all(reading, run_id)] == [0, 1, 2]


# --- Through a whole run ------------------------------------------------------------------------------------------


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    with looking_at(database_url) as onlooker:
        made = World(onlooker)
        try:
            yield made
        finally:
            made.close()


WORDS = [
    {"stream": ["Let ", "me ", "see. "], "call": [call("find", order="17")]},
    {"stream": ["It ", "is ", "there."]},
]


def a_streamed_run(world: World, url: str, pusher: Pushers, script: Any = None) -> tuple[Client, str]:
    world.shop(script or WORDS, stream=True)
    worker = world.worker()
    worker.rt.tokens = pusher(Settings(broker_url=url))
    client = world.client(settings={"broker_url": url})
    run_id = client.enqueue("support", "Go").id
    worker.work(run_id)
    return client, run_id


def test_a_client_sees_the_tokens_of_a_run_in_their_places(
    world: World, broker_url: str, pusher: Pushers
) -> None:
    client, run_id = a_streamed_run(world, broker_url, pusher)
    events = list(client.stream(run_id, timeout_s=30))
    assert [str(event.kind) for event in events] == [
        "run_started",
        *["token"] * 3,
        "step",
        "tool_call",
        *["token"] * 3,
        "step",
        "done",
    ]
    assert events[-1].data["output"] == "It is there."


def test_tokens_that_the_broker_forgot_are_told_as_lost(
    world: World, broker_url: str, pusher: Pushers
) -> None:
    client, run_id = a_streamed_run(world, broker_url, pusher)
    with raw(broker_url) as broker:
        key = key_of(Settings(broker_url=broker_url), run_id)
        wait_until(lambda: broker.xlen(key) == 6, "all tokens")
        broker.xtrim(key, maxlen=1, approximate=False)
        events = list(client.stream(run_id, timeout_s=30))
        lost = [event.data for event in events if event.kind is StreamKind.LOST]
        assert lost == [{"step": 0, "from": 0, "to": None}, {"step": 1, "from": 0, "to": 1}]
        broker.flushdb()
    events = list(client.stream(run_id, timeout_s=30))
    assert [event.data["step"] for event in events if event.kind is StreamKind.LOST] == [0, 1]
    assert events[-1].kind is StreamKind.DONE


def test_a_run_and_its_stream_go_on_while_the_broker_is_frozen(
    world: World, own_broker: ValkeyNode, pusher: Pushers
) -> None:
    own_broker.freeze()
    try:
        world.shop(WORDS, stream=True)
        worker = world.worker()
        worker.rt.tokens = pusher(Settings(broker_url=own_broker.url))
        client = world.client()
        run_id = client.enqueue("support", "Go").id
        began = time.monotonic()
        assert worker.work(run_id)["state"] == "completed"
        assert time.monotonic() - began < 5
        source = TokenReader(Settings(broker_url=own_broker.url))
        events = list(streaming.follow(client.runtime, run_id, SCOPE, timeout_s=30, tokens=source))
        assert time.monotonic() - began < 10
    finally:
        own_broker.thaw()
    assert [str(event.kind) for event in events] == [
        "run_started",
        "lost",
        "step",
        "tool_call",
        "lost",
        "step",
        "done",
    ]


def test_no_argument_and_no_result_of_a_tool_goes_through_the_broker(
    world: World, broker_url: str, pusher: Pushers
) -> None:
    script = [{"stream": ["Looking. "], "call": [call("find", order="secret-17")]}, say("Found.")]
    _, run_id = a_streamed_run(world, broker_url, pusher, script)
    with raw(broker_url) as broker:
        key = key_of(Settings(broker_url=broker_url), run_id)
        wait_until(lambda: broker.xlen(key) == 2, "both tokens")
        assert "secret-17" not in str(broker.xrange(key))

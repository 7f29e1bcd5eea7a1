"""Storing runs: one id one run, all or nothing, refused before the first write."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from cortex_workers import Client, EnqueueRun, RunOverrides
from cortex_workers.errors import (
    AgentNotFound,
    CortexError,
    InputTooLarge,
    InvalidArgument,
    InvalidId,
    InvalidScope,
    NoHost,
    NoScope,
    RunIdReused,
    RunIdTaken,
    SessionNotFound,
    UnstorableText,
)
from cortex_workers.schemas.ids import CHECKPOINT, RUN, SESSION, new_id
from cortex_workers.store import tables
from tests.engine.world import SCOPE, World, say


@pytest.fixture
def client(world: World) -> Client:
    world.shop([say("Hello.")])
    world.worker()
    return world.client()


def requests(count: int, **more: Any) -> list[EnqueueRun]:
    return [EnqueueRun(agent="support", input=f"Hello {n}", scope=SCOPE, **more) for n in range(count)]


def test_a_run_is_ready_for_any_worker_and_announced_once(world: World, client: Client) -> None:
    made = client.enqueue("support", "Hello")
    run = world.run(made.id)
    assert (run["state"], run["instruction"], run["queue_class"], run["revision"]) == (
        "ready",
        "start",
        "start",
        1,
    )
    assert (made.fresh, made.revision, made.session_id) == (True, 1, run["session_id"])
    assert run["wait_reason"] is None
    assert world.notified(made.id) == ["RunReady"]
    assert [event["kind"] for event in world.events(made.id)] == ["run.enqueue"]


def test_the_same_request_under_the_same_id_returns_the_first_run(world: World, client: Client) -> None:
    first = client.enqueue("support", "Hello", run_id=new_id(RUN), metadata={"a": 1})
    before = world.snapshot()
    again = client.enqueue("support", "Hello", run_id=first.id, metadata={"a": 1})
    assert again == first.model_copy(update={"fresh": False})
    assert world.snapshot() == before


def test_the_same_request_later_returns_the_run_as_it_is_by_then(world: World, client: Client) -> None:
    run_id = new_id(RUN)
    client.enqueue("support", "Hello", run_id=run_id)
    world.worker().work(run_id)
    again = client.enqueue("support", "Hello", run_id=run_id)
    assert (again.fresh, again.state, again.revision) == (False, "completed", 3)
    assert len(world.model.requests) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"input": "Bye"},
        {"metadata": {"a": 2}},
        {"session": "s"},
        {"overrides": RunOverrides(max_steps=3)},
        {"scope": f"{SCOPE}/app=b"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_request_under_the_same_id_is_refused(
    world: World, client: Client, other: dict[str, Any]
) -> None:
    run_id = new_id(RUN)
    client.enqueue("support", "Hello", run_id=run_id)
    before = world.snapshot()
    with pytest.raises((RunIdReused, RunIdTaken)):
        client.enqueue("support", **{"input": "Hello", "run_id": run_id, **other})
    assert world.snapshot() == before


def test_who_and_when_are_not_part_of_a_request(world: World, client: Client) -> None:
    run_id = new_id(RUN)
    client.enqueue("support", "Hello", run_id=run_id, workload="a")
    other = world.client(actor="somebody else")
    again = other.enqueue("support", "Hello", run_id=run_id, workload="b", start_by=timedelta(hours=1))
    assert not again.fresh


def test_an_id_of_another_scope_is_taken_and_tells_nothing(world: World, client: Client) -> None:
    run_id = new_id(RUN)
    client.enqueue("support", "secret", run_id=run_id)
    stranger = world.client(scope="tenant=evil")
    for text in ("secret", "guess"):
        with pytest.raises(RunIdTaken) as refused:
            stranger.enqueue("support", text, run_id=run_id)
        assert "secret" not in str(refused.value)
        assert refused.value.data == {}


def test_a_key_makes_the_id(client: Client) -> None:
    first = client.enqueue("support", "Hello", key="order-17")
    assert client.enqueue("support", "Hello", key="order-17").id == first.id
    assert client.enqueue("support", "Hello", key="order-18").id != first.id
    assert client.enqueue("support", "Hello", key="order-17", scope=f"{SCOPE}/app=b").id != first.id
    with pytest.raises(RunIdReused):
        client.enqueue("support", "Bye", key="order-17")


def test_a_key_and_an_id_together_are_refused(client: Client) -> None:
    with pytest.raises(InvalidArgument):
        client.enqueue("support", "Hello", key="k", run_id=new_id(RUN))


def test_many_are_stored_in_pages_of_a_thousand(world: World, client: Client) -> None:
    database = client.runtime.database
    before = database.transactions
    made = client.enqueue_many(requests(1000))
    assert database.transactions - before == 1
    made += client.enqueue_many(requests(1001))
    assert database.transactions - before == 3
    assert len({item.id for item in made}) == 2001


def test_many_keep_the_order_of_the_request(world: World, client: Client) -> None:
    made = client.enqueue_many(requests(20))
    ranks = [world.run(item.id)["rank"] for item in made]
    assert ranks == sorted(set(ranks))
    inputs = {row["run_id"]: row["input"] for row in world.rows(tables.run_specs)}
    assert [inputs[item.id] for item in made] == [f"Hello {number}" for number in range(20)]


def test_one_outcome_for_each_of_many_known_ones_included(world: World, client: Client) -> None:
    known = client.enqueue("support", "Hello 1", key="k1")
    asked = [item.model_copy(update={"key": f"k{number}"}) for number, item in enumerate(requests(3))]
    made = client.enqueue_many([*asked, asked[0]])
    assert [item.fresh for item in made] == [True, False, True, True]
    assert made[1].id == known.id
    assert made[3].id == made[0].id
    assert len(world.rows(tables.runs)) == 3


BAD_AT_THE_END: list[tuple[str, dict[str, Any], type[CortexError]]] = [
    ("conflict", {"key": "used"}, RunIdReused),
    ("agent", {"agent": "nobody"}, AgentNotFound),
    ("session", {"session": new_id(SESSION)}, SessionNotFound),
    ("input", {"input": "a\x00b"}, UnstorableText),
    ("tool", {"overrides": RunOverrides(tools=("fly",))}, InvalidArgument),
]


def test_one_bad_item_of_many_refuses_all_of_them_before_the_first_write(
    world: World, client: Client, subtests: pytest.Subtests
) -> None:
    client.enqueue("support", "Hello", key="used")
    before = world.snapshot()
    good = requests(1000)
    for name, wrong, error in BAD_AT_THE_END:
        bad = EnqueueRun(**{"agent": "support", "input": "x", "scope": SCOPE, **wrong})
        with subtests.test(name):
            with pytest.raises(error):
                client.enqueue_many([*good, bad])
            assert world.snapshot() == before


def test_an_id_that_stands_twice_in_one_request_with_other_content_is_refused(
    world: World, client: Client
) -> None:
    twins = [item.model_copy(update={"key": "twin"}) for item in requests(2)]
    with pytest.raises(RunIdReused):
        client.enqueue_many(twins)
    assert world.rows(tables.runs) == []


def test_threads_that_race_for_one_id_get_one_run(world: World, client: Client) -> None:
    run_id, start = new_id(RUN), threading.Barrier(6)
    clients = [client, world.client()]

    def send(number: int) -> bool:
        start.wait()
        return clients[number % 2].enqueue("support", "Hello", run_id=run_id).fresh

    with ThreadPoolExecutor(6) as pool:
        fresh = list(pool.map(send, range(6)))
    assert sorted(fresh) == [False] * 5 + [True]
    assert len(world.rows(tables.runs)) == len(world.rows(tables.sessions)) == 1
    assert world.notified(run_id) == ["RunReady"]


def test_threads_that_race_for_many_ids_in_different_orders_get_one_run_each(
    world: World, client: Client
) -> None:
    asked = [item.model_copy(update={"key": f"k{number}"}) for number, item in enumerate(requests(60))]
    orders = [asked, list(reversed(asked)), asked[30:] + asked[:30], asked[::2] + asked[1::2]]
    start = threading.Barrier(len(orders))

    def send(items: list[EnqueueRun]) -> int:
        start.wait()
        return sum(item.fresh for item in client.enqueue_many(items))

    with ThreadPoolExecutor(len(orders)) as pool:
        fresh = list(pool.map(send, orders))
    assert sum(fresh) == 60
    assert len(world.rows(tables.runs)) == 60


def test_tenants_that_race_for_the_same_ids_in_different_orders_do_not_deadlock(
    world: World, client: Client
) -> None:
    ids, start = [new_id(RUN) for _ in range(60)], threading.Barrier(2)

    def send(scope: str) -> str:
        start.wait()
        order = ids if scope < "tenant=m" else list(reversed(ids))
        asked = [EnqueueRun(agent="support", input="x", scope=scope, run_id=run_id) for run_id in order]
        try:
            client.enqueue_many(asked)
        except RunIdTaken:
            return "taken"
        return "stored"

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(send, ["tenant=a", "tenant=z"])) == ["stored", "taken"]
    assert len({run["scope"] for run in world.rows(tables.runs)}) == 1


BAD: list[tuple[str, dict[str, Any], type[CortexError]]] = [
    ("no scope", {"scope": ""}, NoScope),
    ("scope without value", {"scope": "tenant"}, InvalidScope),
    ("scope with an empty key", {"scope": "=acme"}, InvalidScope),
    ("scope with an empty value", {"scope": "tenant="}, InvalidScope),
    ("scope of four levels", {"scope": "a=1/b=2/c=3/d=4"}, InvalidScope),
    ("scope with NUL", {"scope": "tenant=a\x00"}, InvalidScope),
    ("unknown agent", {"agent": "nobody"}, AgentNotFound),
    ("agent with NUL", {"agent": "sup\x00port"}, CortexError),
    ("agent that is no text", {"agent": None}, InvalidArgument),
    ("id of a checkpoint", {"run_id": new_id(CHECKPOINT)}, InvalidId),
    ("id that is none", {"run_id": "17"}, InvalidId),
    ("id that is no text", {"run_id": 17}, InvalidId),
    ("empty key", {"key": ""}, InvalidArgument),
    ("long key", {"key": "k" * 201}, InvalidArgument),
    ("key with NUL", {"key": "k\x00"}, UnstorableText),
    ("key with half a character", {"key": "k\ud800"}, UnstorableText),
    ("key that is no text", {"key": 17}, InvalidArgument),
    ("empty session", {"session": ""}, InvalidArgument),
    ("long session", {"session": "s" * 201}, InvalidArgument),
    ("session with NUL", {"session": "s\x00"}, UnstorableText),
    ("session id that is none", {"session": "ses_17"}, InvalidId),
    ("session that is not there", {"session": new_id(SESSION)}, SessionNotFound),
    ("session that is no text", {"session": 17}, InvalidArgument),
    ("workload with NUL", {"workload": "w\x00"}, UnstorableText),
    ("workload that is no text", {"workload": 17}, InvalidArgument),
    ("input with NUL", {"input": "a\x00b"}, UnstorableText),
    ("input with half a character", {"input": "a\ud800b"}, UnstorableText),
    ("input that is no text", {"input": {"text": "Hello"}}, InvalidArgument),
    ("input of nine MiB", {"input": "x" * (9 << 20)}, InputTooLarge),
    ("input of nine MiB in fewer characters", {"input": "é" * (9 << 19)}, InputTooLarge),
    ("metadata that is no object", {"metadata": [1]}, InvalidArgument),
    ("metadata with NaN", {"metadata": {"a": float("nan")}}, InvalidArgument),
    ("metadata with NUL in a key", {"metadata": {"a\x00": 1}}, UnstorableText),
    ("metadata with NUL deep inside", {"metadata": {"a": [{"b": "\x00"}]}}, UnstorableText),
    ("metadata that is no JSON", {"metadata": {"a": object()}}, InvalidArgument),
    ("metadata with number keys", {"metadata": {1: 2}}, InvalidArgument),
    ("large metadata", {"metadata": {"a": "x" * 70_000}}, InputTooLarge),
    ("overrides that are none", {"overrides": {"max_steps": 3}}, InvalidArgument),
    ("overrides with an unknown tool", {"overrides": RunOverrides(tools=("fly",))}, InvalidArgument),
    ("overrides with NUL", {"overrides": RunOverrides(instructions="a\x00")}, UnstorableText),
    ("start_by that is over", {"start_by": timedelta(0)}, InvalidArgument),
    ("principal without a codec", {"principal": {"user": "ada"}}, InvalidArgument),
]


def test_bad_input_gets_a_clear_error_and_writes_nothing(
    world: World, client: Client, subtests: pytest.Subtests
) -> None:
    before = world.snapshot()
    for name, wrong, error in BAD:
        with subtests.test(name):
            with pytest.raises(error) as refused:
                client.enqueue(**{"agent": "support", "input": "Hello", **wrong})
            assert isinstance(refused.value, CortexError)
            assert world.snapshot() == before


def test_a_scope_is_needed_where_the_client_has_none(world: World, client: Client) -> None:
    lost = world.client(scope=None)
    with pytest.raises(NoScope):
        lost.enqueue("support", "Hello")
    assert world.rows(tables.runs) == []


@pytest.mark.parametrize(
    "verb",
    [
        lambda client: client.run("support", "Hello"),
        lambda client: client.continue_run(new_id(RUN)),
        lambda client: client.resolve(new_id(CHECKPOINT), approved=True),
    ],
    ids=["run", "continue_run", "resolve"],
)
def test_verbs_that_run_agents_here_need_a_host(client: Client, verb: Callable[[Client], object]) -> None:
    with pytest.raises(NoHost, match="enqueue, decide"):
        verb(client)


def test_an_input_just_under_the_limit_is_run(world: World, client: Client) -> None:
    text = "x" * (8 << 20)
    run = world.worker().work(client.enqueue("support", text).id)
    assert run["state"] == "completed"
    assert len(world.model.requests[0].messages[0].content) == 8 << 20


def test_a_run_that_nobody_started_in_time_can_be_told_from_a_cancelled_one(
    world: World, client: Client
) -> None:
    from cortex_workers.engine import expire

    run_id = client.enqueue("support", "Hello", start_by=timedelta(seconds=30)).id
    worker = world.worker()
    assert not expire.cancel_unstarted(worker.rt, run_id)
    world.later(31)
    assert expire.cancel_unstarted(worker.rt, run_id)
    run = world.run(run_id)
    assert (run["state"], run["error_code"]) == ("cancelled", "not_started")


def test_a_run_that_was_started_in_time_is_not_cancelled(world: World, client: Client) -> None:
    from cortex_workers.engine import expire

    run_id = client.enqueue("support", "Hello", start_by=timedelta(seconds=30)).id
    worker = world.worker()
    worker.lose_at("model.before", run_id)
    assert not expire.cancel_unstarted(worker.rt, run_id)
    assert worker.work(run_id)["state"] == "completed"

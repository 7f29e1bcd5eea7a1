"""Sessions: which one a run belongs to, and whose turn it is in it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cortex_workers import Client, Host
from cortex_workers.engine import cancel, slot
from cortex_workers.errors import NotContinuable, RunLeased, SessionClosed, SessionNotFound
from cortex_workers.schemas.llm import ModelRequest
from cortex_workers.store import tables, turns
from tests.engine.world import SCOPE, TTL_S, World, call, contents, only, say, turn


def order_of(request: ModelRequest) -> str:
    return contents(request, "user")[-1]


@pytest.fixture
def client(world: World) -> Client:
    """The model pays when it is told to, and answers otherwise."""

    def script(request: ModelRequest) -> dict[str, object]:
        asked = order_of(request)
        if request.messages[-1].role == "user" and asked.startswith("pay"):
            return turn(call("pay", amount=5))
        if request.messages[-1].role == "user" and asked.startswith("find"):
            return turn(call("find", order="1"))
        return say(f"You said: {asked}")

    world.shop(script)
    world.worker()
    return world.client()


def waits(world: World, *run_ids: str) -> list[str | None]:
    return [world.run(run_id)["wait_reason"] for run_id in run_ids]


def test_a_run_without_a_session_gets_one_of_its_own(world: World, client: Client) -> None:
    one, two = client.enqueue("support", "Hello"), client.enqueue("support", "Hello")
    assert one.session_id != two.session_id
    assert not world.run(one.id)["shared"]
    assert client.session(one.session_id)["key"] is None


def test_a_key_names_a_session_within_its_scope_and_agent(world: World, client: Client) -> None:
    world.host.agent("other", model=world.model, tools=[])
    world.worker()
    one = client.enqueue("support", "Hello", session="chat-1")
    assert client.enqueue("support", "Hello", session="chat-1").session_id == one.session_id
    assert client.enqueue("support", "Hello", session="chat-2").session_id != one.session_id
    assert client.enqueue("other", "Hello", session="chat-1").session_id != one.session_id
    below = client.enqueue("support", "Hello", session="chat-1", scope=f"{SCOPE}/app=b")
    assert below.session_id != one.session_id


def test_the_id_of_a_session_continues_it(world: World, client: Client) -> None:
    one = client.enqueue("support", "Hello")
    two = client.enqueue("support", "And again", session=one.session_id)
    assert two.session_id == one.session_id
    # From its second run on a session is shared, the first run included.
    assert all(world.run(run_id)["shared"] and world.run(run_id)["serial"] for run_id in (one.id, two.id))


@pytest.mark.parametrize("stranger", ["scope", "agent"])
def test_the_session_of_somebody_else_is_not_found(world: World, client: Client, stranger: str) -> None:
    world.host.agent("other", model=world.model, tools=[])
    world.worker()
    one = client.enqueue("support", "Hello")
    with pytest.raises(SessionNotFound):
        if stranger == "scope":
            client.enqueue("support", "Hello", session=one.session_id, scope=f"{SCOPE}/app=b")
        else:
            client.enqueue("other", "Hello", session=one.session_id)
    assert len(world.rows(tables.runs)) == 1


def test_first_runs_that_race_for_the_default_session_share_one(world: World, client: Client) -> None:
    start = threading.Barrier(4)

    def send(_: int) -> str:
        start.wait()
        return client.enqueue("support", "Hello", session="default").session_id

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(send, range(4)))) == 1
    assert len(world.rows(tables.sessions)) == 1
    assert sorted(run["session_seq"] for run in world.rows(tables.runs)) == [1, 2, 3, 4]


def test_a_default_session_that_was_aborted_is_followed_by_a_new_one(world: World, client: Client) -> None:
    old = client.enqueue("support", "Hello", session="default").session_id
    world.sql("update sessions set aborted_at = now() where id = :id", id=old)
    assert client.enqueue("support", "Hello", session="default").session_id != old


@pytest.mark.parametrize("column", ["aborted_at", "gated_at"])
def test_a_closed_session_refuses_new_runs_without_a_row(world: World, client: Client, column: str) -> None:
    made = client.enqueue("support", "Hello", session="chat")
    world.sql(f"update sessions set {column} = now() where id = :id", id=made.session_id)
    before = world.snapshot()
    for session in ("chat", made.session_id):
        with pytest.raises(SessionClosed):
            client.enqueue("support", "Hello", session=session)
    assert world.snapshot() == before


# --- Turns -----------------------------------------------------------------------------------------------------------


def test_turns_go_one_after_another_in_the_order_they_were_accepted(world: World, client: Client) -> None:
    one, two, three = (client.enqueue("support", f"{n}", session="chat").id for n in (1, 2, 3))
    assert waits(world, one, two, three) == [None, "turn", "turn"]
    worker = world.worker()
    claimed = worker.claim(one)
    assert slot.claim_named(worker.rt, two) is None
    world.told.clear()
    worker.go_on(claimed)
    assert waits(world, two, three) == [None, "turn"]
    # Whoever gets the turn is announced, and nobody else.
    assert world.notified(two) == ["RunReady"]
    assert world.notified(three) == []
    worker.work(two)
    worker.work(three)
    assert [order_of(request) for request in world.model.requests] == ["1", "2", "3"]


def test_a_run_that_waits_for_its_turn_is_not_claimed_by_anybody(world: World, client: Client) -> None:
    one, two = (client.enqueue("support", f"{n}", session="chat").id for n in (1, 2))
    worker = world.worker()
    claimed = worker.claim(one)
    assert slot.work(worker.rt, None).runs == 0
    with pytest.raises(NotContinuable, match="turn"):
        slot.work(worker.rt, two)
    with pytest.raises(RunLeased):
        slot.work(worker.rt, one)
    worker.go_on(claimed)
    assert slot.work(worker.rt, None).runs == 1


def test_runs_of_one_session_that_race_for_workers_never_run_together(world: World, client: Client) -> None:
    busy, together, most = threading.Lock(), [0], [0]

    def script(request: ModelRequest) -> dict[str, object]:
        with busy:
            together[0] += 1
            most[0] = max(most[0], together[0])
        threading.Event().wait(0.002)
        with busy:
            together[0] -= 1
        return say("Yes.")

    host = Host()
    world.shop(script, host=host)
    worker = world.worker(host, table_claim_s=20.0)
    made = [client.enqueue("support", f"{n}", session="chat").id for n in range(6)]

    def drain(_: int) -> None:
        while any(world.run(run_id)["state"] != "completed" for run_id in made):
            slot.work(worker.rt, None)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(drain, range(3)))
    assert most == [1]
    order = sorted(made, key=lambda run_id: world.run(run_id)["completion_seq"])
    assert order == made


def test_a_paused_run_does_not_block_its_session(world: World, client: Client) -> None:
    paused, next_up = (
        client.enqueue("support", "pay", session="chat").id,
        client.enqueue("support", "2", session="chat").id,
    )
    worker = world.worker()
    worker.work(paused)
    assert waits(world, next_up) == [None]
    assert worker.work(next_up)["state"] == "completed"


def test_an_answered_run_goes_before_those_that_never_began(world: World, client: Client) -> None:
    paused, second, third = (client.enqueue("support", text, session="chat").id for text in ("pay", "2", "3"))
    worker = world.worker()
    worker.work(paused)
    claimed = worker.claim(second)
    client.decide(only(client.checkpoints()).id, approved=True)
    assert waits(world, paused, third) == ["turn", "turn"]
    worker.go_on(claimed)
    assert waits(world, paused, third) == [None, "turn"]
    assert worker.work(paused)["state"] == "completed"
    assert waits(world, third) == [None]


def test_a_decision_takes_the_turn_from_a_run_that_only_waits(world: World, client: Client) -> None:
    paused, second = (client.enqueue("support", text, session="chat").id for text in ("pay", "2"))
    worker = world.worker()
    worker.work(paused)
    assert waits(world, second) == [None]
    client.decide(only(client.checkpoints()).id, approved=True)
    assert waits(world, paused, second) == [None, "turn"]


@pytest.mark.parametrize("how", ["fails", "cancelled while it waits", "rejected", "handed back"])
def test_the_turn_goes_on_however_a_run_leaves_it(world: World, client: Client, how: str) -> None:
    text = "pay" if how == "rejected" else "1"
    one, two = (
        client.enqueue("support", text, session="chat").id,
        client.enqueue("support", "2", session="chat").id,
    )
    worker = world.worker()
    if how == "fails":
        world.model._decide = lambda request: {"fail": "failed"}
        assert worker.work(one)["state"] == "failed"
    elif how == "cancelled while it waits":
        client.cancel(one)
    elif how == "rejected":
        worker.work(one)
        client.decide(only(client.checkpoints()).id, approved=False)
    else:
        slot.give_back(worker.rt, worker.claim(one), "test")
        assert waits(world, one, two) == [None, "turn"]
        worker.work(one)
    assert waits(world, two) == [None]


def test_a_run_that_lost_its_worker_keeps_the_turn_before_those_that_never_began(
    world: World, client: Client
) -> None:
    one, two = (client.enqueue("support", text, session="chat").id for text in ("1", "2"))
    worker = world.worker()
    worker.lose_at("model.before", one)
    assert waits(world, one, two) == [None, "turn"]
    worker.work(one)
    assert waits(world, two) == [None]


def test_a_run_between_two_slices_keeps_the_turn(world: World, client: Client) -> None:
    one, two = (client.enqueue("support", text, session="chat").id for text in ("find", "2"))
    worker = world.worker(slice_steps=1)
    assert worker.work(one)["state"] == "ready"
    assert waits(world, one, two) == [None, "turn"]


def test_a_cancelled_run_holds_the_turn_until_its_worker_lets_go(world: World, client: Client) -> None:
    one, two = (client.enqueue("support", text, session="chat").id for text in ("1", "2"))
    worker = world.worker()
    claimed = worker.claim(one)
    stopped = client.cancel(one)
    assert (stopped.stops_worker, stopped.stops_by) == (worker.name, claimed.row["lease_expires_at"])
    assert waits(world, two) == ["turn"]
    world.told.clear()
    worker.go_on(claimed)
    assert (world.run(one)["state"], world.run(one)["fenced_until"]) == ("cancelled", None)
    assert waits(world, two) == [None]
    assert world.notified(two) == ["RunReady"]


def test_a_cancelled_run_whose_worker_is_dead_holds_the_turn_only_until_its_lease_would_have_ended(
    world: World, client: Client
) -> None:
    one, two = (client.enqueue("support", text, session="chat").id for text in ("1", "2"))
    worker = world.worker()
    session_id = worker.claim(one).row["session_id"]
    client.cancel(one)
    world.database.run(lambda unit: turns.recompute(unit, session_id))
    assert waits(world, two) == ["turn"]
    world.later(TTL_S + 1)
    world.database.run(lambda unit: turns.recompute(unit, session_id))
    assert waits(world, two) == [None]


def test_an_agent_may_have_parallel_turns(world: World, client: Client) -> None:
    host = Host()
    world.shop([say("Yes.")], host=host, turns="parallel")
    worker = world.worker(host)
    one, two = (client.enqueue("support", text, session="chat").id for text in ("1", "2"))
    assert waits(world, one, two) == [None, None]
    claimed = [worker.claim(one), worker.claim(two)]
    assert [worker.go_on(item)["state"] for item in claimed] == ["completed", "completed"]
    assert sorted(world.run(run_id)["completion_seq"] for run_id in (one, two)) == [1, 2]


def test_joining_the_session_of_a_run_that_is_under_way_waits_for_its_end(
    world: World, client: Client
) -> None:
    one = client.enqueue("support", "1")
    worker = world.worker()
    claimed = worker.claim(one.id)
    two = client.enqueue("support", "2", session=one.session_id)
    assert waits(world, two.id) == ["turn"]
    worker.go_on(claimed)
    assert waits(world, two.id) == [None]
    worker.work(two.id)
    # It was claimed after the first had ended, so it knows its answer.
    assert contents(world.model.requests[-1]) == ["1", "You said: 1", "2"]


def test_joining_between_a_pause_and_its_answer_shares_the_paused_run(world: World, client: Client) -> None:
    one = client.enqueue("support", "pay")
    worker = world.worker()
    worker.work(one.id)
    two = client.enqueue("support", "2", session=one.session_id)
    claimed = worker.claim(two.id)
    client.decide(only(client.checkpoints()).id, approved=True)
    assert waits(world, one.id) == ["turn"]
    worker.go_on(claimed)
    assert worker.work(one.id)["state"] == "completed"


def test_a_gated_session_keeps_its_runs_waiting(world: World, client: Client) -> None:
    made = client.enqueue("support", "pay", session="chat")
    worker = world.worker()
    worker.work(made.id)
    checkpoint_id = only(client.checkpoints()).id
    world.sql("update sessions set gated_at = now() where id = :id", id=made.session_id)
    before = world.snapshot()
    with pytest.raises(SessionClosed):
        client.decide(checkpoint_id, approved=True)
    assert world.snapshot() == before
    world.sql("update sessions set gated_at = null where id = :id", id=made.session_id)
    client.decide(checkpoint_id, approved=True)
    world.sql("update sessions set gated_at = now() where id = :id", id=made.session_id)
    world.database.run(lambda unit: turns.recompute(unit, made.session_id))
    assert waits(world, made.id) == ["gate"]
    assert slot.claim_named(worker.rt, made.id) is None


def test_cancelling_a_run_that_waits_for_its_turn_leaves_the_turn_alone(world: World, client: Client) -> None:
    one, two, three = (client.enqueue("support", f"{n}", session="chat").id for n in (1, 2, 3))
    worker = world.worker()
    claimed = worker.claim(one)
    cancel.cancel(worker.rt, two, SCOPE, "ops")
    assert waits(world, three) == ["turn"]
    worker.go_on(claimed)
    assert waits(world, three) == [None]

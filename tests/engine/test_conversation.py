"""The conversation of a session: what a run reads of earlier ones, and what it leaves to later ones."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cortex_workers import Client, RunOverrides
from cortex_workers.errors import SessionNotFound
from cortex_workers.schemas.ids import SESSION, new_id
from cortex_workers.schemas.llm import ModelRequest
from cortex_workers.store import tables
from tests.engine.world import SCOPE, World, call, contents, only, say, turn


@pytest.fixture
def client(world: World) -> Client:
    """The model does what the first word says, once, and then tells how it went."""

    def script(request: ModelRequest) -> dict[str, object]:
        word, _, rest = contents(request, "user")[-1].partition(" ")
        done = sum(message.role == "tool" for message in request.messages)
        if word == "pay" and done < 1:
            return turn(call("pay", amount=int(rest)))
        if word == "ship" and done < 1:
            return turn(call("ship", order=rest)) | {"say": "Shipping."}
        if word == "break" and done < 1:
            return turn(call("ship", order=rest), call("find", order=rest))
        if word in ("break", "fail"):
            return {"fail": "failed"}
        return say(f"Yes, {word}.")

    world.shop(script)
    return world.client()


def send(client: Client, text: str, session: str = "chat") -> str:
    return client.enqueue("support", text, session=session).id


def talk(world: World, client: Client, *texts: str) -> list[str]:
    worker = world.worker()
    made = [send(client, text) for text in texts]
    for run_id in made:
        worker.finish(run_id)
    return made


@pytest.fixture(autouse=True)
def _worker(world: World, client: Client) -> None:
    world.worker()


def test_a_run_reads_what_was_said_before_without_the_tool_calls(world: World, client: Client) -> None:
    talk(world, client, "hello there", "ship 17", "bye now")
    assert contents(world.model.requests[-1]) == [
        "hello there",
        "Yes, hello.",
        "ship 17",
        "Shipping.",
        "Yes, ship.",
        "bye now",
    ]
    assert all(not message.tool_calls for message in world.model.requests[-1].messages)


def test_the_conversation_grows_by_each_runs_own_messages_only(world: World, client: Client) -> None:
    talk(world, client, "a", "b", "c", "d", "e", "f")
    assert len(contents(world.model.requests[-1])) == 11
    assert len(world.rows(tables.messages)) == 6
    (session,) = client.sessions()
    assert session["message_count"] == 12


def test_a_window_shows_the_newest_messages_in_order(world: World, client: Client) -> None:
    worker = world.worker(history_window=5)
    for text in "abcdef":
        worker.work(send(client, text))
    assert contents(world.model.requests[-1]) == ["Yes, c.", "d", "Yes, d.", "e", "Yes, e.", "f"]


def test_a_window_of_nothing_shows_nothing(world: World, client: Client) -> None:
    worker = world.worker(history_window=0)
    worker.work(send(client, "a"))
    worker.work(send(client, "b"))
    assert contents(world.model.requests[-1]) == ["b"]


def test_the_boundary_is_where_the_runs_own_input_stands(world: World, client: Client) -> None:
    made = talk(world, client, "a", "pay 5")
    run = world.run(made[1])
    assert run["new_messages_from"] == 2
    assert contents(world.model.requests[-1])[2] == "pay 5"
    client.decide(only(client.checkpoints()).id, approved=True)
    ended = world.worker().work(made[1])
    assert (ended["state"], ended["new_messages_from"]) == ("completed", 2)


def test_a_paused_run_has_added_nothing_to_the_conversation(world: World, client: Client) -> None:
    talk(world, client, "a", "pay 5", "b")
    assert contents(world.model.requests[-1]) == ["a", "Yes, a.", "b"]


def test_what_was_said_before_is_as_it_was_at_the_runs_start(world: World, client: Client) -> None:
    made = talk(world, client, "a", "pay 5", "b", "c")
    client.decide(only(client.checkpoints()).id, approved=True)
    world.worker().work(made[1])
    assert contents(world.model.requests[-1]) == ["a", "Yes, a.", "pay 5", "", "pay done"]
    # In the order of completion it comes last.
    talk(world, client, "d")
    assert contents(world.model.requests[-1])[-3:] == ["pay 5", "Yes, pay.", "d"]


def test_a_run_that_lost_its_worker_reads_what_it_read_at_first(world: World, client: Client) -> None:
    worker = world.worker()
    other = send(client, "pay 1")
    worker.work(other)
    one = send(client, "hello")
    worker.die_at("model.before", one)
    client.decide(only(client.checkpoints()).id, approved=True)
    worker.lapse(one)
    # Both wait: the one that was cut off earlier has the turn.
    for run_id in (one, other):
        if world.run(run_id)["wait_reason"] is None:
            worker.work(run_id)
    for run_id in (one, other):
        if world.run(run_id)["state"] != "completed":
            worker.work(run_id)
    assert world.run(one)["history_upto"] == 0
    assert contents(next(r for r in reversed(world.model.requests) if r.run_id == one)) == ["hello"]


def test_a_failed_turn_is_told_in_a_note_and_not_replayed(world: World, client: Client) -> None:
    made = talk(world, client, "a", "break 17", "try again")
    assert world.run(made[1])["error_code"] == "model_failed"
    shown = contents(world.model.requests[-1])
    assert (shown[:2], shown[-1]) == (["a", "Yes, a."], "try again")
    (note,) = shown[2:-1]
    assert "failed (model_failed)" in note
    assert "It was asked: break 17" in note
    assert 'ship({"order": "17"}): completed' in note
    # What only reads is not worth a word.
    assert "find" not in note


def test_a_cancelled_turn_is_told_with_what_it_may_have_done(world: World, client: Client) -> None:
    worker = world.worker()
    cut = send(client, "ship 17")
    worker.die_at("tool.after_handler", cut)
    client.cancel(cut)
    world.later(61)
    worker.work(send(client, "try again"))
    note = contents(world.model.requests[-1])[0]
    assert "cancelled" in note
    assert 'ship({"order": "17"}): outcome unknown' in note


def test_notes_stop_at_the_next_turn_that_ends_well(world: World, client: Client) -> None:
    talk(world, client, "fail 1", "fail 2", "hello", "fail 3", "bye")
    shown = contents(world.model.requests[-1])
    assert shown[:2] == ["hello", "Yes, hello."]
    (note,) = shown[2:-1]
    assert "fail 3" in note


def test_a_note_is_fixed_at_the_runs_start(world: World, client: Client) -> None:
    worker = world.worker()
    worker.work(send(client, "fail 1"))
    paused = send(client, "pay 5")
    worker.work(paused)
    worker.work(send(client, "fail 2"))
    client.decide(only(client.checkpoints()).id, approved=True)
    worker.work(paused)
    shown = contents(world.model.requests[-1], "user")
    assert len(shown) == 2
    assert "fail 1" in shown[0]


def test_a_note_tells_what_ran_and_not_what_was_asked_for(world: World, client: Client) -> None:
    worker = world.worker()
    cut = send(client, "pay 5")
    worker.work(cut)
    client.decide(only(client.checkpoints()).id, approved=True, amended_arguments={"amount": 3})
    worker.die_at("tool.after_outcome", cut)
    client.cancel(cut)
    world.later(61)
    worker.work(send(client, "try again"))
    assert 'pay({"amount": 3}): completed' in contents(world.model.requests[-1])[0]


def test_clearing_a_conversation_hides_it_and_deletes_nothing(world: World, client: Client) -> None:
    made = talk(world, client, "a", "fail 1")
    session_id = world.run(made[0])["session_id"]
    before = (len(world.rows(tables.messages)), len(world.rows(tables.runs)))
    assert client.clear_session(session_id) == 2
    assert client.clear_session(session_id) == 0
    talk(world, client, "b")
    assert contents(world.model.requests[-1]) == ["b"]
    assert (len(world.rows(tables.messages)) - 1, len(world.rows(tables.runs)) - 1) == before
    kinds = [row["kind"] for row in world.rows(tables.events, tables.events.c.session_id == session_id)]
    assert kinds.count("session.clear") == 2


def test_clearing_changes_nothing_for_a_run_that_has_begun(world: World, client: Client) -> None:
    made = talk(world, client, "a", "pay 5")
    client.clear_session(world.run(made[0])["session_id"])
    client.decide(only(client.checkpoints()).id, approved=True)
    world.worker().work(made[1])
    assert contents(world.model.requests[-1])[:3] == ["a", "Yes, a.", "pay 5"]
    # What it says comes after the floor.
    talk(world, client, "b")
    assert contents(world.model.requests[-1]) == ["pay 5", "Yes, pay.", "b"]


def test_a_session_that_does_not_exist_cannot_be_cleared(client: Client) -> None:
    with pytest.raises(SessionNotFound):
        client.clear_session(new_id(SESSION))


def test_the_session_of_another_scope_cannot_be_read_or_cleared(world: World, client: Client) -> None:
    made = client.enqueue("support", "a", session="chat")
    stranger = world.client(scope="tenant=evil")
    for verb in (stranger.session, stranger.clear_session):
        with pytest.raises(SessionNotFound):
            verb(made.session_id)
    assert client.session(made.session_id)["scope"] == SCOPE


def test_messages_sent_together_are_turns_that_know_one_another(world: World, client: Client) -> None:
    """Bug case C42."""
    clients, start = [client, world.client(), world.client()], threading.Barrier(3)

    def post(number: int) -> str:
        start.wait()
        return send(clients[number], f"m{number}")

    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(post, range(3)))
    accepted = sorted(made, key=lambda run_id: world.run(run_id)["session_seq"])
    worker = world.worker()
    for run_id in accepted:
        worker.work(run_id)
    said = [
        row["input"]
        for run_id in accepted
        for row in world.rows(tables.run_specs, tables.run_specs.c.run_id == run_id)
    ]
    assert contents(world.model.requests[-1], "user") == said
    assert [world.run(run_id)["completion_seq"] for run_id in accepted] == [1, 2, 3]


def test_six_pauses_with_a_new_worker_each_do_not_double_the_conversation(
    world: World, client: Client
) -> None:
    """Bug case C43."""
    talk(world, client, *(f"t{number}" for number in range(4)))

    def script(request: ModelRequest) -> dict[str, object]:
        done = sum(message.role == "tool" for message in request.messages)
        if contents(request, "user")[-1] != "six":
            return say("Yes.")
        return (
            say("All six.")
            if done == 6
            else turn(call("pay", amount=done + 1)) | {"usage": {"input_tokens": 1}}
        )

    world.model._decide = script
    run_id = send(client, "six")
    world.worker().work(run_id)
    for _ in range(6):
        client.decide(only(client.checkpoints()).id, approved=True)
        world.worker().work(run_id)
    run = world.run(run_id)
    assert (run["state"], run["step_count"]) == ("completed", 7)
    assert [effect.arguments["amount"] for effect in world.effects] == [1, 2, 3, 4, 5, 6]
    own = world.messages(run_id)
    assert [message.role for message in own] == ["assistant", "tool"] * 6 + ["assistant"]
    assert sum(step["usage"]["input_tokens"] for step in world.steps(run_id)) == run["usage"]["input_tokens"]
    last = [request for request in world.model.requests if request.run_id == run_id][-1]
    assert contents(last, "user") == [f"t{number}" for number in range(4)] + ["six"]
    talk(world, client, "seventh")
    assert contents(world.model.requests[-1])[-3:] == ["six", "All six.", "seventh"]
    assert len(world.rows(tables.sessions)) == 1


def test_a_run_without_a_session_knows_nothing_of_others(world: World, client: Client) -> None:
    worker = world.worker()
    for text in ("a", "b"):
        worker.work(client.enqueue("support", text).id)
    assert contents(world.model.requests[-1]) == ["b"]


def test_an_agents_own_window_goes_before_the_setting(world: World) -> None:
    world.host.agent("short", model=world.model, history_window=1)
    worker, client = world.worker(), world.client()
    for text in "abc":
        worker.work(client.enqueue("short", text, session="chat", overrides=RunOverrides()).id)
    assert contents(world.model.requests[-1]) == ["Yes, b.", "c"]

"""Answers from the command line: results, what became of them, closing what is uncertain, decisions call by call."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from cortex_workers.engine import slot
from cortex_workers.schemas.ids import SUSPENSION, new_id
from cortex_workers.store import workers
from cortex_workers.store.database import Database
from cortex_workers.testing import factory
from tests.cli.conftest import Commands
from tests.cli.test_broken_rows import by_hand
from tests.engine.outside import TWO, A, B, paused, result
from tests.engine.test_deferred import ANSWER, Deferring, asks, polls, started
from tests.engine.world import World, looking_at

SCOPE = ("--scope", "tenant=acme")


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    with looking_at(database_url) as onlooker:
        made = World(onlooker)
        try:
            yield made
        finally:
            made.close()


def content_of(world: World, run_id: str, worker: Any) -> list[Any]:
    assert worker.work(run_id)["state"] == "completed"
    return [item.content for item in world.messages(run_id) if item.role == "tool"]


def on_one_line(said: str) -> str:
    return " ".join(said.split())


def test_a_single_result_is_kept_and_the_last_one_admits(cw: Commands, world: World) -> None:
    _client, worker, run_id = paused(world, TWO)
    said = cw("results", "provide", run_id, "--call", B, "--content", '{"parcel": 7}', *SCOPE)
    assert (said.code, said.out) == (0, f"{run_id}: kept; other calls of this pause are open\n")
    said = cw("results", "provide", run_id, "--call", A, "--error", "out of stock", *SCOPE)
    assert (said.code, said.out) == (0, f"{run_id}: admitted\n")
    said = cw("results", "provide", run_id, "--call", A, "--error", "out of stock", *SCOPE)
    assert (said.code, said.out) == (0, f"{run_id}: admitted before\n")
    first, second = content_of(world, run_id, worker)
    assert json.loads(first) == {"error": "out of stock"}
    assert json.loads(second) == {"parcel": 7}


def test_a_whole_answer_is_admitted_and_listed_with_who_gave_it(cw: Commands, world: World) -> None:
    _client, worker, run_id = paused(world, TWO)
    given = json.dumps([{"tool_call_id": A, "content": "1"}, {"tool_call_id": B, "content": 2}])
    document = cw("results", "provide", run_id, "--all", given, "--json", *SCOPE).json
    assert document["admission"]["fresh"] is True
    assert document["admission"]["request"]["input"] == {
        "tool_results": [{"tool_call_id": A, "content": "1"}, {"tool_call_id": B, "content": 2}]
    }
    listed = cw("runs", "answers", run_id, "--json", *SCOPE).json
    (item,) = listed["admissions"]
    assert (item["admitted_by"], item["door"], listed["next"]) == ("cli:ann", "provide_results", None)
    assert "cli:ann" in cw("runs", "answers", run_id, *SCOPE).out
    assert content_of(world, run_id, worker) == ["1", "2"]


def test_another_answer_is_refused_with_its_code(cw: Commands, world: World) -> None:
    _client, _worker, run_id = paused(world)
    assert cw("results", "provide", run_id, "--call", A, "--content", "1", *SCOPE).code == 0
    said = cw("results", "provide", run_id, "--call", A, "--content", "2", *SCOPE)
    assert said.code == 1
    assert "[admission_conflict]" in said.err
    assert cw("results", "provide", run_id, "--call", "x", "--content", "2", *SCOPE).code != 0


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--call", A),
        ("--call", A, "--content", "1", "--error", "x"),
        ("--call", A, "--content", "{"),
        ("--all", "[]", "--call", A),
        ("--all", "{}"),
        ("--all", '[{"content": 1}]'),
        ("--all", "[]", "--error", "x"),
        ("--all", f'[{{"tool_call_id": "{A}", "content": 1, "error": "x"}}]'),
        ("--all", f'[{{"tool_call_id": "{A}"}}]'),
    ],
    ids=" ".join,
)
def test_a_command_that_says_too_little_or_too_much_writes_nothing(
    cw: Commands, world: World, words: tuple[str, ...]
) -> None:
    _client, _worker, run_id = paused(world)
    before = world.snapshot()
    assert cw("results", "provide", run_id, *words, *SCOPE).code == 2
    assert world.snapshot() == before


def test_pages_of_answers_tell_how_to_go_on(cw: Commands, world: World) -> None:
    from tests.engine.world import call, say, turn

    script = [turn(call("quote", item="1")), turn(call("quote", item="2")), say("Done.")]
    _client, worker, run_id = paused(world, script)
    for number in range(2):
        cw("results", "provide", run_id, "--call", f"call_{number}_0", "--content", "1", *SCOPE)
        worker.work(run_id)
    said = cw("runs", "answers", run_id, "--limit", "1", *SCOPE)
    assert "--after sus_" in said.err
    after = cw("runs", "answers", run_id, "--limit", "1", "--json", *SCOPE).json["next"]
    (second,) = cw("runs", "answers", run_id, "--after", after, "--json", *SCOPE).json["admissions"]
    assert second["request"]["version"]["suspension_id"] == world.run(run_id)["suspension_id"]
    assert cw("runs", "answers", run_id, "--json", "--scope", "tenant=other").json["admissions"] == []


def test_an_answer_is_given_up_only_when_nobody_began_with_it(cw: Commands, world: World) -> None:
    from datetime import timedelta

    _client, worker, run_id = paused(world, tool={"ttl": timedelta(seconds=2)})
    cw("results", "provide", run_id, "--call", A, "--content", "1", *SCOPE)
    pause = world.run(run_id)["suspension_id"]
    said = cw("runs", "answers", run_id, "--expire", pause, *SCOPE)
    assert said.code == 1
    assert "deadline" in said.err
    world.later(3)
    claimed = worker.claim(run_id)
    said = cw("runs", "answers", run_id, "--expire", pause, *SCOPE)
    assert said.code == 1
    assert "[resume_already_started]" in said.err
    slot.give_back(worker.rt, claimed, "not begun")
    said = cw("runs", "answers", run_id, "--expire", pause, *SCOPE)
    assert (said.code, said.out) == (0, f"{run_id}: the answer was given up\n")
    assert cw("runs", "answers", run_id, "--expire", pause, "--json", *SCOPE).json["fresh"] is False
    assert world.run(run_id)["error_code"] == "admission_expired"


def test_the_answer_to_give_up_is_found_behind_many_others(cw: Commands, world: World) -> None:
    _client, _worker, run_id = paused(world)
    cw("results", "provide", run_id, "--call", A, "--content", "1", *SCOPE)
    pause = world.run(run_id)["suspension_id"]
    by_hand(
        world.database,
        "insert into resume_admissions select (jsonb_populate_record(a,"
        " jsonb_build_object('suspension_id', 'sus_' || lpad(n::text, 26, '0')))).*"
        " from resume_admissions a, generate_series(1, 300) n where a.run_id = :id",
        id=run_id,
    )
    world.later(8 * 86_400)
    said = cw("runs", "answers", run_id, "--expire", pause, *SCOPE)
    assert (said.code, said.out) == (0, f"{run_id}: the answer was given up\n")
    said = cw("runs", "answers", run_id, "--expire", new_id(SUSPENSION), *SCOPE)
    assert said.code == 1 and "[admission_not_found]" in said.err


def uncertain(world: World) -> tuple[str, list[str]]:
    """A run that lost its worker after it began with an answer: the run, and who held it."""
    client, worker, run_id = paused(world)
    client.provide_results(run_id, [result(A)])
    other = world.worker()
    assert other.lose_at("model.before", run_id)["state"] == "reclaimable"
    return run_id, [worker.name, other.name]


def test_an_uncertain_run_is_closed_when_all_who_held_it_are_gone(cw: Commands, world: World) -> None:
    run_id, (first, second) = uncertain(world)
    world.database.run(lambda unit: workers.end(unit, first, "stopped"))
    world.database.run(lambda unit: workers.end(unit, second, workers.SILENT))
    said = cw("runs", "close-uncertain", run_id, *SCOPE)
    assert (said.code, said.out) == (1, "")
    assert f"worker {second} has not ended" in said.err and first not in said.err
    assert said.err.endswith("Declare dead whom you know to be [closure_refused]\n")
    assert world.run(run_id)["state"] == "reclaimable"
    said = cw("runs", "close-uncertain", run_id, "--dead", second, *SCOPE)
    assert (said.code, said.out) == (0, f"{run_id}: closed as incomplete\n")
    said = cw("runs", "close-uncertain", run_id, *SCOPE)
    assert (said.code, said.out) == (0, f"{run_id}: closed as incomplete before\n")
    run = world.run(run_id)
    assert (run["state"], run["error_code"]) == ("incomplete", "closed_incomplete")
    shown = on_one_line(cw("runs", "show", run_id, *SCOPE).out)
    assert "closed as incomplete by cli:ann" in shown and "cannot be proven" in shown


def test_a_closing_is_a_receipt_for_scripts(cw: Commands, world: World) -> None:
    run_id, names = uncertain(world)
    for name in names:
        world.database.run(lambda unit, name=name: workers.end(unit, name, "stopped"))
    said = cw("runs", "close-uncertain", run_id, "--json", *SCOPE)
    assert (said.code, said.json["fresh"], said.json["request"]["actor"]) == (0, True, "cli:ann")
    assert said.json["run_revision"] == world.run(run_id)["revision"]
    again = cw("runs", "close-uncertain", run_id, "--json", *SCOPE).json
    assert again == {**said.json, "fresh": False}
    said = cw("runs", "close-uncertain", run_id, "--json", *SCOPE, CORTEX_ACTOR="cli:eve")
    assert (said.code, said.json["error"]) == (1, "admission_conflict")
    assert "by cli:ann" in said.json["message"]


def test_what_cannot_be_closed_is_said_and_nothing_is_written(cw: Commands, world: World) -> None:
    client, _worker, run_id = paused(world)
    before = world.snapshot()
    said = cw("runs", "close-uncertain", run_id, *SCOPE)
    assert said.code == 1 and "[admission_not_found]" in said.err
    client.provide_results(run_id, [result(A)])
    assert world.snapshot() != before
    before = world.snapshot()
    for words, code in (
        ((run_id,), "invalid_state"),
        ((run_id, "--scope", "tenant=other"), "admission_not_found"),
        (("arun_x",), "invalid_id"),
    ):
        said = cw("runs", "close-uncertain", *words, *(() if "--scope" in words else SCOPE))
        assert said.code == 1 and said.err.endswith(f"[{code}]\n")
    assert cw("runs", "close-uncertain").code == 2
    assert world.snapshot() == before


def test_a_worker_that_never_held_the_run_is_not_declared(cw: Commands, world: World) -> None:
    run_id, names = uncertain(world)
    dead = [word for name in (*names, "host-9:1:x") for word in ("--dead", name)]
    said = cw("runs", "close-uncertain", run_id, *dead, *SCOPE)
    assert said.code == 1 and "worker host-9:1:x never held this run" in said.err
    assert world.run(run_id)["state"] == "reclaimable"


def test_a_run_that_waits_outside_says_what_for_and_how_to_answer(cw: Commands, world: World) -> None:
    client, _worker, run_id = paused(world, TWO)
    shown = cw("runs", "show", run_id, *SCOPE).out
    assert "paused: waits for results of quote until" in shown
    assert "missing" not in shown
    assert cw("runs", "show", run_id, "--json", *SCOPE).json["missing"] == []
    client.provide_result(run_id, result(A))
    hint = cw("runs", "show", run_id, "--json", *SCOPE).json["next"]
    assert hint.startswith("waits for results of quote (1 of 2 open) until 2")
    assert hint.endswith(f"cortex-workers results provide {run_id} --call {B} --content JSON")
    client.provide_result(run_id, result(B))
    assert re.search(r"answered by ops \(\d+ bytes\), ready again", cw("runs", "show", run_id, *SCOPE).out)


def test_a_run_whose_model_call_waits_says_for_whom(cw: Commands, world: World) -> None:
    client, worker, asked = started(world, Deferring(ANSWER, asks))
    worker.work(asked)
    (question,) = client.checkpoints(run_id=asked)
    shown = on_one_line(cw("runs", "show", asked, *SCOPE).out)
    assert f"paused: {question.id} asks for approval of a model call (budget) until" in shown
    assert "waits for a decision on a model call (budget) until" in shown
    cw("checkpoints", "approve", question.id, "--by", "Ann", *SCOPE)
    shown = on_one_line(cw("runs", "show", asked, *SCOPE).out)
    assert "approved by Ann (as cli:ann), ready again" in shown


def test_a_run_that_waits_for_a_provider_says_when_it_is_asked_again(cw: Commands, world: World) -> None:
    _client, worker, run_id = started(world, Deferring(ANSWER, polls(1)))
    worker.work(run_id)
    at = f"{world.pauses(run_id)[0]['next_poll_at']:%H:%M:%S} UTC"
    shown = on_one_line(cw("runs", "show", run_id, *SCOPE).out)
    assert f"paused: the model call (batch) is made again after {at}" in shown
    assert "waits for the model's provider (batch)" in shown
    assert f"the first sweep after {at} asks again" in shown
    assert "missing" not in shown


def test_calls_are_approved_and_rejected_one_by_one(cw: Commands, database: Database) -> None:
    run = factory.a_paused_run(database, calls=2)
    asked = factory.checkpoint_of(database, run)
    one, other = (item["call_id"] for item in cw("checkpoints", "show", asked, "--json").json["pending"])
    whole = '{"order_id": "17", "amount_cents": 900}'
    said = cw(
        "checkpoints", "approve", asked, "--call", one, "--amend", whole, "--reject-call", other,
        "--reason", "twice",
    )  # fmt: skip
    assert (said.code, said.out) == (0, f"{asked} approved\n")
    decision = cw("checkpoints", "show", asked, "--json").json["decision"]
    assert decision["calls"] == {
        one: {"approved": True, "amended_arguments": json.loads(whole), "reason": None},
        other: {"approved": False, "amended_arguments": None, "reason": "twice"},
    }


@pytest.mark.parametrize("words", [("--call",), ("--call", "--reject-call"), ("--amend-both",)])
def test_calls_that_are_missing_or_said_twice_write_nothing(
    cw: Commands, database: Database, words: tuple[str, ...]
) -> None:
    run = factory.a_paused_run(database, calls=2)
    asked = factory.checkpoint_of(database, run)
    one, other = (item["call_id"] for item in cw("checkpoints", "show", asked, "--json").json["pending"])
    if words == ("--amend-both",):
        given = ["--call", one, "--call", other, "--amend", "{}"]
    else:
        given = [part for option in words for part in (option, one)]
    assert cw("checkpoints", "approve", asked, *given).code in (1, 2)
    assert factory.now(database, run["id"])["revision"] == run["revision"]


@pytest.mark.parametrize("after", ["99999999999999999999999", "-2", "x"])
def test_a_cursor_that_no_event_has_is_wrong_usage(cw: Commands, world: World, after: str) -> None:
    _client, _worker, run_id = paused(world)
    said = cw("runs", "stream", run_id, "--after", after, "--json", *SCOPE)
    assert said.code == 2
    assert said.json["error"] == "wrong_usage" and "--after" in said.json["message"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{}", '"content": "ok"}]\'. Input should be a valid list'),
        ('[{"content": 1}]', "At 0.tool_call_id: Field required"),
        ('[{"tool_call_id": "x", "content": 1, "error": "no"}]', "At 0: a result has a content or an error, not both"),
        ('[{"tool_call_id": "x"}]', "At 0: a content or an error is missing"),
        ("[", "at character 2"),
    ],
)  # fmt: skip
def test_a_list_of_results_that_is_none_is_answered_with_what_is_wanted(
    cw: Commands, world: World, given: str, says: str
) -> None:
    _client, _worker, run_id = paused(world)
    said = cw("results", "provide", run_id, "--all", given, "--json", *SCOPE)
    assert said.code == 2
    assert says in said.json["message"] and "--all takes a list of results, like" in said.json["message"]
    assert ": :" not in said.json["message"]


def test_a_result_of_nothing_is_said_with_null(cw: Commands, world: World) -> None:
    _client, worker, run_id = paused(world)
    given = json.dumps([{"tool_call_id": A, "content": None}])
    assert cw("results", "provide", run_id, "--all", given, *SCOPE).code == 0
    assert content_of(world, run_id, worker) == ["null"]


def test_a_run_that_ended_has_nothing_to_close_whoever_held_it(cw: Commands, world: World) -> None:
    client, worker, run_id = paused(world)
    client.provide_results(run_id, [result(A)])
    assert worker.work(run_id)["state"] == "completed"
    before = world.snapshot()
    for words in ((), ("--dead", worker.name)):
        said = cw("runs", "close-uncertain", run_id, *words, *SCOPE)
        assert said.code == 1
        assert said.err.startswith("error: the run has ended: completed.") and "[invalid_state]" in said.err
    assert world.snapshot() == before


def test_the_hints_say_that_several_calls_may_be_decided_one_by_one(cw: Commands, database: Database) -> None:
    run = factory.a_paused_run(database, calls=3)
    asked = factory.checkpoint_of(database, run)
    one, *others = (item["call_id"] for item in cw("checkpoints", "show", asked, "--json").json["pending"])
    rejected = " ".join(f"--reject-call {call_id}" for call_id in others)
    shown = on_one_line(cw("checkpoints", "show", asked).out)
    assert f"checkpoints approve {asked} --call {one} {rejected}" in shown
    assert "--call and --reject-call" in cw("checkpoints", "list").err
    assert "--call and --reject-call" in cw("runs", "show", run["id"], "--json").json["next"]
    decided = shown.partition("as an example: cortex-workers ")[2].split()
    assert cw(*decided).code == 0
    assert "--call" not in cw("checkpoints", "list", "--all").err


def test_a_single_call_is_decided_as_a_whole(cw: Commands, database: Database) -> None:
    asked = factory.checkpoint_of(database, factory.a_paused_run(database))
    assert "--call" not in cw("checkpoints", "show", asked).out
    assert "--call" not in cw("checkpoints", "list").err

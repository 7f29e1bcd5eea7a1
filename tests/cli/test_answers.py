"""`results provide`, `runs answers` and `checkpoints approve --call`: answers from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cortex_workers.engine import slot
from cortex_workers.store.database import Database
from cortex_workers.testing import factory
from tests.cli.conftest import Commands
from tests.engine.outside import TWO, A, B, paused
from tests.engine.world import World

SCOPE = ("--scope", "tenant=acme")


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    made = World(database_url)
    try:
        yield made
    finally:
        made.close()


def content_of(world: World, run_id: str, worker: Any) -> list[Any]:
    assert worker.work(run_id)["state"] == "completed"
    return [item.content for item in world.messages(run_id) if item.role == "tool"]


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

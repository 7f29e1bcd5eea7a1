"""`messages` and `deliveries` from the command line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.conftest import Commands
from tests.engine.talking import ANSWERS, ASKS, Talk
from tests.engine.world import World, looking_at


@pytest.fixture
def talk(database_url: str) -> Iterator[Talk]:
    with looking_at(database_url) as onlooker:
        world = World(onlooker)
        try:
            yield Talk(world, {"sales": ASKS, "pricing": ANSWERS})
        finally:
            world.close()


def test_a_message_is_sent_shown_and_read(cw: Commands, talk: Talk) -> None:
    said = cw("messages", "send", "pricing", "The dollar is up.", "--as", "ann", "--json")
    assert said.code == 0
    conversation = said.json["conversation_id"]
    listed = cw("messages", "conversations", "--json").json
    assert [item["id"] for item in listed] == [conversation]
    assert conversation in cw("messages", "conversations", "--status", "open").out
    shown = cw("messages", "show", conversation)
    assert "1 of 8 messages" in shown.out
    assert "ann → pricing (inform): The dollar is up." in shown.out
    assert "ann (inform): The dollar is up." in cw("messages", "inbox", "pricing").out
    again = cw("messages", "inbox", "pricing")
    assert (again.code, again.out) == (0, "")
    assert "The dollar is up." in cw("messages", "inbox", "pricing", "--all").out


def test_a_refused_message_is_one_line_with_its_code(cw: Commands, talk: Talk) -> None:
    said = cw("messages", "send", "nobody", "Hello")
    assert said.code == 1
    assert "[unknown_receiver]" in said.err
    assert cw("messages", "send", "pricing", "x", "--performative", "shout").code == 1
    assert cw("messages", "show", "conv_1").code == 1


def test_a_person_answers_a_run_that_waits(cw: Commands, talk: Talk) -> None:
    run_id = talk.begin("sales")
    said = cw("messages", "answer", run_id, "4 EUR")
    assert (said.code, said.out) == (0, f"{run_id}: answered\n")
    assert talk.worker.finish(run_id)["state"] == "completed"
    assert talk.result(run_id)["replies"][0]["sender"] == "cli:ann"
    said = cw("messages", "answer", run_id, "5 EUR")
    assert said.code == 1
    assert "[ask_not_found]" in said.err


def test_deliveries_are_listed_and_a_failed_one_goes_on_its_way_again(cw: Commands, talk: Talk) -> None:
    cw("messages", "send", "pricing", "Look.", "--performative", "request", "--as", "ann")
    (row,) = talk.queued()
    assert row["id"] in cw("deliveries", "list").out
    said = cw("deliveries", "redrive", row["id"])
    assert said.code == 1
    assert "[invalid_state]" in said.err
    talk.world.sql("update a2a_deliveries set receiver_agent = 'gone'")
    assert talk.deliver(row["id"]) == "refused"
    (failed,) = cw("deliveries", "list", "--state", "failed", "--json").json
    assert failed["fail_code"] == "receiver_gone"
    assert "receiver_gone" in cw("deliveries", "list").out
    said = cw("deliveries", "redrive", row["id"])
    assert (said.code, said.out) == (0, f"{row['id']}: queued\n")

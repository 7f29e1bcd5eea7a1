"""`checkpoints`: questions and answers, every refusal with its exit code."""

import json

import pytest

from cortex_workers.store.database import Database
from cortex_workers.testing import factory
from tests.cli.conftest import Commands

WHOLE = '{"order_id": "17", "amount_cents": 900}'


def test_what_waits_is_listed_with_its_call_and_deadline(cw: Commands, database: Database) -> None:
    run = factory.a_paused_run(database, ttl_s=5400)
    said = cw("checkpoints", "list")
    assert factory.checkpoint_of(database, run) in said.out
    assert "refund(" in said.out and "in 1 h" in said.out
    (listed,) = cw("checkpoints", "list", "--json").json
    assert listed["pending"][0]["arguments"] == factory.ARGUMENTS


def test_an_approval_is_recorded_with_who_and_why(cw: Commands, database: Database) -> None:
    run = factory.a_paused_run(database)
    asked = factory.checkpoint_of(database, run)
    said = cw("checkpoints", "approve", asked, "--reason", "seen it", "--by", "Ann", "--amend", WHOLE)
    assert (said.code, said.out) == (0, f"{asked} approved\n")
    assert factory.now(database, run["id"])["state"] == "ready"
    decision = cw("checkpoints", "show", asked, "--json").json["decision"]
    assert decision["amended_arguments"] == json.loads(WHOLE)
    assert (decision["actor"], decision["decided_by"], decision["reason"]) == ("cli:ann", "Ann", "seen it")
    assert "approved by Ann" in cw("checkpoints", "show", asked).out


def test_the_same_decision_again_is_done_another_is_refused_and_told(
    cw: Commands, database: Database
) -> None:
    asked = factory.checkpoint_of(database, factory.a_paused_run(database))
    assert cw("checkpoints", "approve", asked).code == 0
    assert cw("checkpoints", "approve", asked).code == 0
    said = cw("checkpoints", "reject", asked, "--reason", "no")
    assert said.code == 1 and "recorded: approved by cli:ann" in said.err
    document = cw("checkpoints", "reject", asked, "--json").json
    assert (document["error"], document["recorded"]["approved"]) == ("invalid_state", True)


def test_a_rejection_ends_the_run(cw: Commands, database: Database) -> None:
    run = factory.a_paused_run(database)
    said = cw("checkpoints", "reject", factory.checkpoint_of(database, run), "--reason", "not ours")
    assert said.code == 0
    assert factory.now(database, run["id"])["error_text"] == "checkpoint rejected: not ours"


def test_a_late_decision_is_refused(cw: Commands, database: Database) -> None:
    asked = factory.checkpoint_of(database, factory.a_paused_run(database, ttl_s=0.0))
    said = cw("checkpoints", "approve", asked)
    assert said.code == 1 and "[suspension_expired]" in said.err


@pytest.mark.parametrize(
    ("amend", "says"),
    [("{amount_cents: 500}", "at character 2"), ("[500]", "This is a list"), ("500", "This is a number")],
)
def test_amended_arguments_that_are_no_object_are_answered_with_what_is_wanted(
    cw: Commands, database: Database, amend: str, says: str
) -> None:
    asked = factory.checkpoint_of(database, factory.a_paused_run(database))
    said = cw("checkpoints", "approve", asked, "--amend", amend, "--json")
    message = said.json["message"]
    assert said.code == 2 and says in message
    assert "all arguments of the call as a JSON object, like '{" in message
    assert f"cortex-workers checkpoints show {asked}" in message


@pytest.mark.parametrize(
    ("amend", "code"),
    [("{", 2), ("[1]", 2), ("NaN", 2), ('{"amount_cents": "x"}', 1)],
)
def test_amended_arguments_that_do_not_fit_write_nothing(
    cw: Commands, database: Database, amend: str, code: int
) -> None:
    run = factory.a_paused_run(database)
    assert cw("checkpoints", "approve", factory.checkpoint_of(database, run), "--amend", amend).code == code
    assert factory.now(database, run["id"])["revision"] == run["revision"]


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--happened",),
        ("--happened", "--result", "not json"),
        ("--result", "1"),
        ("--did-not-happen", "--result", "1"),
        ("--happened", "--result", "1", "--stop"),
        ("--stop", "--now"),
    ],
)
def test_a_settlement_says_exactly_one_thing(
    cw: Commands, database: Database, words: tuple[str, ...]
) -> None:
    run = factory.an_uncertain_run(database)
    assert cw("checkpoints", "settle", factory.checkpoint_of(database, run), *words).code == 2
    assert factory.now(database, run["id"])["state"] == "paused"


@pytest.mark.parametrize(
    ("words", "state", "says"),
    [
        (("--happened", "--result", '"R-1"'), "ready", "settled as happened"),
        (("--did-not-happen", "--now"), "ready", "settled as did not happen"),
        (("--did-not-happen",), "ready", "settled as did not happen"),
        (("--stop", "--reason", "ask the bank"), "failed", "settled as stop"),
    ],
)
def test_an_uncertain_effect_is_settled(
    cw: Commands, database: Database, words: tuple[str, ...], state: str, says: str
) -> None:
    run = factory.an_uncertain_run(database)
    asked = factory.checkpoint_of(database, run)
    said = cw("checkpoints", "settle", asked, *words)
    assert (said.code, said.out) == (0, f"{asked} {says}\n")
    after = factory.now(database, run["id"])
    assert after["state"] == state
    # Without --now a "did not happen" is believed late: the old worker may still act.
    waits = words == ("--did-not-happen",)
    assert (after["wait_reason"] == "later") == waits
    assert cw("checkpoints", "settle", asked, *words).code == 0, "again changes nothing"


def test_an_uncertain_effect_is_not_approved(cw: Commands, database: Database) -> None:
    asked = factory.checkpoint_of(database, factory.an_uncertain_run(database))
    said = cw("checkpoints", "approve", asked)
    assert said.code == 1
    assert all(word in said.err for word in ("happened", "did_not_happen", "stop", "[invalid_decision]"))


def test_what_is_known_of_an_uncertain_call_is_shown(cw: Commands, database: Database) -> None:
    run = factory.an_uncertain_run(database)
    asked = factory.checkpoint_of(database, run)
    said = cw("checkpoints", "show", asked)
    assert "on worker worker-a, attempt 1" in said.out
    assert f"checkpoints settle {asked} --happened" in said.out
    (known,) = cw("checkpoints", "show", asked, "--json").json["evidence"]
    assert (known["state"], known["term_owner"], known["late_result"]) == ("started", "worker-a", None)

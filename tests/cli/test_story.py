"""`runs show`: a run told in order, and what it waits for, from rows alone."""

import re
from datetime import timedelta

import pytest
from sqlalchemy import text

from cortex_workers.operate import words
from cortex_workers.schemas.lease import Term
from cortex_workers.schemas.lifecycle import RUN as RUN_MACHINE
from cortex_workers.schemas.lifecycle import RunState
from cortex_workers.store import transcript, turns
from cortex_workers.store.database import Database
from cortex_workers.store.transitions import Guard, Move, Row
from cortex_workers.testing import factory
from tests.cli.conftest import Commands, a_worker


def _story(cw: Commands, run: Row) -> list[str]:
    """The lines of the timeline without their times."""
    said = cw("runs", "show", run["id"])
    assert said.code == 0
    lines = said.out.splitlines()
    found = [re.sub(r"^(\d\d:\d\d:\d\d\.\d{3})\s+(\+[\w. ]+?  )?\s*", "", line) for line in lines]
    return [line.rstrip() for line, whole in zip(found, lines, strict=True) if whole[2:3] == ":"]


def _next(cw: Commands, run: Row) -> str:
    return str(cw("runs", "show", run["id"], "--json").json["next"])


def test_a_run_with_an_approval_is_told_in_order(cw: Commands, database: Database) -> None:
    run = factory.a_run(database)
    held = factory.a_running_run(database, run=run, owner="host-1:77:a")
    paused = factory.a_paused_run(database, run=held)
    asked = factory.checkpoint_of(database, paused)
    cw("checkpoints", "approve", asked, "--reason", "seen it", "--by", "Ann")
    held = factory.a_running_run(database, run=factory.now(database, run["id"]), owner="host-2:78:b")
    factory.an_ended_run(database, RunState.COMPLETED, run=held)
    story = _story(cw, run)
    assert [line.split(" (")[0].split(" until")[0] for line in story] == [
        "enqueued for agent support",
        "claimed by worker host-1:77:a",
        "step 0: scripted:factory, 0 in, 0 out, 0 ms → refund",
        'call refund({"order_id": "17", "amount_cents": 1900}) waits',
        f"paused: {asked} asks for approval of refund",
        "approved by Ann",
        "claimed by worker host-2:78:b",
        "completed",
    ]
    shown = cw("runs", "show", run["id"]).out
    assert "reason: seen it" in shown and "output: Done." in shown and "(as cli:ann)" in shown
    assert shown.rstrip().endswith("next  ended: completed")


def test_a_run_that_lost_its_worker_in_a_call_is_told_with_what_came_too_late(
    cw: Commands, database: Database
) -> None:
    run = factory.an_uncertain_run(database)
    asked = factory.checkpoint_of(database, run)
    (call,) = _calls(database, run)
    late = Term(run_id=run["id"], owner="worker-a", revision=call["term_revision"])
    database.run(lambda unit: transcript.write_late_result(unit, late, call["call_id"], "paid, receipt R-1"))
    story = _story(cw, run)
    kinds = [line.split(" ")[0].rstrip(":") for line in story]
    assert kinds == ["enqueued", "claimed", "step", "call", "lease", "claimed", "paused"]
    shown = cw("runs", "show", run["id"]).out
    assert "started, no outcome yet" in shown and "paid, receipt R-1 (evidence only)" in shown
    assert f"paused: {asked} asks what became of refund" in shown
    assert f"cortex-workers checkpoints settle {asked} --happened" in _next(cw, run)


@pytest.mark.parametrize("words", [("checkpoints", "reject"), ("runs", "cancel")])
def test_a_call_that_ended_with_its_run_stands_behind_the_end(
    cw: Commands, database: Database, words: tuple[str, str]
) -> None:
    run = factory.a_paused_run(database)
    cw(*words, factory.checkpoint_of(database, run) if words[0] == "checkpoints" else run["id"])
    kinds = [line.split(" ")[0].rstrip(":") for line in _story(cw, run)]
    assert kinds == [
        "enqueued",
        "claimed",
        "step",
        "paused",
        {"reject": "rejected"}.get(words[1], "cancelled"),
        "call",
    ]


def test_an_earlier_attempt_of_a_call_is_told_with_the_question_about_it(
    cw: Commands, database: Database
) -> None:
    run = factory.an_uncertain_run(database)
    asked = factory.checkpoint_of(database, run)
    assert cw("checkpoints", "settle", asked, "--did-not-happen", "--now").code == 0
    held = factory.a_running_run(database, run=factory.now(database, run["id"]), owner="host-2:78:b")
    calls = _calls(database, run)
    database.run(lambda unit: transcript.record_start(unit, factory.term_of(held), calls))
    shown = cw("runs", "show", run["id"], COLUMNS="200").out
    assert "started, attempt 2, no outcome yet" in shown
    assert f"attempt 1 left no outcome; {asked} asked what became of it" in shown


def test_a_run_that_only_waits_is_not_told_in_nothings(cw: Commands, database: Database) -> None:
    head = cw("runs", "show", factory.a_run(database)["id"]).out.splitlines()[2]
    assert "ready since then, 0 steps, 0 tokens in" in head and " ms" not in head


def _calls(database: Database, run: Row) -> list[Row]:
    with database.read() as unit:
        return transcript.load_calls(unit, run["id"])


def test_contents_are_cut_unless_all_is_wanted(cw: Commands, database: Database) -> None:
    run = factory.a_run(database, text="x" * 5000)
    assert len(cw("runs", "show", run["id"]).out) < 2000
    assert "x" * 5000 in cw("runs", "show", run["id"], "--full", "--json").out


def test_the_document_for_machines_has_ids_times_and_terms(cw: Commands, database: Database) -> None:
    run = factory.a_paused_run(database, calls=2)
    found = cw("runs", "show", run["id"], "--json").json
    by_name = {entry["data"].get("name"): entry for entry in found["entries"]}
    assert by_name["claim"]["data"]["worker_id"] == "worker-a"
    assert by_name["pause"]["data"]["checkpoint_id"] == factory.checkpoint_of(database, run)
    assert by_name["pause"]["data"]["calls"] == ["call_0_0", "call_0_1"]
    assert [entry["ordinal"] for entry in found["entries"]] == sorted(
        entry["ordinal"] for entry in found["entries"]
    )
    assert found["run"]["id"] == run["id"]


@pytest.mark.parametrize("row", [row for row in RUN_MACHINE if row.sources], ids=lambda row: row.name)
def test_every_transition_has_words(row: object) -> None:
    from cortex_workers.operate import story

    assert row.name in story._SAID  # type: ignore[attr-defined]


# --- What it waits for ------------------------------------------------------------------------------------------------


def test_a_paused_run_waits_for_a_decision_until_its_deadline(cw: Commands, database: Database) -> None:
    run = factory.a_paused_run(database, ttl_s=7200)
    hint = _next(cw, run)
    assert hint.startswith("waits for a decision on refund until 2")
    assert f"cortex-workers checkpoints approve {factory.checkpoint_of(database, run)}" in hint
    assert "no deadline" in _next(cw, factory.a_paused_run(database, ttl_s=None))
    assert "the next sweep expires it" in _next(cw, factory.a_paused_run(database, ttl_s=0.0))


def test_a_ready_run_waits_for_a_worker_that_serves_it(cw: Commands, database: Database) -> None:
    factory.an_agent(database)
    run = factory.a_run(database)
    assert "no live worker of pool main has an agent named support" in _next(cw, run)
    a_worker(database)
    assert "1 live worker with 10 free slots will take it" in _next(cw, run)
    with database.transaction() as unit:
        unit.execute(text("update workers set slots_used = slots"))
    assert "start more workers" in _next(cw, run)


def test_a_run_in_a_session_waits_for_its_turn(cw: Commands, database: Database) -> None:
    first = factory.a_run(database, session="chat")
    second = factory.a_run(database, session="chat")
    hint = _next(cw, second)
    assert hint.startswith(f"waits for its turn in {first['session_id']}") and f"{first['id']} has it" in hint


def test_a_run_that_was_handed_back_waits_for_a_time(cw: Commands, database: Database) -> None:
    run = factory.a_running_run(database)
    wait = Move(values=turns.delay(600, 10.0), data={"reason": "principal_undecodable"})
    factory.move(database, "hand_back", run, Guard(term=factory.term_of(run)), wait)
    hint = _next(cw, run)
    assert hint.startswith("waits until 2") and "principal_undecodable" in hint


def test_a_running_run_is_held_and_a_silent_worker_is_told(cw: Commands, database: Database) -> None:
    held = factory.a_running_run(database, owner="host-1:77:a")
    assert _next(cw, held).startswith("held by worker host-1:77:a until ")
    silent = factory.a_running_run(database, owner="host-1:78:b", ttl_s=0.0)
    assert "host-1:78:b is silent" in _next(cw, silent) and "cortex-workers sweep" in _next(cw, silent)


def test_a_cancelled_run_says_until_when_its_worker_may_act(cw: Commands, database: Database) -> None:
    run = factory.an_ended_run(database, RunState.CANCELLED)
    assert "its worker may still act until" in _next(cw, run)


def test_a_run_for_a_newer_version_says_so(cw: Commands, database: Database) -> None:
    run = factory.a_run(database, min_reader=99)
    assert "needs a newer version" in _next(cw, run)


# --- Words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "0 ms"), (0.0004, "0 ms"), (-0.0004, "0 ms"),
        (0.25, "250 ms"), (0.9996, "1.0 s"), (1.25, "1.2 s"), (9.94, "9.9 s"),
        (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 min"), (61, "1 min 1 s"), (3600, "1 h"), (3660, "1 h 1 min"),
        (90_000, "1 d 1 h"), (86_400, "1 d"), (-5, "-5.0 s"),
    ],
)  # fmt: skip
def test_spans_are_said_in_at_most_two_units(seconds: float, said: str) -> None:
    assert words.span(seconds) == said
    assert words.span(timedelta(seconds=seconds)) == said


def test_a_text_is_put_on_one_line_and_cut() -> None:
    assert words.cut("a\n  b\tc", 5) == "a b c"
    assert words.cut("abcdef", 5) == "abcd…"
    assert words.cut("abcdef", None) == "abcdef"

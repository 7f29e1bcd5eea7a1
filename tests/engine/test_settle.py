"""Settling an uncertain effect: happened, did not happen, or stop."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cortex_workers import Client
from cortex_workers.engine import dispatch, slot
from cortex_workers.errors import (
    CheckpointNotFound,
    CortexError,
    InputTooLarge,
    InvalidDecision,
    InvalidId,
    InvalidState,
    UnstorableText,
)
from cortex_workers.schemas.checkpoint import Checkpoint
from cortex_workers.schemas.ids import CHECKPOINT, new_id
from cortex_workers.store import tables, turns
from tests.engine.world import Worker, World, call, only, results, say, turn

SHIP = [turn(call("ship", order="17")), say()]


@pytest.fixture
def uncertain(world: World) -> tuple[Client, Worker, str, str]:
    """A run whose worker died right after the effect."""
    return ask(world)


def ask(world: World, script: Any = None, **options: Any) -> tuple[Client, Worker, str, str]:
    world.shop(script or SHIP, **options)
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Go", session="chat").id
    worker.lose_at("tool.after_handler", run_id)
    assert worker.work(run_id)["state"] == "paused"
    return client, worker, run_id, only(client.checkpoints()).id


Uncertain = tuple[Client, Worker, str, str]


def test_happened_gives_the_model_the_result_and_runs_nothing(world: World, uncertain: Uncertain) -> None:
    client, worker, run_id, checkpoint_id = uncertain
    settled = client.settle(
        checkpoint_id, "happened", result={"parcel": 5}, decided_by="The boss", reason="saw it"
    )
    assert (settled.state, settled.closed_as) == ("resolved", "settled")
    assert settled.decision is not None
    assert (settled.decision.outcome, settled.decision.result) == ("happened", {"parcel": 5})
    run = world.run(run_id)
    assert (run["state"], run["instruction"], run["wait_reason"]) == ("ready", "answer", None)
    row = world.call(run_id)
    assert (row["state"], row["settled_as"], row["settled_by"]) == ("completed", "happened", "The boss")
    assert worker.work(run_id)["output"] == 'Done: {"parcel":5}'
    assert len(world.effects) == 1
    assert world.pauses(run_id)[0]["ended_as"] == "answered"


def test_did_not_happen_runs_the_call_again_under_the_same_key_after_the_wait(
    world: World, uncertain: Uncertain
) -> None:
    client, worker, run_id, checkpoint_id = uncertain
    fenced = world.run(run_id)["fenced_until"]
    client.settle(checkpoint_id, "did_not_happen")
    run = world.run(run_id)
    # As a negative lookup, a person is believed when the old worker can no longer act.
    assert (run["state"], run["wait_reason"]) == ("ready", "later")
    assert (run["not_before"] - fenced).total_seconds() == pytest.approx(600, abs=4)
    assert slot.claim_named(worker.rt, run_id) is None
    world.later(601)
    world.database.run(lambda unit: turns.recompute(unit, run["session_id"]))
    assert worker.work(run_id)["output"] == "Done: ship done"
    assert len(world.effects) == 2
    assert len({effect.key for effect in world.effects}) == 1
    row = world.call(run_id)
    assert (row["state"], row["attempt"], row["settled_by"]) == ("completed", 2, "ops")


def test_the_wait_can_be_skipped_and_that_is_recorded(world: World, uncertain: Uncertain) -> None:
    client, worker, run_id, checkpoint_id = uncertain
    client.settle(checkpoint_id, "did_not_happen", now=True)
    assert world.run(run_id)["wait_reason"] is None
    assert world.events(run_id)[-1]["data"]["now"] is True
    assert worker.work(run_id)["state"] == "completed"


def test_the_wait_can_be_ended_later_by_saying_so(world: World, uncertain: Uncertain) -> None:
    client, worker, run_id, checkpoint_id = uncertain
    client.settle(checkpoint_id, "did_not_happen")
    assert world.run(run_id)["wait_reason"] == "later"
    client.settle(checkpoint_id, "did_not_happen", now=True)
    assert world.run(run_id)["wait_reason"] is None
    assert worker.work(run_id)["state"] == "completed"
    assert world.rows(tables.events, tables.events.c.kind == "run.hurry")[0]["actor"] == "ops"


def test_a_person_who_answers_after_the_wait_does_not_wait(world: World, uncertain: Uncertain) -> None:
    client, worker, run_id, checkpoint_id = uncertain
    world.later(700)
    client.settle(checkpoint_id, "did_not_happen")
    assert worker.work(run_id)["state"] == "completed"


def test_a_proof_that_the_handler_was_never_entered_needs_no_wait(world: World, uncertain: Uncertain) -> None:
    client, worker, run_id, checkpoint_id = uncertain
    world.sql("update tool_calls set late_result = :text", text=dispatch.NEVER_ENTERED)
    client.settle(checkpoint_id, "did_not_happen")
    assert world.run(run_id)["wait_reason"] is None
    assert worker.work(run_id)["state"] == "completed"


def test_a_call_that_was_settled_and_died_again_is_asked_about_again(
    world: World, uncertain: Uncertain
) -> None:
    client, worker, run_id, checkpoint_id = uncertain
    client.settle(checkpoint_id, "did_not_happen", now=True)
    worker.lose_at("tool.after_handler", run_id)
    assert worker.work(run_id)["state"] == "paused"
    newer = only(client.checkpoints())
    assert newer.id != checkpoint_id
    assert newer.metadata["attempt"] == 2
    assert len(world.effects) == 2
    client.settle(newer.id, "happened", result="yes")
    assert worker.work(run_id)["output"] == "Done: yes"


def test_an_answer_outlives_a_worker_that_died_before_running_the_call_again(
    world: World, uncertain: Uncertain
) -> None:
    client, worker, run_id, checkpoint_id = uncertain
    client.settle(checkpoint_id, "did_not_happen", now=True)
    worker.lose_at("tool.before_start_record", run_id)
    world.later(31)
    world.database.run(lambda unit: turns.recompute(unit, world.run(run_id)["session_id"]))
    assert worker.work(run_id)["state"] == "completed"
    assert client.checkpoints() == []


def test_stop_fails_the_run_and_leaves_the_call_as_it_is(world: World, uncertain: Uncertain) -> None:
    client, _worker, run_id, checkpoint_id = uncertain
    settled = client.settle(checkpoint_id, "stop", reason="too risky")
    run = world.run(run_id)
    assert (run["state"], run["error_code"]) == ("failed", "effect_uncertain")
    assert "too risky" in run["error_text"]
    row = world.call(run_id)
    assert (row["state"], row["settled_as"]) == ("started", "stop")
    assert settled.closed_as == "settled"
    assert sorted(world.notified(run_id)[-2:]) == ["CheckpointResolved", "RunFailed"]


def test_a_result_that_is_text_is_told_as_it_is(world: World, uncertain: Uncertain) -> None:
    client, worker, run_id, checkpoint_id = uncertain
    client.settle(checkpoint_id, "happened", result='"quoted"')
    worker.work(run_id)
    assert results(world.messages(run_id)) == ['"quoted"']


def test_no_result_is_a_result(world: World, uncertain: Uncertain) -> None:
    client, worker, run_id, checkpoint_id = uncertain
    client.settle(checkpoint_id, "happened")
    worker.work(run_id)
    assert results(world.messages(run_id)) == ["null"]


def test_a_long_result_is_cut_with_a_notice(world: World, uncertain: Uncertain) -> None:
    client, worker, run_id, checkpoint_id = uncertain
    client.settle(checkpoint_id, "happened", result="x" * (2 << 20))
    worker.work(run_id)
    (told,) = results(world.messages(run_id))
    assert len(told) == 1 << 20
    assert "[cut: this result has 2097152 bytes" in told


def test_what_a_person_changed_is_told_with_the_result(world: World) -> None:
    world.shop([turn(call("pay", amount=5)), say()])
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Go").id
    worker.work(run_id)
    client.decide(only(client.checkpoints()).id, approved=True, amended_arguments={"amount": 3})
    worker.lose_at("tool.after_handler", run_id)
    worker.work(run_id)
    client.settle(only(client.checkpoints()).id, "happened", result="paid")
    told = worker.work(run_id)["output"]
    assert '{"amount": 3}' in told
    assert told.endswith("paid")


WRONG: list[tuple[str, dict[str, Any], type[CortexError]]] = [
    ("another word", {"outcome": "maybe"}, InvalidDecision),
    ("approved", {"outcome": "approved"}, InvalidDecision),
    ("no word", {"outcome": None}, InvalidDecision),
    ("a result of what did not happen", {"outcome": "did_not_happen", "result": 1}, InvalidDecision),
    ("a result of a stop", {"outcome": "stop", "result": 1}, InvalidDecision),
    ("a result that is no JSON", {"result": object()}, InvalidDecision),
    ("a set", {"result": {1, 2}}, InvalidDecision),
    ("NaN", {"result": float("nan")}, InvalidDecision),
    ("NUL", {"result": "a\x00"}, UnstorableText),
    ("NUL inside", {"result": {"a": ["\x00"]}}, UnstorableText),
    ("half a character", {"result": "\ud800"}, UnstorableText),
    ("nine MiB", {"result": "x" * (9 << 20)}, InputTooLarge),
    ("NUL in the reason", {"reason": "\x00"}, UnstorableText),
    ("a mechanism", {"decided_by": "cortex:timer"}, InvalidDecision),
]


def test_a_settlement_that_is_wrong_in_itself_moves_nothing(
    world: World, uncertain: Uncertain, subtests: pytest.Subtests
) -> None:
    client, _worker, _run_id, checkpoint_id = uncertain
    before = world.snapshot()
    for name, wrong, error in WRONG:
        with subtests.test(name):
            with pytest.raises(error):
                client.settle(checkpoint_id, **{"outcome": "happened", **wrong})
            assert world.snapshot() == before
    for missing, kind in (("17", InvalidId), (new_id(CHECKPOINT), CheckpointNotFound)):
        with pytest.raises(kind):
            client.settle(missing, "stop")
    assert world.snapshot() == before


def test_an_approval_is_not_settled(world: World) -> None:
    world.shop([turn(call("pay", amount=5)), say()])
    worker, client = world.worker(), world.client()
    worker.work(client.enqueue("support", "Go").id)
    before = world.snapshot()
    for outcome in ("happened", "did_not_happen", "stop"):
        with pytest.raises(InvalidDecision, match="approve or reject"):
            client.settle(only(client.checkpoints()).id, outcome)
    assert world.snapshot() == before


@pytest.mark.parametrize("result", ["text", {"a": [1, 2.5, None]}, datetime(2026, 1, 2, tzinfo=UTC), (1, 2)])
def test_the_same_settlement_again_returns_what_was_recorded(
    world: World, uncertain: Uncertain, result: Any
) -> None:
    client, worker, run_id, checkpoint_id = uncertain
    first = client.settle(checkpoint_id, "happened", result=result)
    before = world.snapshot()
    assert client.settle(checkpoint_id, "happened", result=result) == first
    assert world.snapshot() == before
    for other in (
        {"outcome": "happened", "result": "other"},
        {"outcome": "did_not_happen"},
        {"outcome": "stop"},
    ):
        with pytest.raises(InvalidState, match="happened") as refused:
            client.settle(checkpoint_id, **other)
        assert refused.value.data["recorded"] == first.decision
    assert worker.work(run_id)["state"] == "completed"
    assert client.settle(checkpoint_id, "happened", result=result) == first


def test_of_settlements_at_one_instant_one_wins(world: World, uncertain: Uncertain) -> None:
    client, worker, run_id, checkpoint_id = uncertain
    outcomes = ["happened", "did_not_happen", "stop", "happened"]
    start = threading.Barrier(len(outcomes))

    def settle(outcome: str) -> Any:
        start.wait()
        try:
            return client.settle(checkpoint_id, outcome, now=True)
        except InvalidState as error:
            return error

    with ThreadPoolExecutor(len(outcomes)) as pool:
        found = list(pool.map(settle, outcomes))
    won = {item.decision.outcome for item in found if isinstance(item, Checkpoint) and item.decision}
    assert len(won) == 1
    if world.run(run_id)["state"] == "ready":
        worker.work(run_id)
    assert world.run(run_id)["state"] == ("failed" if won == {"stop"} else "completed")
    assert len(world.effects) == (2 if won == {"did_not_happen"} else 1)


def test_a_cancel_comes_before_a_settlement(world: World, uncertain: Uncertain) -> None:
    client, _worker, run_id, checkpoint_id = uncertain
    client.cancel(run_id)
    with pytest.raises(InvalidState, match="cancelled"):
        client.settle(checkpoint_id, "happened", result="yes")
    # The run is over; that something may have happened stays on record.
    assert world.call(run_id)["state"] == "started"
    assert client.checkpoints() == []


def test_a_held_session_accepts_facts_and_its_run_waits(world: World, uncertain: Uncertain) -> None:
    client, worker, run_id, checkpoint_id = uncertain
    world.sql("update sessions set gated_at = now()")
    client.settle(checkpoint_id, "happened", result="yes")
    assert (world.run(run_id)["state"], world.run(run_id)["wait_reason"]) == ("ready", "gate")
    assert slot.claim_named(worker.rt, run_id) is None


def test_a_settled_run_goes_before_those_that_never_began(world: World, uncertain: Uncertain) -> None:
    client, worker, run_id, checkpoint_id = uncertain
    second = client.enqueue("support", "2", session="chat").id
    client.settle(checkpoint_id, "happened", result="yes")
    assert [world.run(item)["wait_reason"] for item in (run_id, second)] == [None, "turn"]
    assert worker.work(run_id)["state"] == "completed"


def test_a_run_that_waits_for_its_old_worker_still_has_its_turn(world: World) -> None:
    world.shop(SHIP)
    tool = world.host.tools["ship"]
    tool.spec = tool.spec.model_copy(update={"timeout_s": 5.0})
    worker, client = world.worker(), world.client()
    one, two = (client.enqueue("support", text, session="chat").id for text in "12")
    worker.lose_at("tool.after_handler", one)
    worker.work(one)
    client.settle(only(client.checkpoints()).id, "did_not_happen")
    run = world.run(one)
    assert (run["wait_reason"], world.run(two)["wait_reason"]) == ("later", "turn")
    assert run["not_before"] - run["fenced_until"] == pytest.approx(
        timedelta(seconds=35), abs=timedelta(seconds=4)
    )

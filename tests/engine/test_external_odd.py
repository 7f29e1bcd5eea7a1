"""Answers from outside at odd hours and of odd sizes; processes that answer and go on by themselves."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event

from cortex_workers.engine import expire
from cortex_workers.errors import (
    AdmissionConflict,
    InputTooLarge,
    NoHost,
    NotPausedYet,
    RequiresApproval,
    ResultsMismatch,
    RunAlreadyDone,
    SuspensionExpired,
)
from cortex_workers.schemas.admission import MAX_RESUME_INPUT_BYTES
from tests.engine.outside import ONE, TWO, A, B, C, error, kept_answers, paused, result
from tests.engine.world import World, call, results, say, turn

# --- Odd hours and odd sizes ------------------------------------------------------------------------------------------


def test_a_last_answer_that_meets_the_deadline_takes_nothing_that_was_confirmed(world: World) -> None:
    """The deadline passes after the last answer was found to be in time and before it is admitted."""
    client, worker, run_id = paused(
        world, TWO, tool={"ttl": timedelta(seconds=60), "on_expiry": "return_to_model"}
    )
    assert client.provide_result(run_id, result(A, "in time")) is None

    def read(_connection: Any, _cursor: Any, sql: str, *_rest: Any) -> None:
        if sql.startswith("SELECT pending_calls.answer"):
            world.later(61)

    event.listen(client.runtime.database.engine, "before_cursor_execute", read)
    with pytest.raises(SuspensionExpired):
        client.provide_result(run_id, result(B, "late"))
    assert len(kept_answers(world, run_id)) == 1
    assert expire.expire_pause(worker.rt, world.run(run_id)["suspension_id"])
    assert worker.work(run_id)["state"] == "completed"
    assert results(world.messages(run_id))[0] == "in time"


def test_what_is_confirmed_one_by_one_must_fit_as_a_whole(world: World) -> None:
    client, worker, run_id = paused(world, TWO)
    for size in (MAX_RESUME_INPUT_BYTES + 1, MAX_RESUME_INPUT_BYTES - 200):
        with pytest.raises(InputTooLarge):
            client.provide_result(run_id, result(A, "x" * size))
    assert client.provide_result(run_id, result(A, "x" * (MAX_RESUME_INPUT_BYTES - 2_000))) is None
    with pytest.raises(InputTooLarge):
        client.provide_result(run_id, result(B, "y" * 5_000))
    assert client.provide_result(run_id, error(B, "it did not fit")) is not None
    assert worker.work(run_id)["state"] == "completed"


def test_nobody_who_looks_at_a_pause_reads_the_answers_that_it_keeps(world: World) -> None:
    client, _, run_id = paused(world, TWO)
    client.provide_result(run_id, result(A, "kept"))
    assert all("answer" not in call for call in world.pending(world.run(run_id)["suspension_id"]))


def test_a_result_for_a_later_pause_of_the_turn_is_early_and_not_wrong(world: World) -> None:
    script = [turn(call("pay", amount=1), call("quote", item="lamp"), call("quote", wrong=1)), say()]
    client, worker, run_id = paused(world, script)
    for door in (
        lambda: client.provide_result(run_id, result(B), patience_s=0),
        lambda: client.provide_results(run_id, [result(B)], patience_s=0),
    ):
        with pytest.raises(NotPausedYet):
            door()
    # Neither the call that waits for the approval, nor one that was refused for its arguments, will ever take any.
    with pytest.raises(RequiresApproval):
        client.provide_results(run_id, [result(A)], patience_s=0)
    with pytest.raises((RequiresApproval, ResultsMismatch)):
        client.provide_result(run_id, result(C), patience_s=0)
    (asked,) = client.checkpoints(run_id=run_id)
    client.decide(asked.id, approved=True)
    assert worker.work(run_id)["state"] == "paused"
    assert client.provide_result(run_id, result(B)) is not None
    assert worker.work(run_id)["state"] == "completed"


def test_whoever_repeats_an_answer_that_was_kept_is_told_the_same_whatever_became_of_the_pause(
    world: World,
) -> None:
    client, worker, run_id = paused(
        world, TWO, tool={"ttl": timedelta(seconds=60), "on_expiry": "return_to_model"}
    )
    repeat = lambda: client.provide_result(run_id, result(A, "kept"))  # noqa: E731  said four times
    assert repeat() is None
    world.later(61)
    assert repeat() is None
    assert expire.expire_pause(worker.rt, world.run(run_id)["suspension_id"])
    assert repeat() is None
    assert worker.work(run_id)["state"] == "completed"
    assert repeat() is None
    with pytest.raises(AdmissionConflict):
        client.provide_result(run_id, result(A, "another"))


@pytest.mark.parametrize("other", [True, 1.0, "1"], ids=repr)
def test_a_value_that_only_python_takes_for_the_same_is_another_answer(world: World, other: Any) -> None:
    client, _, run_id = paused(world, ONE)
    assert client.provide_result(run_id, result(A, 1)) is not None
    with pytest.raises(AdmissionConflict):
        client.provide_result(run_id, result(A, other))


def test_an_answer_of_a_hundred_thousand_results_is_too_large(world: World) -> None:
    client, _, run_id = paused(world, ONE)
    with pytest.raises(InputTooLarge, match="at most"):
        client.provide_results(run_id, [result(f"call_{index}") for index in range(100_000)])


def test_whoever_runs_an_approved_call_outside_is_shown_what_a_person_made_of_it(world: World) -> None:
    client, worker, run_id = paused(world, ONE, tool={"needs_approval": True})
    (asked,) = client.checkpoints(run_id=run_id)
    client.decide(asked.id, approved=True, amended_arguments={"item": "chair"})
    assert worker.work(run_id)["state"] == "paused"
    waits = [event.data for event in client.stream(run_id) if event.kind == "suspended"]
    waiting = client.suspension(run_id)
    assert waiting is not None
    assert [(each.kind, each.runs_with) for each in waiting.pending] == [("external", {"item": "chair"})]
    assert [item["pending"][0]["arguments"] for item in waits] == ['{"item": "desk"}', '{"item": "chair"}']
    assert (world.call(run_id)["executed_args"], world.call(run_id)["amended_by"]) == (
        '{"item": "chair"}',
        "ops",
    )


def test_a_process_with_a_host_answers_and_goes_on_by_itself(world: World) -> None:
    client, _, run_id = paused(world, TWO)
    here = world.client(host=world.host)
    run = here.resume(run_id, [result(A), result(B)])
    assert (run.state, run.output) == ("completed", "Done.")
    with pytest.raises(RunAlreadyDone):
        here.resume(run_id, [result(A), result(B)])
    assert len(client.admissions(run_id).admissions) == 1


def test_a_process_without_a_host_records_nothing_by_a_resume(world: World) -> None:
    client, _, run_id = paused(world, ONE)
    with pytest.raises(NoHost):
        client.resume(run_id, [result(A)])
    assert client.admissions(run_id).admissions == ()

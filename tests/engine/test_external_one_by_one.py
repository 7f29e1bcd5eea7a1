"""Results one by one, results that are early, and pauses of several kinds in one turn."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import permutations
from typing import Any

import pytest
from sqlalchemy import event

from cortex_workers import Client
from cortex_workers.engine import expire
from cortex_workers.errors import (
    AdmissionConflict,
    CortexError,
    InvalidState,
    NotPausedYet,
    NotSuspended,
    RequiresApproval,
    ResultsMismatch,
    StoreUnavailable,
)
from cortex_workers.schemas.admission import ResumeAdmission
from cortex_workers.store import tables
from cortex_workers.testing.clock import stopped_clock
from tests.engine import outside
from tests.engine.outside import ONE, THREE, TWO, A, B, C, admissions_of, error, kept_answers, paused, result
from tests.engine.world import World, at, call, only, results, say, turn

# --- One call after the other ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(permutations([A, B, C])), ids="-".join)
def test_single_answers_wait_for_one_another_in_any_order(world: World, order: tuple[str, ...]) -> None:
    client, worker, run_id = paused(world, THREE)
    for call_id in order[:-1]:
        assert client.provide_result(run_id, result(call_id, f"of {call_id}")) is None
        assert world.run(run_id)["state"] == "paused"
    admitted = client.provide_result(run_id, result(order[-1], f"of {order[-1]}"))
    assert admitted is not None
    assert (admitted.fresh, admitted.door) == (True, "provide_result")
    # Bytes have one home.
    assert kept_answers(world, run_id) == []
    assert worker.work(run_id)["state"] == "completed"
    assert results(world.messages(run_id)) == [f"of {call_id}" for call_id in (A, B, C)]
    # The whole form with the same results is the same answer.
    whole = client.provide_results(run_id, [result(call_id, f"of {call_id}") for call_id in (A, B, C)])
    assert whole.digest() == admitted.digest()


def test_a_single_answer_again_is_kept_and_another_is_refused(world: World) -> None:
    client, _worker, run_id = paused(world, TWO)
    assert client.provide_result(run_id, result(A, {"a": 1, "b": 2})) is None
    before = world.snapshot()
    assert client.provide_result(run_id, result(A, {"b": 2, "a": 1})) is None
    with pytest.raises(AdmissionConflict):
        client.provide_result(run_id, result(A, "other"))
    with pytest.raises(AdmissionConflict):
        client.provide_result(run_id, error(A, "no"))
    with pytest.raises(ResultsMismatch):
        client.provide_result(run_id, result("call_9_9"), patience_s=0)
    with pytest.raises(InvalidState, match=B):
        client.provide_results(run_id, [result(A, {"a": 1, "b": 2}), result(B)])
    assert world.snapshot() == before


def together(actions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Do it all at one instant; an error is an answer."""
    start = threading.Barrier(len(actions))

    def act(action: Callable[[], Any]) -> Any:
        start.wait(30)
        try:
            return action()
        except CortexError as refusal:
            return refusal

    with ThreadPoolExecutor(len(actions)) as pool:
        return list(pool.map(act, actions))


@pytest.mark.parametrize("round_", range(3))
def test_the_last_two_single_answers_at_one_instant_admit_once(world: World, round_: int) -> None:
    """Bug case C45."""
    client, worker, run_id = paused(world, THREE)
    assert client.provide_result(run_id, result(B, "2")) is None
    one, other = world.client(), world.client()
    answers = together(
        [
            lambda: one.provide_result(run_id, result(A, "1")),
            lambda: other.provide_result(run_id, result(C, "3")),
        ]
    )
    assert sum(isinstance(answer, ResumeAdmission) and answer.fresh for answer in answers) == 1
    assert sum(answer is None for answer in answers) == 1
    assert len(admissions_of(world, run_id)) == 1
    assert worker.work(run_id)["state"] == "completed"
    assert results(world.messages(run_id)) == ["1", "2", "3"]


def test_two_answers_to_one_call_at_one_instant_and_the_first_stands(world: World) -> None:
    """Bug case C45, the second part."""
    client, worker, run_id = paused(world, TWO)
    clients = [world.client() for _ in range(6)]
    answers = together(
        [
            (lambda who=who, text=f"{number % 2}": who.provide_result(run_id, result(A, text)))
            for number, who in enumerate(clients)
        ]
    )
    assert {type(answer) for answer in answers} == {type(None), AdmissionConflict}
    (kept,) = kept_answers(world, run_id)
    first = json.loads(bytes(kept))["content"]
    assert [number for number, answer in enumerate(answers) if answer is None] == [
        number for number in range(6) if f"{number % 2}" == first
    ]
    client.provide_result(run_id, result(B, "b"))
    worker.work(run_id)
    assert results(world.messages(run_id)) == [first, "b"]


@pytest.mark.parametrize("round_", range(3))
def test_the_whole_form_never_passes_over_a_single_answer_that_was_confirmed(
    world: World, round_: int
) -> None:
    _client, worker, run_id = paused(world, TWO)
    one, other = world.client(), world.client()
    single, whole = together(
        [
            lambda: one.provide_result(run_id, result(A, "single")),
            lambda: other.provide_results(run_id, [result(A, "whole"), result(B)]),
        ]
    )
    if single is None:
        assert isinstance(whole, InvalidState)
        assert one.provide_result(run_id, result(B)) is not None
    else:
        assert isinstance(whole, ResumeAdmission)
        assert isinstance(single, AdmissionConflict)
    worker.work(run_id)
    wanted = "single" if single is None else "whole"
    assert results(world.messages(run_id))[0] == wanted


def test_the_same_answer_from_everybody_at_once_admits_once(world: World) -> None:
    _client, worker, run_id = paused(world, TWO)
    clients = [world.client() for _ in range(10)]
    given = [result(A, "1"), result(B, "2")]
    answers = together([(lambda who=who: who.provide_results(run_id, given)) for who in clients])
    assert [type(answer) for answer in answers] == [ResumeAdmission] * 10
    assert sum(answer.fresh for answer in answers) == 1
    assert len({answer.digest() for answer in answers}) == 1
    assert worker.work(run_id)["state"] == "completed"
    assert len([row for row in world.events(run_id) if row["kind"] == "run.admit"]) == 1


def test_an_answer_and_the_sweep_at_the_deadline_and_one_of_them_wins(world: World) -> None:
    client, worker, run_id = paused(world)
    suspension_id, deadline = world.run(run_id)["suspension_id"], world.pauses(run_id)[0]["expires_at"]
    with stopped_clock(deadline) as clock:
        clock.advance(-0.001)

        def sweep() -> bool:
            clock.set(deadline)
            return expire.expire_pause(worker.rt, suspension_id)

        answer, swept = together([lambda: client.provide_results(run_id, [result(A)]), sweep])
    state = world.run(run_id)["state"]
    assert (isinstance(answer, ResumeAdmission), swept is True) in [(True, False), (False, True)]
    assert state == ("failed" if swept is True else "ready")
    assert swept is True or isinstance(answer, ResumeAdmission)


# --- An answer that is quicker than its pause ------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["whole", "one"])
def test_an_answer_before_the_pause_commits_is_sent_again_by_itself(world: World, door: str) -> None:
    outside.tools(world.host)
    world.shop(ONE)
    worker, client, early = world.worker(), world.client(), world.client()
    run_id = client.enqueue("support", "x").id
    refused, answered = threading.Event(), []

    def answer() -> None:
        try:
            client.provide_results(run_id, [result(A)], patience_s=0)
        except NotPausedYet:
            refused.set()
        if door == "whole":
            answered.append(early.provide_results(run_id, [result(A)], patience_s=60))
        else:
            answered.append(early.provide_result(run_id, result(A), patience_s=60))

    thread = threading.Thread(target=answer)

    def begin() -> None:
        thread.start()
        assert refused.wait(30)

    with at("pause.before_commit", begin):
        worker.work(run_id)
    thread.join(60)
    (admitted,) = answered
    assert admitted is not None
    assert admitted.fresh
    assert worker.work(run_id)["state"] == "completed"


def test_an_answer_to_a_run_that_never_pauses_is_refused_in_the_end(world: World) -> None:
    world.shop([say("Done.")])
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "x").id
    with pytest.raises(NotPausedYet):
        client.provide_results(run_id, [result(A)], patience_s=0.2)
    worker.work(run_id)
    with pytest.raises(NotSuspended):
        client.provide_results(run_id, [result(A)])


# --- Kinds in one turn, and in one session ---------------------------------------------------------------------------


def answer_all(client: Client, world: World, run_id: str) -> str:
    """Answer whatever the run waits for; returns what that was."""
    (pause,) = [row for row in world.pauses(run_id) if row["ended_at"] is None]
    calls = world.pending(pause["id"])
    if pause["reason"] == "approval":
        client.decide(only(client.checkpoints()).id, approved=True)
    else:
        client.provide_results(run_id, [result(row["call_id"], f"of {row['tool']}") for row in calls])
    return str(pause["reason"])


@pytest.mark.parametrize("order", list(permutations(["pay", "quote", "find"])), ids="-".join)
def test_a_turn_of_several_kinds_waits_for_one_kind_after_the_other(
    world: World, order: tuple[str, ...]
) -> None:
    given = {"pay": {"amount": 5}, "quote": {"item": "desk"}, "find": {"order": "1"}}
    script = [turn(*[call(name, **given[name]) for name in order]), say("Done.")]
    client, worker, run_id = paused(world, script)
    reasons = [answer_all(client, world, run_id)]
    assert worker.work(run_id)["state"] == "paused"
    reasons.append(answer_all(client, world, run_id))
    assert worker.work(run_id)["state"] == "completed"
    assert reasons == ["approval", "external_tool"]
    assert sorted(effect.tool for effect in world.effects) == ["find", "pay"]
    told = {item.tool_call_id: item.content for item in world.messages(run_id) if item.role == "tool"}
    wanted = {"pay": "pay done", "quote": "of quote", "find": '{"order": "1"}'}
    assert {name: json.loads(told[f"call_0_{at}"]) if name == "find" else told[f"call_0_{at}"]
            for at, name in enumerate(order)} == {**wanted, "find": {"order": "1"}}  # fmt: skip
    assert [row["state"] for row in world.calls(run_id)] == ["completed"] * 3


def test_a_rejection_in_a_mixed_turn_leaves_the_others_waiting(world: World) -> None:
    script = [turn(call("quote", item="desk"), call("pay", amount=5)), say("Done.")]
    client, worker, run_id = paused(world, script, on_rejection="return_to_model")
    client.decide(only(client.checkpoints()).id, approved=False, reason="no")
    assert worker.work(run_id)["state"] == "paused"
    client.provide_results(run_id, [result(A)])
    assert worker.work(run_id)["state"] == "completed"
    told = {item.tool_call_id: item.content for item in world.messages(run_id) if item.role == "tool"}
    assert told[A] == "12 EUR"
    assert "no" in told[B]
    assert world.effects == []


def test_an_outside_tool_that_needs_approval_is_approved_and_then_waits_for_its_result(
    world: World,
) -> None:
    client, worker, run_id = paused(world, tool={"needs_approval": True})
    with pytest.raises(RequiresApproval):
        client.provide_results(run_id, [result(A)])
    client.decide(only(client.checkpoints()).id, approved=True)
    assert worker.work(run_id)["state"] == "paused"
    assert [row["reason"] for row in world.pauses(run_id)] == ["approval", "external_tool"]
    client.provide_results(run_id, [result(A)])
    assert worker.work(run_id)["state"] == "completed"
    assert results(world.messages(run_id)) == ["12 EUR"]
    (verdict,) = world.rows(tables.adjudications)
    assert (verdict["outcome"], verdict["disposition"]) == ("granted", "authorized")


def test_changed_arguments_of_an_outside_tool_are_what_the_outside_gets_and_the_model_is_told(
    world: World,
) -> None:
    """Bug case C24, for a tool that runs elsewhere."""
    client, worker, run_id = paused(world, tool={"needs_approval": True})
    client.decide(
        only(client.checkpoints()).id,
        approved=True,
        amended_arguments={"item": "chair"},
        decided_by="The boss",
    )
    assert worker.work(run_id)["state"] == "paused"
    (waiting,) = world.pending(world.run(run_id)["suspension_id"])
    assert waiting["payload"] == {"item": "chair"}
    assert json.loads(waiting["arguments"]) == {"item": "desk"}
    client.provide_results(run_id, [result(A)])
    assert worker.work(run_id)["state"] == "completed"
    (told,) = results(world.messages(run_id))
    assert "12 EUR" in told
    assert '{"item": "chair"}' in told
    assert "The boss" in told
    row = world.call(run_id)
    assert (row["executed_args"], row["amended_by"]) == ('{"item": "chair"}', "The boss")


@pytest.mark.parametrize("kind", ["approval", "external_tool"])
def test_the_deadline_of_either_kind_is_its_own(world: World, kind: str) -> None:
    client, worker, run_id = paused(
        world,
        tool={"needs_approval": True, "approval_ttl": timedelta(hours=3), "ttl": timedelta(hours=5)},
    )
    if kind == "external_tool":
        client.decide(only(client.checkpoints()).id, approved=True)
        worker.work(run_id)
    pause = world.pauses(run_id)[-1]
    assert pause["reason"] == kind
    hours = {"approval": 3, "external_tool": 5}[kind]
    assert abs((pause["expires_at"] - pause["created_at"]).total_seconds() - 3600 * hours) < 1


def test_an_answer_in_a_conversation_waits_for_its_turn(world: World) -> None:
    client, worker, run_id = paused(world, session="chat")
    second = client.enqueue("support", "2", session="chat").id
    claimed = worker.claim(second)
    world.told.clear()
    client.provide_results(run_id, [result(A)])
    assert (world.run(run_id)["state"], world.run(run_id)["wait_reason"]) == ("ready", "turn")
    assert world.notified(run_id) == []
    worker.go_on(claimed)
    assert world.run(run_id)["wait_reason"] is None


def test_an_answer_in_a_conversation_is_told_of_as_an_admission(world: World) -> None:
    client, worker, run_id = paused(world, session="chat")
    world.told.clear()
    client.provide_results(run_id, [result(A)])
    assert world.notified(run_id) == ["ResumeAdmitted"]
    assert worker.work(run_id)["state"] == "completed"


def test_every_call_ends_once_whoever_answers(world: World) -> None:
    client, worker, run_id = paused(world, THREE)
    client.provide_results(run_id, [result(A), error(B, "no"), result(C)])
    worker.work(run_id)
    assert [row["state"] for row in world.calls(run_id)] == ["completed", "failed", "completed"]
    assert [item.tool_call_id for item in world.messages(run_id) if item.role == "tool"] == [A, B, C]


def test_a_worker_that_dies_with_the_answer_loses_nothing(world: World) -> None:
    client, worker, run_id = paused(world)
    client.provide_results(run_id, [result(A)])
    world.worker().lose_at("model.before", run_id)
    assert worker.work(run_id)["state"] == "completed"
    assert results(world.messages(run_id)) == ["12 EUR"]


@pytest.mark.parametrize("committed", [True, False], ids=["after the commit", "before the commit"])
@pytest.mark.parametrize("door", ["whole", "one"])
def test_after_a_lost_acknowledgement_the_same_answer_again_tells_what_happened(
    world: World, committed: bool, door: str
) -> None:
    client, worker, run_id = paused(world)
    engine = client.runtime.database.engine

    def lose(connection: Any) -> None:
        real = connection.connection.driver_connection
        if committed:
            real.commit()
            real.execute("select 1")
        world.sql("select pg_terminate_backend(:pid, 5000)", pid=real.info.backend_pid)

    def send() -> ResumeAdmission | None:
        if door == "whole":
            return client.provide_results(run_id, [result(A)])
        return client.provide_result(run_id, result(A))

    event.listen(engine, "commit", lose)
    try:
        with pytest.raises(StoreUnavailable):
            send()
    finally:
        event.remove(engine, "commit", lose)
    assert world.run(run_id)["state"] == ("ready" if committed else "paused")
    assert len(admissions_of(world, run_id)) == committed
    again = send()
    assert again is not None
    assert again.fresh is not committed
    assert worker.work(run_id)["state"] == "completed"
    assert results(world.messages(run_id)) == ["12 EUR"]

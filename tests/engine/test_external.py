"""Tools that run outside: the run waits for their results, and goes on once with exactly these."""

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
    CheckpointNotFound,
    CortexError,
    DuplicateTool,
    InputTooLarge,
    InvalidId,
    InvalidState,
    InvalidTool,
    NoHost,
    NotAgentReplyResumable,
    NotPausedYet,
    NotSuspended,
    RequiresApproval,
    ResultsMismatch,
    RunAlreadyDone,
    RunNotFound,
    StoreUnavailable,
    SuspensionExpired,
    UnstorableText,
)
from cortex_workers.schemas.admission import MAX_RESUME_INPUT_BYTES, ResumeAdmission, ToolResult
from cortex_workers.schemas.ids import CHECKPOINT, RUN, new_id
from cortex_workers.store import suspensions, tables
from cortex_workers.testing.clock import stopped_clock
from tests.engine import outside
from tests.engine.outside import ONE, THREE, TWO, A, B, C, error, paused, result
from tests.engine.world import Worker, World, at, call, error_of, only, results, say, turn


def expire_it(world: World, worker: Worker, run_id: str) -> bool:
    return expire.expire_pause(worker.rt, world.run(run_id)["suspension_id"])


def admissions_of(world: World, run_id: str) -> list[dict[str, Any]]:
    table = tables.resume_admissions
    return world.rows(table, table.c.run_id == run_id, order=table.c.suspension_id)


# --- The pause -------------------------------------------------------------------------------------------------------


def test_a_call_that_runs_outside_pauses_the_run_and_asks_no_person(world: World) -> None:
    client, _worker, run_id = paused(world)
    run = world.run(run_id)
    assert (run["state"], run["step_count"], run["next_step"]) == ("paused", 1, 1)
    assert run["usage"]["requests"] == 1
    (pause,) = world.pauses(run_id)
    assert (pause["reason"], pause["deferral_kind"], pause["step_index"]) == ("external_tool", None, 0)
    assert client.checkpoints() == []
    assert world.notified(run_id) == ["RunReady"]
    (waiting,) = world.pending(pause["id"])
    assert (waiting["kind"], waiting["answerable_by"], waiting["call_id"]) == ("external", "machine", A)
    assert world.call(run_id)["state"] == "pending"
    assert (run["lease_owner"], run["lease_expires_at"]) == (None, None)


def test_the_arguments_of_a_pending_call_are_the_models_byte_for_byte(world: World) -> None:
    odd = '{"item":  "d\\u00e9sk" }'
    _client, _worker, run_id = paused(world, [turn({"tool": "quote", "args": odd}), say("Done.")])
    (waiting,) = world.pending(world.run(run_id)["suspension_id"])
    assert waiting["arguments"] == odd
    assert waiting["payload"] == {"item": "désk"}


def test_what_can_run_runs_before_the_pause_and_the_pause_holds_the_others_in_order(world: World) -> None:
    script = [turn(call("quote", item="desk"), call("ship", order="7"), call("scan", page=2)), say("Done.")]
    client, worker, run_id = paused(world, script)
    assert [effect.tool for effect in world.effects] == ["ship"]
    pause = only(world.pauses(run_id))  # type: ignore[arg-type]
    assert [row["call_id"] for row in world.pending(pause["id"])] == [A, C]
    assert [item.tool_call_id for item in world.messages(run_id) if item.role == "tool"] == [B]
    client.provide_results(run_id, [result(A), result(C, "page two")])
    assert worker.work(run_id)["state"] == "completed"
    assert [effect.tool for effect in world.effects] == ["ship"]
    assert sorted(results(world.messages(run_id))) == ["12 EUR", "page two", "ship done"]


def test_the_stored_conversation_of_a_pause_ends_with_the_models_calls(world: World) -> None:
    _client, _worker, run_id = paused(world)
    stored = world.messages(run_id)
    assert [item.role for item in stored] == ["assistant"]
    assert [item.id for item in stored[0].tool_calls] == [A]


@pytest.mark.parametrize(
    ("own", "agent", "seconds"),
    [
        (timedelta(hours=1), timedelta(hours=24), 3600),
        (None, timedelta(hours=24), 86_400),
        (None, None, 7 * 86_400),
        (timedelta(hours=48), timedelta(hours=24), 172_800),
        (timedelta(0), timedelta(hours=24), None),
        (None, timedelta(0), None),
    ],
    ids=["its own", "the agent's", "the setting's", "its own though longer", "none of its own", "none"],
)
def test_the_deadline_is_the_tools_own_else_the_agents_else_the_settings(
    world: World, own: timedelta | None, agent: timedelta | None, seconds: float | None
) -> None:
    options = {} if agent is None else {"suspension_ttl": agent}
    _client, _worker, run_id = paused(world, tool={"ttl": own}, **options)
    (pause,) = world.pauses(run_id)
    if seconds is None:
        assert pause["expires_at"] is None
    else:
        assert abs((pause["expires_at"] - pause["created_at"]).total_seconds() - seconds) < 1


def test_the_shortest_deadline_of_a_pause_holds(world: World) -> None:
    script = [turn(call("scan", page=1), call("quote", item="desk")), say("Done.")]
    _client, _worker, run_id = paused(
        world, script, tool={"ttl": timedelta(hours=1)}, suspension_ttl=timedelta(hours=2)
    )
    (pause,) = world.pauses(run_id)
    assert abs((pause["expires_at"] - pause["created_at"]).total_seconds() - 3600) < 1


def test_a_call_whose_arguments_do_not_fit_waits_for_nobody(world: World) -> None:
    outside.tools(world.host)
    world.shop([turn(call("quote", thing="desk")), say("Done.")])
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "x").id
    assert worker.work(run_id)["state"] == "completed"
    assert world.pauses(run_id) == []
    assert world.call(run_id)["state"] == "failed"


def test_tools_that_run_outside_are_registered_like_others(world: World) -> None:
    outside.tools(world.host, ttl=timedelta(minutes=5))
    spec = world.host.tools["quote"].spec
    assert (spec.tool_class, spec.external_ttl_s, spec.retry_safe) == ("external", 300.0, False)
    with pytest.raises(DuplicateTool):
        world.host.external_tool(outside.quote)
    with pytest.raises(InvalidTool):
        world.host.external_tool(outside.quote, name="late", ttl=timedelta(seconds=-1))
    with pytest.raises(InvalidTool):
        world.host.external_tool(outside.quote, name="late", ttl=5)  # type: ignore[arg-type]


# --- Answers ---------------------------------------------------------------------------------------------------------


def test_an_answer_makes_the_run_ready_and_runs_nothing(world: World) -> None:
    client, _worker, run_id = paused(world)
    world.told.clear()
    admitted = client.provide_results(run_id, [result(A)])
    run = world.run(run_id)
    assert (run["state"], run["instruction"], run["queue_class"]) == ("ready", "answer", "begun")
    assert admitted.fresh
    assert admitted.request.version.suspension_id == run["suspension_id"]
    assert admitted.claimed_revision == run["revision"] == admitted.request.version.run_revision + 1
    assert (admitted.admitted_by, admitted.door) == ("ops", "provide_results")
    assert world.notified(run_id) == ["ResumeAdmitted"]
    assert len(world.model.requests) == 1
    (pause,) = world.pauses(run_id)
    assert pause["ended_as"] == "answered"


def test_the_model_reads_the_result_and_the_run_ends(world: World) -> None:
    client, worker, run_id = paused(world)
    client.provide_results(run_id, [result(A, {"price": 12, "currency": "EUR"})])
    assert worker.work(run_id)["state"] == "completed"
    (told,) = [item for item in world.model.requests[-1].messages if item.role == "tool"]
    assert (told.tool_call_id, json.loads(told.content)) == (A, {"price": 12, "currency": "EUR"})
    row = world.call(run_id)
    assert (row["state"], row["step_index"]) == ("completed", 0)


def test_an_error_is_what_the_model_reads(world: World) -> None:
    client, worker, run_id = paused(world)
    client.provide_results(run_id, [error(A, "out of stock")])
    assert worker.work(run_id)["state"] == "completed"
    assert error_of(world.messages(run_id)[1]) == "out of stock"
    row = world.call(run_id)
    assert (row["state"], row["error"]) == ("failed", "out of stock")


def test_results_in_any_order_stand_in_the_models(world: World) -> None:
    client, worker, run_id = paused(world, THREE)
    client.provide_results(run_id, [result(C, "3"), result(A, "1"), result(B, "2")])
    worker.work(run_id)
    assert [(item.tool_call_id, item.content) for item in world.messages(run_id) if item.role == "tool"] == [
        (A, "1"),
        (B, "2"),
        (C, "3"),
    ]


def test_a_run_may_wait_again_after_an_answer(world: World) -> None:
    script = [turn(call("quote", item="desk")), turn(call("quote", item="chair")), say("Done.")]
    client, worker, run_id = paused(world, script)
    client.provide_results(run_id, [result(A)])
    assert worker.work(run_id)["state"] == "paused"
    older, newer = world.pauses(run_id)
    assert older["ended_as"] == "answered"
    assert newer["ended_at"] is None
    client.provide_results(run_id, [result("call_1_0")])
    assert worker.work(run_id)["state"] == "completed"
    assert len(admissions_of(world, run_id)) == 2


def test_a_run_that_waited_on_its_last_step_keeps_the_result_and_fails(world: World) -> None:
    client, worker, run_id = paused(world, max_steps=1)
    client.provide_results(run_id, [result(A)])
    run = worker.work(run_id)
    assert (run["state"], run["error_code"]) == ("failed", "max_steps")
    assert results(world.messages(run_id)) == ["12 EUR"]
    assert world.call(run_id)["state"] == "completed"


def test_the_exact_bytes_are_retained(world: World) -> None:
    client, _worker, run_id = paused(world)
    content = {"z": 1.0, "a": ["\u2028 é \U0001f600", None, True, 1e300, -0.0], "": {}}
    admitted = client.provide_results(run_id, [result(A, content)])
    (row,) = admissions_of(world, run_id)
    assert bytes(row["input"]) == admitted.request.input
    assert json.loads(bytes(row["input"])) == {"tool_results": [{"tool_call_id": A, "content": content}]}
    assert client.admissions(run_id).admissions[0].request.input == admitted.request.input


@pytest.mark.parametrize("door", ["whole", "one"])
def test_a_result_may_have_eight_mebibytes_and_not_a_byte_more(world: World, door: str) -> None:
    client, worker, run_id = paused(world)
    frame = len(json.dumps({"tool_results": [{"tool_call_id": A, "content": ""}]}, separators=(",", ":")))
    most = "x" * (MAX_RESUME_INPUT_BYTES - frame)

    def send(content: str) -> ResumeAdmission | None:
        if door == "whole":
            return client.provide_results(run_id, [result(A, content)])
        return client.provide_result(run_id, result(A, content))

    before = world.snapshot()
    with pytest.raises(InputTooLarge):
        send(most + "x")
    assert world.snapshot() == before
    admitted = send(most)
    assert admitted is not None
    assert len(admitted.request.input) == MAX_RESUME_INPUT_BYTES
    assert worker.work(run_id)["state"] == "completed"


def test_what_looks_like_an_object_comes_back_as_data(world: World) -> None:
    """Bug case C49."""
    client, worker, run_id = paused(world)
    odd = {
        "__reduce__": ["os.system", ["true"]],
        "py/object": "builtins.eval",
        "$ref": "#/tool_results/0",
        "tool_call_id": "call_9_9",
        "error": "not an error",
        "tool_results": [{"tool_call_id": A, "content": "no"}],
        "!!python/object/apply:os.system": ["true"],
    }
    client.provide_results(run_id, [result(A, odd)])
    worker.work(run_id)
    (told,) = [item for item in world.messages(run_id) if item.role == "tool"]
    assert (json.loads(told.content), told.is_error) == (odd, False)


# --- Answers that are refused ----------------------------------------------------------------------------------------

MISFIT: list[tuple[str, Callable[[], Sequence[ToolResult]], type[CortexError]]] = [
    ("nothing", list, ResultsMismatch),
    ("one missing", lambda: [result(A)], ResultsMismatch),
    ("one too many", lambda: [result(A), result(B), result("call_9_9")], ResultsMismatch),
    ("one twice", lambda: [result(A), result(B), result(B)], ResultsMismatch),
    ("one for another", lambda: [result(A), result("call_9_9")], ResultsMismatch),
    ("NUL in a result", lambda: [result(A), result(B, "a\x00")], UnstorableText),
    ("NUL deep inside", lambda: [result(A), result(B, {"a": ["\x00"]})], UnstorableText),
    ("half a character", lambda: [result(A), error(B, "\ud800")], UnstorableText),
    ("no JSON", lambda: [result(A), result(B, object())], ResultsMismatch),
    ("NaN", lambda: [result(A), result(B, float("nan"))], ResultsMismatch),
]


@pytest.mark.parametrize(("what", "given", "refusal"), MISFIT, ids=[each[0] for each in MISFIT])
def test_results_that_do_not_fit_the_pause_write_nothing(
    world: World, what: str, given: Callable[[], Sequence[ToolResult]], refusal: type[CortexError]
) -> None:
    client, _worker, run_id = paused(world, TWO)
    before = world.snapshot()
    with pytest.raises(refusal):
        client.provide_results(run_id, given(), patience_s=0)
    assert world.snapshot() == before


def test_no_run_no_scope_no_id_and_nothing_is_written(world: World) -> None:
    client, _worker, run_id = paused(world)
    before = world.snapshot()
    for door in (
        lambda where, **scope: client.provide_results(where, [result(A)], **scope),
        lambda where, **scope: client.provide_result(where, result(A), **scope),
    ):
        with pytest.raises(RunNotFound):
            door(new_id(RUN))
        with pytest.raises(RunNotFound):
            door(run_id, scope="tenant=other")
        with pytest.raises(InvalidId):
            door("run-1")
    assert world.snapshot() == before


def test_an_approval_takes_no_results(world: World) -> None:
    """Only a person can let an engine's tool run; nobody can hand in its result."""
    outside.tools(world.host)
    world.shop([turn(call("pay", amount=5)), say("Done.")])
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Pay").id
    assert worker.work(run_id)["state"] == "paused"
    before = world.snapshot()
    for given in (result(A), error(A, "no")):
        with pytest.raises(RequiresApproval):
            client.provide_results(run_id, [given])
    with pytest.raises((RequiresApproval, ResultsMismatch)):
        client.provide_results(run_id, [])
    with pytest.raises(RequiresApproval):
        client.provide_result(run_id, result(A))
    assert world.snapshot() == before
    assert world.effects == []


def test_a_wait_for_another_agent_takes_no_results(world: World) -> None:
    client, _worker, run_id = paused(world)
    world.sql("update suspensions set reason = 'agent_reply' where run_id = :id", id=run_id)
    world.sql("update pending_calls set kind = 'ask' where run_id = :id", id=run_id)
    before = world.snapshot()
    with pytest.raises(NotAgentReplyResumable):
        client.provide_results(run_id, [result(A)])
    with pytest.raises(NotAgentReplyResumable):
        client.provide_result(run_id, result(A))
    assert world.snapshot() == before


def test_a_decision_finds_no_checkpoint_at_a_pause_for_results(world: World) -> None:
    client, _worker, _run_id = paused(world)
    with pytest.raises(CheckpointNotFound):
        client.decide(new_id(CHECKPOINT), approved=True)


# --- Again, later, too late ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["ready", "running", "completed"])
def test_the_same_answer_again_returns_the_first_receipt_for_ever(world: World, moment: str) -> None:
    client, worker, run_id = paused(world, TWO)
    first = client.provide_results(run_id, [result(A, {"b": 1, "a": 2}), result(B)])
    claimed = worker.claim(run_id) if moment != "ready" else None
    if claimed is not None and moment == "completed":
        assert worker.go_on(claimed)["state"] == "completed"
    before = world.snapshot()
    again = client.provide_results(run_id, [result(B), result(A, {"a": 2, "b": 1})])
    assert (first.fresh, again.fresh) == (True, False)
    assert again.model_copy(update={"fresh": True}) == first
    assert again.digest() == first.digest()
    assert client.provide_result(run_id, result(B)) == again
    with pytest.raises(AdmissionConflict, match="ops"):
        client.provide_results(run_id, [result(A, {"a": 2, "b": 1}), result(B, "13 EUR")])
    with pytest.raises(AdmissionConflict):
        client.provide_result(run_id, result(B, "13 EUR"))
    with pytest.raises(AdmissionConflict):
        client.provide_result(run_id, error(B, "12 EUR"))
    assert world.snapshot() == before


def test_an_answer_to_an_older_pause_returns_its_receipt_and_leaves_the_newer_alone(world: World) -> None:
    script = [turn(call("quote", item="desk")), turn(call("quote", item="chair")), say("Done.")]
    client, worker, run_id = paused(world, script)
    first = client.provide_results(run_id, [result(A)])
    assert worker.work(run_id)["state"] == "paused"
    before = world.snapshot()
    assert client.provide_results(run_id, [result(A)]).digest() == first.digest()
    with pytest.raises(AdmissionConflict):
        client.provide_results(run_id, [result(A, "other")])
    with pytest.raises(CortexError):
        client.provide_results(run_id, [result(A), result("call_1_0")])
    assert world.snapshot() == before


def test_an_answer_after_the_deadline_is_refused_before_and_after_the_sweep(world: World) -> None:
    client, worker, run_id = paused(world, tool={"ttl": timedelta(seconds=2)})
    world.later(3)
    for door in (
        lambda: client.provide_results(run_id, [result(A)]),
        lambda: client.provide_result(run_id, result(A)),
    ):
        with pytest.raises(SuspensionExpired, match="deadline"):
            door()
    assert world.run(run_id)["state"] == "paused"
    assert expire_it(world, worker, run_id)
    run = world.run(run_id)
    assert (run["state"], run["error_code"]) == ("failed", "suspension_expired")
    assert world.call(run_id)["state"] == "denied"
    before = world.snapshot()
    for door in (
        lambda: client.provide_results(run_id, [result(A)]),
        lambda: client.provide_result(run_id, result(A)),
    ):
        with pytest.raises(SuspensionExpired, match="deadline"):
            door()
    assert world.snapshot() == before


def test_an_expired_wait_may_go_back_to_the_model(world: World) -> None:
    client, worker, run_id = paused(world, tool={"ttl": timedelta(seconds=2), "on_expiry": "return_to_model"})
    world.later(3)
    assert expire_it(world, worker, run_id)
    assert world.run(run_id)["state"] == "ready"
    with pytest.raises(SuspensionExpired):
        client.provide_results(run_id, [result(A)])
    assert worker.work(run_id)["state"] == "completed"
    assert "nobody answered before" in error_of(world.messages(run_id)[1])
    assert world.call(run_id)["state"] == "denied"


def test_a_single_answer_that_came_in_time_outlives_the_expiry_of_the_others(world: World) -> None:
    client, worker, run_id = paused(
        world, THREE, tool={"ttl": timedelta(seconds=2), "on_expiry": "return_to_model"}
    )
    assert client.provide_result(run_id, result(B, "in time")) is None
    world.later(3)
    assert expire_it(world, worker, run_id)
    assert worker.work(run_id)["state"] == "completed"
    told = [item for item in world.messages(run_id) if item.role == "tool"]
    assert [item.is_error for item in told] == [True, False, True]
    assert told[1].content == "in time"
    assert [row["state"] for row in world.calls(run_id)] == ["denied", "completed", "denied"]


def test_the_instant_of_the_deadline_belongs_to_the_sweep(world: World) -> None:
    client, worker, run_id = paused(world, TWO)
    deadline = world.pauses(run_id)[0]["expires_at"]
    with stopped_clock(deadline) as clock:
        with pytest.raises(SuspensionExpired):
            client.provide_results(run_id, [result(A), result(B)])
        with pytest.raises(SuspensionExpired):
            client.provide_result(run_id, result(A))
        clock.advance(-0.001)
        assert not expire_it(world, worker, run_id)
        assert client.provide_result(run_id, result(A)) is None
        assert client.provide_result(run_id, result(B)) is not None


def test_an_answer_to_a_cancelled_run_is_refused(world: World) -> None:
    client, _worker, run_id = paused(world, TWO)
    assert client.provide_result(run_id, result(A)) is None
    client.cancel(run_id)
    before = world.snapshot()
    with pytest.raises(NotSuspended):
        client.provide_result(run_id, result(B))
    with pytest.raises(NotSuspended):
        client.provide_results(run_id, [result(A), result(B)])
    assert world.snapshot() == before


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


def kept_answers(world: World, run_id: str) -> list[bytes]:
    suspension_id = world.run(run_id)["suspension_id"]
    return world.database.run(lambda unit: suspensions.kept_answers(unit, suspension_id))


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

"""Tools that run outside: the run waits for their results, and goes on once with exactly these."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest

from cortex_workers.engine import expire
from cortex_workers.errors import (
    AdmissionConflict,
    CheckpointNotFound,
    CortexError,
    DuplicateTool,
    InputTooLarge,
    InvalidId,
    InvalidTool,
    NotAgentReplyResumable,
    NotSuspended,
    RequiresApproval,
    ResultsMismatch,
    RunNotFound,
    SuspensionExpired,
    UnstorableText,
)
from cortex_workers.schemas.admission import MAX_RESUME_INPUT_BYTES, ResumeAdmission, ToolResult
from cortex_workers.schemas.ids import CHECKPOINT, RUN, new_id
from cortex_workers.testing.clock import stopped_clock
from tests.engine import outside
from tests.engine.outside import THREE, TWO, A, B, C, admissions_of, error, paused, result
from tests.engine.world import Worker, World, call, error_of, only, results, say, turn


def expire_it(world: World, worker: Worker, run_id: str) -> bool:
    return expire.expire_pause(worker.rt, world.run(run_id)["suspension_id"])


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

"""Bug cases of pauses and answers that no other file shows whole; where the rest is shown, each test says.

C01 `test_decide.py`, `test_calls.py`, `fleet/test_two_apis.py`. C08, C17 (a) `test_effects.py`. C14 (commit)
`test_decide.py`, `test_external.py`, `fleet/test_postgres.py`; (publish) `fleet/test_lost_hints.py`. C24
`test_decide.py`, `test_calls.py`, `test_external.py`. C26 `test_expiry.py`, `fleet/test_sweeps.py`. C28
`test_pause.py`, `fleet/test_sweeps.py`. C37 `test_payloads.py`, `unit/test_tools_results.py`. C43
`test_conversation.py`. C45 `test_external_one_by_one.py`, `fleet/test_two_apis.py`.
"""

from __future__ import annotations

import importlib
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from cortex_workers import Client
from cortex_workers.errors import CortexError, InvalidInput, NotAgentReplyResumable, Refusal
from cortex_workers.schemas.admission import ToolResult
from cortex_workers.schemas.ids import RUN, SUSPENSION, new_id
from cortex_workers.schemas.llm import ModelRequest
from cortex_workers.schemas.stream import StreamKind
from cortex_workers.store import tables
from cortex_workers.sweep import frame
from cortex_workers.testing.clock import stopped_clock
from tests.engine import outside
from tests.engine.outside import THREE, A, B, C, paused, result
from tests.engine.world import World, call, contents, error_of, only, results, say, turn

# --- C03: a sweep at the instant of a start ---------------------------------------------------------------------------


def test_runs_that_start_at_the_very_instant_of_a_sweep_are_left_alone(world: World) -> None:
    """Bug case C03: every time of these rows is the sweep's own; the rest is in `fleet/test_silence.py`."""
    world.shop([say("Hi.")])
    worker, sweeper, client = world.worker(), world.worker(), world.client()
    with stopped_clock():
        started = [client.enqueue("support", "Go").id for _ in range(50)]
        claimed = [worker.claim(run_id) for run_id in started]
        frame.sweep(sweeper.rt, force=True)
        assert {(row["state"], row["reclaim_total"]) for row in map(world.run, started)} == {("running", 0)}
    for each in claimed:
        assert worker.go_on(each)["state"] == "completed"
    assert Counter(request.run_id for request in world.model.requests) == dict.fromkeys(started, 1)


# --- C10: whoever watched is gone -------------------------------------------------------------------------------------


def test_a_watcher_that_is_cut_off_in_a_step_loses_nothing_and_stops_nothing(world: World) -> None:
    """Bug case C10: the client hangs up while the model thinks."""
    thinks, go = threading.Event(), threading.Event()

    def slow(request: ModelRequest) -> dict[str, Any]:
        thinks.set()
        assert go.wait(30)
        return say("The whole answer.")

    world.shop(slow)
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Go").id
    working = threading.Thread(target=worker.work, args=(run_id,))
    working.start()
    try:
        assert thinks.wait(30)
        following = client.stream(run_id)
        assert next(following).kind is StreamKind.RUN_STARTED
        following.close()  # type: ignore[attr-defined]
        client.close()
    finally:
        go.set()
        working.join(30)
    told = list(world.client().stream(run_id))
    assert told[-1].kind is StreamKind.DONE
    assert world.run(run_id)["output"] == told[-1].data["output"] == "The whole answer."


def test_a_watcher_that_is_cut_off_while_the_run_waits_changes_nothing(world: World) -> None:
    """Bug case C10: the answer comes long after the client has hung up, and a new one reads it all."""
    client, worker, run_id = paused(world)
    following = client.stream(run_id)
    next(following)
    following.close()  # type: ignore[attr-defined]
    client.close()
    other = world.client()
    other.provide_results(run_id, [result(A)])
    assert worker.work(run_id)["state"] == "completed"
    kinds = [event.kind for event in other.stream(run_id)]
    assert kinds[0] is StreamKind.RUN_STARTED and kinds[-1] is StreamKind.DONE
    assert StreamKind.SUSPENDED in kinds


# --- C21: answers and calls -------------------------------------------------------------------------------------------


def test_answers_in_reverse_order_reach_their_calls_whichever_worker_is_there(world: World) -> None:
    """Bug case C21, for calls that run outside: a new worker after every answer."""
    client, _worker, run_id = paused(world, THREE)
    client.provide_result(run_id, outside.error(C, "sold out"))
    world.worker()
    client.provide_result(run_id, result(B, "about the chair"))
    world.worker()
    client.provide_result(run_id, result(A, "about the desk"))
    world.worker().lose_at("model.before", run_id)
    assert world.worker().work(run_id)["state"] == "completed"
    told = [message for message in world.messages(run_id) if message.role == "tool"]
    assert [message.tool_call_id for message in told] == [A, B, C]
    assert [message.content for message in told[:2]] == ["about the desk", "about the chair"]
    assert error_of(told[2]) == "sold out"


# --- C23: what is shown is what runs ----------------------------------------------------------------------------------


def test_what_the_approver_is_shown_is_to_the_byte_what_the_tool_is_given(world: World) -> None:
    """Bug case C23: a validator makes 100 of "100" and fills in the currency, before anybody is asked."""
    world.shop([turn(call("pay", amount="100")), say("Done.")])
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Go").id
    assert worker.work(run_id)["state"] == "paused"
    asked = only(client.checkpoints())
    shown = only(asked.pending)  # type: ignore[arg-type]
    assert (shown.arguments, shown.runs_with) == ('{"amount": "100"}', {"amount": 100, "currency": "EUR"})
    client.decide(asked.id, approved=True)
    assert worker.work(run_id)["state"] == "completed"
    (effect,) = world.effects
    assert effect.arguments == shown.runs_with
    assert type(effect.arguments["amount"]) is int


# --- C30: what cannot be stored ---------------------------------------------------------------------------------------

NUL = "a\x00b"
UNSTORABLE: list[tuple[str, Callable[[Client, str], Any]]] = [
    ("content", lambda client, run_id: client.provide_results(run_id, [result(A, NUL)])),
    ("content, one", lambda client, run_id: client.provide_result(run_id, result(A, NUL))),
    ("deep in content", lambda client, run_id: client.provide_results(run_id, [result(A, {"x": [NUL]})])),
    ("a key", lambda client, run_id: client.provide_results(run_id, [result(A, {NUL: 1})])),
    ("error", lambda client, run_id: client.provide_results(run_id, [outside.error(A, NUL)])),
    ("call id", lambda client, run_id: client.provide_result(run_id, result(NUL))),
    ("surrogate", lambda client, run_id: client.provide_results(run_id, [result(A, "\ud800")])),
    ("agent", lambda client, _: client.enqueue(NUL, "Go")),
    ("input", lambda client, _: client.enqueue("support", NUL)),
    ("session", lambda client, _: client.enqueue("support", "Go", session=NUL)),
    ("reason of a cancel", lambda client, run_id: client.cancel(run_id, reason=NUL)),
    ("question", lambda client, run_id: client.open_checkpoint(run_id, NUL)),
]


@pytest.mark.parametrize("send", [each[1] for each in UNSTORABLE], ids=[each[0] for each in UNSTORABLE])
def test_what_cannot_be_stored_is_refused_at_the_door_and_the_pause_stays(
    world: World, send: Callable[[Client, str], Any]
) -> None:
    """Bug case C30, what comes from outside; what comes from tools and models is in other files."""
    client, worker, run_id = paused(world)
    before = world.snapshot()
    with pytest.raises((InvalidInput, Refusal)):
        send(client, run_id)
    assert world.snapshot() == before
    client.provide_results(run_id, [result(A)])
    assert worker.work(run_id)["state"] == "completed"


@pytest.mark.parametrize("key", ["currency", NUL])
def test_changed_arguments_that_cannot_be_stored_are_refused(world: World, key: str) -> None:
    """Bug case C30: in a value and in a key."""
    world.shop([turn(call("pay", amount=1)), say("Done.")])
    worker, client = world.worker(), world.client()
    worker.work(client.enqueue("support", "Go").id)
    asked, before = only(client.checkpoints()), world.snapshot()
    with pytest.raises(Refusal):
        client.decide(asked.id, approved=True, amended_arguments={"amount": 1, key: NUL})
    assert world.snapshot() == before


# --- C33: very much ---------------------------------------------------------------------------------------------------


def test_a_tool_that_returns_sixty_megabytes_is_cut_and_the_run_ends(world: World) -> None:
    """Bug case C33: smaller ones are in `test_payloads.py`, the limit of answers in `test_external.py`."""

    @world.host.tool
    def dump() -> str:
        """Return everything."""
        return "x" * 60_000_000

    world.shop([turn(call("dump")), say("Done.")])
    worker = world.worker()
    run_id = world.client().enqueue("support", "Go").id
    assert worker.work(run_id)["state"] == "completed"
    (told,) = results(world.messages(run_id))
    assert len(told) == 1 << 20 and "60000000 bytes" in told


def test_a_conversation_of_two_hundred_long_steps_pauses_goes_on_and_ends(world: World) -> None:
    """Bug case C33: 40 MB of results, a pause in the middle, and a hint that is as short as ever."""
    page = "x" * 200_000

    @world.host.tool(retry_safe=True, effects="none")
    def read(page_no: int) -> str:
        """Read a page."""
        return page

    def script(request: ModelRequest) -> dict[str, Any]:
        if request.step == 100:
            return turn(call("pay", amount=1))
        return say("Read.") if request.step == 200 else turn(call("read", page_no=request.step))

    world.shop(script, max_steps=300)
    world.model.keep_requests = 1
    worker, client = world.worker(slice_steps=100), world.client()
    run_id = client.enqueue("support", "Go").id
    assert worker.finish(run_id)["state"] == "paused"
    client.decide(only(client.checkpoints()).id, approved=True)
    run = world.worker(slice_steps=100).finish(run_id)
    assert (run["state"], run["step_count"]) == ("completed", 201)
    assert sum(len(text) for text in results(world.messages(run_id))) >= 199 * len(page)
    assert len(contents(world.model.requests[-1], "tool")) == 200
    assert max(len(item.model_dump_json()) for item in world.told) < 512


# --- C46: only what was stored can run --------------------------------------------------------------------------------


def test_every_refused_answer_leaves_a_line_that_tells_who_and_why(world: World) -> None:
    """Bug case C46: the refusals themselves are in `test_pause.py`, `test_calls.py`, `test_external.py`."""
    outside.tools(world.host)
    world.shop([turn(call("pay", amount=1)), say("Done.")])
    worker, client = world.worker(), world.client(actor="mallory")
    run_id = client.enqueue("support", "Go").id
    worker.work(run_id)
    asked, before = only(client.checkpoints()).id, world.snapshot()
    tries: list[tuple[Callable[[], Any], str, str, str]] = [
        (
            lambda: client.decide(asked, calls={"other": {"approved": True}}),
            "decide",
            asked,
            "invalid_decision",
        ),
        (
            lambda: client.decide(asked, approved=True, amended_arguments={"amount": "all"}),
            "decide",
            asked,
            "invalid_decision",
        ),
        (lambda: client.settle(asked, "happened", result=1), "settle", asked, "invalid_decision"),
        (lambda: client.provide_results(run_id, [result(A)]), "provide_results", run_id, "requires_approval"),
        (lambda: client.provide_result(run_id, result(A)), "provide_result", run_id, "requires_approval"),
        (lambda: client.decide("secret words", approved=True), "decide", "no id", "invalid_id"),
        (lambda: client.provide_results(new_id(RUN), [result(A)]), "provide_results", "", "run_not_found"),
        (lambda: client.decide(asked, approved="yes"), "decide", asked, "invalid_decision"),  # type: ignore[arg-type]
        (lambda: client.decide(asked, calls={"x": {"run": 1}}), "decide", asked, "invalid_decision"),
        (lambda: client.settle(asked, "whatever"), "settle", asked, "invalid_decision"),
        (
            lambda: client.expire_admission(run_id, new_id(SUSPENSION), "0" * 64),
            "expire_admission",
            run_id,
            "admission_not_found",
        ),
        (lambda: client.close_uncertain(run_id), "close_uncertain", run_id, "admission_not_found"),
    ]
    for attempt, door, target, code in tries:
        with structlog.testing.capture_logs() as logs:
            structlog.configure()
            with pytest.raises(CortexError):
                attempt()
        (line,) = [each for each in logs if each["event"] == "answer.refused"]
        assert (line["door"], line["actor"], line["code"]) == (door, "mallory", code)
        assert line["log_level"] == "warning"
        assert line["target"] == target or not target
        assert set(line) == {"event", "log_level", "door", "target", "actor", "code"}
    assert world.snapshot() == before
    assert world.effects == []


def test_a_process_without_a_log_of_its_own_shows_the_line(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug case C46: Python shows warnings where nobody said otherwise."""
    client, _worker, run_id = paused(world)
    structlog.reset_defaults()
    client.provide_results(run_id, [result(A)])
    assert caplog.records == []
    with pytest.raises(CortexError):
        client.provide_results(run_id, [result(A, "a secret")])
    (line,) = caplog.records
    assert (line.name, line.levelname) == ("cortex_workers", "WARNING")
    assert line.getMessage().startswith("answer.refused {") and run_id in line.getMessage()
    assert "secret" not in caplog.text


def test_a_wait_for_another_agent_is_not_ended_by_whoever_posts_results(world: World) -> None:
    """Bug case C46: the pause's own rows say who may answer."""
    client, _worker, run_id = paused(world)
    world.sql("update suspensions set reason = 'agent_reply'")
    before = world.snapshot()
    for door in (
        lambda: client.provide_results(run_id, [result(A)]),
        lambda: client.provide_result(run_id, result(A)),
    ):
        with pytest.raises(NotAgentReplyResumable):
            door()
    assert world.snapshot() == before


# --- C49: data stays data ---------------------------------------------------------------------------------------------


@pytest.fixture
def bait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that nobody has a reason to import, and that a careless reader of tags would."""
    (tmp_path / "cw_bait.py").write_text(
        "class Hook:\n    def __reduce__(self):\n        return (print, ())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield "cw_bait"
    sys.modules.pop("cw_bait", None)


def odd(bait: str) -> dict[str, Any]:
    """Every way in which some library writes that it wants an object."""
    return {
        "__class__": f"{bait}.Hook",
        "__reduce__": [f"{bait}.Hook", []],
        "__import__": bait,
        "py/object": f"{bait}.Hook",
        "$ref": f"{bait}.Hook",
        "$type": f"{bait}.Hook",
        "lc": 1,
        "type": "constructor",
        "id": [bait, "Hook"],
        "!!python/object": f"{bait}.Hook",
        "tool_results": [{"tool_call_id": A}],
        "schema_version": 99,
    }


def test_answers_full_of_tags_come_back_as_data_and_import_nothing(world: World, bait: str) -> None:
    """Bug case C49: in a result, in changed arguments and in a question of the host."""

    @world.host.tool(needs_approval=True)
    def keep(what: dict[str, Any]) -> dict[str, Any]:
        """Keep something."""
        world.effects.append(what)  # type: ignore[arg-type]
        return what

    script = [turn(call("keep", what={})), turn(call("quote", item="desk")), say("Done.")]
    outside.tools(world.host)
    world.shop(script)
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Go", metadata=odd(bait)).id
    worker.work(run_id)
    asked = client.open_checkpoint(run_id, "look", metadata=odd(bait))
    waiting = only([item for item in client.checkpoints() if item.id != asked.id])
    client.decide(waiting.id, approved=True, amended_arguments={"what": odd(bait)})
    assert world.worker().work(run_id)["state"] == "paused"
    (pending,) = world.pending(world.run(run_id)["suspension_id"])
    client.provide_results(run_id, [ToolResult(tool_call_id=pending["call_id"], content=odd(bait))])
    assert world.worker().work(run_id)["state"] == "completed"
    assert world.effects == [odd(bait)]
    assert client.checkpoint(asked.id).metadata == odd(bait)
    (spec,) = world.rows(tables.run_specs)
    assert spec["metadata"] == odd(bait)
    assert bait not in sys.modules


def test_a_pickle_in_a_row_is_bytes_that_cannot_be_read(world: World, bait: str) -> None:
    """Bug case C49: where the answer is kept; on the broker see `tasks/test_worker.py`."""
    found: list[str] = []
    watching = [True]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if watching and (event == "pickle.find_class" or (event == "import" and args and args[0] == bait)):
            found.append(event)

    client, worker, run_id = paused(world)
    client.provide_results(run_id, [result(A)])
    data = pickle.dumps(importlib.import_module(bait).Hook)
    sys.modules.pop(bait)
    world.sql("update resume_admissions set input = :data", data=data)
    sys.addaudithook(hook)
    try:
        run = worker.work(run_id)
    finally:
        watching.clear()
    assert (run["state"], run["error_code"]) == ("failed", "invalid_continuation")
    assert found == [] and bait not in sys.modules


# --- C60: a conversation the provider would take ----------------------------------------------------------------------


def strict(request: ModelRequest) -> None:
    """What a strict provider refuses: a call without its result, or a result without its call."""
    open_calls: list[str] = []
    for message in request.messages:
        if message.role == "tool":
            assert message.tool_call_id in open_calls, f"a result without its call: {message}"
            open_calls.remove(message.tool_call_id)
            continue
        assert open_calls == [], f"calls without results before {message.role}: {open_calls}"
        open_calls = [item.id for item in message.tool_calls]
    assert open_calls == [], f"calls without results at the end: {open_calls}"


@pytest.mark.parametrize("probe", ["tool.after_outcome", "tool.after_handler", "tool.after_start_record"])
def test_a_strict_provider_takes_what_is_sent_after_a_crash_among_three_calls(
    world: World, probe: str
) -> None:
    """Bug case C60."""
    three = turn(call("ship", order="1"), call("ship", order="2"), call("ship", order="3"))

    def script(request: ModelRequest) -> dict[str, Any]:
        strict(request)
        return three if request.step == 0 else say("Done.")

    world.shop(script)
    client = world.client()
    worker = world.worker()
    run_id = client.enqueue("support", "Go").id
    worker.lose_at(probe, run_id, nth=2)
    if world.worker().work(run_id)["state"] == "paused":
        client.settle(only(client.checkpoints()).id, "happened", result="outcome unknown")
        assert world.worker().work(run_id)["state"] == "completed"
    assert len(results(world.messages(run_id))) == 3
    assert len({effect.key for effect in world.effects}) == len(world.effects)
    assert len(world.model.requests) == 2


@pytest.mark.parametrize("kind", ["pay", "quote"])
def test_a_strict_provider_takes_the_next_message_after_a_cancel_with_calls_open(
    world: World, kind: str
) -> None:
    """Bug case C60, its second half, for both kinds of waiting."""
    outside.tools(world.host)
    given = {"amount": 1} if kind == "pay" else {"item": "desk"}

    def script(request: ModelRequest) -> dict[str, Any]:
        strict(request)
        asked = contents(request, "user")[-1]
        return turn(call(kind, **given), call(kind, **given)) if asked == "Go" else say("Fine.")

    world.shop(script)
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Go", session="chat").id
    assert worker.work(run_id)["state"] == "paused"
    client.cancel(run_id)
    assert client.checkpoints() == []
    after = worker.work(client.enqueue("support", "And now?", session="chat").id)
    assert (after["state"], after["output"]) == ("completed", "Fine.")
    assert world.rows(tables.suspensions, tables.suspensions.c.ended_at.is_(None)) == []

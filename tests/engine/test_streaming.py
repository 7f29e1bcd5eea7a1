"""Following a run: every durable fact once and in order, whoever works on it."""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import pytest
from sqlalchemy import event as sql

from cortex_workers import ToolContext
from cortex_workers.engine import expire, slot, streaming
from cortex_workers.errors import InvalidId, RunNotFound, WaitTimeout
from cortex_workers.operate.closer import ResumeCloser
from cortex_workers.operate.closing_proof import WorkersGone
from cortex_workers.schemas.admission import ToolResult
from cortex_workers.schemas.ids import RUN, new_id
from cortex_workers.schemas.stream import StreamEvent, StreamKind
from cortex_workers.store import stream, workers
from cortex_workers.store.transitions import Guard
from cortex_workers.testing import factory
from tests.contract.recorder import recording
from tests.engine.following import PAY, Kept, Scene, kinds
from tests.engine.world import SCOPE, World, at, call, only, say, turn


@pytest.fixture
def scene(world: World) -> Scene:
    return Scene(world)


# --- What is told -------------------------------------------------------------------------------------------------


def test_a_run_is_told_from_its_start_over_a_pause_to_its_end(scene: Scene) -> None:
    scene.shop(PAY)
    run_id = scene.enqueue()
    scene.worker.work(run_id)
    first = scene.told(run_id)
    assert kinds(first) == [
        "run_started",
        "step",
        "tool_call",
        "step",
        "tool_call",
        "checkpoint",
        "suspended",
    ]
    started, step, found, _, paid, asked, suspended = first
    assert started.data == {"agent": "support", "resumed": False}
    assert (step.data["index"], step.data["type"]) == (0, "generation")
    assert found.data == {
        "tool_name": "find",
        "arguments": '{"order": "17"}',
        "tool_id": scene.world.calls(run_id)[0]["call_id"],
    }
    checkpoint = only(scene.client.checkpoints())
    assert asked.data["checkpoint_id"] == checkpoint.id
    assert (suspended.data["reason"], suspended.data["pending"]) == (
        "approval",
        [{"id": paid.data["tool_id"], "name": "pay", "arguments": '{"amount": 5}'}],
    )
    scene.client.decide(checkpoint.id, approved=True)
    scene.world.worker().work(run_id)
    second = scene.told(run_id, after=first[-1].cursor)
    assert kinds(second) == ["run_started", "step", "done"]
    assert second[0].data["resumed"] is True
    run = scene.world.run(run_id)
    assert second[-1].data["output"] == "Paid."
    assert second[-1].data["tokens_used"] == run["usage"]["input_tokens"] + run["usage"]["output_tokens"]
    assert second[-1].data["duration_ms"] >= 0
    # Who comes later is told the same, and the pause that was answered does not end it.
    assert scene.told(run_id) == [*first, *second]


def test_a_stream_follows_while_things_happen(scene: Scene) -> None:
    scene.shop(PAY)
    run_id = scene.enqueue()
    seen: list[StreamEvent] = []
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(lambda: [seen.append(event) for event in scene.follow(run_id)])
        scene.worker.work(run_id)
        following.result(30)
    assert kinds(seen)[-1] == "suspended"
    assert sum(event.is_terminal for event in seen) == 1


@pytest.mark.parametrize(
    ("script", "last"),
    [
        ([{"fail": "failed"}], ("error", "model_failed")),
        ([turn(call("find", order="1"))], ("error", "model_failed")),
    ],
)
def test_a_failure_is_told_with_its_code(scene: Scene, script: Any, last: tuple[str, str]) -> None:
    scene.shop(script)
    run_id = scene.enqueue()
    scene.worker.work(run_id)
    event = scene.told(run_id)[-1]
    assert (str(event.kind), event.data["code"]) == last


def test_a_rejection_an_expiry_and_a_cancellation_end_a_stream(scene: Scene) -> None:
    scene.shop([turn(call("pay", amount=5)), say()])
    rejected, expired, cancelled, never = (scene.enqueue() for _ in range(4))
    for run_id in (rejected, expired, cancelled):
        scene.worker.work(run_id)
    cursors = {run_id: scene.told(run_id)[-1].cursor for run_id in (rejected, expired, cancelled)}
    scene.client.decide(only(scene.client.checkpoints(run_id=rejected)).id, approved=False, reason="no")
    scene.client.cancel(cancelled)
    scene.client.cancel(never)
    scene.world.later(8 * 86_400)
    assert expire.expire_pause(scene.worker.rt, scene.world.run(expired)["suspension_id"])
    codes = {rejected: "checkpoint_rejected", expired: "suspension_expired", cancelled: "cancelled"}
    for run_id, code in codes.items():
        (event,) = scene.told(run_id, after=cursors[run_id])
        assert (str(event.kind), event.data["code"]) == ("error", code)
    (event,) = scene.told(never)
    assert (str(event.kind), event.data["message"]) == ("error", "cancelled")


def test_an_uncertain_effect_and_its_settlement_are_told(scene: Scene) -> None:
    scene.shop([turn(call("ship", order="1")), say("Done.")])
    run_id = scene.enqueue()
    scene.worker.lose_at("tool.after_handler", run_id)
    scene.world.worker().work(run_id)
    events = scene.told(run_id)
    assert kinds(events) == [
        "run_started",
        "step",
        "tool_call",
        "run_started",
        "checkpoint",
        "suspended",
    ]
    assert events[-2].data["kind"] == "uncertain_effect"
    scene.client.settle(only(scene.client.checkpoints()).id, "happened", result="shipped")
    scene.world.worker().work(run_id)
    assert kinds(scene.told(run_id, after=events[-1].cursor)) == ["run_started", "step", "done"]


def test_a_closed_run_is_told_as_incomplete(scene: Scene) -> None:
    @scene.world.host.external_tool
    def pack(order: str, ctx: ToolContext) -> str:
        """Pack an order."""
        raise NotImplementedError  # it runs outside

    scene.shop([turn(call("pack", order="1")), say("Done.")])
    run_id = scene.enqueue()
    scene.worker.work(run_id)
    suspended = scene.told(run_id)[-1]
    assert (suspended.data["reason"], suspended.data["pending"][0]["name"]) == ("external_tool", "pack")
    call_id = suspended.data["pending"][0]["id"]
    scene.client.provide_results(run_id, [ToolResult(tool_call_id=call_id, content="packed")])
    dying = scene.world.worker()
    dying.lose_at("model.before", run_id)
    for name in (scene.worker.name, dying.name):
        scene.world.database.run(lambda unit, name=name: workers.end(unit, name, "stopped"))
    proof = WorkersGone(scene.client.runtime, "ops")
    ResumeCloser(scene.client.runtime, proof, proof).close(proof.request(run_id, SCOPE))
    events = scene.told(run_id, after=suspended.cursor)
    assert kinds(events) == ["run_started", "incomplete"]
    assert events[-1].data == {"code": "closed_incomplete"}


def test_a_run_that_only_waited_for_a_slot_was_not_resumed(scene: Scene) -> None:
    scene.shop([say("Hi.")])
    run_id = scene.enqueue()
    slot.give_back(scene.worker.rt, scene.worker.claim(run_id), "reserve")
    scene.worker.work(run_id)
    started = [event.data["resumed"] for event in scene.told(run_id) if event.kind == "run_started"]
    assert started == [False, False]


def test_an_answer_of_several_calls_is_one_fact_that_no_cursor_splits(scene: Scene) -> None:
    scene.shop([turn(*(call("find", order=str(number)) for number in range(3))), say("Done.")])
    run_id = scene.enqueue()
    scene.worker.work(run_id)
    events = scene.told(run_id)
    calls = [event for event in events if event.kind is StreamKind.TOOL_CALL]
    for event in calls[:-1]:
        again = scene.told(run_id, after=event.cursor)
        assert [item for item in again if item.kind is StreamKind.TOOL_CALL] == calls
    assert StreamKind.TOOL_CALL not in [item.kind for item in scene.told(run_id, after=calls[-1].cursor)]


# --- Cursors ------------------------------------------------------------------------------------------------------


def test_attaching_anywhere_misses_nothing_and_repeats_no_whole_fact(scene: Scene) -> None:
    scene.shop(PAY)
    run_id = scene.enqueue()
    scene.worker.work(run_id)
    scene.client.decide(only(scene.client.checkpoints()).id, approved=True)
    scene.world.worker().work(run_id)
    whole = scene.told(run_id)
    for count, event in enumerate(whole[:-1], start=1):
        rest = scene.told(run_id, after=event.cursor)
        assert rest[-1] == whole[-1]
        # Nothing is missing, and only what belongs to a fact cut in two comes again.
        assert [item for item in whole[count:] if item not in rest] == []
        assert [item.cursor for item in rest] == [
            item.cursor for item in whole if _fact(whole, item) > event.cursor
        ]


def _fact(whole: list[StreamEvent], event: StreamEvent) -> int:
    """The ordinal of the fact that an event belongs to: that of the next event which ends one."""
    for item in whole[whole.index(event) :]:
        if item.kind not in (StreamKind.CHECKPOINT,):
            return item.cursor
    raise AssertionError


@pytest.mark.parametrize("beyond", [0, 1, 10_000])
def test_whoever_comes_after_the_end_is_told_the_end(scene: Scene, beyond: int) -> None:
    scene.shop([say("Hi.")])
    run_id = scene.enqueue()
    scene.worker.work(run_id)
    end = scene.told(run_id)[-1]
    assert scene.told(run_id, after=end.cursor + beyond) == [end]


def test_a_pause_that_was_seen_is_waited_out(scene: Scene) -> None:
    scene.shop([turn(call("pay", amount=5)), say("Paid.")])
    run_id = scene.enqueue()
    scene.worker.work(run_id)
    cursor = scene.told(run_id)[-1].cursor
    assert scene.so_far(run_id, after=cursor) == []
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(scene.told, run_id, after=cursor)
        scene.client.decide(only(scene.client.checkpoints()).id, approved=True)
        scene.world.worker().work(run_id)
        assert kinds(following.result(30)) == ["run_started", "step", "done"]


def test_a_second_pause_ends_the_stream_and_the_first_does_not(scene: Scene) -> None:
    scene.shop([turn(call("pay", amount=1)), turn(call("pay", amount=2)), say()])
    run_id = scene.enqueue()
    scene.worker.work(run_id)
    scene.client.decide(only(scene.client.checkpoints()).id, approved=True)
    scene.world.worker().work(run_id)
    events = scene.told(run_id)
    assert [event.kind for event in events].count(StreamKind.SUSPENDED) == 2
    assert events[-1].data["suspension_id"] == scene.world.run(run_id)["suspension_id"]


def test_long_runs_come_in_pages_and_whole(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.shop([*(turn(call("find", order=str(number))) for number in range(8)), say("Done.")])
    run_id = scene.enqueue()
    scene.worker.work(run_id)
    whole = scene.told(run_id)
    for page in (1, 2, 3, 5):
        monkeypatch.setattr(stream, "PAGE", page)
        assert scene.told(run_id) == whole


def test_many_facts_that_say_nothing_do_not_stop_a_stream(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hand-offs and decisions are facts without an event: a page of them is passed."""
    scene.shop([say("Hi.")])
    run_id = scene.enqueue()
    monkeypatch.setattr(stream, "PAGE", 2)
    for _ in range(3):
        row = scene.worker.claim(run_id).row
        factory.move(scene.world.database, "hand_off", row, _guard(row))
    scene.worker.work(run_id)
    assert kinds(scene.told(run_id)) == [*["run_started"] * 4, "step", "done"]


def _guard(row: Any) -> Any:
    return Guard(term=factory.term_of(row))


def test_facts_of_one_look_are_of_one_moment(scene: Scene) -> None:
    """A commit between two statements of a look could hide a fact behind a cursor that has passed it."""
    scene.shop([say("Hi.")])
    run_id = scene.enqueue()
    with recording(scene.world.database) as recorder, scene.world.database.transaction() as unit:
        stream.facts(unit, run_id, -1)
    statements = [item.sql for one in recorder.transactions for item in one]
    assert len(statements) == 1
    assert all(table in statements[0] for table in ("events", "steps", "messages"))


def test_a_run_that_ends_between_two_statements_of_a_look_is_told_whole(scene: Scene) -> None:
    scene.shop([turn(call("find", order="1")), say("Done.")])
    run_id = scene.enqueue()
    ran: list[Any] = []

    def race(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if "UNION ALL" in statement and not ran:
            ran.append(run_id)
            ran.append(scene.worker.work(run_id)["state"])

    engine = scene.client.runtime.database.engine
    sql.listen(engine, "after_cursor_execute", race)
    try:
        # All that there is has been seen, so the first look finds nothing, and then that the run is over.
        events = scene.told(run_id, after=0)
    finally:
        sql.remove(engine, "after_cursor_execute", race)
    assert ran == [run_id, "completed"]
    assert kinds(events) == ["run_started", "step", "tool_call", "step", "done"]


def test_a_follower_meets_every_fact_of_a_run_that_races_ahead(scene: Scene) -> None:
    scene.shop([*(turn(call("find", order=str(number))) for number in range(12)), say("Done.")])
    followed = [scene.enqueue() for _ in range(4)]
    with ThreadPoolExecutor(5) as pool:
        following = [pool.submit(scene.told, run_id) for run_id in followed]
        for run_id in followed:
            pool.submit(scene.worker.work, run_id)
        for run_id, each in zip(followed, following, strict=True):
            assert each.result(60) == scene.told(run_id)


# --- Whoever works ------------------------------------------------------------------------------------------------


def test_a_run_that_is_handed_off_goes_on_in_the_same_stream(scene: Scene) -> None:
    scene.shop([turn(call("find", order="1")), say("Done.")])
    run_id = scene.enqueue()
    following = scene.follow(run_id)
    with at("turn.after_commit", scene.worker.rt.drain.set):
        assert scene.worker.work(run_id)["state"] == "reclaimable"
    first = list(itertools.islice(following, 3))
    assert kinds(first) == ["run_started", "step", "tool_call"]
    scene.world.worker().work(run_id)
    rest = list(following)
    assert kinds(rest) == ["run_started", "step", "done"]
    assert rest[0].data["resumed"] is True


def test_a_lapse_and_a_slice_do_not_end_a_stream(scene: Scene) -> None:
    scene.shop([turn(call("find", order="1")), turn(call("find", order="2")), say("Done.")])
    run_id = scene.enqueue()
    scene.world.worker(slice_steps=1).work(run_id)
    scene.world.worker().lose_at("model.after", run_id)
    scene.world.worker().work(run_id)
    events = scene.told(run_id)
    assert [event.data["resumed"] for event in events if event.kind is StreamKind.RUN_STARTED] == [
        False,
        True,
        True,
    ]
    assert kinds(events)[-1] == "done"


def test_a_client_that_hangs_up_changes_nothing(scene: Scene) -> None:
    scene.shop([turn(call("find", order="1")), say("Done.")], stream=True)
    run_id = scene.enqueue()
    source = Kept()
    following = scene.follow(run_id, tokens=source)
    claimed = scene.worker.claim(run_id)
    assert next(following).kind is StreamKind.RUN_STARTED
    before = scene.world.snapshot()
    following.close()  # type: ignore[attr-defined]
    assert source.closed
    assert scene.world.snapshot() == before
    assert scene.worker.go_on(claimed)["state"] == "completed"


def test_no_connection_is_held_while_a_client_takes_its_time(scene: Scene) -> None:
    scene.shop([say("Hi.")])
    run_id = scene.enqueue()
    scene.worker.work(run_id)
    pool: Any = scene.client.runtime.database.engine.pool
    following = scene.follow(run_id)
    next(following)
    assert pool.checkedout() == 0
    list(following)


# --- Who asks -----------------------------------------------------------------------------------------------------


def test_what_cannot_be_followed_is_refused(scene: Scene) -> None:
    scene.shop([say("Hi.")])
    run_id = scene.enqueue()
    with pytest.raises(InvalidId):
        scene.follow("nonsense")
    with pytest.raises(RunNotFound):
        scene.told(new_id(RUN))
    with pytest.raises(RunNotFound):
        list(streaming.follow(scene.client.runtime, run_id, "tenant=other"))


def test_silence_is_told_after_the_time_given(scene: Scene) -> None:
    scene.shop([say("Hi.")])
    run_id = scene.enqueue()
    with pytest.raises(WaitTimeout, match="ready"):
        scene.told(run_id, timeout_s=0.2)


# --- The twin for event loops -------------------------------------------------------------------------------------


def test_the_async_twin_tells_the_same(scene: Scene) -> None:
    scene.shop(PAY)
    run_id = scene.enqueue()
    scene.worker.work(run_id)

    async def collect() -> list[StreamEvent]:
        rt = scene.client.runtime
        return [event async for event in streaming.afollow(rt, run_id, SCOPE, timeout_s=30)]

    assert asyncio.run(collect()) == scene.told(run_id)
    with pytest.raises(InvalidId):
        streaming.afollow(scene.client.runtime, "nonsense", SCOPE)


def test_many_async_followers_wait_on_no_thread_and_hang_up_at_once(scene: Scene) -> None:
    """More followers than the event loop has threads to lend: waiting takes none."""
    scene.shop([say("Hi.")])
    run_id, ended = scene.enqueue(), scene.enqueue()
    scene.worker.work(ended)
    rt, sources = scene.client.runtime, [Kept() for _ in range(60)]

    async def wait_for_ever(source: Kept) -> None:
        async for _ in streaming.afollow(rt, run_id, SCOPE, tokens=source):
            raise AssertionError("nothing happens to this run")

    async def crowd() -> list[str]:
        async with anyio.create_task_group() as group:
            for source in sources:
                group.start_soon(wait_for_ever, source)
            with anyio.fail_after(30):
                while any(source.reads < 2 for source in sources):
                    await asyncio.sleep(0)
                found = [event async for event in streaming.afollow(rt, ended, SCOPE)]
            group.cancel_scope.cancel()
        return kinds(found)

    assert asyncio.run(crowd()) == ["run_started", "step", "done"]
    assert all(source.closed for source in sources)

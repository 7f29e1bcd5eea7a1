"""Tokens beside the facts of a run: in order, and their gaps told."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cortex_workers.engine.watched_tokens import WatchedTokens
from cortex_workers.ports import Token
from cortex_workers.schemas.stream import StreamEvent, StreamKind
from tests.engine.following import PAY, Kept, Scene, kinds, text
from tests.engine.world import World, call, say
from tests.waiting import wait_until


@pytest.fixture
def scene(world: World) -> Scene:
    return Scene(world)


# --- Tokens -------------------------------------------------------------------------------------------------------

STREAMED = [
    {"stream": ["Let ", "me ", "see. "], "call": [call("find", order="17")]},
    {"stream": ["It ", "is ", "there."]},
]


def streaming_run(scene: Scene, kept: Kept, script: Any = None) -> str:
    scene.shop(script or STREAMED, stream=True)
    scene.worker.rt.tokens = kept
    run_id = scene.enqueue()
    scene.worker.work(run_id)
    return run_id


def test_tokens_come_before_the_step_they_make_and_after_its_start(scene: Scene) -> None:
    kept = Kept()
    run_id = streaming_run(scene, kept)
    events = scene.told(run_id, tokens=kept)
    assert kinds(events) == [
        "run_started",
        *["token"] * 3,
        "step",
        "tool_call",
        *["token"] * 3,
        "step",
        "done",
    ]
    assert [(event.data["step"], event.data["index"]) for event in events if event.kind == "token"] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    assert text(events) == "Let me see. It is there."
    assert kept.closed


def test_tokens_are_seen_while_the_model_speaks(scene: Scene) -> None:
    """Before anything of the step is stored."""
    spoke, go_on = threading.Event(), threading.Event()

    class Watched(Kept):
        def push(self, token: Token) -> None:
            super().push(token)
            if token.index == 2:
                spoke.set()
                assert go_on.wait(30)

    kept = Watched()
    scene.shop([{"stream": ["One, ", "two, ", "three."]}], stream=True)
    scene.worker.rt.tokens = kept
    run_id = scene.enqueue()
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(scene.worker.work, run_id)
        assert spoke.wait(30)
        events = scene.so_far(run_id, tokens=kept)
        go_on.set()
        working.result(30)
    assert kinds(events) == ["run_started", "token", "token", "token"]
    assert scene.world.steps(run_id) != []


def test_a_gap_between_tokens_is_told_where_it_is(scene: Scene) -> None:
    kept = Kept(lost=lambda token: token.step == 0 and token.index == 1)
    events = scene.told(streaming_run(scene, kept), tokens=kept)
    assert kinds(events)[:5] == ["run_started", "token", "lost", "token", "step"]
    (lost,) = (event for event in events if event.kind is StreamKind.LOST)
    assert lost.data == {"step": 0, "from": 1, "to": 1}


def test_the_beginning_that_is_gone_is_told(scene: Scene) -> None:
    kept = Kept(lost=lambda token: (token.step, token.index) in ((0, 0), (0, 1)))
    events = scene.told(streaming_run(scene, kept), tokens=kept)
    assert kinds(events)[1:3] == ["lost", "token"]
    assert events[1].data == {"step": 0, "from": 0, "to": 1}


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_end_of_a_step_that_is_gone_is_told_before_the_step(scene: Scene, first: int) -> None:
    kept = Kept(lost=lambda token: token.step == 1 and token.index >= first)
    events = scene.told(streaming_run(scene, kept), tokens=kept)
    (place,) = (index for index, event in enumerate(events) if event.kind is StreamKind.LOST)
    assert events[place].data == {"step": 1, "from": first, "to": None}
    assert kinds(events)[place:] == ["lost", "step", "done"]


def test_tokens_that_are_all_gone_are_told_step_by_step_and_waited_for_once(scene: Scene) -> None:
    kept = Kept(lost=lambda _: True)
    script = [
        *({"stream": [f"{number} "], "call": [call("find", order="1")]} for number in range(20)),
        say("x"),
    ]
    run_id = streaming_run(scene, kept, script)
    events = scene.told(run_id, tokens=kept)
    assert [event.data["step"] for event in events if event.kind is StreamKind.LOST] == list(range(21))
    # One grace of half a second in all, however many steps: each of its looks is one read.
    assert kept.reads < 60


def test_tokens_that_are_only_late_are_waited_for(scene: Scene) -> None:
    kept = Kept(lost=lambda _: True)
    run_id = streaming_run(scene, kept, [{"stream": ["Late ", "but ", "whole."]}])

    class Late(Kept):
        def read(self, run_id: str, place: str | None) -> tuple[Sequence[Token], str | None]:
            if self.reads == 3:
                for index, piece in enumerate(["Late ", "but ", "whole."]):
                    self.push(Token(run_id, 0, index, piece))
            return super().read(run_id, place)

    events = scene.told(run_id, tokens=Late())
    assert kinds(events) == ["run_started", *["token"] * 3, "step", "done"]


def test_an_agent_that_does_not_stream_loses_nothing(scene: Scene) -> None:
    scene.shop(STREAMED)
    kept = Kept()
    scene.worker.rt.tokens = kept
    run_id = scene.enqueue()
    scene.worker.work(run_id)
    assert StreamKind.LOST not in [event.kind for event in scene.told(run_id, tokens=kept)]
    assert kept._tokens == []


def test_who_attaches_again_is_not_told_the_tokens_of_steps_that_are_over(scene: Scene) -> None:
    kept = Kept()
    run_id = streaming_run(scene, kept)
    events = scene.told(run_id, tokens=kept)
    first_step = next(event for event in events if event.kind is StreamKind.STEP)
    rest = scene.told(run_id, tokens=kept, after=first_step.cursor)
    assert text(rest) == "It is there."
    assert kinds(rest) == ["tool_call", *["token"] * 3, "step", "done"]
    # In the midst of a step its tokens come from the first on: their index says so.
    token = next(event for event in events if event.kind is StreamKind.TOKEN)
    assert text(scene.told(run_id, tokens=kept, after=token.cursor)) == "Let me see. It is there."


def test_a_step_that_another_worker_repeats_starts_its_tokens_anew(scene: Scene) -> None:
    kept = Kept()
    scene.shop([{"stream": ["One, ", "two, ", "three."]}], stream=True)
    scene.worker.rt.tokens = kept
    run_id = scene.enqueue()
    scene.worker.lose_at("model.after", run_id)
    second = scene.world.worker()
    second.rt.tokens = kept
    second.work(run_id)
    events = scene.told(run_id, tokens=kept)
    tokens = [event.data["index"] for event in events if event.kind is StreamKind.TOKEN]
    assert tokens == [0, 1, 2, 0, 1, 2]
    assert StreamKind.LOST not in [event.kind for event in events]


def test_tokens_of_a_failed_call_come_before_the_failure(scene: Scene) -> None:
    kept = Kept()
    run_id = streaming_run(scene, kept, [{"stream": ["So ", "far "], "fail": "failed"}])
    events = scene.told(run_id, tokens=kept)
    assert kinds(events) == ["run_started", "token", "token", "error"]


def watched(*tokens: Token, closed: int = -1) -> WatchedTokens:
    kept = Kept()
    for token in tokens:
        kept.push(token)
    made = WatchedTokens(kept, "r", closed)
    made.fetch()
    return made


def pairs(*given: tuple[int, int]) -> list[Token]:
    return [Token("r", step, index, "ab") for step, index in given]


def test_a_repeated_step_whose_beginning_is_gone_is_told() -> None:
    events = watched(*pairs((0, 0), (0, 1), (0, 2), (0, 1))).give(-1)
    assert kinds(events) == ["token", "token", "token", "lost", "token"]
    assert events[3].data == {"step": 0, "from": 0, "to": 0}


def test_a_gap_is_not_told_a_second_time_at_the_end_of_its_step() -> None:
    events = watched(*pairs((0, 0), (0, 2))).end_step(0, 6, True, -1)
    assert kinds(events) == ["token", "lost", "token"]


def test_what_a_stale_worker_says_of_a_step_that_is_stored_is_not_shown() -> None:
    made = watched(*pairs((0, 0), (0, 1)))
    assert kinds(made.end_step(0, 4, True, -1)) == ["token", "token"]
    made._held.extend(pairs((0, 0), (1, 0)))
    assert [event.data["step"] for event in made.give(-1)] == [1]


def test_a_step_without_text_lost_none() -> None:
    for chars in (0, None):
        assert watched().end_step(0, chars, True, -1) == []


def test_the_stream_of_a_client_is_this_one(scene: Scene) -> None:
    scene.shop(PAY)
    run_id = scene.enqueue()
    scene.worker.work(run_id)
    following = scene.client.stream(run_id, timeout_s=30)
    assert inspect.isgenerator(following)
    assert list(following) == scene.told(run_id)

    async def collect() -> list[StreamEvent]:
        return [event async for event in scene.client.astream(run_id, timeout_s=30)]

    assert asyncio.run(collect()) == scene.told(run_id)


def test_a_stream_of_two_processes_tells_both_the_same(scene: Scene) -> None:
    scene.shop(PAY)
    run_id = scene.enqueue()
    other = scene.world.client()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(lambda each=each: list(each.stream(run_id))) for each in (scene.client, other)]
        wait_until(lambda: all(each.running() for each in both), "both clients to follow")
        scene.worker.work(run_id)
        first, second = (each.result(30) for each in both)
    assert first == second == scene.told(run_id)

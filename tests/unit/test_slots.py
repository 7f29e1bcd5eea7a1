"""The slots of a process: what starts may hold, what begun runs always find, what a drain closes."""

from __future__ import annotations

import math
import threading
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex_workers.lease.slots import Kind, Slots, start_limit

Action = tuple[Literal["enter", "leave", "switch"], Kind, Kind]
KINDS: list[Kind] = ["start", "begun"]
ACTIONS = st.tuples(
    st.sampled_from(["enter", "leave", "switch"]), st.sampled_from(KINDS), st.sampled_from(KINDS)
)


@pytest.mark.parametrize(
    ("total", "limit"), [(0, 0), (1, 1), (2, 2), (3, 1), (4, 2), (10, 8), (20, 18), (21, 18), (200, 180)]
)
def test_starts_leave_a_tenth_of_the_slots_and_two_at_least(total: int, limit: int) -> None:
    assert start_limit(total) == limit


@given(st.integers(min_value=0, max_value=5000))
def test_a_process_with_slots_takes_starts_and_one_with_three_keeps_some_back(total: int) -> None:
    limit = start_limit(total)
    assert (limit >= 1) == (total >= 1)
    assert limit <= total
    if total > 2:
        assert limit == max(1, total - max(2, math.ceil(total / 10)))
        assert total - limit >= 2


@given(st.integers(min_value=0, max_value=12), st.lists(ACTIONS, max_size=80))
def test_no_order_of_events_overfills_a_process_or_lets_starts_into_the_reserve(
    total: int, actions: list[Action]
) -> None:
    slots = Slots(total)
    inside: dict[Kind, int] = {"start": 0, "begun": 0}
    for action, kind, other in actions:
        if action == "enter":
            free = slots.free if kind == "begun" else slots.free_for_start
            assert slots.try_enter(kind) == (free > 0)
            inside[kind] += free > 0
        elif inside[kind] == 0:
            continue
        elif action == "leave":
            slots.leave(kind)
            inside[kind] -= 1
        else:
            may = kind == other or other == "begun" or inside["start"] < slots.start_limit
            assert slots.switch(kind, other) == may
            if may:
                inside[kind] -= 1
                inside[other] += 1
        assert slots.used == inside["start"] + inside["begun"] <= total
        assert inside["start"] <= slots.start_limit
        assert slots.free == total - slots.used
        assert slots.free_for_start == min(slots.free, slots.start_limit - inside["start"])


def test_begun_runs_find_a_slot_however_many_starts_there_are() -> None:
    slots = Slots(10)
    assert [slots.try_enter("start") for _ in range(10)] == [True] * 8 + [False] * 2
    assert slots.try_enter("begun")
    assert slots.try_enter("begun")
    assert not slots.try_enter("begun")


def test_a_drain_lets_nothing_in_and_everything_out() -> None:
    slots = Slots(4)
    assert slots.try_enter("begun")
    slots.close()
    assert slots.closed
    assert (slots.free, slots.free_for_start) == (0, 0)
    assert not slots.try_enter("begun")
    assert not slots.switch("begun", "begun")
    slots.leave("begun")
    assert slots.used == 0


def test_a_slot_that_nobody_took_cannot_be_given_back() -> None:
    slots = Slots(4)
    assert slots.try_enter("begun")
    with pytest.raises(ValueError, match="start"):
        slots.leave("start")


def test_only_the_end_of_being_full_is_told() -> None:
    told: list[int] = []
    slots = Slots(2)
    slots.on_room(lambda: told.append(slots.used))
    assert slots.try_enter("start")
    slots.leave("start")
    assert told == []
    assert slots.try_enter("start")
    assert slots.try_enter("begun")
    slots.leave("start")
    slots.leave("begun")
    assert told == [1]


def test_many_threads_at_once_take_no_more_than_there_is() -> None:
    slots = Slots(40)
    line = threading.Barrier(8)
    entered: list[bool] = []

    def take() -> None:
        line.wait()
        entered.extend(slots.try_enter("begun") for _ in range(10))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (entered.count(True), slots.used, slots.free) == (40, 40, 0)


def test_the_greatest_rank_and_the_median_time_are_remembered() -> None:
    slots = Slots(4)
    assert (slots.last_start_rank, slots.median_run_s) == (0, math.inf)
    for rank, seconds in [(7, 0.1), (9, 0.3), (8, 30.0)]:
        slots.note_start_rank(rank)
        slots.note_run(seconds)
    assert (slots.last_start_rank, slots.median_run_s) == (9, 0.3)
    for _ in range(100):
        slots.note_run(0.01)
    assert slots.median_run_s == 0.01

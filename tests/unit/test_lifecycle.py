"""The table of the lifecycle is sound in itself."""

import pytest

from cortex_workers.errors import all_errors
from cortex_workers.schemas.lifecycle import (
    CHECKPOINT,
    CLAIMABLE_RUN_STATES,
    MACHINES,
    RUN,
    STATES,
    TERMINAL_DELIVERY_STATES,
    TERMINAL_RUN_STATES,
    TERMINAL_TOOL_CALL_STATES,
    AskState,
    CheckpointState,
    Fence,
    LeaseEffect,
    RunState,
    ToolCallState,
    Transition,
    transition,
)

LATER = {"run": {RunState.CREATED}, "checkpoint": set(), "tool_call": set(), "delivery": set(), "ask": set()}
"""States whose rows arrive with later rooms: a host's own runs."""

TERMINAL = {
    "run": TERMINAL_RUN_STATES,
    "checkpoint": {CheckpointState.RESOLVED},
    "tool_call": TERMINAL_TOOL_CALL_STATES,
    "delivery": TERMINAL_DELIVERY_STATES,
    "ask": {AskState.SEALED},
}

# runs.md 1.3, last paragraph; the states that a later room adds are not in it yet.
ILLEGAL = [
    (RunState.PAUSED, RunState.COMPLETED),
    (RunState.READY, RunState.PAUSED),
    (RunState.RECLAIMABLE, RunState.PAUSED),
    (RunState.PAUSED, RunState.RECLAIMABLE),
    (RunState.READY, RunState.RECLAIMABLE),
    (RunState.CREATED, RunState.PAUSED),
    (RunState.CREATED, RunState.READY),
    (RunState.CREATED, RunState.RECLAIMABLE),
]


@pytest.mark.parametrize("machine", MACHINES)
def test_names_are_unique_in_a_machine(machine: str) -> None:
    names = [row.name for row in MACHINES[machine]]
    assert len(names) == len(set(names))
    assert [transition(machine, name).name for name in names] == names


@pytest.mark.parametrize("machine", MACHINES)
def test_only_declared_states_are_named(machine: str) -> None:
    named = {state for row in MACHINES[machine] for state in (*row.sources, row.target)}
    assert named <= set(STATES[machine])


@pytest.mark.parametrize("machine", MACHINES)
def test_every_state_is_reachable_or_arrives_with_a_later_room(machine: str) -> None:
    assert reachable(machine) == set(STATES[machine]) - LATER[machine]


def reachable(machine: str) -> set[str]:
    found: set[str] = set()
    while True:
        more = {row.target for row in MACHINES[machine] if not row.sources or found.intersection(row.sources)}
        if more <= found:
            return found
        found |= more


@pytest.mark.invariant("I4")
@pytest.mark.parametrize("machine", MACHINES)
def test_nothing_leaves_a_terminal_state_and_something_leaves_every_other(machine: str) -> None:
    left = {state for row in MACHINES[machine] for state in row.sources}
    # `created` has its way out already: cancelling a host's own run.
    live = set(STATES[machine]) - set(TERMINAL[machine])
    assert left == live


@pytest.mark.parametrize("machine", MACHINES)
def test_a_name_and_a_source_have_one_target(machine: str) -> None:
    pairs = [(row.name, source) for row in MACHINES[machine] for source in row.sources]
    assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize(("source", "target"), ILLEGAL)
def test_an_illegal_move_is_not_in_the_table(source: RunState, target: RunState) -> None:
    assert [row.name for row in RUN if source in row.sources and row.target == target] == []


def test_a_run_is_leased_exactly_while_it_runs() -> None:
    for row in RUN:
        enters, leaves = row.target == RunState.RUNNING, RunState.RUNNING in row.sources
        assert (row.lease is LeaseEffect.TAKE) == enters, row.name
        assert (row.lease in (LeaseEffect.DROP, LeaseEffect.FENCE)) == leaves, row.name


def test_what_is_taken_from_a_holder_is_fenced_and_what_a_holder_gives_is_not() -> None:
    for row in RUN:
        if RunState.RUNNING in row.sources:
            taken = row.fence in (Fence.REVISION, Fence.LAPSED) or row.name == "watchdog"
            assert (row.lease is LeaseEffect.FENCE) == taken, row.name


def test_a_pause_is_left_only_under_its_own_fence_and_ends_then() -> None:
    fences = {Fence.LIVE_PAUSE, Fence.THIS_PAUSE, Fence.OVERDUE_PAUSE}
    for row in RUN:
        leaves = RunState.PAUSED in row.sources
        assert (row.fence in fences) == leaves, row.name
        assert (row.ends_pause_as is not None) == leaves, row.name


def test_a_waiting_run_is_announced_unless_it_was_only_handed_back() -> None:
    for row in RUN:
        if row.target in CLAIMABLE_RUN_STATES and not row.name.startswith("hand_back"):
            assert {"RunReady", "RunReclaimable", "ResumeAdmitted"} & {str(news) for news in row.announces}, (
                row.name
            )


def test_only_a_lapse_counts_a_reclaim() -> None:
    assert [row.name for row in RUN if row.counts_reclaim] == ["lapse"]
    assert not [row.name for row in RUN if row.counts_reclaim and row.good_end]


def test_more_than_one_source_needs_a_fence_that_tells_them_apart() -> None:
    """Hooks are told the former state; only a claim reads it in its own statement."""
    assert [row.name for row in RUN if len(row.sources) > 1] == ["claim"]


@pytest.mark.parametrize("row", [row for rows in MACHINES.values() for row in rows], ids=lambda row: row.name)
def test_a_row_says_what_it_is_for_and_refuses_with_a_known_code(row: Transition) -> None:
    assert row.says.endswith(".")
    assert row.refusal in {error.code for error in all_errors()}


def test_a_checkpoint_closes_in_five_ways_and_never_opens_again() -> None:
    closings = {row.name for row in CHECKPOINT if row.target == CheckpointState.RESOLVED}
    assert closings == {"decided", "settled", "expired", "cancelled", "superseded"}


def test_a_start_record_is_taken_back_only_by_its_own_holder() -> None:
    assert transition("tool_call", "take_back").fence is Fence.TERM


def test_a_call_that_waits_is_never_unknown() -> None:
    assert transition("tool_call", "write_off").sources == (ToolCallState.STARTED,)


def test_a_name_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"run\.teleport"):
        transition("run", "teleport")

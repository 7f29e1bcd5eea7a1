"""The reasoning loop: steps, results, arguments, budgets, slices."""

from __future__ import annotations

import pytest

from tests.engine.world import World, call, contents, error_of, results, say, turn


def test_a_run_takes_a_step_for_each_model_call_and_ends_with_the_answer(world: World) -> None:
    world.shop([turn(call("find", order="17")), say()])
    run = world.worker().work(world.client().enqueue("support", "Where is order 17?").id)
    assert (run["state"], run["output"]) == ("completed", 'Done: {"order":"17"}')
    assert [step["step_index"] for step in world.steps(run["id"])] == [0, 1]

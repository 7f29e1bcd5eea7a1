"""The reasoning loop: steps, results, arguments, call ids, budgets, slices."""

from __future__ import annotations

import json
import threading
from datetime import timedelta

import pytest

from cortex_workers import RunOverrides
from cortex_workers.schemas.llm import ModelRequest, Usage
from tests.engine.world import World, at, call, contents, error_of, results, say, turn


def test_a_run_takes_a_step_for_each_model_call_and_ends_with_the_answer(world: World) -> None:
    world.shop([turn(call("find", order="17")), say()])
    run = world.worker().work(world.client().enqueue("support", "Where is order 17?").id)
    assert (run["state"], run["output"], run["step_count"]) == ("completed", 'Done: {"order":"17"}', 2)
    assert [step["step_index"] for step in world.steps(run["id"])] == [0, 1]
    assert run["started_at"] <= run["completed_at"]


def test_the_usage_of_a_run_is_the_sum_of_its_steps(world: World) -> None:
    first = Usage(input_tokens=10, output_tokens=3, cache_read_tokens=2, requests=1)
    world.shop(
        [
            turn(call("find", order="1")) | {"usage": first.model_dump()},
            say() | {"usage": {"input_tokens": 5}},
        ]
    )
    run = world.worker().work(world.client().enqueue("support", "Go").id)
    assert Usage.model_validate(run["usage"]) == Usage(
        input_tokens=15, output_tokens=3, cache_read_tokens=2, requests=2
    )


def test_the_model_reads_the_results_in_the_order_of_its_calls(world: World) -> None:
    world.shop(
        [turn(call("find", order="1"), call("ship", order="2"), call("find", order="3")), say("Done.")]
    )
    world.worker().work(world.client().enqueue("support", "Go").id)
    assert results(world.model.requests[-1].messages) == ['{"order":"1"}', "ship done", '{"order":"3"}']
    assert [effect.tool for effect in world.effects] == ["find", "ship", "find"]


def test_a_tool_gets_the_same_key_that_its_record_stands_under(world: World) -> None:
    world.shop([turn(call("ship", order="1")), turn(call("ship", order="2")), say()])
    run = world.worker().work(world.client().enqueue("support", "Go").id)
    keys = [f"{run['id']}/{row['step_index']}/{row['call_id']}" for row in world.calls(run["id"])]
    assert [effect.key for effect in world.effects] == keys
    assert len(set(keys)) == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"order": 17}', "order"),
        ("{}", "order is missing"),
        ('{"order": "1", "colour": "red"}', "colour is not a parameter"),
        ("[1]", "a JSON object is needed"),
        ("order 17, please", "not valid JSON"),
    ],
)
def test_arguments_that_do_not_fit_are_an_error_the_model_reads(
    world: World, arguments: str, told: str
) -> None:
    world.shop([{"call": [{"tool": "ship", "args": arguments}]}, say("I see.")])
    run = world.worker().work(world.client().enqueue("support", "Go").id)
    assert run["state"] == "completed"
    assert told in error_of(world.messages(run["id"])[1])
    assert world.call(run["id"])["state"] == "failed"
    assert world.effects == []


def test_a_tool_that_does_not_exist_is_an_error_the_model_reads(world: World) -> None:
    world.shop([turn(call("fly", to="moon"), call("find", order="1")), say("I see.")])
    run = world.worker().work(world.client().enqueue("support", "Go").id)
    assert run["state"] == "completed"
    unknown, found = world.calls(run["id"])
    assert (unknown["state"], found["state"]) == ("failed", "completed")
    assert "no tool named 'fly'" in error_of(world.messages(run["id"])[1])


def test_a_tool_outside_the_narrowed_list_is_neither_shown_nor_run(world: World) -> None:
    world.shop([turn(call("ship", order="1")), say("I see.")])
    narrow = RunOverrides(tools=("find",))
    run = world.worker().work(world.client().enqueue("support", "Go", overrides=narrow).id)
    assert [tool.name for tool in world.model.requests[0].tools] == ["find"]
    assert world.call(run["id"])["state"] == "failed"
    assert world.effects == []


def test_a_list_narrowed_to_nothing_stays_empty(world: World) -> None:
    world.shop([turn(call("find", order="1")), say("I see.")])
    run = world.worker().work(world.client().enqueue("support", "Go", overrides=RunOverrides(tools=())).id)
    assert [request.tools for request in world.model.requests] == [(), ()]
    assert world.call(run["id"])["state"] == "failed"


def test_what_a_tool_raises_is_an_error_the_model_reads(world: World) -> None:
    @world.host.tool
    def explode(fuse: int) -> str:
        """Explode."""
        raise RuntimeError("it went off")

    world.shop([turn(call("explode", fuse=1)), say("I see.")])
    run = world.worker().work(world.client().enqueue("support", "Go").id)
    assert run["state"] == "completed"
    assert error_of(world.messages(run["id"])[1]) == "RuntimeError: it went off"
    assert world.call(run["id"])["state"] == "failed"


def test_a_tool_that_wants_to_leave_the_process_has_failed(world: World) -> None:
    @world.host.tool
    def leave(code: int) -> str:
        """Leave."""
        raise SystemExit(code)

    world.shop([turn(call("leave", code=1)), say("I see.")])
    run = world.worker().work(world.client().enqueue("support", "Go").id)
    assert run["state"] == "completed"
    assert world.call(run["id"])["state"] == "failed"


def test_an_async_tool_runs_like_any_other(world: World) -> None:
    @world.host.tool
    async def greet(name: str) -> str:
        """Greet."""
        return f"Hello, {name}."

    world.shop([turn(call("greet", name="Ada")), say()])
    run = world.worker().work(world.client().enqueue("support", "Go").id)
    assert run["output"] == "Done: Hello, Ada."


def test_calls_with_the_same_or_no_id_in_one_turn_are_answered_separately(world: World) -> None:
    twins = [{"tool": "ship", "args": {"order": str(number)}, "id": id} for number, id in enumerate("aa")]
    nameless = [{"tool": "find", "args": {"order": str(number)}, "id": ""} for number in (2, 3)]
    world.shop([{"call": [*twins, *nameless]}, say("Done.")])
    run = world.worker().work(world.client().enqueue("support", "Go").id)
    assert run["state"] == "completed"
    rows = world.calls(run["id"])
    assert len({row["call_id"] for row in rows}) == 4
    assert all(row["call_id"] for row in rows)
    assert [row["provider_call_id"] for row in rows[:2]] == ["a", "a"]
    assert len({effect.key for effect in world.effects}) == 4


def test_a_call_id_that_comes_again_in_a_later_step_is_another_call(world: World) -> None:
    same = [{"call": [{"tool": "ship", "args": {"order": order}, "id": "x"}]} for order in "12"]
    world.shop([*same, say("Done.")])
    run = world.worker().work(world.client().enqueue("support", "Go").id)
    first, second = world.calls(run["id"])
    assert first["call_id"] != second["call_id"]
    assert [effect.arguments["order"] for effect in world.effects] == ["1", "2"]
    assert run["state"] == "completed"


def test_the_arguments_are_kept_as_the_model_wrote_them(world: World) -> None:
    text = '{ "order":   "17" }'
    world.shop([{"call": [{"tool": "ship", "args": text}]}, say()])
    run = world.worker().work(world.client().enqueue("support", "Go").id)
    assert world.messages(run["id"])[0].tool_calls[0].arguments == text


def test_running_out_of_steps_fails_the_run(world: World) -> None:
    world.shop(lambda request: turn(call("find", order=str(request.step))), max_steps=3)
    run = world.worker().work(world.client().enqueue("support", "Go").id)
    assert (run["state"], run["error_code"], run["step_count"]) == ("failed", "max_steps", 3)
    # What the last step found out is not lost with it.
    assert [row["state"] for row in world.calls(run["id"])] == ["completed"] * 3


def test_a_run_may_have_more_steps_than_its_agent(world: World) -> None:
    world.shop([turn(call("find", order="1")), say()], max_steps=1)
    client = world.client()
    assert world.worker().work(client.enqueue("support", "Go").id)["error_code"] == "max_steps"
    wider = client.enqueue("support", "Go", overrides=RunOverrides(max_steps=2))
    assert world.worker().work(wider.id)["state"] == "completed"


def test_an_empty_answer_completes_and_is_noted(world: World) -> None:
    world.shop([say("")])
    run = world.worker().work(world.client().enqueue("support", "Go").id)
    assert (run["state"], run["output"]) == ("completed", "")
    assert world.events(run["id"])[-1]["data"] == {"empty_output": True}


def test_a_budget_of_leased_time_fails_the_run_at_the_next_boundary(world: World) -> None:
    world.shop([turn(call("find", order="1")), say()])
    tight = RunOverrides(budget_s=1e-6)
    run = world.worker().work(world.client().enqueue("support", "Go", overrides=tight).id)
    assert (run["state"], run["error_code"]) == ("failed", "budget_exhausted")
    assert world.model.requests == []


def test_the_time_a_run_is_paused_is_not_taken_from_its_budget(world: World) -> None:
    world.shop([turn(call("pay", amount=5)), say()], budget=timedelta(seconds=600))
    client, worker = world.client(), world.worker()
    run_id = client.enqueue("support", "Go").id
    worker.work(run_id)
    world.later(6000)
    client.decide(client.checkpoints()[0].id, approved=True)
    assert worker.work(run_id)["state"] == "completed"


def test_the_time_a_dead_worker_held_a_run_is_taken_from_its_budget_up_to_its_lease(world: World) -> None:
    world.shop([turn(call("find", order="1")), say()], budget=timedelta(seconds=30))
    worker = world.worker()
    run_id = world.client().enqueue("support", "Go").id
    assert 59 < worker.lose_at("turn.after_commit", run_id)["leased_time"] < 62
    assert worker.work(run_id)["error_code"] == "budget_exhausted"


def test_a_budget_used_up_by_the_model_ends_the_run_before_the_call_is_even_recorded(world: World) -> None:
    def slow(request: ModelRequest) -> dict[str, object]:
        threading.Event().wait(1.1)
        return turn(call("ship", order="1"))

    world.shop(slow, budget=timedelta(seconds=1))
    worker = world.worker()
    run_id = world.client().enqueue("support", "Go").id
    run = worker.work(run_id)
    assert run["error_code"] == "budget_exhausted"
    assert (world.calls(run_id), world.effects) == ([], [])
    # The answer itself is kept.
    assert len(world.messages(run_id)) == 1


def test_a_slice_ends_after_so_many_steps_and_another_term_goes_on(world: World) -> None:
    world.shop(lambda request: say() if request.step == 5 else turn(call("find", order=str(request.step))))
    worker = world.worker(slice_steps=2)
    run_id = world.client().enqueue("support", "Go").id
    first = worker.work(run_id)
    assert (first["state"], first["instruction"], first["step_count"]) == ("ready", "go_on", 2)
    assert (first["reclaim_count"], first["handed_off"], first["queue_class"]) == (0, False, "begun")
    # The results of the last turn are in before anybody else goes on.
    assert [row["state"] for row in world.calls(run_id)] == ["completed"] * 2
    run = worker.finish(run_id)
    assert (run["state"], run["step_count"]) == ("completed", 6)
    assert [effect.arguments["order"] for effect in world.effects] == ["0", "1", "2", "3", "4"]
    assert [event["kind"] for event in world.events(run_id)].count("run.slice_end") == 2


def test_a_slice_does_not_end_before_anything_was_done_in_it(world: World) -> None:
    world.shop([turn(call("find", order="1")), say()])
    worker = world.worker(slice_s=0.1)
    claimed = worker.claim(world.client().enqueue("support", "Go").id)
    from cortex_workers.engine.continue_run import execute

    execute(worker.rt, claimed.row, claimed.held, slice_began=-1e9)
    run = world.run(claimed.row["id"])
    assert (run["state"], run["step_count"]) == ("ready", 1)


def test_the_request_carries_what_the_agent_says(world: World) -> None:
    world.shop([say("Hi.")], max_tokens=7, temperature=0.0, model_settings={"top_p": 0.5})
    world.worker().work(world.client().enqueue("support", "Go").id)
    (request,) = world.model.requests
    assert (request.system, request.max_tokens, request.temperature) == ("Help.", 7, 0.0)
    assert request.settings == {"top_p": 0.5}
    assert contents(request) == ["Go"]


def test_a_run_may_change_its_agent(world: World) -> None:
    world.shop([say("Hi.")], max_tokens=7)
    changed = RunOverrides(instructions="Be short.", temperature=0.0, max_tokens=3)
    world.worker().work(world.client().enqueue("support", "Go", overrides=changed).id)
    (request,) = world.model.requests
    assert (request.system, request.max_tokens, request.temperature) == ("Be short.", 3, 0.0)


def test_an_agent_edited_during_a_pause_is_the_old_one_to_the_paused_run(world: World) -> None:
    script = [turn(call("pay", amount=5)), turn(call("find", order="1")), say("Done.")]
    world.shop(script, max_steps=1)
    client, old = world.client(), world.worker()
    overrides = RunOverrides(max_steps=3, tools=("pay", "find"))
    run_id = client.enqueue("support", "Go", overrides=overrides).id
    old.work(run_id)

    other = World(world.onlooker)
    other.shop(lambda request: say("Other."), max_steps=9, model_settings={"new": True}, history_window=3)
    edited = world.worker(other.host)
    other.close()
    client.decide(client.checkpoints()[0].id, approved=True)
    run = old.finish(run_id)
    assert (run["state"], run["step_count"]) == ("completed", 3)
    last = world.model.requests[-1]
    assert sorted(tool.name for tool in last.tools) == ["find", "pay"]
    assert last.settings == {}
    assert client.enqueue("support", "Go").fresh
    newest = client.runs(limit=1)[0]
    assert newest.agent_digest != run["agent_digest"]
    assert edited.rt.versions.get(newest.agent_digest).max_steps == 9  # type: ignore[union-attr]


def test_a_subscriber_that_raises_changes_no_outcome(world: World) -> None:
    world.shop([say("Hi.")])
    worker, heard = world.worker(), []

    def raises(notification: object) -> None:
        heard.append(notification)
        raise RuntimeError("not my day")

    worker.rt.hooks.subscribe(raises)
    run = worker.work(world.client().enqueue("support", "Go").id)
    assert run["state"] == "completed"
    assert heard


def test_a_bug_of_ours_fails_the_run_instead_of_leaving_it_to_lapse(world: World) -> None:
    world.shop([say("Hi.")])
    worker = world.worker()
    run_id = world.client().enqueue("support", "Go").id

    def bug() -> None:
        raise ZeroDivisionError

    with at("model.before", bug):
        run = worker.work(run_id)
    assert (run["state"], run["error_code"]) == ("failed", "run_failed")
    assert "ZeroDivisionError" in run["error_text"]


def test_a_model_call_lost_before_it_was_stored_is_made_again_and_has_one_step(world: World) -> None:
    world.shop([turn(call("find", order="1")), say()])
    worker = world.worker()
    run_id = world.client().enqueue("support", "Go").id
    worker.lose_at("model.after", run_id)
    assert worker.work(run_id)["state"] == "completed"
    assert len(world.model.requests) == 3
    assert len(world.steps(run_id)) == 2


def test_what_a_model_said_beside_its_calls_is_kept(world: World) -> None:
    world.shop([turn(call("find", order="1")) | {"say": "Let me look."}, say()])
    run = world.worker().work(world.client().enqueue("support", "Go").id)
    assert [item.content for item in world.messages(run["id"])] == [
        "Let me look.",
        '{"order":"1"}',
        'Done: {"order":"1"}',
    ]


def test_the_same_answer_again_and_again_is_each_time_a_call_of_its_own(world: World) -> None:
    def script(request: ModelRequest) -> dict[str, object]:
        return say("Done.") if request.step == 3 else turn(call("find", order="1"))

    world.shop(script)
    run = world.worker().work(world.client().enqueue("support", "Go").id)
    assert len({row["call_id"] for row in world.calls(run["id"])}) == 3
    assert json.loads(results(world.messages(run["id"]))[0]) == {"order": "1"}


def test_a_run_whose_worker_died_before_its_first_commit_starts_again(world: World) -> None:
    world.shop([say("Hi.")])
    worker = world.worker()
    run_id = world.client().enqueue("support", "Go").id
    lost = worker.lose_at("model.before", run_id)
    assert (lost["state"], lost["reclaim_count"], lost["queue_class"]) == ("reclaimable", 1, "begun")
    assert worker.work(run_id)["output"] == "Hi."

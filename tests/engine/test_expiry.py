"""Pauses that nobody answered in time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from cortex_workers import Client
from cortex_workers.engine import expire
from cortex_workers.errors import InvalidState
from cortex_workers.store import tables
from tests.engine.world import Worker, World, call, error_of, only, say, turn


def paused(world: World, script: Any = None, **options: Any) -> tuple[Client, Worker, str]:
    world.shop(
        script or [turn(call("pay", amount=5)), say("Done.")], suspension_ttl=timedelta(hours=1), **options
    )
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Pay 5", session="chat").id
    assert worker.work(run_id)["state"] == "paused"
    return client, worker, run_id


def expire_it(world: World, worker: Worker, run_id: str) -> bool:
    return expire.expire_pause(worker.rt, world.run(run_id)["suspension_id"])


def test_an_overdue_pause_fails_its_run_and_leaves_the_list(world: World) -> None:
    """Bug case C26, the policy `fail`."""
    client, worker, run_id = paused(world)
    checkpoint_id = only(client.checkpoints()).id
    deadline = world.pauses(run_id)[0]["expires_at"]
    assert not expire_it(world, worker, run_id)
    world.later(3601)
    assert expire_it(world, worker, run_id)
    run = world.run(run_id)
    assert (run["state"], run["error_code"]) == ("failed", "suspension_expired")
    assert f"{deadline:%Y-%m-%d %H:%M:%S} UTC" in run["error_text"]
    assert client.checkpoints() == []
    closed = client.checkpoint(checkpoint_id)
    assert closed.closed_as == "expired"
    assert closed.decision is not None
    assert (closed.decision.approved, closed.decision.decided_by) == (False, "cortex")
    assert world.pauses(run_id)[0]["ended_as"] == "expired"
    assert world.call(run_id)["state"] == "denied"
    assert world.events(run_id)[-1]["kind"] == "run.expire"
    assert world.events(run_id)[-1]["actor"] == "cortex:sweeper"
    assert sorted(world.notified(run_id)[-2:]) == ["CheckpointResolved", "RunFailed"]
    # Once is enough.
    assert not expire_it(world, worker, run_id)
    with pytest.raises(InvalidState, match="expired"):
        client.decide(checkpoint_id, approved=True)


def test_an_overdue_pause_may_go_back_to_the_model(world: World) -> None:
    """Bug case C26, the policy `return_to_model`."""
    client, worker, run_id = paused(world, on_expiry="return_to_model")
    world.later(3601)
    assert expire_it(world, worker, run_id)
    run = world.run(run_id)
    assert (run["state"], run["instruction"]) == ("ready", "answer")
    assert world.pauses(run_id)[0]["ended_as"] == "expired"
    assert only(client.checkpoints(pending_only=False)).closed_as == "expired"
    assert worker.work(run_id)["state"] == "completed"
    assert "nobody answered before" in error_of(world.messages(run_id)[1])
    assert (world.call(run_id)["state"], world.effects) == ("denied", [])
    (verdict,) = world.rows(tables.adjudications)
    assert (verdict["outcome"], verdict["authority"], verdict["approver"]) == (
        "expired",
        "mechanism",
        "cortex:sweeper",
    )


@pytest.mark.parametrize(
    ("agent", "tools", "state"),
    [
        ("fail", [None, None], "failed"),
        ("fail", ["return_to_model", "return_to_model"], "ready"),
        ("return_to_model", ["fail", None], "failed"),
        ("return_to_model", [None, "return_to_model"], "ready"),
    ],
)
def test_a_tool_may_have_its_own_policy_and_the_strictest_of_a_turn_holds(
    world: World, agent: Any, tools: list[Any], state: str
) -> None:
    for number, policy in enumerate(tools):

        @world.host.tool(name=f"ask_{number}", needs_approval=True, on_expiry=policy)
        def ask() -> str:
            """Ask."""
            return "asked"

    _client, worker, run_id = paused(
        world, [turn(call("ask_0"), call("ask_1")), say("Done.")], on_expiry=agent
    )
    world.later(3601)
    assert expire_it(world, worker, run_id)
    assert world.run(run_id)["state"] == state


def test_the_instant_of_the_deadline_belongs_to_the_sweep(world: World) -> None:
    from cortex_workers.errors import SuspensionExpired
    from cortex_workers.testing.clock import stopped_clock

    client, worker, run_id = paused(world)
    deadline = world.pauses(run_id)[0]["expires_at"]
    with stopped_clock(deadline) as clock:
        with pytest.raises(SuspensionExpired):
            client.decide(only(client.checkpoints()).id, approved=True)
        clock.advance(-0.001)
        assert not expire_it(world, worker, run_id)
        clock.set(deadline)
        assert expire_it(world, worker, run_id)


def test_the_last_instant_before_the_deadline_belongs_to_the_decider(world: World) -> None:
    from cortex_workers.testing.clock import stopped_clock

    client, _worker, run_id = paused(world)
    deadline = world.pauses(run_id)[0]["expires_at"]
    with stopped_clock(deadline) as clock:
        clock.advance(-0.001)
        client.decide(only(client.checkpoints()).id, approved=True)
    assert world.run(run_id)["state"] == "ready"


def test_a_cancel_of_an_overdue_pause_wins_if_it_comes_first(world: World) -> None:
    client, worker, run_id = paused(world)
    world.later(3601)
    client.cancel(run_id)
    assert not expire_it(world, worker, run_id)
    assert world.run(run_id)["state"] == "cancelled"


def test_a_pause_that_was_answered_does_not_expire(world: World) -> None:
    client, worker, run_id = paused(world)
    client.decide(only(client.checkpoints()).id, approved=True)
    world.later(3601)
    assert not expire_it(world, worker, run_id)
    assert worker.work(run_id)["state"] == "completed"
    assert not expire_it(world, worker, run_id)


def test_an_older_pause_of_a_run_does_not_expire(world: World) -> None:
    client, worker, run_id = paused(
        world, [turn(call("pay", amount=1)), turn(call("pay", amount=2)), say("Done.")]
    )
    older = world.run(run_id)["suspension_id"]
    client.decide(only(client.checkpoints()).id, approved=True)
    worker.work(run_id)
    world.later(3601)
    before = world.snapshot()
    assert not expire.expire_pause(worker.rt, older)
    assert world.snapshot() == before


def test_the_pauses_of_a_session_that_an_operator_holds_do_not_expire(world: World) -> None:
    _client, worker, run_id = paused(world)
    session_id = world.run(run_id)["session_id"]
    world.sql("update sessions set gated_at = now() where id = :id", id=session_id)
    world.later(3601)
    assert not expire_it(world, worker, run_id)
    assert world.run(run_id)["state"] == "paused"


def test_an_expiry_gives_the_turn_to_whoever_is_next(world: World) -> None:
    client, worker, run_id = paused(world, on_expiry="return_to_model")
    second = client.enqueue("support", "2", session="chat").id
    claimed = worker.claim(second)
    world.later(3601)
    assert expire_it(world, worker, run_id)
    assert world.run(run_id)["wait_reason"] == "turn"
    worker.go_on(claimed)
    assert world.run(run_id)["wait_reason"] is None

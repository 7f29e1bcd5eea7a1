"""Checkpoints that a host writes itself: asked, decided and recorded; no run ever moves by them."""

from __future__ import annotations

from typing import Any

import pytest

from cortex_workers import Client
from cortex_workers.engine import expire
from cortex_workers.errors import (
    CheckpointNotFound,
    CortexError,
    InvalidArgument,
    InvalidDecision,
    InvalidId,
    InvalidState,
    RunNotFound,
    UnstorableText,
)
from cortex_workers.schemas.ids import RUN, new_id
from tests.engine.world import Worker, World, call, only, say, turn

PAY = [turn(call("pay", amount=5)), say("Done.")]


def paused(world: World, **options: Any) -> tuple[Client, Worker, str]:
    world.shop(PAY, **options)
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Pay 5").id
    assert worker.work(run_id)["state"] == "paused"
    return client, worker, run_id


def but_checkpoints(world: World) -> dict[str, Any]:
    return {name: rows for name, rows in world.snapshot().items() if name != "checkpoints"}


@pytest.mark.parametrize("approved", [True, False])
@pytest.mark.parametrize("state", ["paused", "completed"])
def test_opening_and_deciding_it_changes_nothing_but_itself(world: World, state: str, approved: bool) -> None:
    client, worker, run_id = paused(world)
    if state == "completed":
        client.decide(only(client.checkpoints()).id, approved=True)
        worker.work(run_id)
    before = but_checkpoints(world)
    world.told.clear()
    made = client.open_checkpoint(run_id, "May we publish this?", metadata={"page": 7})
    assert (made.kind, made.state, made.pending, made.expires_at) == ("host", "pending", (), None)
    assert made.metadata == {"page": 7}
    assert client.checkpoint(made.id) == made
    decided = client.decide(made.id, approved=approved, reason="why not", decided_by="Ann")
    assert (decided.state, decided.closed_as) == ("resolved", "decided")
    assert decided.decision is not None
    assert (decided.decision.approved, decided.decision.actor, decided.decision.decided_by) == (
        approved,
        "ops",
        "Ann",
    )
    assert but_checkpoints(world) == before
    assert world.notified(run_id) == ["CheckpointCreated", "CheckpointResolved"]


def test_the_first_decision_stands(world: World) -> None:
    client, _worker, run_id = paused(world)
    made = client.open_checkpoint(run_id, "Publish?")
    decided = client.decide(made.id, approved=True)
    assert client.decide(made.id, approved=True) == decided
    with pytest.raises(InvalidState) as refused:
        client.decide(made.id, approved=False)
    assert refused.value.recorded == decided.decision


def test_resolving_it_continues_no_run(world: World) -> None:
    _client, _worker, run_id = paused(world)
    client = world.client(host=world.host)
    made = client.open_checkpoint(run_id, "Publish?")
    run = client.resolve(made.id, approved=True)
    assert (run.id, run.state) == (run_id, "paused")


@pytest.mark.parametrize("end", ["expire", "cancel", "decide"])
def test_the_end_of_a_pause_leaves_it_open(world: World, end: str) -> None:
    client, worker, run_id = paused(world)
    asked = only(client.checkpoints())
    made = client.open_checkpoint(run_id, "Publish?")
    if end == "expire":
        world.later(8 * 86_400)
        assert expire.expire_pause(worker.rt, world.run(run_id)["suspension_id"])
    elif end == "cancel":
        client.cancel(run_id)
    else:
        client.decide(asked.id, approved=False)
    assert [item.id for item in client.checkpoints()] == [made.id]
    assert client.decide(made.id, approved=True).closed_as == "decided"


@pytest.mark.parametrize(
    "given",
    [
        {"calls": {"call_0_0": {"approved": True}}},
        {"approved": True, "amended_arguments": {"amount": 1}},
    ],
    ids=["calls", "arguments"],
)
def test_it_has_no_calls(world: World, given: dict[str, Any]) -> None:
    client, _worker, run_id = paused(world)
    made = client.open_checkpoint(run_id, "Publish?")
    before = world.snapshot()
    with pytest.raises(InvalidDecision):
        client.decide(made.id, **given)
    with pytest.raises(CortexError):
        client.settle(made.id, "did_not_happen")
    with pytest.raises(CheckpointNotFound):
        client.decide(made.id, approved=True, scope="tenant=other")
    assert world.snapshot() == before


@pytest.mark.parametrize(
    ("reason", "metadata", "error"),
    [
        ("", None, InvalidArgument),
        ("  ", None, InvalidArgument),
        ("x" * 501, None, InvalidArgument),
        ("a\x00", None, UnstorableText),
        ("Publish?", {"suspension_id": "sus_1"}, InvalidArgument),
        ("Publish?", {"a": "\x00"}, UnstorableText),
        ("Publish?", {"a": object()}, InvalidArgument),
    ],
)
def test_what_cannot_be_asked_is_not_written(
    world: World, reason: str, metadata: dict[str, Any] | None, error: type[CortexError]
) -> None:
    client, _worker, run_id = paused(world)
    before = world.snapshot()
    with pytest.raises(error):
        client.open_checkpoint(run_id, reason, metadata=metadata)
    assert world.snapshot() == before


def test_only_of_a_run_of_this_scope(world: World) -> None:
    client, _worker, run_id = paused(world)
    with pytest.raises(RunNotFound):
        client.open_checkpoint(run_id, "Publish?", scope="tenant=other")
    with pytest.raises(RunNotFound):
        client.open_checkpoint(new_id(RUN), "Publish?")
    with pytest.raises(InvalidId):
        client.open_checkpoint("x", "Publish?")


def test_open_questions_are_counted_in_a_scope_and_below(world: World) -> None:
    client, worker, run_id = paused(world)
    below = client.enqueue("support", "Pay 5", scope="tenant=acme/user=1").id
    worker.work(below)
    other = client.enqueue("support", "Pay 5", scope="tenant=other").id
    worker.work(other)
    made = client.open_checkpoint(run_id, "Publish?")
    assert client.count_checkpoints() == len(client.checkpoints()) == 3
    assert client.count_checkpoints(run_id=run_id) == 2
    assert client.count_checkpoints(scope="tenant=acme/user=1") == 1
    client.decide(made.id, approved=True)
    assert client.count_checkpoints(run_id=run_id) == 1
    with pytest.raises(InvalidId):
        client.count_checkpoints(run_id="x")

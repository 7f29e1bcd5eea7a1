"""A worker's slot: which run it takes, how long it stays, what it holds ahead and gives back."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cortex_workers import Client
from cortex_workers.engine import ahead, slot
from cortex_workers.errors import NotContinuable, RunAlreadyDone, RunNotFound, Stopping
from cortex_workers.schemas.ids import RUN, new_id
from cortex_workers.schemas.llm import ModelRequest
from tests.engine.world import Worker, World, call, commits, contents, say, turn
from tests.waiting import wait_until


def script(request: ModelRequest) -> dict[str, Any]:
    if contents(request, "user")[-1] == "pay" and request.messages[-1].role == "user":
        return turn(call("pay", amount=5))
    return say("Hi.")


@pytest.fixture
def client(world: World) -> Client:
    world.shop(script)
    world.worker()
    return world.client()


def states(world: World, run_ids: list[str]) -> list[str]:
    return [world.run(run_id)["state"] for run_id in run_ids]


def answered(world: World, client: Client) -> str:
    """A run that has begun and waits for a worker."""
    run_id = client.enqueue("support", "pay").id
    world.worker().work(run_id)
    client.decide(next(item for item in client.checkpoints() if item.run_id == run_id).id, approved=True)
    return run_id


def test_a_hint_names_the_run_it_prefers(world: World, client: Client) -> None:
    first, second = (client.enqueue("support", f"{n}").id for n in (1, 2))
    slot.work(world.worker().rt, second)
    assert states(world, [first, second]) == ["ready", "completed"]


def test_what_has_begun_goes_before_a_start_that_a_hint_names(world: World, client: Client) -> None:
    begun = answered(world, client)
    start = client.enqueue("support", "1").id
    done = slot.work(world.worker().rt, start)
    assert (done.run_id, done.runs) == (start, 1)
    assert states(world, [begun, start]) == ["completed", "ready"]


def test_what_has_begun_is_claimed_first_in_first_out(world: World, client: Client) -> None:
    order = [answered(world, client) for _ in range(3)]
    worker = world.worker(claim_batch=1)
    for done in range(3):
        slot.work(worker.rt, None)
        assert states(world, order) == ["completed"] * (done + 1) + ["ready"] * (2 - done)


def test_the_end_of_a_slice_goes_behind_what_waits_already(world: World, client: Client) -> None:
    world.model._decide = lambda request: turn(call("find", order=str(request.step)))
    sliced, other = (client.enqueue("support", f"{n}").id for n in (1, 2))
    worker = world.worker(slice_steps=1)
    worker.work(sliced)
    worker.work(other)
    worker.work(sliced)
    assert world.run(sliced)["rank"] > world.run(other)["rank"]


def test_a_hint_whose_run_needs_nothing_takes_the_best_that_waits(world: World, client: Client) -> None:
    done, waiting = client.enqueue("support", "1").id, client.enqueue("support", "2").id
    worker = world.worker()
    worker.work(done)
    assert slot.work(worker.rt, done).runs == 1
    assert states(world, [waiting]) == ["completed"]
    with pytest.raises(RunAlreadyDone):
        slot.work(worker.rt, done)
    with pytest.raises(RunNotFound):
        slot.work(worker.rt, new_id(RUN))


def test_hints_that_come_a_hundred_times_run_it_once(world: World, client: Client) -> None:
    run_id = client.enqueue("support", "1").id
    worker = world.worker()
    slot.work(worker.rt, run_id)
    for _ in range(20):
        with pytest.raises(RunAlreadyDone):
            slot.work(worker.rt, run_id)
    assert len(world.model.requests) == 1


def test_a_slot_goes_on_with_what_is_in_the_table_for_a_while(world: World, client: Client) -> None:
    made = [client.enqueue("support", f"{n}").id for n in range(5)]
    done = slot.work(world.worker(table_claim_s=60.0).rt, made[0])
    assert done.runs == 5
    assert states(world, made) == ["completed"] * 5


def test_a_slot_leaves_after_its_time(world: World, client: Client) -> None:
    made = [client.enqueue("support", f"{n}").id for n in range(3)]
    assert slot.work(world.worker(table_claim_s=0.0).rt, None).runs == 1
    assert sorted(states(world, made)) == ["completed", "ready", "ready"]


def test_a_start_finds_no_slot_where_all_are_taken_by_starts(world: World, client: Client) -> None:
    run_id, begun = client.enqueue("support", "1").id, answered(world, client)
    worker = world.worker(slots=5)
    for _ in range(worker.rt.slots.start_limit):
        assert worker.rt.slots.try_enter("start")
    with pytest.raises(NotContinuable, match="slot"):
        slot.work(worker.rt, run_id, "start")
    # What has begun still finds one.
    assert slot.work(worker.rt, begun, "begun").runs == 1
    assert states(world, [run_id, begun]) == ["ready", "completed"]


def test_a_begun_hint_that_finds_only_a_start_counts_as_one(world: World, client: Client) -> None:
    run_id = client.enqueue("support", "1").id
    worker = world.worker(slots=5)
    for _ in range(worker.rt.slots.start_limit):
        assert worker.rt.slots.try_enter("start")
    slot.work(worker.rt, None, "begun")
    run = world.run(run_id)
    assert (run["state"], run["reclaim_total"], run["instruction"]) == ("ready", 0, "start")


def test_slots_are_given_back_whatever_happens(world: World, client: Client) -> None:
    worker = world.worker()
    with pytest.raises(RunNotFound):
        slot.work(worker.rt, new_id(RUN))
    slot.work(worker.rt, client.enqueue("support", "1").id)
    assert worker.rt.slots.used == 0


# --- Ahead -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held ahead waits long enough for a busy machine."""
    monkeypatch.setattr(ahead, "BEGIN_WITHIN_S", 60.0)


def warm(world: World, client: Client, worker: Worker) -> None:
    """Let the worker know that runs are short here."""
    for _ in range(3):
        worker.rt.slots.note_run(0.001)
    assert worker.rt.slots.median_run_s < slot.SHORT_RUN_S


def test_short_runs_are_claimed_ahead_and_taken_by_the_next_slot(
    world: World, client: Client, patient: None
) -> None:
    worker = world.worker()
    warm(world, client, worker)
    made = [client.enqueue("support", f"{n}").id for n in range(6)]
    slot.work(worker.rt, None)
    assert sorted(states(world, made)) == ["completed"] + ["running"] * 5
    assert len(worker.rt.keeper.terms()) == 5
    with commits(worker.rt) as made_now:
        slot.work(worker.rt, None)
    # Nothing is claimed for it: only its end is written.
    assert len(made_now) == 1
    assert states(world, made).count("completed") == 2


def test_what_nobody_begins_in_time_is_given_back_untouched(world: World, client: Client) -> None:
    worker = world.worker()
    warm(world, client, worker)
    made = [client.enqueue("support", f"{n}").id for n in range(4)]
    before = {run_id: world.run(run_id) for run_id in made}
    slot.work(worker.rt, None)
    wait_until(
        lambda: sorted(states(world, made)) == ["completed"] + ["ready"] * 3, "the rest to be given back"
    )
    same = (
        "instruction",
        "queue_class",
        "reclaim_count",
        "reclaim_total",
        "started_at",
        "history_upto",
        "rank",
    )
    for run_id in made:
        run = world.run(run_id)
        if run["state"] == "ready":
            assert {name: run[name] for name in same} == {name: before[run_id][name] for name in same}
            assert run["wait_reason"] is None
    assert worker.rt.keeper.terms() == []
    other = world.worker()
    for _ in range(3):
        slot.work(other.rt, None)
    assert states(world, made) == ["completed"] * 4


def test_what_is_held_ahead_is_given_back_at_once_in_a_drain(
    world: World, client: Client, patient: None
) -> None:
    worker = world.worker()
    warm(world, client, worker)
    made = [client.enqueue("support", f"{n}").id for n in range(4)]
    slot.work(worker.rt, None)
    worker.rt.drain.set()
    wait_until(lambda: states(world, made).count("running") == 0, "what was held ahead to be given back", 30)
    with pytest.raises(Stopping):
        slot.work(worker.rt, None)


def test_runs_that_share_a_session_are_not_claimed_ahead(world: World, client: Client) -> None:
    worker = world.worker()
    warm(world, client, worker)
    made = [client.enqueue("support", f"{n}", session=f"s{n}").id for n in range(4)]
    slot.work(worker.rt, None)
    assert sorted(states(world, made)) == ["completed", "ready", "ready", "ready"]


def test_long_runs_are_not_claimed_ahead(world: World, client: Client) -> None:
    worker = world.worker()
    for _ in range(3):
        worker.rt.slots.note_run(5.0)
    made = [client.enqueue("support", f"{n}").id for n in range(4)]
    slot.work(worker.rt, None)
    assert states(world, made).count("ready") == 3


def test_what_is_held_ahead_and_lost_is_not_run(world: World, client: Client, patient: None) -> None:
    worker = world.worker()
    warm(world, client, worker)
    made = [client.enqueue("support", f"{n}").id for n in range(2)]
    slot.work(worker.rt, None)
    (held,) = [run_id for run_id in made if world.run(run_id)["state"] == "running"]
    client.cancel(held)
    assert worker.rt.keeper.kick(10)
    slot.work(worker.rt, None)
    assert (world.run(held)["state"], len(world.model.requests)) == ("cancelled", 1)


# --- Fairness --------------------------------------------------------------------------------------------------------


def test_a_tenant_with_a_backlog_does_not_starve_another(world: World, client: Client) -> None:
    flood = [client.enqueue("support", f"{n}").id for n in range(10)]
    worker = world.worker(claim_batch=1)
    slot.work(worker.rt, None)
    assert worker.rt.keeper.kick(10)
    late = world.client(scope="tenant=small").enqueue("support", "Hello").id
    # A newcomer stands right behind what is claimed now, not behind the backlog.
    ahead = [run_id for run_id in flood if world.run(run_id)["rank"] < world.run(late)["rank"]]
    assert len(ahead) <= 2
    for _ in range(3):
        slot.work(worker.rt, None)
    assert world.run(late)["state"] == "completed"


def test_two_slots_never_take_one_run(world: World, client: Client) -> None:
    made = [client.enqueue("support", f"{n}").id for n in range(12)]
    worker = world.worker(table_claim_s=60.0)
    threads = [threading.Thread(target=lambda: slot.work(worker.rt, None)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert states(world, made) == ["completed"] * 12
    assert len(world.model.requests) == 12

"""A worker that has lost its run writes nothing, dispatches nothing, and says what it knows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from cortex_workers import Client, Host, ToolContext
from cortex_workers.engine import expire, slot
from cortex_workers.engine.ahead import Claimed
from cortex_workers.engine.continue_run import execute
from cortex_workers.errors import InvalidState, NotSuspended, RunAlreadyDone, RunLeased, UnstorableText
from cortex_workers.schemas.llm import ModelRequest
from cortex_workers.store import tables
from tests.engine.world import SCOPE, TTL_S, Worker, World, at, call, only, results, say, turn
from tests.waiting import wait_until

SHIP = [turn(call("ship", order="17")), say()]


def begin(world: World, script: Any = None, **options: Any) -> tuple[Client, Worker, str]:
    world.shop(script or SHIP, **options)
    worker, client = world.worker(), world.client()
    return client, worker, client.enqueue("support", "Go").id


def take_away_and_tell(world: World, worker: Worker, run_id: str) -> Callable[[], None]:
    """The lease runs out, the sweep passes, and the holder's keeper finds out."""

    def act() -> None:
        worker.lapse(run_id)
        assert worker.rt.keeper.kick(10)

    return act


# --- The fence -------------------------------------------------------------------------------------------------------


@pytest.mark.invariant("I2")
@pytest.mark.parametrize(
    "probe", ["model.before", "model.after", "tool.before_start_record", "tool.after_handler"]
)
def test_every_write_of_a_worker_that_lost_its_run_is_refused(world: World, probe: str) -> None:
    script = [turn(call("find", order="1"), call("ship", order="2")), say("Done.")]
    _client, worker, run_id = begin(world, script)
    taken: list[Any] = []

    def take() -> None:
        worker.lapse(run_id)
        taken.append(world.snapshot())

    with at(probe, take):
        worker.work(run_id)
    after = world.snapshot()
    changed = {name for name in after if after[name] != taken[0][name]}
    assert changed == set()
    assert "RunCompleted" not in world.notified(run_id)
    assert "RunFailed" not in world.notified(run_id)
    other = world.worker()
    assert other.work(run_id)["state"] == "completed"
    assert [effect.tool for effect in world.effects].count("ship") == 1


@pytest.mark.invariant("I2")
def test_a_completion_of_a_worker_that_lost_its_run_is_refused(world: World) -> None:
    _client, worker, run_id = begin(world, [say("Hi.")])
    claimed = worker.claim(run_id)
    worker.lapse(run_id)
    other = world.worker()
    theirs = other.claim(run_id)
    before = world.snapshot()
    assert execute(worker.rt, claimed.row, claimed.held) == "lost"
    assert world.snapshot() == before
    assert other.go_on(theirs)["state"] == "completed"
    assert [event["kind"] for event in world.events(run_id)].count("run.complete") == 1


def test_a_pause_of_a_worker_that_lost_its_run_is_refused(world: World) -> None:
    client, worker, run_id = begin(world, [turn(call("pay", amount=5)), say()])
    claimed = worker.claim(run_id)
    worker.lapse(run_id)
    assert execute(worker.rt, claimed.row, claimed.held) == "lost"
    assert (client.checkpoints(), world.pauses(run_id)) == ([], [])
    assert "CheckpointCreated" not in world.notified(run_id)


@pytest.mark.parametrize("how", ["fail", "slice", "hand_off", "hand_back"])
def test_however_a_worker_that_lost_its_run_lets_go_it_is_refused(world: World, how: str) -> None:
    scripts: dict[str, Any] = {
        "fail": [{"fail": "failed"}],
        "hand_back": [{"fail": "unavailable", "retry_after_s": 120}],
    }
    world.shop(scripts.get(how, lambda request: turn(call("find", order=str(request.step)))))
    worker, client = world.worker(slice_steps=1), world.client()
    run_id = client.enqueue("support", "Go").id
    taken: list[Any] = []

    def take() -> None:
        worker.lapse(run_id)
        if how == "hand_off":
            worker.rt.drain.set()
        taken.append(world.snapshot())

    probe = "model.before" if how in scripts else "tool.after_handler"
    with at(probe, take):
        worker.work(run_id)
    assert world.snapshot() == taken[0]
    assert world.run(run_id)["state"] == "reclaimable"


def test_a_lease_that_ran_out_refuses_writes_before_anybody_has_taken_the_run(world: World) -> None:
    _client, worker, run_id = begin(world)
    claimed = worker.claim(run_id)

    def fall_asleep() -> None:
        claimed.held.release()
        world.later(TTL_S + 1)

    with at("model.after", fall_asleep):
        run = worker.go_on(claimed)
    assert (run["state"], world.steps(run_id), world.effects) == ("running", [], [])
    assert expire.lapse(worker.rt, run_id)


def test_a_lease_that_ran_out_while_nobody_could_renew_it_is_renewed_and_the_write_goes_in(
    world: World,
) -> None:
    _client, worker, run_id = begin(world)
    with at("model.after", lambda: world.later(TTL_S + 1)):
        run = worker.work(run_id)
    assert (run["state"], run["reclaim_total"], len(world.effects)) == ("completed", 0, 1)


def test_two_workers_that_claim_one_run_at_one_instant_do_not_both_get_it(world: World) -> None:
    """Invariant 93 in the fleet's door."""
    _client, worker, run_id = begin(world, [say("Hi.")])
    others = [worker, world.worker(), world.worker(), world.worker()]
    start, won = threading.Barrier(len(others)), []

    def claim(one: Worker) -> None:
        start.wait()
        claimed = slot.claim_named(one.rt, run_id)
        if claimed is not None:
            won.append((one, claimed))

    threads = [threading.Thread(target=claim, args=(one,)) for one in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    ((winner, claimed),) = won
    assert winner.go_on(claimed)["state"] == "completed"


# --- Before the handler ----------------------------------------------------------------------------------------------


def test_a_worker_that_lost_its_run_before_the_handler_does_not_enter_it_and_says_so(world: World) -> None:
    """Ruling 4; bug case C05 (b)."""
    client, worker, run_id = begin(world)
    with at("tool.after_start_record", take_away_and_tell(world, worker, run_id)):
        worker.work(run_id)
    assert world.effects == []
    row = world.call(run_id)
    assert (row["state"], row["late_result"]) == ("started", "never entered")
    # That is a proof: the next worker runs it without a wait and without a person.
    assert world.worker().work(run_id)["state"] == "completed"
    assert (len(world.effects), client.checkpoints()) == (1, [])
    row = world.call(run_id)
    assert (row["state"], row["attempt"], row["late_result"]) == ("completed", 2, None)


def test_a_proof_belongs_to_the_term_it_was_written_in(world: World) -> None:
    """A worker that wakes up late must not vouch for a call that somebody else has started since."""
    _client, worker, run_id = begin(world)
    other = world.worker()

    def take_over() -> None:
        worker.lapse(run_id)
        claimed = other.claim(run_id)
        world.sql(
            "update tool_calls set term_owner = :owner, term_revision = :revision, late_result = null",
            owner=other.name,
            revision=claimed.row["revision"],
        )
        assert worker.rt.keeper.kick(10)

    with at("tool.after_start_record", take_over):
        worker.work(run_id)
    assert world.effects == []
    assert world.call(run_id)["late_result"] is None


def test_an_unconfirmed_lease_stops_at_the_handler_until_the_verdict_is_in(world: World) -> None:
    """Ruling 28: loss of trust blocks, it does not kill."""
    _client, worker, run_id = begin(world)
    claimed = worker.claim(run_id)
    order: list[str] = []

    def distrust() -> None:
        claimed.held._confirmed_at = -1e9
        assert not claimed.held.trusted()
        order.append("distrusted")
        worker.rt.keeper.kick()

    confirm = claimed.held.confirm

    def confirmed(*args: Any) -> None:
        order.append("confirmed")
        confirm(*args)

    claimed.held.confirm = confirmed  # type: ignore[method-assign]
    with at("tool.after_start_record", distrust):
        assert worker.go_on(claimed)["state"] == "completed"
    assert order[:2] == ["distrusted", "confirmed"]
    assert len(world.effects) == 1


def test_an_unconfirmed_lease_that_turns_out_lost_is_not_dispatched(world: World) -> None:
    _client, worker, run_id = begin(world)
    claimed = worker.claim(run_id)

    def distrust() -> None:
        claimed.held._confirmed_at = -1e9
        worker.lapse(run_id)
        worker.rt.keeper.kick()

    with at("tool.after_start_record", distrust):
        worker.go_on(claimed)
    assert world.effects == []
    assert world.call(run_id)["late_result"] == "never entered"


# --- Cancel ----------------------------------------------------------------------------------------------------------


@pytest.mark.invariant("I2")
def test_a_cancel_stops_the_holder_before_its_next_side_effect(world: World) -> None:
    client, worker, run_id = begin(
        world, [turn(call("find", order="1"), call("ship", order="2")), say("Done.")]
    )

    def cancel() -> None:
        stopped = client.cancel(run_id, reason="changed my mind")
        assert (stopped.stops_worker, stopped.in_flight) == (worker.name, ())

    with at("tool.before_start_record", cancel):
        run = worker.work(run_id)
    assert (run["state"], run["error_code"], run["error_text"]) == (
        "cancelled",
        "cancelled",
        "changed my mind",
    )
    assert [effect.tool for effect in world.effects] == ["find"]
    assert (run["fenced_until"], run["lease_owner"]) == (None, None)
    assert world.notified(run_id)[-1] == "RunCancelled"


def test_a_cancel_while_a_call_is_under_way_names_it_and_keeps_what_it_returns_as_evidence(
    world: World,
) -> None:
    seen: list[Any] = []

    @world.host.tool
    def slow(ctx: ToolContext) -> str:
        """Take your time."""
        seen.append(client.cancel(ctx.run_id))
        assert worker.rt.keeper.kick(10)
        seen.append(ctx.cancelled())
        return "returned all the same"

    client, worker, run_id = begin(world, [turn(call("slow")), say()])
    run = worker.work(run_id)
    assert run["state"] == "cancelled"
    assert (seen[0].in_flight, seen[0].stops_worker) == (("slow",), worker.name)
    assert seen[1] is True
    row = world.call(run_id)
    assert (row["state"], row["late_result"]) == ("started", "returned all the same")
    assert len(world.messages(run_id)) == 1


def test_a_tool_may_leave_when_its_run_was_cancelled(world: World) -> None:
    @world.host.tool(retry_safe=True)
    def patient(ctx: ToolContext) -> str:
        """Wait until it is cancelled."""
        client.cancel(ctx.run_id)
        assert worker.rt.keeper.kick(10)
        ctx.raise_if_stopping()
        raise AssertionError

    client, worker, run_id = begin(world, [turn(call("patient")), say()])
    assert worker.work(run_id)["state"] == "cancelled"
    assert [row["state"] for row in world.calls(run_id)] == []


@pytest.mark.parametrize("state", ["ready", "reclaimable"])
def test_a_waiting_run_that_is_cancelled_stays_cancelled(world: World, state: str) -> None:
    client, worker, run_id = begin(world)
    if state == "reclaimable":
        worker.lose_at("tool.after_handler", run_id)
    stopped = client.cancel(run_id)
    assert stopped.run.state == "cancelled"
    assert stopped.in_flight == (("ship",) if state == "reclaimable" else ())
    with pytest.raises(RunAlreadyDone) as refused:
        world.client(host=world.host).continue_run(run_id)
    assert refused.value.data["run"].state == "cancelled"
    with pytest.raises(RunAlreadyDone):
        slot.work(worker.rt, run_id, "begun")


def test_cancelling_a_paused_run_closes_its_own_question_and_no_other(world: World) -> None:
    client, worker, run_id = begin(world, [turn(call("pay", amount=5)), say()])
    other_id = client.enqueue("support", "Go").id
    for one in (run_id, other_id):
        worker.work(one)
    mine = next(item for item in client.checkpoints() if item.run_id == run_id)
    client.cancel(run_id, reason="no")
    assert only(client.checkpoints()).run_id == other_id
    closed = client.checkpoint(mine.id)
    assert closed.closed_as == "cancelled"
    assert closed.decision is not None
    assert not closed.decision.approved
    (pause,) = world.pauses(run_id)
    assert pause["ended_as"] == "cancelled"
    assert world.call(run_id)["state"] == "denied"


@pytest.mark.invariant("I4")
@pytest.mark.parametrize("state", ["completed", "failed", "cancelled"])
def test_what_has_ended_is_not_cancelled(world: World, state: str) -> None:
    client, worker, run_id = begin(world, [say("Hi.") if state == "completed" else {"fail": "failed"}])
    if state == "cancelled":
        client.cancel(run_id)
    else:
        worker.work(run_id)
    before = world.snapshot()
    with pytest.raises(InvalidState, match=state):
        client.cancel(run_id)
    assert world.snapshot() == before


def test_a_cancel_that_meets_a_moving_run_ends_it_all_the_same(world: World) -> None:
    client, _worker, run_id = begin(
        world, lambda request: turn(call("find", order=str(request.step))), max_steps=10_000
    )
    moving, stop = world.worker(slice_steps=1), threading.Event()

    def move() -> None:
        while not stop.is_set():
            claimed = slot.claim_named(moving.rt, run_id)
            if claimed is None:
                return
            moving.go_on(claimed)

    def cancelled() -> bool:
        try:
            return client.cancel(run_id).run.state == "cancelled"
        except NotSuspended:
            return False

    thread = threading.Thread(target=move)
    thread.start()
    try:
        wait_until(cancelled, "the cancel to meet the run")
    finally:
        stop.set()
        thread.join(20)
    assert world.run(run_id)["state"] == "cancelled"
    assert world.run(run_id)["fenced_until"] is None


def test_a_bad_reason_cancels_nothing(world: World) -> None:
    client, _worker, run_id = begin(world)
    before = world.snapshot()
    with pytest.raises(UnstorableText):
        client.cancel(run_id, reason="\x00")
    assert world.snapshot() == before


# --- Lapses ----------------------------------------------------------------------------------------------------------


def test_a_silent_worker_loses_its_run(world: World) -> None:
    _client, worker, run_id = begin(world, [say("Hi.")])
    worker.die_at("model.before", run_id)
    world.told.clear()
    assert not expire.lapse(worker.rt, run_id)
    run = worker.lapse(run_id)
    assert (run["state"], run["reclaim_count"], run["reclaim_total"], run["lease_owner"]) == (
        "reclaimable",
        1,
        1,
        None,
    )
    (told,) = world.told
    assert (told.kind, told.hand_off) == ("RunReclaimable", False)  # type: ignore[union-attr]
    assert (run["interrupted_reason"], run["handed_off"]) == ("lapse", False)


def lapse_often(world: World, worker: Worker, run_id: str, times: int) -> list[float]:
    """Let so many workers die with a run; returns the pause after each."""
    pauses = []
    for _ in range(times):
        worker.die_at("model.before", run_id)
        run = worker.lapse(run_id)
        pauses.append((run["not_before"] - run["state_since"]).total_seconds())
        world.later(pauses[-1] + 0.01)
        world.wake()
    return pauses


@pytest.mark.parametrize(("times", "state", "code"), [(3, "completed", None), (4, "failed", "reclaim_limit")])
def test_a_run_that_loses_more_workers_than_allowed_fails(
    world: World, times: int, state: str, code: str | None
) -> None:
    _client, worker, run_id = begin(world, [say("Hi.")])
    assert lapse_often(world, worker, run_id, times) == pytest.approx([0, 30, 120, 120][:times], abs=0.01)
    run = worker.work(run_id)
    assert (run["state"], run["error_code"], run["reclaim_count"]) == (state, code, times)
    assert len(world.model.requests) == (1 if state == "completed" else 0)


def test_with_a_limit_of_none_one_lapse_is_too_many(world: World) -> None:
    world.shop([say("Hi.")])
    worker = world.worker(reclaim_limit=0)
    run_id = world.client().enqueue("support", "Go").id
    worker.lose_at("model.before", run_id)
    assert worker.work(run_id)["error_code"] == "reclaim_limit"


def test_a_good_end_of_a_term_forgets_the_lapses_before_it(world: World) -> None:
    client, worker, run_id = begin(world, [turn(call("pay", amount=5)), say()])
    lapse_often(world, worker, run_id, 3)
    worker.work(run_id)
    run = world.run(run_id)
    assert (run["state"], run["reclaim_count"], run["reclaim_total"]) == ("paused", 0, 3)
    client.decide(only(client.checkpoints()).id, approved=True)
    assert worker.work(run_id)["state"] == "completed"


def test_a_reclaimed_run_is_the_same_run(world: World) -> None:
    client, worker, run_id = begin(
        world, [turn(call("find", order="1")), turn(call("ship", order="2")), say("Done.")]
    )
    before = world.run(run_id)
    worker.lose_at("tool.after_outcome", run_id)
    other = world.worker()
    run = other.work(run_id)
    same = ("session_id", "scope", "agent_digest", "session_seq", "new_messages_from", "history_upto")
    assert {name: run[name] for name in same if before[name] is not None} == {
        name: before[name] for name in same if before[name] is not None
    }
    assert (run["state"], run["step_count"]) == ("completed", 3)
    assert client.get(run_id).usage.requests == 3
    assert results(world.messages(run_id)) == ['{"order":"1"}', "ship done"]


def test_a_run_whose_version_is_gone_fails_with_a_reason(world: World) -> None:
    _client, worker, run_id = begin(world, [say("Hi.")])
    claimed = worker.claim(run_id)
    worker.rt.versions._known.clear()
    world.sql("delete from agent_versions")
    run = worker.go_on(claimed)
    assert (run["state"], run["error_code"]) == ("failed", "run_not_recoverable")


def test_a_version_without_a_step_budget_fails_the_run(world: World) -> None:
    _client, worker, run_id = begin(world, [say("Hi.")])
    claimed = worker.claim(run_id)
    digest = claimed.row["agent_digest"]
    known = worker.rt.versions._known
    known[digest] = known[digest].model_copy(update={"max_steps": 0})
    assert worker.go_on(claimed)["error_code"] == "invalid_continuation"


def test_a_run_under_a_live_lease_is_not_taken_however_long_its_step(world: World) -> None:
    """Bug cases C03 and C04: a sweep looks at leases, not at ages."""

    def slow(request: ModelRequest) -> dict[str, Any]:
        for _ in range(5):
            world.later(TTL_S * 0.6)
            assert worker.rt.keeper.kick(10)
            assert not expire.lapse(worker.rt, run_id)
            assert slot.claim_named(other.rt, run_id) is None
        return say("Hi.")

    _client, worker, run_id = begin(world, slow)
    other = world.worker()
    run = worker.work(run_id)
    assert (run["state"], run["reclaim_total"], run["revision"]) == ("completed", 0, 3)
    assert len(world.model.requests) == 1
    with pytest.raises(RunAlreadyDone):
        slot.work(other.rt, run_id)


def test_a_run_that_somebody_holds_is_refused_with_who_and_until_when(world: World) -> None:
    _client, worker, run_id = begin(world, [say("Hi.")])
    claimed = worker.claim(run_id)
    other = world.worker()
    with pytest.raises(RunLeased) as refused:
        slot.work(other.rt, run_id)
    assert refused.value.data["owner"] == worker.name
    assert refused.value.data["expires_at"] == claimed.row["lease_expires_at"]


def test_a_host_without_agents_claims_nothing(world: World) -> None:
    _client, _worker, run_id = begin(world, [say("Hi.")])
    stranger = world.worker(Host())
    assert slot.claim_named(stranger.rt, run_id) is None
    assert slot.work(stranger.rt, None).runs == 0


def test_the_harness_claims_under_the_name_of_the_worker(world: World) -> None:
    _client, worker, run_id = begin(world, [say("Hi.")])
    claimed = worker.claim(run_id)
    assert isinstance(claimed, Claimed)
    assert world.run(run_id)["lease_owner"] == worker.name != world.worker().name
    assert {row["scope"] for row in world.rows(tables.runs)} == {SCOPE}

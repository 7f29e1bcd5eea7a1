"""What each pass of a sweep does, and what it leaves alone."""

from collections.abc import Iterator
from datetime import timedelta

import pytest

from cortex_workers.schemas.agent import AgentDefinition
from cortex_workers.schemas.lifecycle import RunState
from cortex_workers.store import agents, leases, sessions, turns, workers
from cortex_workers.store.transitions import Guard, Move
from cortex_workers.testing import factory
from tests.engine.sweeping import Sweeper, sweepers

INTERVAL_S = 10.0


@pytest.fixture
def one(database_url: str) -> Iterator[Sweeper]:
    with sweepers(database_url, sweep_interval_s=INTERVAL_S) as (only,):
        only.a_worker()
        yield only


# --- Leases -----------------------------------------------------------------------------------------------------------


def test_a_run_whose_lease_is_over_becomes_reclaimable_and_is_announced(one: Sweeper) -> None:
    run = factory.a_running_run(one.database, ttl_s=INTERVAL_S)
    assert one.sweep("lapses").done == {"lapses": 1}
    after = one.now(run)
    assert (after["state"], after["reclaim_count"], after["lease_owner"]) == ("reclaimable", 1, None)
    assert after["fenced_until"] == run["lease_expires_at"]
    assert [told.kind for told in one.told][-1] == "RunReclaimable"
    assert one.sweep("lapses").done == {"lapses": 0}


def test_a_renewed_lease_is_left_alone(one: Sweeper) -> None:
    run = factory.a_running_run(one.database, ttl_s=INTERVAL_S)
    one.clock.advance(INTERVAL_S / 2)
    term = factory.term_of(run)
    one.database.run(lambda unit: leases.renew(unit, term.owner, [term], 60.0))
    assert one.sweep("lapses").done == {"lapses": 0}
    assert one.now(run)["state"] == "running"


# --- Deadlines --------------------------------------------------------------------------------------------------------


def test_a_run_nobody_started_in_time_is_cancelled(one: Sweeper) -> None:
    late = factory.a_run(one.database, start_by=one.clock.at)
    in_time = factory.a_run(one.database, start_by=one.clock.at + timedelta(seconds=INTERVAL_S + 1))
    assert one.sweep("start_by").done == {"start_by": 1}
    assert (one.now(late)["state"], one.now(late)["error_code"]) == ("cancelled", "not_started")
    assert one.now(in_time)["state"] == "ready"


def test_a_run_that_has_begun_is_never_too_late_to_start(one: Sweeper) -> None:
    run = factory.a_run(one.database, start_by=one.clock.at + timedelta(seconds=1))
    begun = factory.a_reclaimable_run(
        one.database, run=factory.a_running_run(one.database, run=run), handed_off=True
    )
    assert one.sweep("start_by").done == {"start_by": 0}
    assert one.now(begun)["state"] == "reclaimable"


def test_an_overdue_pause_fails_its_run_closes_its_checkpoint_and_leaves_an_event(one: Sweeper) -> None:
    run = factory.a_paused_run(one.database, ttl_s=INTERVAL_S)
    assert one.sweep("expiries").done == {"expiries": 1}
    after = one.now(run)
    assert (after["state"], after["error_code"]) == ("failed", "suspension_expired")
    closed = one.execute("select state, closed_as from checkpoints where run_id = :id", id=run["id"]).one()
    assert tuple(closed) == ("resolved", "expired")
    assert one.events(run)[-1] == "run.expire"
    assert one.sweep("expiries").done == {"expiries": 0}


def test_an_overdue_pause_may_go_back_to_the_model(one: Sweeper) -> None:
    run = factory.a_paused_run(one.database, ttl_s=INTERVAL_S, on_expiry="return_to_model")
    one.told.clear()
    one.sweep("expiries")
    after = one.now(run)
    assert (after["state"], after["instruction"], after["wait_reason"]) == ("ready", "answer", None)
    assert sorted(told.kind for told in one.told) == ["CheckpointResolved", "RunReady"]


def test_a_pause_is_never_ended_before_its_deadline(one: Sweeper) -> None:
    run = factory.a_paused_run(one.database, ttl_s=INTERVAL_S + 0.001)
    assert one.sweep("expiries").done == {"expiries": 0}
    assert one.now(run)["state"] == "paused"


def test_a_pause_without_a_deadline_is_never_listed(one: Sweeper) -> None:
    run = factory.a_paused_run(one.database, ttl_s=None)
    one.clock.advance(days=400)
    one.sweep("expiries")
    assert one.now(run)["state"] == "paused"


def test_a_pause_in_a_gated_session_waits_for_the_lift(one: Sweeper) -> None:
    run = factory.a_paused_run(one.database, ttl_s=1.0)
    one.execute("update sessions set gated_at = now() where id = :id", id=run["session_id"])
    assert one.sweep("expiries").done == {"expiries": 0}
    one.execute("update sessions set gated_at = null where id = :id", id=run["session_id"])
    assert one.sweep("expiries").done == {"expiries": 1}


# --- Waits ------------------------------------------------------------------------------------------------------------


def test_a_wait_for_a_time_ends_when_it_comes_and_is_announced(one: Sweeper) -> None:
    run = factory.a_running_run(one.database, ttl_s=3600)
    wait = Move(values=turns.delay(30.0, INTERVAL_S))
    factory.move(one.database, "hand_back", run, Guard(term=factory.term_of(run)), wait)
    one.told.clear()
    one.sweep("waits")
    assert one.now(run)["wait_reason"] == "later"
    one.clock.advance(20)
    one.sweep("waits")
    assert one.now(run)["wait_reason"] is None
    assert [(told.kind, told.run_id) for told in one.told] == [("RunReady", run["id"])]


def test_a_wait_in_a_shared_session_ends_by_whose_turn_it_is(one: Sweeper) -> None:
    first = factory.a_run(one.database, session="chat")
    second = factory.a_run(one.database, session="chat")
    running = factory.a_running_run(one.database, run=first, ttl_s=3600)
    wait = Move(values=turns.delay(30.0, INTERVAL_S))
    factory.move(one.database, "hand_back", running, Guard(term=factory.term_of(running)), wait)
    assert one.now(first)["wait_reason"] == "later"
    one.clock.advance(31)
    one.sweep("waits")
    assert (one.now(first)["wait_reason"], one.now(second)["wait_reason"]) == (None, "turn")


def test_a_session_whose_turn_nobody_computed_is_computed_after_a_minute(one: Sweeper) -> None:
    first = factory.a_run(one.database, session="chat")
    one.execute("update runs set wait_reason = 'turn' where id = :id", id=first["id"])
    one.sweep("waits")
    assert one.now(first)["wait_reason"] == "turn"
    one.clock.advance(60)
    one.sweep("waits")
    assert one.now(first)["wait_reason"] is None
    assert one.told[-1].run_id == first["id"]


def test_a_cancelled_run_gives_the_turn_free_once_its_worker_cannot_act_any_more(one: Sweeper) -> None:
    first = factory.a_run(one.database, session="chat")
    second = factory.a_run(one.database, session="chat")
    running = factory.a_running_run(one.database, run=first, ttl_s=25)
    factory.move(one.database, "cancel_running", running, Guard(revision=running["revision"]))
    one.sweep("waits")
    assert one.now(second)["wait_reason"] == "turn"
    one.clock.advance(20)
    one.sweep("waits")
    assert one.now(first)["fenced_until"] is None
    assert one.now(second)["wait_reason"] is None


def test_the_fence_of_a_cancelled_run_of_its_own_session_is_forgotten(one: Sweeper) -> None:
    run = factory.an_ended_run(
        one.database, RunState.CANCELLED, run=factory.a_running_run(one.database, ttl_s=5)
    )
    assert run["fenced_until"] is not None
    one.sweep("waits")
    assert one.now(run)["fenced_until"] is None


# --- Nobody serves it -------------------------------------------------------------------------------------------------

OTHER = AgentDefinition(name="courier", model="scripted:factory")


def test_a_run_that_no_live_worker_serves_is_marked_and_freed_when_one_comes(one: Sweeper) -> None:
    run = factory.a_run(one.database, agent=OTHER)
    one.sweep("waits")
    assert one.now(run)["wait_reason"] is None, "too soon to say"
    one.clock.advance(3 * INTERVAL_S)
    one.sweep("waits")
    assert one.now(run)["wait_reason"] == "no_worker"
    one.told.clear()
    one.a_worker("worker-2", OTHER)
    one.sweep("waits")
    assert one.now(run)["wait_reason"] is None
    assert [told.run_id for told in one.told] == [run["id"]]


def test_a_run_that_somebody_serves_is_not_marked_however_long_it_waits(one: Sweeper) -> None:
    run = factory.a_run(one.database)
    one.clock.advance(hours=3)
    one.sweep("waits")
    assert one.now(run)["wait_reason"] is None


def test_a_worker_without_slots_serves_nobody_else(one: Sweeper) -> None:
    run = factory.a_run(one.database, agent=OTHER)
    one.a_worker("a-client", OTHER, slots=0)
    one.clock.advance(3 * INTERVAL_S)
    one.sweep("waits")
    assert one.now(run)["wait_reason"] == "no_worker"


def test_a_turn_without_a_worker_keeps_its_session_waiting_and_goes_on_in_order(one: Sweeper) -> None:
    first = factory.a_run(one.database, agent=OTHER, session="chat")
    second = factory.a_run(one.database, agent=OTHER, session="chat")
    one.clock.advance(3 * INTERVAL_S)
    one.sweep("waits")
    assert (one.now(first)["wait_reason"], one.now(second)["wait_reason"]) == ("no_worker", "turn")
    one.a_worker("worker-2", OTHER)
    one.told.clear()
    one.sweep("waits")
    assert (one.now(first)["wait_reason"], one.now(second)["wait_reason"]) == (None, "turn")
    assert [told.run_id for told in one.told] == [first["id"]]


def test_runs_follow_their_agent_to_another_pool(one: Sweeper) -> None:
    run = factory.a_run(one.database, agent=OTHER)
    moved = OTHER.model_copy(update={"pool": "gpu"})
    one.a_worker("worker-2", moved, pool="gpu")
    factory.an_agent(one.database, moved)
    one.told.clear()
    one.clock.advance(3 * INTERVAL_S)
    one.sweep("waits")
    assert (one.now(run)["pool"], one.now(run)["wait_reason"]) == ("gpu", None)
    assert [(told.run_id, getattr(told, "pool", None)) for told in one.told] == [(run["id"], "gpu")]


# --- Hints ------------------------------------------------------------------------------------------------------------


@pytest.mark.invariant("I5")
@pytest.mark.invariant("I6")
def test_a_run_without_a_hint_gets_one_after_three_seconds_where_the_depth_is_known(one: Sweeper) -> None:
    run = factory.a_run(one.database)
    one.again("hints")
    assert one.hinted == []
    one.clock.advance(5)
    assert one.again("hints").done == {"hints": 1}
    assert [(hint.run_id, hint.kind) for hint in one.hinted] == [(run["id"], "RunReady")]


def test_healing_sends_no_more_hints_than_there_are_slots_without_one(one: Sweeper) -> None:
    rows = [factory.a_run(one.database) for _ in range(20)]
    one.depth.waiting["cw.continue"] = 7
    one.sweep("hints")
    assert [hint.run_id for hint in one.hinted] == [row["id"] for row in rows[:3]], "ten slots, seven hints"
    one.hinted.clear()
    one.depth.waiting["cw.continue"] = 10
    one.sweep("hints")
    assert one.hinted == []


def test_a_hosts_subscriber_does_not_hear_of_healing(one: Sweeper) -> None:
    factory.a_run(one.database)
    one.told.clear()
    one.sweep("hints")
    assert one.hinted and one.told == []


def test_where_the_depth_is_unknown_one_row_is_hinted_at_ever_more_rarely(one: Sweeper) -> None:
    factory.a_run(one.database)
    one.depth.waiting["cw.continue"] = None
    began, at = one.clock.at, []
    for _ in range(29):
        before = len(one.hinted)
        one.sweep("hints")
        if len(one.hinted) > before:
            at.append((one.clock.at - began).total_seconds())
    assert at == [20.0, 50.0, 110.0, 230.0], "pauses of at least 15, 30, 60 and 120 s"


def test_on_rabbitmq_a_known_depth_does_not_make_healing_quicker(database_url: str) -> None:
    with sweepers(database_url, broker_url="amqp://localhost//") as (one,):
        one.a_worker()
        factory.a_run(one.database)
        one.sweep("hints")
        assert one.hinted == []
        one.sweep("hints")
        assert len(one.hinted) == 1


@pytest.mark.invariant("I5")
@pytest.mark.invariant("I5")
def test_a_waiting_run_is_announced_again_once_per_interval_whoever_sweeps(database_url: str) -> None:
    with sweepers(database_url, 3, renotify_s=300.0) as three:
        run = factory.a_run(three[0].database)
        for each in three:
            each.told.clear()
        three[0].clock.advance(300)
        for _ in range(29):
            for each in three:
                each.again("hints")
            three[0].clock.advance(10)
        told = [told for each in three for told in each.told]
        assert [(each.run_id, getattr(each, "renotified", None)) for each in told] == [(run["id"], True)]


def test_a_repeat_keeps_what_a_hand_off_was(one: Sweeper) -> None:
    run = factory.a_reclaimable_run(one.database, handed_off=True)
    one.told.clear()
    one.clock.advance(300)
    one.sweep("hints")
    (told,) = one.told
    assert told.model_dump(exclude={"revision", "pool"}) == {
        "kind": "RunReclaimable",
        "run_id": run["id"],
        "hand_off": True,
        "renotified": True,
    }


def test_renotification_can_be_switched_off(database_url: str) -> None:
    with sweepers(database_url, renotify_s=0.0) as (one,):
        factory.a_run(one.database)
        one.told.clear()
        one.clock.advance(days=3)
        one.sweep("hints")
        assert one.told == []


def test_a_run_that_may_not_be_claimed_is_not_announced(one: Sweeper) -> None:
    factory.a_run(one.database, session="chat")
    second = factory.a_run(one.database, session="chat")
    one.told.clear()
    one.clock.advance(hours=1)
    one.sweep("hints")
    assert second["id"] not in {each.run_id for each in [*one.told, *one.hinted]}


# --- Checkpoints ------------------------------------------------------------------------------------------------------


def _reopen(one: Sweeper, run_id: str) -> None:
    # The half of a decision: the run has moved on, its checkpoint was not closed.
    one.execute(
        "update checkpoints set state = 'pending', closed_as = null, decision = null where run_id = :id",
        id=run_id,
    )


def test_a_question_whose_run_has_ended_is_closed_as_superseded(one: Sweeper) -> None:
    run = factory.a_paused_run(one.database)
    factory.move(one.database, "cancel_paused", run, Guard(suspension_id=run["suspension_id"]))
    assert one.sweep("checkpoints").done == {"checkpoints": 1}
    row = one.execute(
        "select state, closed_as, decision from checkpoints where run_id = :id", id=run["id"]
    ).one()
    assert (row.state, row.closed_as) == ("resolved", "superseded")
    assert (row.decision["approved"], row.decision["decided_by"]) == (False, "cortex")
    assert one.told[-1].kind == "CheckpointResolved"


def test_a_question_whose_run_waits_on_another_pause_is_closed(one: Sweeper) -> None:
    run = factory.an_answered_run(one.database)
    _reopen(one, run["id"])
    again = factory.a_paused_run(one.database, run=factory.a_running_run(one.database, run=run, ttl_s=3600))
    one.sweep("checkpoints")
    open_ones = one.execute("select suspension_id from checkpoints where state = 'pending'").all()
    assert [row.suspension_id for row in open_ones] == [again["suspension_id"]]


@pytest.mark.parametrize("state", [RunState.READY, RunState.RUNNING, RunState.RECLAIMABLE])
def test_a_question_is_left_while_its_run_answers_this_very_pause(one: Sweeper, state: RunState) -> None:
    run = factory.an_answered_run(one.database)
    if state is not RunState.READY:
        run = factory.a_running_run(one.database, run=run, ttl_s=3600)
    if state is RunState.RECLAIMABLE:
        factory.a_reclaimable_run(one.database, run=run, handed_off=True)
    _reopen(one, run["id"])
    assert one.sweep("checkpoints").done == {"checkpoints": 0}


def test_a_hosts_own_checkpoint_is_never_touched(one: Sweeper) -> None:
    run = factory.a_paused_run(one.database)
    factory.move(one.database, "cancel_paused", run, Guard(suspension_id=run["suspension_id"]))
    one.execute("update checkpoints set suspension_id = null, kind = 'host' where run_id = :id", id=run["id"])
    assert one.sweep("checkpoints").done == {"checkpoints": 0}


def test_questions_are_looked_at_a_page_every_five_minutes_from_where_the_last_ended(
    database_url: str,
) -> None:
    with sweepers(database_url, sweep_page=2) as (one,):
        for _ in range(5):
            run = factory.a_paused_run(one.database)
            factory.move(one.database, "cancel_paused", run, Guard(suspension_id=run["suspension_id"]))
        assert one.sweep("checkpoints").done == {"checkpoints": 2}
        assert one.sweep("checkpoints").skipped == 1
        one.clock.advance(300)
        assert one.sweep("checkpoints").done == {"checkpoints": 2}
        one.clock.advance(300)
        assert one.sweep("checkpoints").done == {"checkpoints": 1}
        assert one.counts("checkpoints").cursor is None, "the next one begins anew"


# --- Workers ----------------------------------------------------------------------------------------------------------


def test_a_worker_that_nobody_heard_of_is_noted_as_ended(one: Sweeper) -> None:
    one.a_worker("silent-one", heartbeat_every_s=20.0)
    ended = "select id, ended_as from workers where ended_at is not null"
    one.clock.advance(40)
    one.sweep("workers")
    assert one.execute(ended).all() == []
    one.clock.advance(10)
    assert one.sweep("workers").done == {"workers": 1}
    assert [tuple(row) for row in one.execute(ended)] == [("silent-one", "silent")]


def test_the_current_version_follows_the_workers_that_are_left(one: Sweeper) -> None:
    newer = factory.AGENT.model_copy(update={"instructions": "Be kind."})
    factory.an_agent(one.database)
    one.clock.advance(1)
    one.a_worker("worker-2", newer)
    one.database.run(lambda unit: agents.add_versions(unit, [newer]))
    one.execute(
        "update agent_versions set published_at = now() + interval '1 day' where digest = :d",
        d=newer.digest(),
    )
    one.sweep("workers")
    assert one.execute("select current_digest from agents").scalar() == newer.digest()
    one.database.run(lambda unit: workers.end(unit, "worker-2", "stopped"))
    one.sweep("workers")
    assert one.execute("select current_digest from agents").scalar() == factory.AGENT.digest()


def test_a_session_is_locked_before_its_runs_are_recomputed(one: Sweeper) -> None:
    """A session that somebody holds is passed over by its row, and the others go on."""
    held = factory.a_run(one.database, session="held")
    free = factory.a_run(one.database, session="free")
    one.execute("update runs set wait_reason = 'turn'")
    one.execute("update sessions set id = 'ses_0' || substr(id, 6) where id = :id", id=held["session_id"])
    one.execute("update runs set session_id = 'ses_0' || substr(session_id, 6) where id = :id", id=held["id"])
    one.clock.advance(60)
    one.rt.database.engine.dispose()
    with one.database.transaction() as other:
        assert sessions.lock(other, one.now(held)["session_id"]) is not None
        one.sweep("waits")
        assert one.now(free)["wait_reason"] is None
    assert one.now(held)["wait_reason"] == "turn"
    assert one.counts("waits").skipped == 1

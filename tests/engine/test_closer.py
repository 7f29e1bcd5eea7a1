"""An uncertain start is closed as incomplete: once, under the guards of the host, with a receipt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cortex_workers.engine import expire
from cortex_workers.errors import (
    AdmissionConflict,
    AdmissionNotFound,
    ClosureRefused,
    InvalidState,
    RunLeased,
    StoreUnavailable,
)
from cortex_workers.operate.closer import closure
from cortex_workers.schemas.admission import ResumeClosureRequest, ToolResult
from cortex_workers.schemas.ids import RUN, new_id
from cortex_workers.store import leases
from cortex_workers.testing import factory
from tests.engine.closing import Scene
from tests.engine.world import SCOPE, TTL_S, World, call, turn


@pytest.fixture
def scene(world: World) -> Scene:
    return Scene(world)


STATES = ["reclaimable", "uncertain", "lapsed"]


@pytest.mark.parametrize("state", STATES)
def test_an_uncertain_start_ends_as_incomplete_with_its_receipt_and_event(scene: Scene, state: str) -> None:
    run_id = getattr(scene, state)()
    before = scene.world.run(run_id)
    request = scene.request(run_id)
    made = scene.close(request)
    run = scene.world.run(run_id)
    assert (run["state"], run["revision"], run["lease_owner"]) == ("incomplete", before["revision"] + 1, None)
    assert (run["error_code"], run["completed_at"] is not None) == ("closed_incomplete", True)
    assert (made.fresh, made.request, made.run_revision) == (True, request, run["revision"])
    made.verify()
    event = scene.world.events(run_id)[-1]
    names = {"reclaimable": "close_reclaimable", "uncertain": "close_paused", "lapsed": "close_running"}
    assert (event["id"], event["kind"]) == (made.event_id, f"run.{names[state]}")
    assert (event["actor"], event["revision"]) == ("ops@example.com", run["revision"])
    assert event["data"]["request_digest"] == made.request_digest
    assert scene.receipts(run_id) == ["closure", "start"]
    assert scene.world.notified(run_id).count("RunFailed") == 1


def test_the_run_its_event_and_the_receipt_are_one_transaction(scene: Scene) -> None:
    run_id = scene.reclaimable()
    scene.close(scene.request(run_id))
    assert (
        scene.world.sql(
            "select 1 from runs r join events e on e.run_id = r.id and e.kind = 'run.close_reclaimable'"
            " join resume_receipts c on c.run_id = r.id and c.kind = 'closure'"
            " where r.id = :id and r.xmin::text = e.xmin::text and e.xmin::text = c.xmin::text",
            id=run_id,
        )
        == 1
    )


def test_what_an_uncertain_run_asked_can_not_be_answered_any_more(scene: Scene) -> None:
    run_id = scene.uncertain()
    (asked,) = scene.client.checkpoints(run_id=run_id)
    scene.close(scene.request(run_id))
    after = scene.client.checkpoint(asked.id)
    assert (after.state, after.closed_as) == ("resolved", "superseded")
    pause = scene.world.pauses(run_id)[-1]
    assert (pause["ended_as"], pause["ended_at"] is not None) == ("aborted", True)
    with pytest.raises(InvalidState):
        scene.client.settle(asked.id, "happened", result="shipped")
    # The evidence of the call is left as it is: closing settles nothing.
    assert scene.world.calls(run_id)[-1]["state"] == "started"
    assert [effect.tool for effect in scene.world.effects] == ["ship"]


def test_nobody_can_go_on_with_a_closed_run_and_the_stale_holder_writes_nothing(scene: Scene) -> None:
    run_id = scene.answered()
    stale = scene.worker()
    claimed = stale.claim(run_id)
    scene.world.later(TTL_S + 1)
    scene.close(scene.request(run_id))
    before = scene.world.snapshot()
    stale.go_on(claimed)
    after = scene.world.snapshot()
    assert {name for name in before if before[name] != after[name]} <= {"runs"}
    assert scene.world.run(run_id)["state"] == "incomplete"
    assert [item["kind"] for item in scene.world.events(run_id)][-1] == "run.close_running"


# --- Once ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_the_same_request_again_gives_the_original_receipt(scene: Scene, state: str) -> None:
    request = scene.request(getattr(scene, state)())
    first = scene.close(request)
    before = scene.world.snapshot()
    again = scene.close(request)
    assert (again, again.fresh, first.fresh) == (first.model_copy(update={"fresh": False}), False, True)
    assert scene.world.snapshot() == before
    assert closure(scene.rt, request.version.run_id, request.version.suspension_id, SCOPE) == again


def test_a_receipt_outlives_its_proof_but_not_the_right_to_ask_for_it(scene: Scene) -> None:
    request = scene.request(scene.reclaimable())
    first = scene.close(request)
    scene.world.later(3600)
    assert scene.close(request).closed_at == first.closed_at
    assert len(scene.guards.asked) == 2
    assert len(scene.guards.fenced) == 1
    scene.guards.refuses = PermissionError("not for you")
    scene.refused(ClosureRefused, request, "not for you")


@pytest.mark.parametrize(
    "change",
    [
        {"actor": "eve"},
        {"proof_ref": "another"},
        {"proof_digest": "b" * 64},
        {"issuer_revision": "8"},
        {"admission_digest": "0" * 64},
        {"run_revision": 99},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_request_for_a_closed_run_is_a_conflict_that_carries_the_receipt(
    scene: Scene, change: dict[str, Any]
) -> None:
    run_id = scene.reclaimable()
    request = scene.request(run_id)
    first = scene.close(request)
    other = ResumeClosureRequest(**{**request.model_dump(), **change})
    scene.refused(AdmissionConflict, other, "another request")
    with pytest.raises(AdmissionConflict) as caught:
        scene.close(other)
    assert caught.value.data["closure"].event_id == first.event_id


def test_many_who_close_at_once_write_one_receipt(scene: Scene) -> None:
    request = scene.request(scene.reclaimable())
    together = threading.Barrier(4)

    def around(close: Callable[[ResumeClosureRequest], None], given: ResumeClosureRequest) -> None:
        together.wait(20)
        close(given)

    scene.guards.around = around
    with ThreadPoolExecutor(4) as pool:
        made = [each.result() for each in [pool.submit(scene.close, request) for _ in range(4)]]
    assert sorted(item.fresh for item in made) == [False, False, False, True]
    assert len({item.event_id for item in made}) == 1
    kinds = [row["kind"] for row in scene.world.events(request.version.run_id)]
    assert kinds.count("run.close_reclaimable") == 1


def test_of_two_requests_at_once_one_wins_and_the_other_is_told(scene: Scene) -> None:
    first = scene.request(scene.reclaimable())
    second = ResumeClosureRequest(**{**first.model_dump(), "actor": "eve"})
    together = threading.Barrier(2)

    def around(close: Callable[[ResumeClosureRequest], None], given: ResumeClosureRequest) -> None:
        together.wait(20)
        close(given)

    scene.guards.around = around

    def attempt(request: ResumeClosureRequest) -> str:
        try:
            return str(scene.close(request).fresh)
        except AdmissionConflict as error:
            return error.code

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(attempt, [first, second])) == ["True", "admission_conflict"]


def test_after_a_lost_acknowledgement_the_same_request_tells_what_happened(scene: Scene) -> None:
    request = scene.request(scene.reclaimable())

    def around(close: Callable[[ResumeClosureRequest], None], given: ResumeClosureRequest) -> None:
        close(given)
        raise StoreUnavailable("the connection was lost during the commit", unknown=True)

    scene.guards.around = around
    with pytest.raises(StoreUnavailable):
        scene.close(request)
    scene.guards.around = None
    again = scene.close(request)
    assert (again.fresh, again.run_revision) == (False, request.run_revision + 1)


# --- Exactly this admission, start and revision -------------------------------------------------------------------


def test_an_answer_that_nobody_began_with_is_not_uncertain(scene: Scene) -> None:
    run_id = scene.answered()
    scene.refused(InvalidState, scene.request(run_id), "nobody began")


@pytest.mark.parametrize("name", ["admission_digest", "start_digest"])
def test_another_digest_is_a_conflict(scene: Scene, name: str) -> None:
    scene.refused(AdmissionConflict, scene.request(scene.reclaimable(), **{name: "0" * 64}), "names another")


def test_another_revision_of_the_pause_is_a_conflict(scene: Scene) -> None:
    run_id = scene.reclaimable()
    version = scene.request(run_id).version
    other = version.model_copy(update={"run_revision": version.run_revision + 1})
    scene.refused(AdmissionConflict, scene.request(run_id, version=other), "another answer")


def test_a_request_for_an_earlier_revision_of_the_run_is_refused(scene: Scene) -> None:
    run_id = scene.lapsed()
    request = scene.request(run_id)
    assert expire.lapse(scene.rt, run_id)
    scene.refused(InvalidState, request, "the run moved")
    assert scene.close(scene.request(run_id)).fresh


@pytest.mark.parametrize("end", ["cancelled", "completed"])
def test_a_run_that_ended_meanwhile_is_not_closed(scene: Scene, end: str) -> None:
    run_id = scene.reclaimable()
    request = scene.request(run_id)
    if end == "cancelled":
        scene.client.cancel(run_id)
    else:
        scene.worker().finish(run_id)
    assert scene.world.run(run_id)["state"] == end
    scene.refused(InvalidState, request, "the run moved")
    scene.refused(InvalidState, scene.request(run_id), f"the run has ended: {end}")


def test_a_live_lease_refuses(scene: Scene) -> None:
    run_id = scene.answered()
    scene.worker().die_at("model.before", run_id)
    scene.refused(RunLeased, scene.request(run_id))


def test_what_is_left_of_a_lease_that_was_taken_away_refuses_until_it_is_over(scene: Scene) -> None:
    run_id = scene.answered()
    worker = scene.worker()
    term = factory.term_of(worker.claim(run_id).row)
    scene.world.database.run(lambda unit: leases.hand_off_all(unit, term.owner, [term], term.owner))
    assert scene.world.run(run_id)["state"] == "reclaimable"
    scene.refused(RunLeased, scene.request(run_id))
    scene.world.later(TTL_S + 1)
    assert scene.close(scene.request(run_id)).fresh


def test_a_pause_that_waits_for_an_ordinary_answer_is_not_uncertain(scene: Scene) -> None:
    scene.world.model._decide = lambda request: (
        turn(call("pack", order="1")) if len(request.messages) == 1 else turn(call("pay", amount=5))
    )
    run_id = scene.answered()
    assert scene.worker().work(run_id)["state"] == "paused"
    scene.refused(InvalidState, scene.request(run_id), "not uncertain")


def test_only_the_latest_answer_of_a_run_is_closed(scene: Scene) -> None:
    scene.world.model._decide = lambda request: turn(call("pack", order="1"))
    run_id = scene.answered()
    worker = scene.worker()
    assert worker.work(run_id)["state"] == "paused"
    first = scene.request(run_id)
    (asked,) = scene.world.pending(scene.world.run(run_id)["suspension_id"])
    scene.client.provide_results(run_id, [ToolResult(tool_call_id=asked["call_id"], content="again")])
    worker.lose_at("model.before", run_id)
    stale = {
        "version": first.version,
        "admission_digest": first.admission_digest,
        "start_digest": first.start_digest,
    }
    scene.refused(AdmissionConflict, scene.request(run_id, **stale), "a later answer")
    assert scene.close(scene.request(run_id)).fresh


@pytest.mark.parametrize("scope", ["tenant=other", "tenant=acme/team=a", "tenant=acm"])
def test_another_scope_sees_nothing(scene: Scene, scope: str) -> None:
    scene.refused(AdmissionNotFound, scene.request(scene.reclaimable(), scope=scope))


def test_a_scope_above_is_not_the_exact_scope(scene: Scene) -> None:
    run_id = scene.client.enqueue("support", "Go", scope=f"{SCOPE}/team=a").id
    scene.worker().work(run_id)
    (asked,) = scene.world.pending(scene.world.run(run_id)["suspension_id"])
    scene.client.provide_results(run_id, [ToolResult(tool_call_id=asked["call_id"], content="packed")])
    scene.worker().lose_at("model.before", run_id)
    scene.refused(AdmissionNotFound, scene.request(run_id))
    assert scene.close(scene.request(run_id, scope=f"{SCOPE}/team=a")).fresh


def test_an_unknown_run_is_not_found(scene: Scene) -> None:
    request = scene.request(scene.reclaimable())
    other = request.version.model_copy(update={"run_id": new_id(RUN)})
    scene.refused(AdmissionNotFound, ResumeClosureRequest(**{**request.model_dump(), "version": other}))

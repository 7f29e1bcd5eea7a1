"""What proves that a run may be closed: the request, its guards, and those that are shipped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from pydantic import ValidationError

from cortex_workers.engine import ledger
from cortex_workers.errors import (
    AdmissionConflict,
    AdmissionNotFound,
    ClosureRefused,
    InvalidArgument,
    InvalidState,
    StoreUnavailable,
    WaitTimeout,
)
from cortex_workers.operate.closer import ResumeCloser, closure
from cortex_workers.operate.closing_proof import WorkersGone
from cortex_workers.schemas.admission import ClaimVersion, ResumeClosure, ResumeClosureRequest
from cortex_workers.schemas.ids import RUN, SUSPENSION, new_id
from cortex_workers.store import admissions, workers
from cortex_workers.store.unit import Unit
from cortex_workers.testing.clock import stopped_clock
from tests.contract.recorder import recording
from tests.contract.test_lock_order import out_of_order
from tests.engine.closing import Scene
from tests.engine.world import SCOPE, World, at


@pytest.fixture
def scene(world: World) -> Scene:
    return Scene(world)


# --- The proof ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("observed_s", "expires_s", "counts"),
    [(1, 300, False), (0, 300, True), (-300, 0, False), (-300, 0.000001, True), (-300, -1, False)],
)
def test_a_proof_counts_from_when_it_was_observed_until_just_before_it_expires(
    scene: Scene, observed_s: float, expires_s: float, counts: bool
) -> None:
    run_id = scene.reclaimable()
    scene.world.later(60)
    with scene.rt.database.read() as unit:
        now = admissions.database_time(unit)
    with stopped_clock(now):
        request = scene.request(
            run_id,
            observed_at=now + timedelta(seconds=observed_s),
            expires_at=now + timedelta(seconds=expires_s),
        )
        if counts:
            assert scene.close(request).closed_at == now
        else:
            scene.refused(ClosureRefused, request)


def test_a_proof_that_expires_while_its_closing_waits_for_the_run_is_refused(scene: Scene) -> None:
    """The window is judged with every lock held, not when the request came in."""
    request = scene.request(scene.reclaimable())
    scene.guards.around = lambda close, given: (scene.world.later(301), close(given))[1]
    with pytest.raises(ClosureRefused, match="expired"):
        scene.close(request)
    assert scene.receipts(request.version.run_id) == ["start"]


@pytest.mark.parametrize("error", [PermissionError("not for you"), ValueError(""), ClosureRefused("mine")])
def test_what_the_authorizer_raises_refuses(scene: Scene, error: Exception) -> None:
    scene.guards.refuses = error
    scene.refused(ClosureRefused, scene.request(scene.reclaimable()))
    assert scene.guards.fenced == []


def test_what_the_fence_raises_refuses(scene: Scene) -> None:
    def around(close: Callable[[ResumeClosureRequest], None], given: ResumeClosureRequest) -> None:
        raise RuntimeError("a callback is still under way")

    scene.guards.around = around
    scene.refused(ClosureRefused, scene.request(scene.reclaimable()), "still under way")


def test_a_fence_that_does_not_close_has_closed_nothing(scene: Scene) -> None:
    scene.guards.around = lambda close, given: None
    scene.refused(ClosureRefused, scene.request(scene.reclaimable()), "without closing")


def test_a_fence_may_not_name_another_request(scene: Scene) -> None:
    run_id = scene.reclaimable()
    other = scene.request(run_id, actor="eve")
    scene.guards.around = lambda close, given: close(other)
    scene.refused(ClosureRefused, scene.request(run_id), "another request")


def test_a_fence_that_swallows_the_refusal_does_not_hide_it(scene: Scene) -> None:
    def around(close: Callable[[ResumeClosureRequest], None], given: ResumeClosureRequest) -> None:
        with pytest.raises(AdmissionConflict):
            close(given)

    scene.guards.around = around
    scene.refused(AdmissionConflict, scene.request(scene.reclaimable(), start_digest="0" * 64))


def test_a_fence_that_closes_twice_closes_once(scene: Scene) -> None:
    scene.guards.around = lambda close, given: (close(given), close(given))[1]
    made = scene.close(scene.request(scene.reclaimable()))
    kinds = [row["kind"] for row in scene.world.events(made.request.version.run_id)]
    assert (made.fresh, kinds.count("run.close_reclaimable")) == (True, 1)


def test_a_guard_that_hangs_is_left_behind_and_closes_nothing_later(scene: Scene) -> None:
    release, refused = threading.Event(), threading.Event()

    def around(close: Callable[[ResumeClosureRequest], None], given: ResumeClosureRequest) -> None:
        assert release.wait(30)
        with pytest.raises(WaitTimeout):
            close(given)
        refused.set()

    scene.guards.around = around
    request = scene.request(scene.reclaimable())
    with pytest.raises(WaitTimeout):
        scene.close(request, within_s=0.2)
    release.set()
    assert refused.wait(30)
    assert scene.receipts(request.version.run_id) == ["start"]
    assert scene.world.run(request.version.run_id)["state"] == "reclaimable"


def test_the_bound_is_thirty_seconds_at_most(scene: Scene) -> None:
    assert ResumeCloser(scene.rt, scene.guards, scene.guards)._within_s == 30
    assert ResumeCloser(scene.rt, scene.guards, scene.guards, within_s=3600)._within_s == 30


def test_a_closing_takes_its_locks_in_the_one_order(scene: Scene) -> None:
    requests = [scene.request(scene.uncertain("talk")), scene.request(scene.reclaimable())]
    with recording(scene.rt.database) as recorder:
        for request in requests:
            scene.close(request)
    assert [found for one in recorder.transactions if (found := out_of_order(one))] == []
    locked = [{name for item in one for name, _ in item.locks} for one in recorder.transactions]
    assert any({"sessions", "runs", "suspensions", "checkpoints"} <= names for names in locked)


def test_the_turn_of_a_shared_session_goes_on(scene: Scene) -> None:
    run_id = scene.uncertain("talk")
    scene.close(scene.request(run_id))
    following = scene.client.enqueue("support", "Next", session="talk").id
    assert scene.worker().work(following)["state"] == "paused"


# --- Requests and receipts ----------------------------------------------------------------------------------------


def made_up() -> ResumeClosureRequest:
    """A well-formed request about nothing that exists."""
    return ResumeClosureRequest(
        scope=SCOPE,
        version=ClaimVersion(run_id=new_id(RUN), suspension_id=new_id(SUSPENSION), run_revision=3),
        admission_digest="a" * 64,
        start_digest="b" * 64,
        run_revision=6,
        actor="ops",
        issuer="hypervisor",
        issuer_revision="7",
        proof_ref="case 4711",
        proof_digest="c" * 64,
        observed_at=datetime(2026, 1, 1, tzinfo=UTC),
        expires_at=datetime(2026, 1, 2, tzinfo=UTC),
    )


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 2},
        {"scope": "acme"},
        {"scope": ""},
        {"admission_digest": "A" * 64},
        {"start_digest": "a" * 63},
        {"proof_digest": "a" * 64 + "\n"},
        {"run_revision": 0},
        {"actor": ""},
        {"issuer": "x" * 501},
        {"issuer_revision": "a\x00b"},
        {"proof_ref": ""},
        {"observed_at": datetime(2026, 1, 1)},  # noqa: DTZ001  a time without a zone is what is refused
        {"surprise": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_malformed_request_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ResumeClosureRequest(**{**made_up().model_dump(), **change})
    if "surprise" not in change:
        unchecked = ResumeClosureRequest.model_construct(**{**dict(made_up()), **change})
        with pytest.raises(ValidationError):
            unchecked.freeze()


def test_a_request_that_nobody_checked_is_checked_by_the_closer(scene: Scene) -> None:
    unchecked = ResumeClosureRequest.model_construct(**{**dict(made_up()), "actor": ""})
    scene.refused(InvalidArgument, unchecked, "actor")
    assert scene.guards.asked == []


def test_a_proof_that_expires_before_it_was_observed_is_no_request() -> None:
    request = made_up()
    with pytest.raises(ValidationError, match="expires before"):
        ResumeClosureRequest(**{**request.model_dump(), "expires_at": request.observed_at})


def test_a_request_has_one_digest_whatever_the_zone_it_was_written_in() -> None:
    request = made_up()
    elsewhere = timezone(timedelta(hours=9))
    moved = ResumeClosureRequest(
        **{**request.model_dump(), "observed_at": request.observed_at.astimezone(elsewhere)}
    )
    assert (moved, moved.digest()) == (request, request.digest())
    assert request.freeze() == request
    assert ResumeClosureRequest.model_validate_json(request.model_dump_json()).digest() == request.digest()
    digests = {
        ResumeClosureRequest(**{**request.model_dump(), **change}).digest()
        for change in ({"actor": "a"}, {"actor": "b"}, {"proof_ref": "x"}, {"run_revision": 77})
    }
    assert len(digests) == 4


def test_digests_of_the_ledger_do_not_depend_on_the_zone_of_a_connection(scene: Scene) -> None:
    run_id = scene.reclaimable()
    here = scene.request(run_id)

    def elsewhere(unit: Unit) -> tuple[str, str]:
        unit.connection.exec_driver_sql("set local timezone = 'Asia/Tokyo'")
        row = admissions.latest(unit, run_id)
        assert row is not None and row["admitted_at"].utcoffset() == timedelta(hours=9)
        start = admissions.receipt(unit, run_id, row["suspension_id"], "start")
        assert start is not None
        return admissions.to_admission(row).digest(), admissions.to_start(row, start).digest()

    assert scene.world.database.run(elsewhere) == (here.admission_digest, here.start_digest)


@pytest.mark.parametrize(
    "change",
    [
        {"request_digest": "0" * 64},
        {"event_id": "evt_nonsense"},
        {"run_revision": 1},
        {"closed_at": datetime(2020, 1, 1, tzinfo=UTC)},
        {"closed_at": datetime(2120, 1, 1, tzinfo=UTC)},
    ],
    ids=str,
)
def test_a_receipt_that_does_not_fit_its_request_is_found(scene: Scene, change: dict[str, Any]) -> None:
    made = scene.close(scene.request(scene.reclaimable()))
    made.verify()
    with pytest.raises(ValueError):
        made.model_copy(update=change).verify()


def test_closing_excludes_neither_the_start_nor_an_expiry_of_its_own_accord(scene: Scene) -> None:
    made = scene.close(scene.request(scene.reclaimable()))
    version = made.request.version
    assert ledger.start(scene.rt, version.run_id, version.suspension_id, SCOPE) is not None
    assert ledger.expiry(scene.rt, version.run_id, version.suspension_id, SCOPE) is None


def test_a_run_that_was_not_closed_has_no_receipt(scene: Scene) -> None:
    version = scene.request(scene.reclaimable()).version
    assert closure(scene.rt, version.run_id, version.suspension_id, SCOPE) is None
    with pytest.raises(AdmissionNotFound):
        closure(scene.rt, version.run_id, version.suspension_id, "tenant=other")


# --- The shipped guards -------------------------------------------------------------------------------------------


class Shipped:
    """Closing with what comes with the product."""

    def __init__(self, scene: Scene, *declared: str, actor: str = "ops") -> None:
        self.proof = WorkersGone(scene.rt, actor, declared)
        self.closer = ResumeCloser(scene.rt, self.proof, self.proof)

    def close(self, run_id: str) -> ResumeClosure:
        return self.closer.close(self.proof.request(run_id, SCOPE))


def ended(scene: Scene, *names: str, as_: str = "stopped") -> None:
    for name in names:
        scene.world.database.run(lambda unit, name=name: workers.end(unit, name, as_))


def test_a_run_is_closed_when_every_worker_that_held_it_has_ended(scene: Scene) -> None:
    run_id = scene.uncertain()
    shipped = Shipped(scene)
    names = [worker.name for worker in scene.workers]
    assert len(set(names)) == 3
    for name in names:
        with pytest.raises(ClosureRefused, match="has not ended"):
            shipped.close(run_id)
        ended(scene, name)
    made = shipped.close(run_id)
    assert (made.fresh, made.request.issuer, made.request.actor) == (True, "cortex:workers", "ops")
    # Asked for once more, it is the request that the run was closed by.
    assert (shipped.close(run_id).fresh, shipped.close(run_id).event_id) == (False, made.event_id)


def test_a_worker_that_fell_silent_has_not_ended_but_may_be_declared_dead(scene: Scene) -> None:
    run_id = scene.reclaimable()
    kept, silent = (worker.name for worker in scene.workers)
    ended(scene, kept)
    ended(scene, silent, as_=workers.SILENT)
    with pytest.raises(ClosureRefused, match=silent):
        Shipped(scene).close(run_id)
    assert Shipped(scene, silent).close(run_id).fresh


def test_a_worker_that_is_heard_of_can_not_be_declared_dead(scene: Scene) -> None:
    run_id = scene.reclaimable()
    names = [worker.name for worker in scene.workers]
    scene.world.sql("update workers set heartbeat_at = heartbeat_at + interval '1 day'")
    with pytest.raises(ClosureRefused, match="heard of just now"):
        Shipped(scene, *names).close(run_id)
    assert scene.world.run(run_id)["state"] == "reclaimable"


def test_a_worker_without_a_row_has_to_be_declared(scene: Scene) -> None:
    run_id = scene.reclaimable()
    first, second = (worker.name for worker in scene.workers)
    ended(scene, first)
    scene.world.sql("delete from workers where id = :id", id=second)
    with pytest.raises(ClosureRefused, match="nothing is known"):
        Shipped(scene).close(run_id)
    assert Shipped(scene, second).close(run_id).fresh


def test_who_never_held_the_run_is_not_declared(scene: Scene) -> None:
    with pytest.raises(InvalidArgument, match="never held"):
        Shipped(scene, "worker-of-another-day").proof.request(scene.reclaimable(), SCOPE)


def test_the_proof_is_checked_against_the_rows_and_the_asker(scene: Scene) -> None:
    run_id = scene.reclaimable()
    ended(scene, *(worker.name for worker in scene.workers))
    request = Shipped(scene).proof.request(run_id, SCOPE)
    forged = ResumeClosureRequest(**{**request.model_dump(), "proof_digest": "0" * 64})
    foreign = ResumeClosureRequest(**{**request.model_dump(), "issuer": "somebody"})
    for other in (forged, foreign):
        with pytest.raises(ClosureRefused):
            Shipped(scene).closer.close(other)
    with pytest.raises(ClosureRefused, match="somebody else"):
        Shipped(scene, actor="eve").closer.close(request)
    assert Shipped(scene).closer.close(request).fresh


def test_a_new_holder_between_the_request_and_the_closing_refuses(scene: Scene) -> None:
    run_id = scene.reclaimable()
    ended(scene, *(worker.name for worker in scene.workers))
    shipped = Shipped(scene)
    request = shipped.proof.request(run_id, SCOPE)
    scene.worker().lose_at("model.before", run_id)
    with pytest.raises(ClosureRefused):
        shipped.closer.close(request)
    assert scene.world.run(run_id)["state"] == "reclaimable"


def test_the_shipped_request_needs_an_answer_that_somebody_began_with(scene: Scene) -> None:
    run_id = scene.answered()
    proof = Shipped(scene).proof
    with pytest.raises(InvalidState, match="nobody began"):
        proof.request(run_id, SCOPE)
    with pytest.raises(AdmissionNotFound):
        proof.request(run_id, "tenant=other")
    with pytest.raises(InvalidArgument, match="valid_for"):
        proof.request(run_id, SCOPE, valid_for=timedelta(days=2))


def test_whoever_may_still_be_there_is_named_at_once(scene: Scene) -> None:
    run_id = scene.uncertain()
    first, second, third = (worker.name for worker in scene.workers)
    ended(scene, second)
    with pytest.raises(ClosureRefused) as caught:
        scene.client.close_uncertain(run_id)
    assert first in caught.value.message and third in caught.value.message
    assert second not in caught.value.message


def test_the_client_closes_for_its_actor_and_reads_the_receipt(scene: Scene) -> None:
    run_id = scene.reclaimable()
    pause = scene.request(run_id).version.suspension_id
    names = [worker.name for worker in scene.workers]
    ended(scene, *names, as_=workers.SILENT)
    assert scene.client.closure(run_id) is None
    before = scene.world.snapshot()
    with pytest.raises(ClosureRefused, match="has not ended"):
        scene.client.close_uncertain(run_id)
    assert scene.world.snapshot() == before
    made = scene.client.close_uncertain(run_id, names)
    made.verify()
    assert (made.fresh, made.request.actor, made.request.scope) == (True, "ops", SCOPE)
    assert scene.world.run(run_id)["state"] == "incomplete"
    kept = made.model_copy(update={"fresh": False})
    assert scene.client.closure(run_id) == scene.client.closure(run_id, pause) == kept
    # Nobody has to be declared dead once more to be told of it.
    assert scene.client.close_uncertain(run_id) == scene.client.close_uncertain(run_id, names) == kept


def test_a_run_that_somebody_else_closed_is_a_conflict_that_names_them(scene: Scene) -> None:
    run_id = scene.reclaimable()
    ended(scene, *(worker.name for worker in scene.workers))
    made = scene.client.close_uncertain(run_id)
    with pytest.raises(AdmissionConflict, match="by ops") as caught:
        scene.world.client(actor="eve").close_uncertain(run_id)
    assert caught.value.data["closure"] == made.model_copy(update={"fresh": False})


def test_the_client_closes_only_in_the_exact_scope_and_with_a_list(scene: Scene) -> None:
    run_id = scene.reclaimable()
    ended(scene, *(worker.name for worker in scene.workers))
    for scope in ("tenant=other", "tenant=acme/user=1"):
        with pytest.raises(AdmissionNotFound):
            scene.client.close_uncertain(run_id, scope=scope)
        with pytest.raises(AdmissionNotFound):
            scene.client.closure(run_id, scope=scope)
    with pytest.raises(InvalidArgument, match="list of worker ids"):
        scene.client.close_uncertain(run_id, "worker-a")
    assert scene.world.run(run_id)["state"] == "reclaimable"


def test_a_closing_that_dies_before_its_commit_leaves_nothing(scene: Scene) -> None:
    request = scene.request(scene.reclaimable())

    def cut(unit: Unit, row: Any, before: str | None, after: Any) -> None:
        raise StoreUnavailable("cut off")

    database = scene.rt.database
    database._hooks = (cut,)
    try:
        scene.refused(StoreUnavailable, request)
    finally:
        database._hooks = ()
    assert scene.close(request).fresh


def test_a_claim_and_a_closing_at_once_have_one_winner(scene: Scene) -> None:
    run_id = scene.reclaimable()
    request = scene.request(run_id)
    rival = scene.worker()
    claimed: list[bool] = []

    def around(close: Callable[[ResumeClosureRequest], None], given: ResumeClosureRequest) -> None:
        with at("claim.after_commit", lambda: None):
            claimed.append(rival.claim(run_id) is not None)
        close(given)

    scene.guards.around = around
    with pytest.raises(InvalidState, match="the run moved"):
        scene.close(request)
    assert claimed == [True]
    assert scene.world.run(run_id)["state"] == "running"

"""The ledger of answers: what is retained of each, who began with it, and how one is given up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.exc import IntegrityError

from cortex_workers import Client
from cortex_workers.engine import expire, ledger, slot
from cortex_workers.errors import (
    AdmissionConflict,
    AdmissionNotFound,
    InvalidArgument,
    InvalidId,
    InvalidScope,
    InvalidState,
    NotContinuable,
    RefusedForNow,
    ResumeAlreadyStarted,
    RunLeased,
)
from cortex_workers.schemas.admission import ResumeExpiry
from cortex_workers.schemas.ids import RUN, SUSPENSION, new_id
from cortex_workers.store import admissions, claims, leases, tables
from tests.engine.outside import TWO, A, B, paused, result
from tests.engine.world import SCOPE, TTL_S, Worker, World, call, say, turn

SHORT = {"ttl": timedelta(seconds=2)}


def admitted(world: World, **options: Any) -> tuple[Client, Worker, str, str]:
    """A run with an answer that nobody began with: client, worker, run, pause."""
    client, worker, run_id = paused(world, tool=SHORT, **options)
    client.provide_results(run_id, [result(A)])
    return client, worker, run_id, world.run(run_id)["suspension_id"]


def receipts(world: World, run_id: str) -> list[tuple[str, int]]:
    table = tables.resume_receipts
    return [(row["kind"], row["run_revision"]) for row in world.rows(table, table.c.run_id == run_id)]


def digest_of(client: Client, run_id: str) -> str:
    return client.admissions(run_id).admissions[-1].request_digest


# --- Starts ----------------------------------------------------------------------------------------------------------


def test_an_answer_has_no_start_before_a_worker_takes_it(world: World) -> None:
    _client, worker, run_id, pause = admitted(world)
    assert ledger.start(worker.rt, run_id, pause, SCOPE) is None
    with worker.rt.database.read() as unit:
        assert admissions.unstarted(unit, run_id, pause)


@pytest.mark.parametrize("way", ["named", "the next", "a batch", "the pinned answer"])
def test_whichever_claim_takes_the_run_writes_the_start_in_its_own_statement(world: World, way: str) -> None:
    _client, worker, run_id, pause = admitted(world)
    claimer = worker.rt.claimer
    with worker.rt.database.transaction() as unit:
        if way == "named":
            (row,) = claims.claim_named(unit, claimer, run_id)
        elif way == "the pinned answer":
            (row,) = claims.claim_named(unit, claimer, run_id, suspension_id=pause)
        else:
            (row,) = claims.claim_next(unit, claimer, starts=True, batch=5 if way == "a batch" else 1)
    assert row["id"] == run_id
    assert receipts(world, run_id) == [("start", row["revision"])]
    started = ledger.start(worker.rt, run_id, pause, SCOPE)
    assert started is not None
    (kept,) = world.client().admissions(run_id).admissions
    assert (started.request_digest, started.version) == (kept.request_digest, kept.request.version)
    assert started.digest() == ledger.start(worker.rt, run_id, pause, SCOPE).digest()  # type: ignore[union-attr]


def test_of_two_workers_one_starts_and_the_other_is_told_who_has_it(world: World) -> None:
    _client, worker, run_id, pause = admitted(world)
    others = [world.worker() for _ in range(3)]
    start = threading.Barrier(4)

    def take(who: Worker) -> Any:
        start.wait(30)
        return slot.claim_named(who.rt, run_id, pause)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(take, [worker, *others]))
    assert sum(item is not None for item in found) == 1
    assert len(receipts(world, run_id)) == 1
    with pytest.raises(RunLeased):
        slot.work(others[0].rt, run_id, "begun", suspension_id=pause)


def test_a_claim_without_an_answer_writes_no_start(world: World) -> None:
    client, worker, run_id = paused(world)
    assert receipts(world, run_id) == []
    other = client.enqueue("support", "2").id
    worker.claim(other)
    assert world.rows(tables.resume_receipts) == []


def test_the_pin_of_an_older_pause_takes_nothing(world: World) -> None:
    """A hint for one answer never goes on with a later one."""
    script = [turn(call("quote", item="desk")), turn(call("quote", item="chair")), say("Done.")]
    client, worker, run_id = paused(world, script)
    older = world.run(run_id)["suspension_id"]
    client.provide_results(run_id, [result(A)])
    assert worker.work(run_id)["state"] == "paused"
    client.provide_results(run_id, [result("call_1_0")])
    newer = world.run(run_id)["suspension_id"]
    assert slot.claim_named(worker.rt, run_id, older) is None
    assert world.run(run_id)["state"] == "ready"
    claimed = slot.claim_named(worker.rt, run_id, newer)
    assert claimed is not None
    assert worker.go_on(claimed)["state"] == "completed"
    assert [kind for kind, _ in receipts(world, run_id)] == ["start", "start"]


def test_a_hand_back_takes_the_start_back(world: World) -> None:
    client, worker, run_id, pause = admitted(world)
    claimed = worker.claim(run_id)
    assert len(receipts(world, run_id)) == 1
    slot.give_back(worker.rt, claimed, "not begun")
    assert receipts(world, run_id) == []
    assert (world.run(run_id)["state"], world.run(run_id)["instruction"]) == ("ready", "answer")
    # So the answer may still be given up, or begun with.
    world.later(3)
    done = client.expire_admission(run_id, pause, digest_of(client, run_id))
    assert done.fresh


def test_a_worker_that_cannot_go_on_takes_its_start_back_too(world: World) -> None:
    class NotNow:
        def encode(self, principal: Any) -> bytes:
            return b"ada"

        def decode(self, data: bytes) -> Any:
            raise RefusedForNow("the directory is away", retry_in_s=0.0, reason="principal")

    _client, worker, run_id, _pause = admitted(world)
    world.sql("update run_specs set principal = 'ada' where run_id = :id", id=run_id)
    world.host.codec = NotNow()
    row = worker.work(run_id)
    assert row["state"] == "ready"
    assert receipts(world, run_id) == []


def test_a_claim_whose_reply_was_lost_gives_its_start_back(world: World) -> None:
    _client, worker, run_id, _pause = admitted(world)
    with worker.rt.database.transaction() as unit:
        claims.claim_named(unit, worker.rt.claimer, run_id)
    assert len(receipts(world, run_id)) == 1
    with worker.rt.database.transaction() as unit:
        leases.hand_back_strays(unit, worker.name, [], worker.name)
    assert receipts(world, run_id) == []


def test_a_lapse_keeps_the_start_and_the_next_worker_goes_on_by_its_term(world: World) -> None:
    _client, worker, run_id, pause = admitted(world)
    world.worker().lose_at("claim.after_commit", run_id)
    (kept,) = receipts(world, run_id)
    claimed = slot.claim_named(worker.rt, run_id, pause)
    assert claimed is not None
    assert receipts(world, run_id) == [kept]
    # Handing back the second claim does not touch the first one's receipt.
    slot.give_back(worker.rt, claimed, "not begun")
    assert receipts(world, run_id) == [kept]
    assert world.run(run_id)["state"] == "reclaimable"
    assert worker.work(run_id)["state"] == "completed"
    assert [item.content for item in world.messages(run_id) if item.role == "tool"] == ["12 EUR"]


def test_a_start_that_was_lost_before_its_commit_is_not_there(world: World) -> None:
    _client, worker, run_id, _pause = admitted(world)
    other = world.worker()
    other.die_at("claim.before_commit", run_id)
    assert receipts(world, run_id) == []
    assert worker.work(run_id)["state"] == "completed"
    assert len(receipts(world, run_id)) == 1


# --- Giving up -------------------------------------------------------------------------------------------------------


def test_an_answer_that_nobody_began_with_may_be_given_up_after_the_deadline(world: World) -> None:
    client, worker, run_id, pause = admitted(world)
    digest = digest_of(client, run_id)
    with pytest.raises(InvalidState, match="deadline"):
        client.expire_admission(run_id, pause, digest)
    world.later(3)
    done = client.expire_admission(run_id, pause, digest)
    run = world.run(run_id)
    assert (run["state"], run["error_code"]) == ("failed", "admission_expired")
    assert (done.fresh, done.request_digest, done.run_revision) == (True, digest, run["revision"])
    assert ledger.expiry(worker.rt, run_id, pause, SCOPE) == done.model_copy(update={"fresh": False})
    (event,) = world.events(run_id)[-1:]
    assert (event["kind"], event["actor"], event["id"]) == ("run.expire_admission", "ops", done.event_id)
    # The original receipt for ever, and the answer is still there.
    assert client.expire_admission(run_id, pause, digest) == done.model_copy(update={"fresh": False})
    assert not client.provide_results(run_id, [result(A)]).fresh
    assert slot.claim_named(worker.rt, run_id, pause) is None
    assert receipts(world, run_id) == [("expiry", run["revision"])]


def test_time_alone_gives_up_no_answer(world: World) -> None:
    _client, worker, run_id, pause = admitted(world)
    world.later(30 * 86_400)
    assert not expire.expire_pause(worker.rt, pause)
    assert worker.work(run_id)["state"] == "completed"


@pytest.mark.parametrize("moment", ["running", "lapsed", "completed"])
def test_an_answer_that_was_begun_with_is_not_given_up(world: World, moment: str) -> None:
    client, worker, run_id, pause = admitted(world)
    world.later(3)
    if moment == "completed":
        worker.work(run_id)
    else:
        claimed = worker.claim(run_id)
        if moment == "lapsed":
            world.later(TTL_S + 1)
            assert expire.lapse(worker.rt, claimed.row["id"])
    before = world.snapshot()
    with pytest.raises(ResumeAlreadyStarted):
        client.expire_admission(run_id, pause, digest_of(client, run_id))
    assert world.snapshot() == before


def test_a_digest_of_another_answer_or_scope_gives_up_nothing(world: World) -> None:
    client, _worker, run_id, pause = admitted(world)
    world.later(3)
    digest, before = digest_of(client, run_id), world.snapshot()
    with pytest.raises(AdmissionConflict):
        client.expire_admission(run_id, pause, "0" * 64)
    with pytest.raises(AdmissionNotFound):
        client.expire_admission(run_id, new_id(SUSPENSION), digest)
    with pytest.raises(AdmissionNotFound):
        client.expire_admission(new_id(RUN), pause, digest)
    for scope in ("tenant=other", "tenant=acme/user=1"):
        with pytest.raises(AdmissionNotFound):
            client.expire_admission(run_id, pause, digest, scope=scope)
    with pytest.raises(InvalidId):
        client.expire_admission("x", pause, digest)
    assert world.snapshot() == before


@pytest.mark.parametrize("round_", range(4))
def test_a_start_and_a_giving_up_at_one_instant_exclude_each_other(world: World, round_: int) -> None:
    client, worker, run_id, pause = admitted(world)
    world.later(3)
    digest, start = digest_of(client, run_id), threading.Barrier(2)

    def give_up() -> Any:
        start.wait(30)
        try:
            return client.expire_admission(run_id, pause, digest)
        except (ResumeAlreadyStarted, InvalidState) as refusal:
            return refusal

    def begin() -> Any:
        start.wait(30)
        return slot.claim_named(worker.rt, run_id, pause)

    with ThreadPoolExecutor(2) as pool:
        gone, claimed = (each.result(60) for each in (pool.submit(give_up), pool.submit(begin)))
    assert isinstance(gone, ResumeExpiry) == (claimed is None)
    kinds = [kind for kind, _ in receipts(world, run_id)]
    assert kinds == (["expiry"] if claimed is None else ["start"])
    assert world.run(run_id)["state"] == ("failed" if claimed is None else "running")


def test_the_database_itself_refuses_a_start_beside_an_expiry(world: World) -> None:
    client, _worker, run_id, pause = admitted(world)
    world.later(3)
    client.expire_admission(run_id, pause, digest_of(client, run_id))
    with pytest.raises(IntegrityError):
        world.sql(
            "insert into resume_receipts (run_id, suspension_id, kind, digest, run_revision)"
            " values (:run, :pause, 'start', 'x', 1)",
            run=run_id,
            pause=pause,
        )


# --- Reading ---------------------------------------------------------------------------------------------------------


def test_answers_are_read_page_by_page_in_the_order_of_their_pauses(world: World) -> None:
    turns = [turn(call("quote", item=str(number))) for number in range(4)]
    client, worker, run_id = paused(world, [*turns, say("Done.")])
    for number in range(4):
        client.provide_results(run_id, [result(f"call_{number}_0", number)])
        worker.work(run_id)
    whole = client.admissions(run_id).admissions
    assert [item.request.version.suspension_id for item in whole] == [
        row["id"] for row in world.pauses(run_id)
    ]
    seen, after = [], None
    while True:
        page = client.admissions(run_id, after=after, limit=3)
        seen += page.admissions
        if page.next is None:
            break
        after = page.next
    assert tuple(seen) == whole
    assert ledger.latest(worker.rt, run_id, SCOPE) == whole[-1]
    first = whole[0].request.version
    assert ledger.get(worker.rt, run_id, first.suspension_id, SCOPE) == whole[0]


def test_the_ledger_is_read_in_the_exact_scope_alone(world: World) -> None:
    client, worker, run_id, pause = admitted(world)
    for scope in ("tenant=other", "tenant=acme/user=1"):
        assert client.admissions(run_id, scope=scope).admissions == ()
        for read in (
            lambda where=scope: ledger.latest(worker.rt, run_id, where),
            lambda where=scope: ledger.get(worker.rt, run_id, pause, where),
            lambda where=scope: ledger.start(worker.rt, run_id, pause, where),
            lambda where=scope: ledger.expiry(worker.rt, run_id, pause, where),
        ):
            with pytest.raises(AdmissionNotFound):
                read()
    below = client.enqueue("support", "x", scope="tenant=acme/user=1").id
    worker.work(below)
    client.provide_results(below, [result(A)])
    assert client.admissions(below).admissions == ()
    assert len(client.admissions(below, scope="tenant=acme/user=1").admissions) == 1


def test_the_answer_to_one_pause_is_read_by_its_id_in_its_exact_scope(world: World) -> None:
    client, _worker, run_id, pause = admitted(world)
    (kept,) = client.admissions(run_id).admissions
    assert client.admission(run_id, pause) == kept
    for scope in ("tenant=other", "tenant=acme/user=1", "tenant"):
        with pytest.raises((AdmissionNotFound, InvalidScope)):
            client.admission(run_id, pause, scope=scope)
    with pytest.raises(AdmissionNotFound):
        client.admission(run_id, new_id(SUSPENSION))
    with pytest.raises(InvalidId):
        client.admission(run_id, "x")


@pytest.mark.parametrize("limit", [0, -1, 257])
def test_a_page_has_one_to_256_answers(world: World, limit: int) -> None:
    client, worker, run_id, _pause = admitted(world)
    with pytest.raises(InvalidArgument):
        client.admissions(run_id, limit=limit)
    with pytest.raises(InvalidArgument):
        ledger.discover_replies(worker.rt, SCOPE, None, limit)
    assert len(client.admissions(run_id, limit=256).admissions) == 1


def test_what_is_given_back_is_detached_from_what_is_kept(world: World) -> None:
    client, _worker, run_id, _pause = admitted(world)
    (one,) = client.admissions(run_id).admissions
    with pytest.raises(Exception, match="frozen"):
        one.request_digest = "x"  # type: ignore[misc]
    assert one.model_dump(mode="json").keys() >= {"schema_version", "request", "request_digest"}
    assert "fresh" not in one.model_dump()
    assert type(one).model_validate(one.model_dump(mode="json")) == one


def test_discovery_names_runs_that_wait_for_agents_or_go_on_with_an_answer_by_id(world: World) -> None:
    client, worker, first = paused(world)
    ids = [first, *(client.enqueue("support", str(number)).id for number in range(3))]
    for run_id in ids[1:]:
        worker.work(run_id)
    world.sql("update suspensions set reason = 'agent_reply' where run_id = :id", id=ids[1])
    client.provide_results(ids[2], [result(A)])
    below = client.enqueue("support", "x", scope="tenant=acme/user=1").id
    worker.work(below)
    client.provide_results(below, [result(A)], scope="tenant=acme/user=1")
    assert ledger.discover_replies(worker.rt, SCOPE, None, 256) == sorted(ids[1:3])
    (one,) = ledger.discover_replies(worker.rt, SCOPE, None, 1)
    assert one == min(ids[1:3])
    assert ledger.discover_replies(worker.rt, SCOPE, one, 1) == [max(ids[1:3])]
    assert ledger.discover_replies(worker.rt, SCOPE, max(ids[1:3]), 1) == []
    with pytest.raises(InvalidId):
        ledger.discover_replies(worker.rt, SCOPE, "x", 1)
    assert worker.work(ids[2])["state"] == "completed"
    assert ledger.discover_replies(worker.rt, SCOPE, None, 256) == [ids[1]]


def test_a_hint_for_an_answer_that_was_dealt_with_is_an_ordinary_refusal(world: World) -> None:
    client, worker, run_id = paused(world, TWO)
    pause = world.run(run_id)["suspension_id"]
    with pytest.raises(NotContinuable):
        slot.work(worker.rt, run_id, "begun", suspension_id=pause)
    client.provide_results(run_id, [result(A), result(B)])
    assert slot.work(worker.rt, run_id, "begun", suspension_id=pause).last_state == "completed"
    assert world.run(run_id)["state"] == "completed"

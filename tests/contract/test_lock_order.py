"""The lock order of `cortex_workers/store/README.md`: read off every door, and proven by sessions that wait."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from cortex_workers.engine import expire, suspend
from cortex_workers.schemas.ids import RUN, SESSION, new_id
from cortex_workers.schemas.lifecycle import RUN as RUN_MACHINE
from cortex_workers.schemas.run import EnqueueRun
from cortex_workers.store import claims, leases, runs, sessions, tables, transcript, turns
from cortex_workers.store.claims import Claimer
from cortex_workers.store.database import Database
from cortex_workers.store.transitions import Guard, Move, Row
from cortex_workers.testing import factory
from tests.contract.meeting import Referee, in_background, together
from tests.contract.recorder import Recorder, Statement, recording
from tests.engine.world import SCOPE, Worker, World, at, call, say, turn

ORDER = ["sessions", "tenants", "runs", "suspensions", "pending_calls", "checkpoints"]


def out_of_order(transaction: list[Statement]) -> list[str]:
    """The tables that a transaction locks, when it may wait for one before which it should have come."""
    held: list[str] = []
    for statement in transaction:
        for table, may_wait in statement.locks:
            if table not in ORDER or table in held:
                continue
            held.append(table)
            if may_wait and any(ORDER.index(table) < ORDER.index(other) for other in held[:-1]):
                return held
    return []


# --- Read off every door ------------------------------------------------------------------------------------------

SCRIPT = {
    "match": [
        {"input_contains": "pay", "turns": [turn(call("find", order="1"), call("pay", amount=1)), say()]},
        {"input_contains": "ship", "turns": [turn(call("ship", order="1"), call("ship", order="2")), say()]},
        {"input_contains": "fail", "turns": [{"fail": "failed"}]},
        {"default": True, "turns": [turn(call("find", order="1")), turn(call("find", order="2")), say()]},
    ]
}


def test_every_door_takes_its_locks_in_order(world: World) -> None:
    world.shop(SCRIPT)
    worker, client = world.worker(), world.client()
    with recording(worker.rt.database, client.runtime.database, world.database) as recorder:
        produce(client)
        decide_every_way(world, worker, client)
        settle_every_way(world, worker, client)
        give_up_every_way(world, client)
        cancel_every_way(world, client)
        sweep_every_way(world, worker)
    moved = {row["kind"] for row in world.rows(tables.events)}
    # A host's own runs come with a later room; everything else was done above.
    assert moved == {f"run.{row.name}" for row in RUN_MACHINE} - {"run.cancel_created"}
    check(recorder)


def check(recorder: Recorder) -> None:
    wrong = {str(found): one for one in recorder.transactions if (found := out_of_order(one))}
    assert list(wrong) == [], "\n\n".join(
        f"{found}:\n" + "\n".join(statement.sql[:300] for statement in one) for found, one in wrong.items()
    )
    # Each of these is waited for by somebody here, or the reading of statements is wrong.
    waited_for = {
        name for one in recorder.transactions for item in one for name, waits in item.locks if waits
    }
    assert waited_for >= set(ORDER)


def produce(client: Any) -> None:
    client.enqueue("support", "alone")
    client.enqueue("support", "first", session="talk")
    client.enqueue("support", "second", session="talk")
    many = [
        EnqueueRun(agent="support", input=str(number), scope=f"tenant={tenant}", session=key)
        for number, (tenant, key) in enumerate([("b", "y"), ("a", "x"), ("a", None), ("b", "x")])
    ]
    client.enqueue_many(many)


def paused(world: World, worker: Worker, client: Any, session: str | None = None) -> tuple[Row, str]:
    made = client.enqueue("support", "pay", session=session)
    row = worker.finish(made.id)
    assert row["state"] == "paused"
    return row, client.checkpoints(run_id=made.id)[0].id


def decide_every_way(world: World, worker: Worker, client: Any) -> None:
    for session in (None, new_id(RUN)):
        row, checkpoint = paused(world, worker, client, session)
        client.decide(checkpoint, approved=True)
        assert worker.finish(row["id"])["state"] == "completed"
        _, checkpoint = paused(world, worker, client, session)
        client.decide(checkpoint, approved=False, reason="no")


def settle_every_way(world: World, worker: Worker, client: Any) -> None:
    for outcome, more in (
        ("happened", {"result": "shipped"}),
        ("did_not_happen", {"now": True}),
        ("stop", {}),
    ):
        made = client.enqueue("support", "ship")
        worker.lose_at("tool.after_start_record", made.id)
        assert worker.finish(made.id)["state"] == "paused"
        (asked,) = client.checkpoints(run_id=made.id)
        client.settle(asked.id, outcome, **more)


def give_up_every_way(world: World, client: Any) -> None:
    for shared in (False, True):

        def made(text: str, shared: bool = shared) -> str:
            return str(client.enqueue("support", text, session=new_id(RUN) if shared else None).id)

        def ended(run_id: str) -> None:
            client.cancel(run_id)

        run_id = made("slices")
        assert world.worker(slice_steps=1).work(run_id)["state"] == "ready"
        ended(run_id)
        run_id, drained = made("ship"), world.worker()
        with at("turn.after_commit", drained.rt.drain.set):
            assert drained.work(run_id)["state"] == "reclaimable"
        refuse_for_now(world, run_id, "reclaimable")
        ended(run_id)
        run_id = made("refused")
        refuse_for_now(world, run_id, "ready")
        ended(run_id)
        run_id, watched = made("watched"), world.worker()
        term = factory.term_of(watched.claim(run_id).row)
        world.database.run(lambda unit, by=watched.name, term=term: leases.hand_off_all(unit, by, [term], by))
        assert world.run(run_id)["state"] == "reclaimable"
        ended(run_id)
        assert world.worker().work(made("fail"))["state"] == "failed"


def refuse_for_now(world: World, run_id: str, state: str) -> None:
    worker = world.worker()
    row = worker.claim(run_id).row
    suspend.hand_back_claimed(worker.rt.database.run, row, factory.term_of(row), 5.0, 10.0, "not now")
    assert world.run(run_id)["state"] == state
    world.later(6)


def cancel_every_way(world: World, client: Any) -> None:
    for state in ("ready", "running", "reclaimable", "paused"):
        for session in (None, new_id(RUN)):
            run = factory.a_run_in(world.database, state, session=session)  # type: ignore[arg-type]
            client.cancel(run["id"], reason="no longer wanted")


def sweep_every_way(world: World, worker: Worker) -> None:
    for session in (None, new_id(RUN)):
        for policy in ("fail", "return_to_model"):
            run = factory.a_paused_run(
                world.database, ttl_s=0.0, on_expiry=policy, session=session and new_id(RUN)
            )
            assert expire.expire_pause(worker.rt, run["suspension_id"])
        run = factory.a_running_run(world.database, ttl_s=0.0, session=session)
        assert expire.lapse(worker.rt, run["id"])
        late = factory.a_run(world.database, start_by=run["created_at"], session=session and new_id(RUN))
        assert expire.cancel_unstarted(worker.rt, late["id"])

"""A holder's writes after an outage: refused only because nobody could renew the lease, they are repeated."""

import itertools
from typing import Any

import pytest
from sqlalchemy import event

from cortex_workers.engine import expire
from tests.engine.world import Worker, World, at, call, results, say, turn

PAST = "update runs set lease_expires_at = now() - interval '1 s' where state = 'running'"


def begin(world: World) -> tuple[Worker, str]:
    world.shop([turn(call("ship", order="17")), turn(call("pay", amount=5)), say()])
    worker = world.worker()
    return worker, world.client().enqueue("support", "Go").id


@pytest.mark.parametrize("probe", ["model.after", "tool.after_start_record", "tool.after_handler"])
def test_a_write_that_is_refused_because_nobody_could_renew_is_repeated_after_the_renewal(
    world: World, probe: str
) -> None:
    worker, run_id = begin(world)
    with at(probe, lambda: world.sql(PAST)):
        row = worker.work(run_id)
    assert (row["state"], row["reclaim_total"]) == ("paused", 0)
    (shipped, waiting) = world.calls(run_id)
    assert (shipped["state"], shipped["late_result"], waiting["state"]) == ("completed", None, "pending")
    assert [effect.tool for effect in world.effects] == ["ship"]
    assert results(world.messages(run_id)) == ["ship done"]


@pytest.mark.parametrize("nth", [2, 3], ids=["pause", "end"])
def test_a_term_also_ends_well_after_an_outage(world: World, nth: int) -> None:
    worker, run_id = begin(world)
    client = world.client()
    with at("model.after", lambda: world.sql(PAST), nth=nth):
        row = worker.work(run_id)
        assert row["state"] == "paused"
        client.decide(client.checkpoints()[0].id, approved=True)
        row = worker.work(run_id)
    assert (row["state"], row["reclaim_total"]) == ("completed", 0)


def test_a_write_of_a_run_that_somebody_took_is_not_repeated(world: World) -> None:
    worker, run_id = begin(world)
    other = world.worker()

    def take() -> None:
        world.sql(PAST)
        assert expire.lapse(other.rt, run_id)

    with at("tool.after_handler", take):
        row = worker.work(run_id)
    assert (row["state"], row["reclaim_total"]) == ("reclaimable", 1)
    (call_row,) = world.calls(run_id)
    assert (call_row["state"], call_row["late_result"]) == ("started", "ship done")


def test_a_cancelled_run_is_let_go_after_one_look(world: World) -> None:
    worker, run_id = begin(world)
    client = world.client()
    with at("tool.after_handler", lambda: client.cancel(run_id)):
        row = worker.work(run_id)
    assert row["state"] == "cancelled"
    assert world.call(run_id)["late_result"] == "ship done"


# Commits of a worker on the way: 1 and 5 are claims, which write nothing that could be lost.
@pytest.mark.parametrize("nth", [2, 3, 4, 6, 7, 8])
@pytest.mark.parametrize("committed", ["before", "never", "later"])
def test_a_commit_whose_answer_is_lost_is_settled_by_reading_the_row(
    world: World, nth: int, committed: str
) -> None:
    """Bug case C51."""
    worker, run_id = begin(world)
    client = world.client()
    count = itertools.count(1)

    def lose(connection: Any) -> None:
        if next(count) != nth:
            return
        real = connection.connection.driver_connection
        if committed == "later":
            # The server goes on with what it was sent, whoever has left; the row is locked until then.
            real.pgconn.send_query(b"select pg_sleep(0.4); commit")
            real.close()
            return
        if committed == "before":
            real.commit()
            real.execute("select 1")
        world.sql("select pg_terminate_backend(:pid, 5000)", pid=real.info.backend_pid)

    event.listen(worker.rt.database.engine, "commit", lose)
    assert worker.work(run_id)["state"] == "paused"
    client.decide(client.checkpoints()[0].id, approved=True)
    row = worker.work(run_id)
    assert next(count) > nth, "there was no such commit"
    assert (row["state"], row["reclaim_total"], row["step_count"]) == ("completed", 0, 3)
    assert [effect.tool for effect in world.effects] == ["ship", "pay"]
    assert results(world.messages(run_id)) == ["ship done", "pay done"]
    assert [each["late_result"] for each in world.calls(run_id)] == [None, None]
    assert [item["step_index"] for item in world.steps(run_id)] == [0, 1, 2]

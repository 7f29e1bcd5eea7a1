"""The frame of every sweep: who takes a pass, what happens to rows that cannot be handled, and what it all costs."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import text

from cortex_workers.errors import InvalidArgument, StoreUnavailable
from cortex_workers.schemas.agent import AgentDefinition
from cortex_workers.schemas.outcomes import Swept
from cortex_workers.store import sweeps
from cortex_workers.sweep import frame
from cortex_workers.testing import factory
from tests.engine.sweeping import Sweeper, counted_statements, sweepers
from tests.waiting import wait_until

INTERVAL_S = 10.0


@pytest.fixture
def one(database_url: str) -> Iterator[Sweeper]:
    with sweepers(database_url, sweep_interval_s=INTERVAL_S) as (only,):
        yield only


# --- Who sweeps -------------------------------------------------------------------------------------------------------


def test_a_sweep_does_every_pass_in_order_and_tells_what_it_did(one: Sweeper) -> None:
    factory.a_running_run(one.database, ttl_s=1.0)
    swept = one.sweep()
    assert list(swept.done) == [
        "lapses",
        "start_by",
        "asks",
        "polls",
        "expiries",
        "deliveries",
        "waits",
        "hints",
        "checkpoints",
        "replies",
        "workers",
    ]
    assert (swept.done["lapses"], swept.skipped) == (1, 0)


def test_a_sweep_right_after_another_finds_nothing_due(one: Sweeper) -> None:
    one.sweep()
    factory.a_running_run(one.database, ttl_s=0.0)
    assert one.again() == Swept(done={}, skipped=11)
    one.clock.advance(INTERVAL_S / 2)
    assert one.again("lapses").done == {"lapses": 1}, (
        "half an interval is enough: beat's jitter costs no sweep"
    )


def test_an_operator_may_sweep_at_any_time(one: Sweeper) -> None:
    one.sweep()
    factory.a_running_run(one.database, ttl_s=0.0)
    assert frame.sweep(one.rt, ["lapses"], by="operator", force=True).done == {"lapses": 1}


def test_only_named_passes_are_done_and_an_unknown_name_is_refused(one: Sweeper) -> None:
    assert list(one.sweep("hints", "lapses").done) == ["lapses", "hints"]
    with pytest.raises(InvalidArgument, match=r"no such pass: laps; there are lapses, start_by"):
        one.again("laps")


def test_five_thousand_queued_sweeps_cost_one_statement_each(one: Sweeper) -> None:
    one.sweep()
    with counted_statements(one) as sent:
        for _ in range(5000):
            assert one.again().done == {}
    assert len(sent) == 5000


def test_two_beats_do_not_sweep_twice_as_often(database_url: str) -> None:
    with sweepers(database_url, 2, sweep_interval_s=INTERVAL_S) as both:
        done = 0
        for _ in range(10):
            done += sum(len(each.again("lapses").done) for each in both)
            both[0].clock.advance(INTERVAL_S)
        assert done == 10


def test_the_age_of_the_last_sweep_is_that_of_the_pass_that_is_behind(one: Sweeper) -> None:
    assert frame.last_sweep_age_s(one.rt) is None
    one.sweep()
    one.clock.advance(25)
    one.again("hints")
    assert frame.last_sweep_age_s(one.rt) == pytest.approx(25)


# --- Holders that die -------------------------------------------------------------------------------------------------


def test_a_pass_whose_holder_died_is_taken_again_within_three_intervals(one: Sweeper) -> None:
    one.sweep()
    one.clock.advance(INTERVAL_S)
    with one.database.read() as unit:
        assert sweeps.take(unit, "expiries", "a-worker-that-dies", 5.0, 25.0) is not None
    run = factory.a_paused_run(one.database, ttl_s=0.0)
    after = 0.0
    while one.now(run)["state"] == "paused":
        after += INTERVAL_S
        assert after <= 3 * INTERVAL_S
        one.sweep()
    assert one.now(run)["state"] == "failed"


def test_a_holder_that_was_taken_for_dead_does_not_undo_its_successor(one: Sweeper) -> None:
    with one.database.read() as unit:
        sweeps.look(unit, ["lapses"])
        first = sweeps.take(unit, "lapses", "slow", 5.0, 25.0)
        one.clock.advance(26)
        second = sweeps.take(unit, "lapses", "next", 5.0, 25.0)
        assert first is not None and second is not None and second.gap_s == pytest.approx(26)
        sweeps.finish(unit, first, "slow", {}, {"due": 9, "done": 9, "skipped": 0})
    assert (one.counts("lapses").finished_at, one.counts("lapses").due) == (None, 0)


SWEEP_ONCE = """
import sys
from cortex_workers import probes, wiring
from cortex_workers.settings import load_settings
from cortex_workers.sweep import frame
probes.arm_from_environment()
rt = wiring.build(load_settings(), role="client")
print(frame.sweep(rt, ["expiries"]).model_dump_json())
"""


def _process(database_url: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "CORTEX_DATABASE_URL": database_url, "CORTEX_SWEEP_INTERVAL_S": "0.4", **environment}
    return subprocess.run(
        [sys.executable, "-c", SWEEP_ONCE], env=env, capture_output=True, text=True, timeout=60
    )


def test_a_sweep_killed_after_its_first_row_is_finished_by_another_process(database_url: str) -> None:
    with sweepers(database_url) as (one,):
        runs = [factory.a_paused_run(one.database, ttl_s=0.0) for _ in range(5)]
        killed = _process(database_url, CORTEX_PROBE="sweep.after_first_row")
        assert killed.returncode == -signal.SIGKILL
        states = [one.now(run)["state"] for run in runs]
        assert sorted(states) == ["failed", "paused", "paused", "paused", "paused"]

        def rest() -> bool:
            done = json.loads(_process(database_url).stdout.splitlines()[-1])["done"]
            return bool(done.get("expiries"))

        wait_until(rest, what="the pass to be taken from the dead process")
        assert {one.now(run)["state"] for run in runs} == {"failed"}
        assert [one.events(run).count("run.expire") for run in runs] == [1] * 5


def test_after_a_time_without_sweeps_leases_are_left_alone_once(one: Sweeper) -> None:
    one.sweep()
    run = factory.a_running_run(one.database, ttl_s=1.0)
    one.clock.advance(4 * INTERVAL_S)
    swept = one.again()
    assert "lapses" not in swept.done and "expiries" in swept.done
    assert one.now(run)["state"] == "running"
    age = frame.last_sweep_age_s(one.rt)
    assert age is not None and age > 3 * INTERVAL_S, (
        "so the fallback looks again, and does not wait three intervals"
    )
    assert "lapses" not in one.again().done, (
        "another worker looks in the same instant: nobody had time to renew"
    )
    one.clock.advance(frame.SETTLE_S)
    assert one.again().done == {"lapses": 1}
    assert one.now(run)["state"] == "reclaimable"


def test_a_wait_before_an_outage_does_not_count_for_the_one_after(one: Sweeper) -> None:
    one.sweep()
    one.clock.advance(4 * INTERVAL_S)
    one.again()  # waits, and leaves its mark
    run = factory.a_running_run(one.database, ttl_s=1.0)
    one.clock.advance(4 * INTERVAL_S)
    assert "lapses" not in one.again().done
    assert one.now(run)["state"] == "running"
    one.clock.advance(frame.SETTLE_S)
    assert one.again().done["lapses"] == 1


def test_sweeps_that_are_always_rare_do_not_wait_for_ever(one: Sweeper) -> None:
    one.sweep()
    run = factory.a_running_run(one.database, ttl_s=1.0)
    waited = 0
    while one.now(run)["state"] == "running":
        one.clock.advance(4 * INTERVAL_S)
        one.again()
        waited += 1
        assert waited <= frame.MOST_WAITS + 1


def test_without_a_gap_nothing_waits(one: Sweeper) -> None:
    one.sweep()
    run = factory.a_running_run(one.database, ttl_s=1.0)
    one.clock.advance(2 * INTERVAL_S)
    one.sweep()
    assert one.now(run)["state"] == "reclaimable"


# --- Many at once -----------------------------------------------------------------------------------------------------


def _at_once(works: list[Callable[[], object]]) -> None:
    errors: list[BaseException] = []
    gate = threading.Barrier(len(works))

    def go(work: Callable[[], object]) -> None:
        gate.wait()
        try:
            work()
        except BaseException as error:  # noqa: BLE001  told to the test, below, with what it was
            errors.append(error)

    threads = [threading.Thread(target=go, args=(work,)) for work in works]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors == []


def test_however_many_sweep_at_once_each_row_is_handled_once(database_url: str) -> None:
    with sweepers(database_url, 6, sweep_interval_s=INTERVAL_S) as many:
        first = many[0]
        lapsed = [factory.a_running_run(first.database, ttl_s=0.0) for _ in range(10)]
        overdue = [factory.a_paused_run(first.database, ttl_s=0.0) for _ in range(10)]
        first.clock.advance(INTERVAL_S)
        # As if no row kept them apart: each of them goes through all that is due.
        passes = [each for each in frame.PASSES if each.name in ("lapses", "expiries")]
        _at_once([lambda each=each: _all_rows(each, passes) for each in many])
        assert [first.events(run).count("run.lapse") for run in lapsed] == [1] * 10
        assert [first.now(run)["reclaim_count"] for run in lapsed] == [1] * 10
        assert [first.events(run).count("run.expire") for run in overdue] == [1] * 10


def _all_rows(sweeper: Sweeper, passes: list[frame.Pass]) -> None:
    for each in passes:
        each.work(frame.PassRun(sweeper.rt, each.name, {}))


def test_of_many_that_sweep_at_once_one_gets_each_pass(database_url: str) -> None:
    with sweepers(database_url, 8, sweep_interval_s=INTERVAL_S) as many:
        done: list[Swept] = []
        _at_once([lambda each=each: done.append(each.again()) for each in many])
        taken = [name for swept in done for name in swept.done]
        assert sorted(taken) == sorted(frame.NAMES)


# --- Rows that cannot be handled --------------------------------------------------------------------------------------


def test_a_page_of_rows_that_may_not_be_swept_starves_nobody(database_url: str) -> None:
    with sweepers(database_url, sweep_page=10) as (one,):
        newer = [factory.a_paused_run(one.database, ttl_s=0.0) for _ in range(10)]
        locked = [factory.a_paused_run(one.database, ttl_s=0.0) for _ in range(20)]
        good = [factory.a_paused_run(one.database, ttl_s=0.001) for _ in range(5)]
        one.execute(
            "update suspensions set schema_version = 99 where run_id = any(:ids)",
            ids=[r["id"] for r in newer],
        )
        with one.database.transaction() as other:
            ids = [run["id"] for run in locked]
            other.execute(text("select 1 from runs where id = any(:ids) for update"), {"ids": ids})
            assert one.sweep("expiries").done == {"expiries": 5}
        assert {one.now(run)["state"] for run in good} == {"failed"}
        assert {one.now(run)["state"] for run in [*newer, *locked]} == {"paused"}
        assert (one.counts("expiries").due, one.counts("expiries").skipped) == (35, 30)
        assert one.sweep("expiries").done == {"expiries": 20}, "what was locked is met again"


def test_a_row_that_fails_is_logged_counted_and_passed(
    one: Sweeper, caplog: pytest.LogCaptureFixture
) -> None:
    broken = factory.a_paused_run(one.database, ttl_s=0.0)
    good = factory.a_paused_run(one.database, ttl_s=0.0)
    one.execute(
        """update run_specs set overrides = '{"max_steps": "many"}' where run_id = :id""", id=broken["id"]
    )
    assert one.sweep("expiries").done == {"expiries": 1}
    assert (one.now(broken)["state"], one.now(good)["state"]) == ("paused", "failed")
    assert one.counts("expiries").skipped == 1
    assert "sweep.row_failed" in caplog.text and "ValidationError" in caplog.text


def test_a_row_that_is_locked_in_the_very_moment_costs_its_own_turn_only(database_url: str) -> None:
    """Free when the page was read, locked when it is its turn: the lock is not waited for longer than the setting."""
    with sweepers(database_url, db_lock_timeout_s=0.1) as (one,):
        held = factory.a_running_run(one.database, ttl_s=0.0)
        run = frame.PassRun(one.rt, "lapses", {})
        with one.database.transaction() as other:
            other.execute(text("select 1 from runs where id = :id for update"), {"id": held["id"]})
            run.row(held["id"], lambda: frame.lapsed.expire.lapse(one.rt, held["id"]))
        assert run.counts == {"due": 1, "done": 0, "skipped": 1}
        run.row(held["id"], lambda: frame.lapsed.expire.lapse(one.rt, held["id"]))
        assert run.done == 1


def test_a_database_that_is_gone_ends_the_sweep(database_url: str) -> None:
    with sweepers("postgresql://nobody@127.0.0.1:1/nothing") as (lost,), pytest.raises(StoreUnavailable):
        lost.again()


def test_a_pass_that_runs_out_of_time_goes_on_where_it_stopped(database_url: str) -> None:
    with sweepers(database_url, sweep_page=2) as (one,):
        runs = [factory.a_paused_run(one.database, ttl_s=0.0) for _ in range(6)]
        one.execute("update runs set agent_digest = 'gone'")
        one.clock.advance(INTERVAL_S)
        spent = frame.PassRun(one.rt, "expiries", {})
        seen: list[str] = []

        def slow(_rt: object, row: str) -> bool:
            seen.append(row)
            if len(seen) == 3:
                spent._end = 0.0
            return True

        spent.each_due(frame.expired.due.overdue_pauses_across_scopes, slow)
        assert (len(seen), list(spent.cursor)) == (3, ["after"])
        following = frame.PassRun(one.rt, "expiries", json.loads(json.dumps(spent.cursor)))
        rest: list[str] = []

        def quick(_rt: object, row: str) -> bool:
            rest.append(row)
            return True

        following.each_due(frame.expired.due.overdue_pauses_across_scopes, quick)
        assert (len(rest), following.cursor) == (3, {})
        assert sorted([*seen, *rest]) == sorted(str(run["suspension_id"]) for run in runs)


# --- What it costs ----------------------------------------------------------------------------------------------------


def test_the_number_of_statements_is_bounded_by_what_is_due(one: Sweeper) -> None:
    one.a_worker()
    factory.an_agent(one.database)
    one.sweep()
    with counted_statements(one) as idle:
        one.clock.advance(INTERVAL_S)
        one.again()
    for _ in range(30):
        factory.a_run(one.database)
        factory.a_paused_run(one.database)
        factory.a_running_run(one.database, ttl_s=3600)
    one.sweep()
    with counted_statements(one) as busy:
        one.clock.advance(INTERVAL_S)
        one.again()
    assert len(idle) <= 45
    # One pool with runs in it: its target, and one look at each of its queues.
    assert len(busy) - len(idle) <= 6


def test_a_worker_looks_at_versions_that_are_new_and_says_which_it_serves(database_url: str) -> None:
    from cortex_workers import Host, wiring
    from cortex_workers.settings import load_settings
    from cortex_workers.store import agents, workers

    host = Host()

    @host.tool(retry_safe=True, effects="none")
    def find(order: str) -> str:
        """Find an order."""
        return order

    host.agent("support", model="scripted:none", instructions="Help.", tools=["find"])
    rt = wiring.build(load_settings(database_url=database_url), host=host, role="worker")
    own = host.definitions()["support"]
    rt.served.look_at(own.digest(), own)
    rt.database.run(lambda unit: workers.register(unit, rt.worker_id, version="1", reader_version=1, slots=2))
    edited = own.model_copy(update={"instructions": "Help kindly."})
    stranger = AgentDefinition(name="courier", model="scripted:none")
    rt.database.run(lambda unit: agents.add_versions(unit, [own, edited, stranger]))
    frame.look_around(rt)
    with rt.database.read() as unit:
        found = workers.get(unit, rt.worker_id)
    assert found is not None and set(found.agents) == {own.digest(), edited.digest()}
    rt.database.dispose()

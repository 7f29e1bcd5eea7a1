"""The finders of the sweep: pages in order, what they pass over, and that their cost is that of what is due."""

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, text

from cortex_workers.store import due, hints, waits
from cortex_workers.store.database import Database
from cortex_workers.store.unit import Unit
from cortex_workers.testing import factory
from cortex_workers.testing.clock import StoppedClock, stopped_clock


@pytest.fixture
def clock() -> Iterator[StoppedClock]:
    with stopped_clock() as clock:
        yield clock


def _all(database: Database, find: Callable[[Unit, Any, int], list[due.Due]], limit: int) -> list[list[str]]:
    """Every page, by the key of the one before."""
    pages, after = [], None
    while True:
        with database.read() as unit:
            page = find(unit, after, limit)
        if not page:
            return pages
        pages.append([item.id for item in page])
        after = page[-1].key


def test_lapsed_runs_come_in_pages_the_longest_first_and_none_twice(
    database: Database, clock: StoppedClock
) -> None:
    runs = [factory.a_running_run(database, ttl_s=ttl) for ttl in (5.0, 1.0, 3.0, 3.0, 2.0)]
    alive = factory.a_running_run(database, ttl_s=60.0)
    clock.advance(5)
    pages = _all(database, due.lapsed_across_scopes, 2)
    found = [row for page in pages for row in page]
    assert [len(page) for page in pages] == [2, 2, 1]
    assert found == [run["id"] for run in sorted(runs, key=lambda run: (run["lease_expires_at"], run["id"]))]
    assert alive["id"] not in found


def test_every_scope_is_looked_at(database: Database, clock: StoppedClock) -> None:
    runs = [
        factory.a_running_run(database, ttl_s=0.0, scope=f"tenant={name}") for name in ("a", "b/user=c", "d")
    ]
    assert sorted(_all(database, due.lapsed_across_scopes, 10)[0]) == sorted(run["id"] for run in runs)


@pytest.mark.parametrize("table", ["runs", "suspensions", "sessions"])
def test_an_overdue_pause_is_free_only_while_nobody_holds_any_of_its_rows(
    database: Database, clock: StoppedClock, table: str
) -> None:
    run = factory.a_paused_run(database, ttl_s=0.0)
    ids = {"runs": run["id"], "suspensions": run["suspension_id"], "sessions": run["session_id"]}
    with database.transaction() as other:
        other.execute(text(f"select 1 from {table} where id = :id for no key update"), {"id": ids[table]})
        with database.read() as unit:
            assert [row.free for row in due.overdue_pauses_across_scopes(unit, None, 10)] == [False]
    with database.read() as unit:
        assert [row.free for row in due.overdue_pauses_across_scopes(unit, None, 10)] == [True]


@pytest.mark.parametrize("column", ["runs.min_reader", "suspensions.schema_version"])
def test_a_pause_for_a_newer_version_is_found_and_not_free(
    database: Database, clock: StoppedClock, column: str
) -> None:
    factory.a_paused_run(database, ttl_s=0.0)
    table, _, name = column.partition(".")
    with database.transaction() as unit:
        unit.execute(text(f"update {table} set {name} = 99"))
    with database.read() as unit:
        assert [row.free for row in due.overdue_pauses_across_scopes(unit, None, 10)] == [False]


def test_finding_a_row_leaves_no_lock_behind(database: Database, clock: StoppedClock) -> None:
    run = factory.a_running_run(database, ttl_s=0.0)
    with database.read() as unit:
        assert due.lapsed_across_scopes(unit, None, 10)[0].free
        with database.transaction() as other:
            other.execute(text("select 1 from runs where id = :id for update nowait"), {"id": run["id"]})


def test_a_session_is_found_while_nobody_has_its_turn(database: Database, clock: StoppedClock) -> None:
    first = factory.a_run(database, session="chat")
    factory.a_run(database, session="chat")
    clock.advance(61)

    def stuck() -> list[str]:
        with database.read() as unit:
            return due.sessions_without_a_turn_across_scopes(unit, 60.0, None, 10)

    assert stuck() == [], "the first may be claimed"
    running = factory.a_running_run(database, run=first, ttl_s=3600)
    assert stuck() == [], "the first runs"
    with database.transaction() as unit:
        unit.execute(
            text(
                "update runs set state = 'paused', suspension_id = 's', lease_owner = null, "
                "lease_expires_at = null where id = :id"
            ),
            {"id": running["id"]},
        )
    assert stuck() == [first["session_id"]], "the first is paused, and nobody computed what that means"


def test_hints_are_for_the_first_in_line(database: Database, clock: StoppedClock) -> None:
    runs = [factory.a_run(database) for _ in range(5)]
    clock.advance(3)
    late = factory.a_run(database)
    with database.read() as unit:
        found = hints.unheard_across_scopes(unit, "main", "start", 3.0, 3)
        everything = hints.unheard_across_scopes(unit, "main", "start", 3.0, 100)
    assert [told.run_id for told in found] == [run["id"] for run in runs[:3]]
    assert late["id"] not in {told.run_id for told in everything}


def test_the_pools_are_those_in_which_runs_wait(database: Database, clock: StoppedClock) -> None:
    assert _pools(database) == []
    for pool in ("main", "gpu", "gpu", "a"):
        factory.a_run(database, pool=pool)
    factory.a_run(database, pool="held", wait_reason="later")
    assert _pools(database) == ["a", "gpu", "main"]


def _pools(database: Database) -> list[str]:
    with database.read() as unit:
        return hints.pools_across_scopes(unit)


# --- Plans ------------------------------------------------------------------------------------------------------------

FILL = """
insert into runs (id, scope, agent, agent_digest, session_id, session_seq, state, instruction, queue_class, rank,
                  suspension_id, completed_at, wait_reason, notified_at, lease_owner, lease_expires_at, shared, serial)
select 'arun_' || n, 'tenant=t' || n % 50, 'support', 'd', 'ses_' || n / 4, n, s.state, 'start', 'start', n,
       'sus_' || n, case when s.state = 'completed' then now() end,
       case when s.state = 'ready' and n % 2 = 0 then 'turn' end,
       now(), case when s.state = 'running' then 'w' end, case when s.state = 'running' then now() + interval '1 h' end,
       true, s.state <> 'running'
from generate_series(1, 20000) n,
     lateral (select case when n % 10 = 0 then 'running' when n % 10 = 1 then 'paused' when n % 10 = 2 then 'ready'
              else 'completed' end as state) s;
insert into sessions (id, scope, agent) select distinct session_id, scope, agent from runs on conflict do nothing;
insert into suspensions (id, run_id, session_id, scope, run_revision, reason, step_index, next_step, messages_upto,
                         usage, digest, on_expiry, expires_at, ended_at)
select suspension_id, id, session_id, scope, 1, 'approval', 0, 1, 1, '{}', 'd', 'fail', now() + interval '1 d',
       case when state <> 'paused' then now() end from runs;
insert into checkpoints (id, scope, run_id, agent, suspension_id, kind, reason, step_index, state)
select 'acp_' || id, scope, id, agent, suspension_id, 'tool_approval', 'r', 0,
       case when state = 'paused' then 'pending' else 'resolved' end from runs;
analyze;
"""

FINDERS: dict[str, Callable[[Unit], object]] = {
    "lapsed": lambda unit: due.lapsed_across_scopes(unit, None, 100),
    "start_by": lambda unit: due.overdue_starts_across_scopes(unit, None, 100),
    "pauses": lambda unit: due.overdue_pauses_across_scopes(unit, None, 100),
    "cut_off": lambda unit: due.cut_off_across_scopes(unit, None, 100),
    "later": lambda unit: due.sessions_with_a_wait_over_across_scopes(unit, None, 100),
    "end_later": lambda unit: waits.end_later(unit, 100),
    "end_fences": lambda unit: waits.end_fences(unit, 100),
    "end_unserved": lambda unit: waits.end_unserved(unit, 100),
    "questions": lambda unit: due.open_questions_across_scopes(unit, None, 100),
    "pools": hints.pools_across_scopes,
    "unheard": lambda unit: hints.unheard_across_scopes(unit, "main", "start", 0.0, 100),
    "renotify": lambda unit: hints.renotify(unit, "main", "start", 300.0, None, 100),
}


@pytest.fixture(scope="module")
def filled(common_database: Database) -> Database:
    with common_database.transaction() as unit:
        for statement in FILL.split(";\n"):
            if statement.strip():
                unit.execute(text(statement.replace(":", "\\:")))
    return common_database


def _plan(database: Database, find: Callable[[Unit], object]) -> dict[str, Any]:
    """How PostgreSQL did the last statement that a finder sends: the plan with what it touched."""
    sent: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        sent.append((statement, parameters))

    event.listen(database.engine, "before_cursor_execute", note)
    try:
        with database.read() as unit:
            find(unit)
    finally:
        event.remove(database.engine, "before_cursor_execute", note)
    statement, parameters = sent[-1]
    with database.engine.connect() as connection:
        explained = connection.exec_driver_sql(
            f"explain (analyze, buffers, format json) {statement}", parameters
        ).scalar()
    found = json.loads(explained) if isinstance(explained, str) else explained
    return dict(found[0]["Plan"])


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)


@pytest.mark.parametrize("name", sorted(FINDERS))
def test_a_finder_reads_an_index_and_no_more_than_a_page_of_rows(filled: Database, name: str) -> None:
    plan = _plan(filled, FINDERS[name])
    scans = [
        node.get("Relation Name")
        for node in _nodes(plan)
        if node["Node Type"] == "Seq Scan"
        and node.get("Relation Name") not in (None, "workers", "agents", "sweeps")
    ]
    assert scans == []
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 1200


def test_what_is_not_due_costs_nothing(filled: Database) -> None:
    """Twenty thousand rows, none of them due: a handful of pages each."""
    for name in (
        "lapsed",
        "start_by",
        "pauses",
        "cut_off",
        "later",
        "end_later",
        "end_fences",
        "end_unserved",
        "pools",
    ):
        plan = _plan(filled, FINDERS[name])
        assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] <= 40, name


def test_intervals_are_kept_to_the_microsecond(database: Database, clock: StoppedClock) -> None:
    run = factory.a_paused_run(database, ttl_s=10.0)
    with database.read() as unit:
        clock.advance(10)
        clock.set(clock.at - timedelta(microseconds=1))
        assert due.overdue_pauses_across_scopes(unit, None, 10) == []
        clock.set(clock.at + timedelta(microseconds=1))
        assert [row.id for row in due.overdue_pauses_across_scopes(unit, None, 10)] == [run["suspension_id"]]

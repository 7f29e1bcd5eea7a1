"""How many hints are useful: as many as slots could take, and never so few that nobody wakes up (ruling 16)."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import event

from cortex_workers.settings import load_settings
from cortex_workers.store import workers
from cortex_workers.store.database import Database
from cortex_workers.store.demand import hint_target
from cortex_workers.testing import factory
from tests.contract.rows import Rows

pytestmark = pytest.mark.contract


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    found = Database(load_settings(database_url=database_url), lambda _: None)
    yield found
    found.dispose()


@pytest.fixture
def rows(database_url: str) -> Iterator[Rows]:
    found = Rows(database_url)
    yield found
    found.close()


def a_worker(database: Database, name: str, slots: int, used: int = 0, pool: str = "main") -> None:
    def work(unit: Any) -> None:
        workers.register(unit, name, version="1", reader_version=1, slots=slots, pool=pool)
        workers.heartbeat(unit, name, used, 0)

    database.run(work)


def target(database: Database, pool: str = "main") -> dict[str, int]:
    return database.run(lambda unit: hint_target(unit, pool))


def test_no_rows_no_hints(database: Database) -> None:
    a_worker(database, "w", slots=200)
    assert target(database) == {"continue": 0, "resume": 0}


def test_as_many_as_rows_while_slots_are_plenty(database: Database) -> None:
    a_worker(database, "w", slots=200)
    for _ in range(3):
        factory.a_run(database)
    assert target(database) == {"continue": 3, "resume": 0}


def test_no_more_than_the_free_slots_of_all_live_workers(database: Database, rows: Rows) -> None:
    rows.ready(50)
    a_worker(database, "w1", slots=10, used=7)
    a_worker(database, "w2", slots=10, used=2)
    assert target(database)["continue"] == 11


def test_begun_runs_are_counted_for_their_own_queue(database: Database) -> None:
    a_worker(database, "w", slots=200)
    factory.a_run(database)
    factory.a_reclaimable_run(database)
    assert target(database) == {"continue": 1, "resume": 1}


def test_full_workers_still_get_one_hint_each(database: Database, rows: Rows) -> None:
    rows.ready(5)
    for name in ("w1", "w2", "w3"):
        a_worker(database, name, slots=4, used=4)
    assert target(database)["continue"] == 3


def test_before_the_first_worker_one_hint_waits_for_it(database: Database, rows: Rows) -> None:
    rows.ready(5)
    assert target(database)["continue"] == 1


@pytest.mark.parametrize("gone", ["ended", "draining", "asked to drain"])
def test_workers_that_take_nothing_more_do_not_count(database: Database, rows: Rows, gone: str) -> None:
    rows.ready(5)
    a_worker(database, "w1", slots=2)
    a_worker(database, "w2", slots=100)

    def leave(unit: Any) -> None:
        if gone == "ended":
            workers.end(unit, "w2", "stopped")
        elif gone == "draining":
            workers.mark_draining(unit, "w2")
        else:
            workers.request_drain(unit, "w2", by="a test", reason="a test")

    database.run(leave)
    assert target(database)["continue"] == 2


def test_a_pool_has_its_own_rows_and_workers(database: Database, rows: Rows) -> None:
    rows.ready(5)
    a_worker(database, "w1", slots=3)
    a_worker(database, "w2", slots=100, pool="gpu")
    assert (target(database)["continue"], target(database, "gpu")["continue"]) == (3, 0)


def test_a_run_that_waits_its_turn_is_not_demand(database: Database, rows: Rows) -> None:
    rows.ready_in_session(4)
    a_worker(database, "w", slots=100)
    assert target(database)["continue"] == 1


def test_a_long_backlog_is_not_counted_to_its_end(database: Database, rows: Rows) -> None:
    a_worker(database, "w", slots=20)
    rows.ready(100)
    few = buffers(database)
    rows.ready(4000)
    assert target(database)["continue"] == 20
    assert buffers(database) <= few * 1.5 + 20


def buffers(database: Database) -> int:
    """The pages that the statement reads."""
    said: list[tuple[str, Any]] = []

    def listen(_c: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool) -> None:
        said.append((statement, parameters))

    event.listen(database.engine, "before_cursor_execute", listen)
    target(database)
    event.remove(database.engine, "before_cursor_execute", listen)
    ((statement, parameters),) = said
    with database.engine.connect() as connection:
        cursor = connection.connection.cursor()
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters)
        row = cursor.fetchone()
        assert row is not None
        plan = row[0][0]["Plan"] if isinstance(row[0], list) else json.loads(row[0])[0]["Plan"]
        return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])

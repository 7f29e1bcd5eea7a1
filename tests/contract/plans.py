"""What Postgres does for the statements of a piece of work, and how much it reads for them."""

from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import Connection, event

from cortex_workers.store.database import Database
from cortex_workers.store.unit import Unit
from tests.contract.recorder import Statement

Work = Callable[[Unit], Any]


class _Undo(Exception):
    pass


def statements(database: Database, work: Work) -> list[Statement]:
    """The statements of some work; what it did is undone."""
    caught: list[Statement] = []

    def listening(connection: Connection, _cursor: Any, sql: str, parameters: Any, *_rest: Any) -> None:
        caught.append(Statement(sql, parameters))

    event.listen(database.engine, "before_cursor_execute", listening)
    try:
        with database.transaction() as unit:
            work(unit)
            raise _Undo
    except _Undo:
        return caught
    finally:
        event.remove(database.engine, "before_cursor_execute", listening)


def explain(database: Database, statement: Statement, *, run: bool = False) -> dict[str, Any]:
    """The plan of a statement; with ``run`` as it really went, and undone."""
    options = "analyze, buffers, timing off, format json" if run else "format json"
    with database.engine.connect() as connection:
        found = connection.exec_driver_sql(
            f"explain ({options}) {statement.sql}", statement.parameters
        ).scalar()
        connection.rollback()
    plan: dict[str, Any] = found[0]["Plan"]
    return plan


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A plan's node and all below it."""
    yield plan
    for below in plan.get("Plans", ()):
        yield from nodes(below)


def indexes(database: Database, work: Work) -> set[str]:
    """The indexes that the statements of some work use."""
    return {
        node["Index Name"]
        for statement in statements(database, work)
        for node in nodes(explain(database, statement))
        if "Index Name" in node
    }


def sequential(database: Database, work: Work) -> set[str]:
    """The tables that the statements of some work read from end to end."""
    return {
        node["Relation Name"]
        for statement in statements(database, work)
        for node in nodes(explain(database, statement))
        if node["Node Type"] == "Seq Scan"
    }


def buffers(database: Database, work: Work) -> int:
    """The shared buffers that the statements of some work touch, when nothing is left to clean up or to load."""
    found = statements(database, work)
    runs = []
    for _ in range(3):
        plans = [explain(database, statement, run=True) for statement in found]
        runs.append(sum(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] for plan in plans))
    return min(runs)

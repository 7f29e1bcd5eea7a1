"""What the tables hold, to be compared before and after."""

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import ColumnElement, Table, false, select

from cortex_workers.store import tables
from cortex_workers.store.database import Database

Rows = dict[str, list[dict[str, Any]]]


def of_run(database: Database, run_id: str, session_id: str) -> Rows:
    """Every row that belongs to a run, its session included."""

    def mine(table: Table) -> ColumnElement[bool]:
        if table is tables.runs:
            return table.c.id == run_id
        if table is tables.sessions:
            return table.c.id == session_id
        return table.c.run_id == run_id if "run_id" in table.c else false()

    return _read(database, mine)


def everything(database: Database) -> Rows:
    """Every row there is."""
    return _read(database, lambda table: table.primary_key.columns[0].is_not(None))


def counts(database: Database) -> dict[str, int]:
    """How many rows each table has."""
    return {name: len(rows) for name, rows in everything(database).items()}


def _read(database: Database, which: Callable[[Table], ColumnElement[bool]]) -> Rows:
    found: Rows = {}
    with database.read() as unit:
        for name, table in tables.metadata.tables.items():
            statement = select(table).where(which(table)).order_by(*table.primary_key.columns)
            found[name] = [dict(row) for row in unit.execute(statement).mappings()]
    return found


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """The columns in which two versions of a row differ."""
    return {name for name in before if before[name] != after[name]}

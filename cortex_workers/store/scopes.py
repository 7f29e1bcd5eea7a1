"""Lists over a scope and all scopes below it.

Source: runs.md 2.2 (prefix match); tables.md (scope is one text, a prefix is an equality or one range).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, Table, and_, or_, select, union_all

from cortex_workers.store.unit import Unit

Order = Callable[[Any], Sequence[Any]]


def within(column: Any, scope: str) -> ColumnElement[bool]:
    """The rows of a scope and of those below it."""
    return or_(column == scope, _below(column, scope))


def _below(column: Any, scope: str) -> ColumnElement[bool]:
    # "0" follows "/".
    return and_(column >= scope + "/", column < scope + "0")


def first_within(
    unit: Unit, statement: Select[Any], table: Table, scope: str, order: Order, limit: int
) -> list[dict[str, Any]]:
    """The first rows of a scope and of those below it; ``order`` gets the columns and says how they are sorted.

    In two arms: an index on (scope, order) gives the scope's own rows in order and stops at the limit, which one
    condition over both could not; only those below, a range of many scopes, are sorted.
    """
    arms = [
        select(statement.where(which).order_by(*order(table.c)).limit(limit).subquery())
        for which in (table.c.scope == scope, _below(table.c.scope, scope))
    ]
    both = union_all(*arms).subquery()
    found = unit.execute(select(both).order_by(*order(both.c)).limit(limit))
    return [dict(row) for row in found.mappings()]

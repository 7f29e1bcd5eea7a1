"""Listens to the statements of a process: transaction by transaction, with the tables each one locks."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, event

from cortex_workers.store.database import Database

_LOCKING = re.compile(
    r"\bUPDATE\s+(?P<updated>\w+)\s+SET\b"
    r"|\bINSERT\s+INTO\s+(?P<inserted>\w+)"
    r"|\bDELETE\s+FROM\s+(?P<deleted>\w+)"
    r"|\bFOR\s+(NO KEY\s+)?(UPDATE|SHARE)(\s+OF\s+(?P<named>\w+(,\s*\w+)*))?(?P<skips>\s+SKIP\s+LOCKED)?",
    re.IGNORECASE,
)
_FROM = re.compile(r"\bFROM\s+(\w+)", re.IGNORECASE)


@dataclass(frozen=True)
class Statement:
    """One statement as it was sent."""

    sql: str
    parameters: Any

    @property
    def writes(self) -> bool:
        return any(kind in ("updated", "inserted", "deleted") for kind, _ in self._found())

    @property
    def locks(self) -> list[tuple[str, bool]]:
        """The tables whose rows it locks, in the order in which it says so, and whether it may wait for them.

        An insert meets somebody only where it says what to do about a row that is there.
        """
        meets = "ON CONFLICT" in self.sql
        return [
            (table, kind != "passes over") for kind, table in self._found() if kind != "inserted" or meets
        ]

    def _found(self) -> list[tuple[str, str]]:
        found = []
        for match in _LOCKING.finditer(self.sql):
            for kind in ("updated", "inserted", "deleted"):
                if match[kind]:
                    found.append((kind, match[kind]))
            if match["named"] or match[0].upper().startswith("FOR"):
                named = match["named"] or _table_of(self.sql[: match.start()])
                kind = "passes over" if match["skips"] else "locks"
                found += [(kind, name.strip()) for name in named.split(",")]
        return found


def _table_of(before: str) -> str:
    """The table of the select that a locking clause ends: what its own FROM names, not one in parentheses."""
    own, depth = [], 0
    for char in reversed(before):
        depth += {")": 1, "(": -1}.get(char, 0)
        if depth < 0:
            break
        own.append(char if depth == 0 else " ")
    return _FROM.findall("".join(reversed(own)))[-1]


@dataclass
class Recorder:
    """``transactions`` are the committed ones in order, each a list of statements; ``single`` stood alone."""

    transactions: list[list[Statement]] = field(default_factory=list)
    single: list[Statement] = field(default_factory=list)
    _open: dict[int, list[Statement]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def writing(self) -> int:
        """How many transactions wrote something, those of one statement included."""
        many = [one for one in self.transactions if any(statement.writes for statement in one)]
        return len(many) + len([statement for statement in self.single if statement.writes])

    def statement(self, connection: Connection, _cursor: Any, sql: str, parameters: Any, *_rest: Any) -> None:
        with self._lock:
            if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
                self.single.append(Statement(sql, parameters))
            else:
                self._open.setdefault(id(connection), []).append(Statement(sql, parameters))

    def commit(self, connection: Connection) -> None:
        with self._lock:
            done = self._open.pop(id(connection), [])
            if done:
                self.transactions.append(done)

    def rollback(self, connection: Connection) -> None:
        with self._lock:
            self._open.pop(id(connection), None)


@contextmanager
def recording(*databases: Database) -> Iterator[Recorder]:
    """Record what these send through their pool for work (renewals and heartbeats have another)."""
    recorder = Recorder()
    heard = [
        ("before_cursor_execute", recorder.statement),
        ("commit", recorder.commit),
        ("rollback", recorder.rollback),
    ]
    for database in databases:
        for name, listener in heard:
            event.listen(database.engine, name, listener)
    try:
        yield recorder
    finally:
        for database in databases:
            for name, listener in heard:
                event.remove(database.engine, name, listener)

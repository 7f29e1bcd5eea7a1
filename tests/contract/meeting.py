"""Real sessions that meet at one row: a lock that is held, threads that start together, and who waits for whom."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg import sql

from tests.waiting import wait_until

T = TypeVar("T")

_WAITING = """
    select count(*) from pg_stat_activity
    where datname = current_database() and wait_event_type = 'Lock' and application_name like 'cortex-workers%'
"""
_DEADLOCKS = "select deadlocks from pg_stat_database where datname = current_database()"


class Referee:
    """A connection of its own that holds rows, and sees who waits."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection = psycopg.connect(url, autocommit=True)

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def holding(self, table: str, *ids: str, key: str = "id") -> Iterator[psycopg.Connection[Any]]:
        """Hold the locks of these rows."""
        with psycopg.connect(self._url) as holder:
            self._lock(holder, table, key, list(ids))
            yield holder
            holder.rollback()

    def is_free(self, table: str, row_id: str) -> bool:
        """Whether nobody holds this row's lock."""
        with psycopg.connect(self._url) as asker:
            try:
                self._lock(asker, table, "id", [row_id], " nowait")
            except psycopg.errors.LockNotAvailable:
                return False
            finally:
                asker.rollback()
        return True

    def _lock(
        self, connection: psycopg.Connection[Any], table: str, key: str, ids: Sequence[str], more: str = ""
    ) -> None:
        statement = sql.SQL(
            "select {key} from {table} where {key} = any(%s) order by {key} for no key update" + more
        )
        found = connection.execute(
            statement.format(key=sql.Identifier(key), table=sql.Identifier(table)), (list(ids),)
        ).fetchall()
        assert len(found) == len(ids), f"no such rows in {table}: {ids}"

    def wait_for_waiters(self, count: int = 1) -> None:
        """Wait until so many of our sessions wait for a lock."""
        wait_until(lambda: self.waiters() == count, what=f"{count} sessions to wait for a lock")

    def waiters(self) -> int:
        row = self._connection.execute(_WAITING).fetchone()
        return int(row[0]) if row else 0

    def deadlocks(self) -> int:
        """How many deadlocks Postgres has resolved in this database."""
        # The counter is sent by a session when it is idle, and the view is kept for a transaction.
        self._connection.execute("select pg_stat_force_next_flush()")
        row = self._connection.execute(_DEADLOCKS).fetchone()
        return int(row[0]) if row else 0


def together(*works: Callable[[], T]) -> list[T | Exception]:
    """Start all at one instant; what each returned, or the error that it raised."""
    start = threading.Barrier(len(works))

    def one(work: Callable[[], T]) -> T | Exception:
        start.wait()
        try:
            return work()
        except Exception as error:  # noqa: BLE001  the loser's error is what the test is about
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(one, works))


@contextmanager
def in_background(*works: Callable[[], T]) -> Iterator[list[Future[T]]]:
    """Run all while the block goes on; the block may ask for their results."""
    with ThreadPoolExecutor(len(works)) as pool:
        yield [pool.submit(work) for work in works]

"""How a pass goes through its rows: a page at a time, a transaction a row, until nothing is due or its time is used.

A row that fails, or that somebody holds, is counted as skipped and met again next time; the key of a page goes past it,
so it never stands before the others.
Source: ruling 25; bug cases C16, C19.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from cortex_workers import probes, telemetry
from cortex_workers.engine.runtime import Runtime
from cortex_workers.errors import StoreUnavailable
from cortex_workers.store import sweeps
from cortex_workers.store.due import Due
from cortex_workers.store.unit import Unit

T = TypeVar("T")


class PassRun:
    """One run of one pass: its budget, its counts, and where it goes on next time (``cursor``; empty = through)."""

    def __init__(self, rt: Runtime, name: str, cursor: Mapping[str, Any]) -> None:
        self.rt = rt
        self.name = name
        self.came_from = dict(cursor)
        self.cursor: dict[str, Any] = {}
        self.page = rt.settings.sweep_page
        self.due = self.done = self.skipped = 0
        self._end = time.monotonic() + rt.settings.sweep_budget_s

    @property
    def over(self) -> bool:
        """Whether its time is used, or this process drains."""
        return time.monotonic() >= self._end or self.rt.drain.is_set()

    @property
    def counts(self) -> dict[str, int]:
        """For its row and its log line."""
        return {"due": self.due, "done": self.done, "skipped": self.skipped}

    def row(self, row_id: str, act: Callable[[], bool | int]) -> None:
        """Handle one row in its own transaction; whatever happens to it, the pass goes on.

        Raises: StoreUnavailable when the database is gone, which is about every row.
        """
        self.due += 1
        try:
            self.done += int(act())
        except StoreUnavailable as error:
            if not sweeps.is_about_one_row(error):
                raise
            self._skip(row_id, "locked")
        except Exception as error:  # noqa: BLE001  one broken row must not keep the others from being handled
            self._skip(row_id, type(error).__name__)
        probes.reach("sweep.after_first_row")

    def count(self, rows: int) -> None:
        """Note rows that one statement handled."""
        self.due += rows
        self.done += rows

    def repeat(self, work: Callable[[Unit], int]) -> None:
        """Do one statement's worth of rows after another, each its own transaction, until a page is not full."""
        while not self.over:
            handled = self.rt.database.run(work)
            self.count(handled)
            if handled:
                probes.reach("sweep.after_first_row")
            if handled < self.page:
                return

    def each_due(
        self,
        find: Callable[[Unit, Sequence[str] | None, int], list[Due]],
        act: Callable[[Runtime, str], bool],
    ) -> None:
        """Go through what is due in the order of its time; goes on where an earlier run ran out of time."""
        after: Sequence[str] | None = self.came_from.get("after")
        while not self.over:
            page = self._read(find, after)
            for item in page:
                if self.over:
                    break
                self._one(item, act)
                after = item.key
            else:
                if len(page) < self.page:
                    return
        self.cursor = {"after": list(after)} if after is not None else {}

    def each_id(
        self,
        find: Callable[[Unit, str | None, int], list[T]],
        name_of: Callable[[T], str],
        act: Callable[[T], bool | int],
    ) -> None:
        """Go through what is due in the order of its ids, from the first."""
        after: str | None = None
        while not self.over:
            page = self._read(find, after)
            for item in page:
                if self.over:
                    return
                after = name_of(item)
                self.row(after, lambda item=item: act(item))  # type: ignore[misc]
            if len(page) < self.page:
                return

    def _one(self, item: Due, act: Callable[[Runtime, str], bool]) -> None:
        if item.free:
            self.row(item.id, lambda: act(self.rt, item.id))
        else:
            self.due += 1
            self.skipped += 1

    def _read(self, find: Callable[[Unit, Any, int], list[T]], after: Any) -> list[T]:
        with self.rt.database.read() as unit:
            return find(unit, after, self.page)

    def _skip(self, row_id: str, error: str) -> None:
        self.skipped += 1
        telemetry.event("sweep.row_failed", level="warning", sweep=self.name, row=row_id, error=error)

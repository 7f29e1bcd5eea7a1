"""Waits that are over, that nobody recomputed, or that nobody knew of.

Source: rulings 15, 16, 30, 36, 53.
"""

from __future__ import annotations

from collections.abc import Callable

from cortex_workers.store import due, turns, waits
from cortex_workers.store.due import Due
from cortex_workers.store.unit import Unit
from cortex_workers.sweep.rows import PassRun

STUCK_TURN_S = 60.0
UNSERVED_INTERVALS = 3.0
"""A run is marked as without a worker after so many sweep intervals: a restart of the fleet is not worth a mark."""


def sweep_waits(run: PassRun) -> None:
    """End what may end, then mark what no worker can take."""
    limit = run.page
    run.repeat(lambda unit: waits.end_later(unit, limit))
    _recompute(run, due.sessions_with_a_wait_over_across_scopes)
    run.repeat(lambda unit: waits.end_fences(unit, limit))
    _free_turns(run)
    _recompute(run, _stuck)
    run.repeat(lambda unit: waits.end_unserved(unit, limit))
    _serve_sessions(run)
    older_s = UNSERVED_INTERVALS * run.rt.settings.sweep_interval_s
    run.repeat(lambda unit: waits.mark_unserved(unit, older_s, limit))


def _stuck(unit: Unit, after: str | None, limit: int) -> list[str]:
    return due.sessions_without_a_turn_across_scopes(unit, STUCK_TURN_S, after, limit)


def _recompute(run: PassRun, find: Callable[[Unit, str | None, int], list[str]]) -> None:
    interval_s = run.rt.settings.sweep_interval_s

    def recompute(session_id: str) -> int:
        return run.rt.database.run(lambda unit: turns.recompute(unit, session_id, interval_s))

    run.each_id(find, str, recompute)


def _free_turns(run: PassRun) -> None:
    """A cancelled run whose holder never said that it stopped gives its session's turn free."""

    def let_go(item: tuple[Due, int]) -> bool:
        row, revision = item
        # As its holder would: the revision it knows is the one before the cancel.
        run.rt.database.run(lambda unit: turns.let_go(unit, row.id, revision - 1))
        return True

    after = None
    while not run.over:
        with run.rt.database.read() as unit:
            page = due.cut_off_across_scopes(unit, after, run.page)
        for item in page:
            run.row(item[0].id, lambda item=item: let_go(item))  # type: ignore[misc]
            after = item[0].key
        if len(page) < run.page:
            return


def _serve_sessions(run: PassRun) -> None:
    interval_s = run.rt.settings.sweep_interval_s

    def serve(session_id: str) -> int:
        return run.rt.database.run(lambda unit: waits.end_unserved_in(unit, session_id, interval_s))

    run.each_id(waits.sessions_served_again_across_scopes, str, serve)

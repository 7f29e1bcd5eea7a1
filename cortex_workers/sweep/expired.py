"""What nobody started or answered in time: unstarted runs are cancelled, pauses expire.

Source: runs.md T15, 9.2; decision R14; rulings 39, 40; bug case C26.
"""

from __future__ import annotations

from cortex_workers.engine import expire
from cortex_workers.store import due
from cortex_workers.sweep.rows import PassRun


def sweep_start_by(run: PassRun) -> None:
    """Cancel runs whose producer wanted them started by now."""
    run.each_due(due.overdue_starts_across_scopes, expire.cancel_unstarted)


def sweep_expiries(run: PassRun) -> None:
    """Expire pauses past their deadline; one of a gated session waits for the lift."""
    run.each_due(due.overdue_pauses_across_scopes, expire.expire_pause)


def sweep_polls(run: PassRun) -> None:
    """Ask again for deferred model calls that the provider may have answered by now."""
    run.each_due(due.overdue_polls_across_scopes, expire.poll)

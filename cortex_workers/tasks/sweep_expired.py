"""Work for the sweeper: every periodic pass, or those named.

Source: rulings 24, 25.
"""

from __future__ import annotations

from cortex_workers.schemas.outcomes import Outcome
from cortex_workers.tasks import process
from cortex_workers.tasks.app import app
from cortex_workers.tasks.base import FleetTask
from cortex_workers.tasks.messages import SweepExpiredMessage
from cortex_workers.tasks.routes import SWEEP_EXPIRED


@app.task(base=FleetTask, name=SWEEP_EXPIRED, message=SweepExpiredMessage)  # type: ignore[untyped-decorator]
def sweep_expired(message: SweepExpiredMessage) -> Outcome:
    """Find what is overdue or forgotten, and repair it."""
    from cortex_workers.sweep import frame

    return frame.sweep(process.runtime(), message.passes)

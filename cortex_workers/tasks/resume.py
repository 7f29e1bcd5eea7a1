"""Continue a run with exactly the answer that was admitted, and with no later pause's.

Source: decisions 8; rulings 12, 41.
"""

from __future__ import annotations

from cortex_workers.schemas.outcomes import Outcome
from cortex_workers.tasks import process
from cortex_workers.tasks.app import app
from cortex_workers.tasks.base import FleetTask
from cortex_workers.tasks.messages import ResumeMessage
from cortex_workers.tasks.routes import RESUME


@app.task(base=FleetTask, name=RESUME, message=ResumeMessage)  # type: ignore[untyped-decorator]
def resume(message: ResumeMessage) -> Outcome:
    """Continue a run with an admitted answer."""
    from cortex_workers.engine import slot

    return slot.work(process.runtime(), message.run_id, "begun", suspension_id=message.suspension_id)

"""Work for a slot: continue the run that the hint prefers, then others straight from the table.

Source: rulings 12 to 14, 16, 18.
"""

from __future__ import annotations

from typing import Any

from cortex_workers.schemas.outcomes import Outcome
from cortex_workers.tasks import process
from cortex_workers.tasks.app import app
from cortex_workers.tasks.base import FleetTask, work_off
from cortex_workers.tasks.messages import ContinueRunMessage
from cortex_workers.tasks.routes import CONTINUE_RUN


@app.task(base=FleetTask, name=CONTINUE_RUN, message=ContinueRunMessage)  # type: ignore[untyped-decorator]
def continue_run(message: ContinueRunMessage) -> Outcome:
    """Continue a run."""
    from cortex_workers.engine import slot

    return slot.work(process.runtime(), message.run_id, message.kind)


def claim_from_table() -> dict[str, Any]:
    """The same without a message: what this worker does once after each connection to the broker."""
    return work_off(ContinueRunMessage, continue_run.run, (), {}).model_dump()

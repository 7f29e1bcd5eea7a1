"""Do whatever one delivery is due for: start its run, store its reply, call a peer, ask a peer again.

Source: decisions 10; ruling 24.
"""

from __future__ import annotations

from cortex_workers.schemas.outcomes import Delivered, Outcome
from cortex_workers.tasks import process
from cortex_workers.tasks.app import app
from cortex_workers.tasks.base import FleetTask
from cortex_workers.tasks.messages import DeliverMessage
from cortex_workers.tasks.routes import DELIVER_A2A


@app.task(base=FleetTask, name=DELIVER_A2A, message=DeliverMessage)  # type: ignore[untyped-decorator]
def deliver_a2a(message: DeliverMessage) -> Outcome:
    """Do what a delivery is due for."""
    from cortex_workers.a2a import deliver

    did = deliver.deliver(process.runtime(), message.delivery_id)
    return Delivered(delivery_id=message.delivery_id, did=did)

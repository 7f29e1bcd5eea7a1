"""What has arrived for an agent or a person, read once.

Source: messaging.md c.8; ruling 66.
"""

from __future__ import annotations

from cortex_workers.engine.execution import Execution, Planned
from cortex_workers.engine.runtime import Runtime
from cortex_workers.engine.validate import checked_id
from cortex_workers.errors import InvalidArgument
from cortex_workers.host.messaging import MOST_ITEMS
from cortex_workers.schemas.a2a import Address, InboxItem
from cortex_workers.schemas.ids import CONVERSATION
from cortex_workers.store import a2a_inbox, runs
from cortex_workers.store.unit import Unit


def of_run(unit: Unit, ex: Execution, planned: Planned) -> list[InboxItem]:
    """Unread messages in conversations of this run's session; read from now on, together with the call's outcome.

    Raises: InvalidArgument, InvalidId.
    """
    assert planned.ready is not None
    limit, conversation_id = planned.ready.values["limit"], planned.ready.values["conversation_id"]
    if not 1 <= limit <= MOST_ITEMS:
        raise InvalidArgument(f"limit is 1 to {MOST_ITEMS}")
    if conversation_id is not None:
        checked_id(CONVERSATION, conversation_id)
    runs.lock(unit, ex.run_id)  # before any delivery (ruling 68)
    rows = a2a_inbox.page(
        unit,
        ex.row["scope"],
        Address(ex.row["agent"]),
        conversation_id=conversation_id,
        session_id=ex.row["session_id"],
        limit=limit,
    )
    a2a_inbox.mark_read(unit, [row["delivery_id"] for row in rows], f"{ex.run_id}/{planned.call.id}")
    return [a2a_inbox.to_item(row) for row in rows]


def read(
    rt: Runtime,
    owner: str,
    scope: str,
    *,
    unread_only: bool,
    conversation_id: str | None,
    after: str | None,
    limit: int,
) -> list[InboxItem]:
    """What has arrived for somebody in exactly this scope, oldest first; unread ones are read from now on.

    Raises: InvalidId, InvalidArgument.
    """
    address = Address.parse(owner)
    if not address.agent:
        raise InvalidArgument("name the owner of the inbox")
    if conversation_id is not None:
        checked_id(CONVERSATION, conversation_id)

    def work(unit: Unit) -> list[InboxItem]:
        rows = a2a_inbox.page(
            unit,
            scope,
            address,
            unread_only=unread_only,
            conversation_id=conversation_id,
            after=after,
            limit=limit,
        )
        a2a_inbox.mark_read(unit, [row["delivery_id"] for row in rows])
        return [a2a_inbox.to_item(row) for row in rows]

    return rt.database.run(work)

"""Deliveries: one message on its way to one receiver. Their states move here, by the table of the lifecycle.

Lock order: a delivery after runs and pauses, before questions (ruling 68).
Source: messaging.md a.5, b.3; rulings 63, 64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import insert, select, update

from cortex_workers.schemas.a2a import Address, Delivery
from cortex_workers.store import clock, tables, transitions
from cortex_workers.store.scopes import first_within
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit

deliveries = tables.a2a_deliveries


def add(unit: Unit, rows: Sequence[Mapping[str, Any]]) -> None:
    """Store deliveries of one message: what an inbox holds arrives at once, the rest waits to be carried."""
    now = clock.wall()
    mail = [row for row in rows if row["kind"] in ("informative", "control")]
    carried = [row for row in rows if row["kind"] not in ("informative", "control")]
    transitions.create_in(
        unit, "delivery", "arrive", [{**row, "accepted_at": now, "settled_at": now} for row in mail]
    )
    transitions.create_in(unit, "delivery", "queue", [{**row, "notified_at": now} for row in carried])


def get(unit: Unit, delivery_id: str) -> Row | None:
    """One delivery, whatever its scope; ``due`` and ``lapsed`` are judged on the database clock."""
    statement = select(
        deliveries,
        (deliveries.c.next_attempt_at <= clock.wall()).label("due"),
        (deliveries.c.lease_expires_at <= clock.wall()).label("lapsed"),
    ).where(deliveries.c.id == delivery_id)
    found = unit.execute(statement).mappings().first()
    return dict(found) if found is not None else None


def get_scoped(unit: Unit, delivery_id: str, scope: str) -> Row | None:
    """One delivery, when the scope covers it."""
    row = get(unit, delivery_id)
    covered = row is not None and (row["scope"] == scope or row["scope"].startswith(scope + "/"))
    return row if covered else None


def lock(unit: Unit, delivery_id: str) -> Row | None:
    """A delivery's row, held to the end of the transaction."""
    statement = select(deliveries).where(deliveries.c.id == delivery_id)
    found = unit.execute(statement.with_for_update(key_share=True)).mappings().first()
    return dict(found) if found is not None else None


def of_message(unit: Unit, message_id: str) -> list[Row]:
    """The deliveries of one message."""
    statement = select(deliveries).where(deliveries.c.message_id == message_id).order_by(deliveries.c.id)
    return [dict(row) for row in unit.execute(statement).mappings()]


def begin(unit: Unit, delivery_id: str, run_id: str, *, over: bool) -> Row | None:
    """A queued delivery has its run now; ``over``: that run has ended already. None when somebody was quicker."""
    now = clock.wall()
    values = {"run_id": run_id, "accepted_at": now, "settle_due_at": now if over else None}
    where = [deliveries.c.id == delivery_id, deliveries.c.next_attempt_at <= now]
    return _one(unit, "begin", where, values)


def call(unit: Unit, row: Row, owner: str, lease_s: float) -> Row | None:
    """Take a delivery in order to call code that is not ours; None when it is somebody else's or not due."""
    now = clock.wall()
    values = {
        "owner": owner,
        "lease_expires_at": now + timedelta(seconds=lease_s),
        "attempts": deliveries.c.attempts + 1,
    }
    name, when = {
        "queued": ("call", deliveries.c.next_attempt_at <= now),
        "awaiting_remote": ("ask_again", deliveries.c.next_attempt_at <= now),
        "delivering": ("take_over", deliveries.c.lease_expires_at <= now),
    }[row["state"]]
    if name == "ask_again":
        # Asking how far the peer is has no limit of its own; the deadline of whoever waits ends it.
        values["attempts"] = deliveries.c.attempts
    return _one(unit, name, [deliveries.c.id == row["id"], when], values)


def finish_call(unit: Unit, name: str, held: Row, values: Mapping[str, Any]) -> Row | None:
    """End a call under its term (owner and revision): ``answer``, ``await_remote``, ``retry``, ``admit``, ``fail``."""
    where = [
        deliveries.c.id == held["id"],
        deliveries.c.owner == held["owner"],
        deliveries.c.revision == held["revision"],
    ]
    ended = {"settled_at": clock.wall()} if name in ("answer", "fail") else {}
    return _one(unit, name, where, {"owner": None, "lease_expires_at": None, **ended, **values})


def later(seconds: float) -> Any:
    """The database's time so many seconds from now, for ``next_attempt_at``."""
    return clock.wall() + timedelta(seconds=seconds)


def settle(unit: Unit, delivery_id: str, reply_message_id: str | None, note: str | None = None) -> bool:
    """The run of a delivery has ended and its reply is stored."""
    values = {"settled_at": clock.wall(), "reply_message_id": reply_message_id, "error": note}
    return _one(unit, "settle", [deliveries.c.id == delivery_id], values) is not None


def refuse(unit: Unit, delivery_id: str, code: str, error: str) -> bool:
    """A queued delivery cannot be carried."""
    values = {"settled_at": clock.wall(), "fail_code": code, "error": error[:2000]}
    return _one(unit, "refuse", [deliveries.c.id == delivery_id], values) is not None


def retire_of_conversation(unit: Unit, conversation_id: str, why: str) -> int:
    """Whatever of a conversation is still on its way is not carried any more."""
    return _retire(unit, [deliveries.c.conversation_id == conversation_id], why)


def retire_of_messages(unit: Unit, message_ids: Iterable[str], why: str) -> int:
    """The same for some messages."""
    return _retire(unit, [deliveries.c.message_id.in_(list(message_ids))], why)


def _retire(unit: Unit, where: Sequence[Any], why: str) -> int:
    values = {
        "settled_at": clock.wall(),
        "error": why,
        "owner": None,
        "lease_expires_at": None,
        "revision": deliveries.c.revision + 1,
    }
    return len(transitions.apply_in(unit, "delivery", "retire", where, values))


def redrive(unit: Unit, delivery_id: str, actor: str) -> Row | None:
    """Send a failed delivery on its way again, with a fresh count of attempts; None when it has not failed.

    Writes: the delivery, and an event that says who did it.
    """
    now = clock.wall()
    values = {
        "attempts": 0,
        "next_attempt_at": now,
        "notified_at": now,
        "fail_code": None,
        "error": None,
        "settled_at": None,
    }
    moved = _one(unit, "redrive", [deliveries.c.id == delivery_id], values)
    if moved is not None:
        unit.execute(
            insert(tables.events).values(
                scope=moved["scope"],
                conversation_id=moved["conversation_id"],
                kind="delivery.redrive",
                actor=actor,
                data={"delivery_id": delivery_id},
            )
        )
    return moved


def run_has_ended(unit: Unit, run_id: str) -> str | None:
    """Stamp the delivery that started a run, which has ended; returns its id. Index: a2a_deliveries_run."""
    found = unit.scalar(
        update(deliveries)
        .where(
            deliveries.c.run_id == run_id,
            deliveries.c.state == "running",
            deliveries.c.settle_due_at.is_(None),
        )
        .values(settle_due_at=clock.wall())
        .returning(deliveries.c.id)
    )
    return str(found) if found is not None else None


def page(
    unit: Unit, scope: str, *, state: str | None = None, before: str | None = None, limit: int = 50
) -> list[dict[str, Any]]:
    """The newest deliveries of a scope and below; ``before`` is the id of the last one seen."""
    statement = select(deliveries)
    if state is not None:
        statement = statement.where(deliveries.c.state == state)
    if before is not None:
        statement = statement.where(deliveries.c.id < before)
    return first_within(unit, statement, deliveries, scope, lambda c: (c.id.desc(),), limit)


def receiver(row: Row) -> Address:
    """To whom a delivery goes."""
    return Address(row["receiver_agent"], row["receiver_node"])


def to_delivery(row: Row) -> Delivery:
    """The public type of a row."""
    values = {name: row[name] for name in Delivery.model_fields if name in row}
    return Delivery.model_validate({**values, "receiver": str(receiver(row))})


def _one(unit: Unit, name: str, where: Sequence[Any], values: Mapping[str, Any]) -> Row | None:
    moved = transitions.apply_in(
        unit, "delivery", name, where, {**values, "revision": deliveries.c.revision + 1}
    )
    return moved[0] if moved else None

"""The end of a delivery: the reply is stored, the question perhaps sealed and its run made ready, in one transaction.

It happens away from the end of the recipient's run, so that two who answer one another never wait for each other.
Source: messaging.md e.5, i.3; rulings 61, 63.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cortex_workers import probes, telemetry
from cortex_workers.a2a import accept, answer, words
from cortex_workers.a2a.accept import Origin, Route
from cortex_workers.a2a.answer import Held
from cortex_workers.a2a.shape import Speech
from cortex_workers.engine.bus import Moved
from cortex_workers.engine.runtime import Runtime
from cortex_workers.host import cut_result
from cortex_workers.schemas.a2a import Address
from cortex_workers.schemas.notifications import MessageDelivered, MessageRefused
from cortex_workers.schemas.performatives import Performative
from cortex_workers.store import a2a_asks, a2a_deliveries, runs
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit


@dataclass(frozen=True, slots=True)
class Ending:
    """How a delivery ends: the transition, and what is said to whoever sent the message (nothing: ``content`` None).

    ``held`` is the row as a worker took it, for the transitions that only that worker may do.
    """

    name: str
    performative: Performative = Performative.INFORM
    content: str | None = None
    held: Row | None = None
    code: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


def settle(rt: Runtime, delivery: Row, message: Row) -> bool:
    """Store the reply of a run that has ended; False when it has not, or somebody else was quicker."""
    with rt.database.read() as unit:
        run = runs.get(unit, delivery["run_id"])
    said = words.reply_of(run) if run is not None else (Performative.FAILURE, "its run is gone")
    if said is None:
        return False
    return end(rt, delivery, message, Ending("settle", *said))


def end(rt: Runtime, delivery: Row, message: Row, ending: Ending) -> bool:
    """End a delivery as said; False when somebody else moved it."""

    def work(unit: Unit) -> bool:
        done = _end(unit, rt, delivery, message, ending)
        if done:
            probes.reach("reply.before_commit")
        return done

    while True:
        try:
            ended = rt.database.run(work)
            break
        except Moved:
            return False
    if ended:
        probes.reach("reply.after_commit")
        telemetry.DELIVERIES.labels(ending.name).inc()
        telemetry.event("delivery.ended", delivery_id=delivery["id"], how=ending.name, code=ending.code)
    return ended


def _end(unit: Unit, rt: Runtime, delivery: Row, message: Row, ending: Ending) -> bool:
    asked = (
        a2a_asks.get(unit, message["scope"], message["reply_with"])
        if message["reply_with"] is not None
        else None
    )
    held = answer.hold(unit, message["conversation_id"], asked, delivery["id"])
    if held.delivery is None or not _is_mine(held.delivery, ending):
        return False
    responder = a2a_deliveries.receiver(delivery)
    counts = ending.content is not None and answer.may_take(unit, held, responder)
    reply, note = _reply(unit, rt, held, message, ending, responder, counts)
    _move(unit, held.delivery, ending, reply["id"] if reply is not None else None, note)
    if counts and reply is not None and held.ask is not None:
        answer.take(unit, rt, held.ask, responder, reply["id"])
    return True


def _is_mine(row: Row, ending: Ending) -> bool:
    if ending.held is not None:
        taken = ending.held
        return bool((row["owner"], row["revision"]) == (taken["owner"], taken["revision"]))
    return bool(row["state"] == {"settle": "running", "refuse": "queued"}[ending.name])


def _reply(
    unit: Unit, rt: Runtime, held: Held, message: Row, ending: Ending, responder: Address, counts: bool
) -> tuple[Row | None, str | None]:
    """The reply as a message of the conversation; where it cannot be one, why."""
    if ending.content is None:
        return None, None
    if held.conversation["status"] != "open":
        return None, "the conversation was closed before the reply"
    if not counts and held.conversation["hops_used"] >= held.conversation["hop_ceiling"]:
        return None, "the conversation had used up its messages before the reply"
    sender = Address.parse(message["sender"])
    said = Speech(
        sender=responder,
        receivers=(sender,),
        performative=ending.performative,
        content=cut_result(ending.content, rt.settings.message_bytes),
        labels={name: text for name, text in message["labels"].items() if name in ("ontology", "protocol")},
        in_reply_to=message["reply_with"],
    )
    failed = ending.name in ("refuse", "fail")
    reply = accept.store(
        unit,
        said,
        Origin(scope=message["scope"], principal=message["principal"]),
        held.conversation,
        exempt=counts,
        # A failed delivery may be sent on its way again, and then have a reply of its own.
        answers_delivery_id=None if failed else held.delivery["id"] if held.delivery is not None else None,
    )
    if not counts:
        kind = "informative" if sender.local else "remote"
        accept.send_off(unit, reply, [accept.delivery_row(reply, sender, kind)], {sender: Route("person")})
    return reply, None


def _move(unit: Unit, row: Row, ending: Ending, reply_id: str | None, note: str | None) -> None:
    moves: dict[str, Callable[[], object]] = {
        "settle": lambda: a2a_deliveries.settle(unit, row["id"], reply_id, note),
        "refuse": lambda: a2a_deliveries.refuse(
            unit, row["id"], ending.code or "refused", ending.content or ""
        ),
    }
    if ending.name in moves:
        moved = moves[ending.name]()
    else:
        values: dict[str, Any] = {"reply_message_id": reply_id, "error": note, **ending.values}
        if ending.name == "fail":
            values.update(fail_code=ending.code, error=(ending.content or "")[:2000])
        moved = a2a_deliveries.finish_call(unit, ending.name, row, values)
    assert moved, f"{ending.name} found the delivery in another state under its lock"
    if ending.name in ("refuse", "fail"):
        unit.announce(
            MessageRefused(delivery_id=row["id"], message_id=row["message_id"], code=ending.code or "")
        )
    else:
        unit.announce(MessageDelivered(delivery_id=row["id"], message_id=row["message_id"]))

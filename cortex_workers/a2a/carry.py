"""Call code that is not ours for one delivery: a transport to a peer, or the host's hand-off handler.

The row is taken first, under a lease, and moved afterwards by the same holder only; no transaction is open meanwhile.
Source: messaging.md b.3, d.6, f.1; ruling 64.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

from cortex_workers import probes, telemetry
from cortex_workers.a2a import settle, start
from cortex_workers.a2a.ask import sealed_by_now
from cortex_workers.a2a.settle import Ending
from cortex_workers.engine.runtime import Runtime
from cortex_workers.errors import SessionClosed, TransportBusy
from cortex_workers.host import clean_text
from cortex_workers.ports import (
    Admitted,
    Assignment,
    Deferred,
    HandoffHandler,
    PeerReply,
    PeerTask,
    Rejected,
    Transport,
)
from cortex_workers.schemas.a2a import Address
from cortex_workers.schemas.ids import RUN, same_suffix
from cortex_workers.schemas.performatives import ANSWERS, Performative
from cortex_workers.store import a2a_deliveries, a2a_messages, agents
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit

T = TypeVar("T")
BACKOFF_S = (1.0, 4.0, 15.0, 60.0)
JITTER = 0.2
LONGEST_POLL_S = 30.0
_SHARE = 0.9
"""Of its lease, how much a call may take: the rest is for writing down what became of it."""


def carry(rt: Runtime, row: Row, message: Row) -> str:
    """Take a due delivery, call, and store what came of it."""
    receiver = a2a_deliveries.receiver(row)
    transport = _transport(rt, receiver)
    if not receiver.local and transport is None:
        return start.NOTHING  # another worker has the transport
    if row["kind"] != "directive" and _is_past(rt, row, message):
        return "retired"
    held = rt.database.run(
        lambda unit: a2a_deliveries.call(unit, row, rt.worker_id, rt.settings.delivery_lease_s)
    )
    if held is None:
        return start.NOTHING
    if held["attempts"] > rt.settings.delivery_attempts:
        code = "poison" if row["state"] == "delivering" else "exhausted"
        return _fail(rt, held, message, code, f"{receiver} could not be reached: too many attempts")
    try:
        done = _assign(rt, held, message) if transport is None else _call(rt, transport, held, message)
    except TransportBusy as error:
        return _again(rt, held, message, error)
    except Exception as error:  # foreign code: whatever a transport or handler raises ends this delivery
        text = clean_text(str(error) or type(error).__name__)[0][:1000]
        return _fail(rt, held, message, "transport", f"{receiver} could not be reached: {text}")
    return done


def _transport(rt: Runtime, receiver: Address) -> Transport | None:
    transports = rt.host.transports if rt.host is not None else ()
    return next((item for item in transports if not receiver.local and item.handles(receiver)), None)


def _is_past(rt: Runtime, row: Row, message: Row) -> bool:
    """Nobody waits any more: the peer is not called, or not asked again."""

    def work(unit: Unit) -> bool:
        if not sealed_by_now(unit, message):
            return False
        return bool(a2a_deliveries.retire_of_messages(unit, [message["id"]], "nobody waits for the answer"))

    return rt.database.run(work)


def _timed(rt: Runtime, name: str, call: Callable[[], T]) -> T:
    done = rt.threads.run_with_timeout(call, rt.settings.delivery_lease_s * _SHARE, name)
    probes.reach("delivery.after_call")
    return done


def _call(rt: Runtime, transport: Transport, held: Row, message: Row) -> str:
    receiver, task = a2a_deliveries.receiver(held), held["remote_task_id"]
    envelope = a2a_messages.to_envelope(message)
    if task is None:
        said = _timed(rt, "transport", lambda: transport.deliver(envelope, receiver, held["id"]))
    else:
        said = _timed(rt, "transport", lambda: transport.poll(task, receiver))
    if isinstance(said, PeerTask):
        values = {
            "remote_task_id": said.task_id[:500],
            "next_attempt_at": a2a_deliveries.later(min(max(said.poll_after_s, 0.0), LONGEST_POLL_S)),
        }
        return _finish(rt, "await_remote", held, values)
    return _answered(rt, held, message, said)


def _answered(rt: Runtime, held: Row, message: Row, said: PeerReply) -> str:
    content = None
    if said.content is not None and message["reply_with"] is not None:
        content = clean_text(said.content)[0]
    spoken = said.performative if said.performative in ANSWERS else Performative.INFORM
    ending = Ending("answer", Performative(spoken), content, held=held)
    return "answered" if settle.end(rt, held, message, ending) else start.NOTHING


def _again(rt: Runtime, held: Row, message: Row, error: TransportBusy) -> str:
    attempts = int(held["attempts"])
    if attempts >= rt.settings.delivery_attempts:
        receiver = a2a_deliveries.receiver(held)
        return _fail(rt, held, message, "exhausted", f"{receiver} could not be reached: {error.message}")
    usual = BACKOFF_S[min(attempts, len(BACKOFF_S)) - 1] * random.uniform(1 - JITTER, 1 + JITTER)
    wait_s = error.retry_in_s if error.retry_in_s is not None else usual
    return _retry(rt, held, wait_s, error.message)


def _retry(rt: Runtime, held: Row, wait_s: float, why: str) -> str:
    values = {"next_attempt_at": a2a_deliveries.later(wait_s), "error": clean_text(why)[0][:2000]}
    return _finish(rt, "retry", held, values)


def _finish(rt: Runtime, name: str, held: Row, values: dict[str, object]) -> str:
    moved = rt.database.run(lambda unit: a2a_deliveries.finish_call(unit, name, held, values))
    return name if moved is not None else start.NOTHING


def _fail(rt: Runtime, held: Row, message: Row, code: str, text: str) -> str:
    telemetry.event("delivery.failed", "warning", delivery_id=held["id"], code=code)
    ending = Ending("fail", Performative.FAILURE, text, held=held, code=code)
    return "failed" if settle.end(rt, held, message, ending) else start.NOTHING


class RefuseAssignments:
    """The hand-off handler of a host that has none."""

    def assign(self, assignment: Assignment) -> Rejected:
        """Refuse."""
        return Rejected(f"{assignment.receiver} takes no assignments here")


def _assign(rt: Runtime, held: Row, message: Row) -> str:
    handler: HandoffHandler = (rt.host.handoff if rt.host is not None else None) or RefuseAssignments()
    assignment = Assignment(
        scope=message["scope"],
        message_id=message["id"],
        sender=message["sender"],
        receiver=str(a2a_deliveries.receiver(held)),
        body=dict(message["metadata"]["assignment"]),
        run_id=same_suffix(RUN, held["id"]),
    )
    verdict = _timed(rt, "hand-off", lambda: handler.assign(assignment))
    if isinstance(verdict, Deferred):
        return _retry(rt, held, max(verdict.seconds, 0.0), "the assignment was deferred")
    if isinstance(verdict, Admitted):
        return _admit(rt, held, message)
    if not isinstance(verdict, Rejected):
        raise TypeError(f"the hand-off handler returned a {type(verdict).__name__}")
    reason = clean_text(verdict.reason)[0]
    ending = Ending("answer", Performative.REFUSE, reason, held=held)
    return "answered" if settle.end(rt, held, message, ending) else start.NOTHING


def _admit(rt: Runtime, held: Row, message: Row) -> str:
    with rt.database.read() as unit:
        agent = agents.current(unit, held["receiver_agent"])
    if agent is None:
        gone = f"there is no agent named {held['receiver_agent']} any more"
        return _fail(rt, held, message, "receiver_gone", gone)

    def work(unit: Unit) -> bool:
        run_id = start.store_run(unit, held, message, agent)
        values = {"run_id": run_id, "accepted_at": a2a_deliveries.later(0.0)}
        if a2a_deliveries.finish_call(unit, "admit", held, values) is None:
            raise start.Taken()
        return True

    try:
        rt.database.run(work)
    except start.Taken:
        return start.NOTHING
    except SessionClosed as error:
        return _fail(rt, held, message, error.code, error.message)
    return "begun"

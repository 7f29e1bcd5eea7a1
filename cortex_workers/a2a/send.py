"""The door for people and hosts: a message to agents, or the answer that a run waits for.

Source: messaging.md c.5 to c.7; rulings 65, 66.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cortex_workers import telemetry
from cortex_workers.a2a import accept, answer, closing
from cortex_workers.a2a.accept import Origin
from cortex_workers.a2a.shape import Speech, speech
from cortex_workers.engine.bus import Moved
from cortex_workers.engine.runtime import Runtime
from cortex_workers.engine.validate import checked_id, checked_label
from cortex_workers.errors import (
    AskNotFound,
    AskSealed,
    InvalidArgument,
    InvalidState,
    MessagingOff,
    RunNotFound,
)
from cortex_workers.schemas.a2a import Address, Outgoing, SendResult
from cortex_workers.schemas.ids import RUN
from cortex_workers.schemas.performatives import ANSWERS, Performative
from cortex_workers.store import a2a_asks, agents, runs
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit

_TRIES = 5


def send(rt: Runtime, outgoing: Outgoing, scope: str, principal: bytes | None, actor: str) -> SendResult:
    """Send one message; one that answers an open question is taken as its answer and makes no delivery.

    The same ``key`` again returns what was sent first.
    Raises: MessageRefused and its kinds, ConversationNotFound, InvalidArgument, InvalidId, InputTooLarge, MessagingOff.
    """
    if rt.host is not None and not rt.host.messaging:
        raise MessagingOff()
    said = speech(outgoing, rt.settings.message_bytes)
    checked_label("the key", outgoing.key)
    who = Origin(scope=scope, principal=principal, key=f"client/{outgoing.key}" if outgoing.key else None)

    def work(unit: Unit) -> SendResult:
        if who.key is not None:
            known = accept.again(unit, scope, who.key)
            if known is not None:
                return known
        if said.performative is Performative.CANCEL:
            return closing.close(unit, rt, said, who, participant=False)
        taken, mail = _answer(unit, rt, said, who, outgoing.on_behalf_of, actor)
        return taken if taken is not None else accept.accept(unit, rt, mail, who)

    sent = _again_when_moved(rt, work)
    telemetry.event("message.sent", message_id=sent.message_id, deliveries=len(sent.deliveries))
    return sent


def answer_run(
    rt: Runtime,
    run_id: str,
    content: str,
    *,
    sender: str,
    scope: str,
    actor: str,
    principal: bytes | None = None,
    call_id: str | None = None,
    performative: str = Performative.INFORM,
    on_behalf_of: str | None = None,
) -> SendResult:
    """Answer the question that a run waits on; its token is found here and shown to nobody.

    Raises: RunNotFound, AskNotFound when it waits on none, InvalidArgument when it waits on several and none is named,
    AskSealed when somebody was quicker, InvalidState for words that are no answer.
    """
    checked_id(RUN, run_id)
    with rt.database.read() as unit:
        run = runs.get_scoped(unit, run_id, scope)
        if run is None:
            raise RunNotFound(f"there is no run {run_id} in this scope")
        asked = a2a_asks.of_run(unit, run_id, call_id)
        question = _only(run_id, asked)
    if performative not in ANSWERS:
        raise InvalidState(
            f"{performative!r:.40} is no answer; an answer informs, refuses, proposes and the like"
        )
    sent = send(
        rt,
        Outgoing(
            sender=sender,
            receivers=(str(Address(run["agent"])),),
            performative=performative,
            content=content,
            in_reply_to=question["reply_with"],
            on_behalf_of=on_behalf_of,
        ),
        question["scope"],
        principal,
        actor,
    )
    if sent.deliveries:
        raise AskSealed(f"the question was closed a moment ago; the answer is mail: {sent.message_id}")
    return sent


def _only(run_id: str, asked: list[Row]) -> Row:
    if not asked:
        raise AskNotFound(f"run {run_id} waits for no answer of an agent")
    if len(asked) > 1:
        calls = ", ".join(str(row["call_id"]) for row in asked)
        raise InvalidArgument(f"run {run_id} waits for several answers; name the call: {calls[:300]}")
    return asked[0]


def _again_when_moved(rt: Runtime, work: Callable[[Unit], SendResult]) -> SendResult:
    for _ in range(_TRIES):
        try:
            return rt.database.run(work)
        except Moved:
            continue
    raise InvalidState("the conversation kept moving; look at it and try again")


def _answer(
    unit: Unit, rt: Runtime, said: Speech, who: Origin, on_behalf_of: str | None, actor: str
) -> tuple[SendResult | None, Speech]:
    """Take a message as the answer to an open question, or say what it is instead: mail."""
    if said.in_reply_to is None or said.performative not in ANSWERS:
        return None, said
    asked = a2a_asks.get(unit, who.scope, said.in_reply_to)
    if asked is None:
        return None, said
    responder = _responder(unit, asked, said, on_behalf_of)
    if responder is None:
        return None, replace(said, metadata={**said.metadata, "unmatched_reply": True})
    held = answer.hold(unit, asked["conversation_id"], asked)
    if held.ask is None or not answer.may_take(unit, held, responder):
        return None, replace(said, conversation_id=asked["conversation_id"])
    message = accept.store(unit, said, who, held.conversation, exempt=True)
    by = None if responder == said.sender else actor
    answer.take(unit, rt, held.ask, responder, message["id"], by)
    return SendResult(message_id=message["id"], conversation_id=message["conversation_id"]), said


def _responder(unit: Unit, asked: Row, said: Speech, on_behalf_of: str | None) -> Address | None:
    """For whom an answer counts: the sender, if he was asked; a person may stand in for one who was (messaging.md c.7).

    Raises: InvalidArgument when it has to be said for whom.
    """
    message, receivers = answer.receivers_of(unit, asked)
    elsewhere = said.conversation_id is not None and said.conversation_id != asked["conversation_id"]
    if elsewhere or Address.parse(message["sender"]) not in said.receivers:
        return None
    if said.sender in receivers:
        return said.sender
    if not said.sender.local or agents.current(unit, said.sender.agent) is not None:
        return None
    if on_behalf_of is not None:
        chosen = Address.parse(on_behalf_of)
        if chosen not in receivers:
            raise InvalidArgument(f"{chosen} was not asked")
        return chosen
    if len(receivers) > 1:
        names = ", ".join(str(item) for item in receivers)
        raise InvalidArgument(f"several were asked; say on whose behalf this is: {names[:300]}")
    return receivers[0]

"""A question: looked at before the pause, written by the transaction that pauses (ruling 62).

Nothing of a question exists before the run waits for its answer, and everything does from then on.
Source: messaging.md c.2, c.4, d.2; rulings 62, 65.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from cortex_workers.a2a import accept
from cortex_workers.a2a.accept import Origin, Question, Route
from cortex_workers.a2a.shape import Speech, refuse_no_directive, speech
from cortex_workers.engine.bus import Asked, AskRefused
from cortex_workers.engine.execution import Execution, Planned
from cortex_workers.engine.runtime import Runtime
from cortex_workers.errors import (
    AskLoop,
    ConversationNotFound,
    HopCeiling,
    InvalidArgument,
    Refusal,
)
from cortex_workers.schemas.a2a import LABELS, Address, Outgoing
from cortex_workers.store import a2a_asks, a2a_conversations, a2a_messages, admissions
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit

LEAST_S, MOST_S = 30.0, 604_800.0
MARGIN_S = 5.0
"""A question asked on the way to an answer has to come back so much earlier."""
MOST_REPEATS = 2
"""How often the same two may ask one another in one chain."""


@dataclass(frozen=True, slots=True)
class _Asking:
    """One question on its way: the call, what it says, and how long its receivers may take."""

    item: Planned
    speech: Speech
    reply_by_s: float


def outgoing(ex: Execution, planned: Planned) -> Outgoing:
    """A message as the model's arguments give it; the sender is the running agent, whatever they say.

    Raises: InvalidArgument where the two that are needed are missing.
    """
    assert planned.ready is not None
    given = planned.ready.values
    to = [given["to"]] if isinstance(given["to"], str) else list(given["to"])
    if not any(name.strip() for name in to) or not given["content"]:
        raise InvalidArgument("both to and content are required")
    return Outgoing(
        sender=str(Address(ex.row["agent"])),
        receivers=tuple(to),
        performative=given["performative"],
        content=given["content"],
        conversation_id=given["conversation_id"],
        **{name: given[name] for name in LABELS if given.get(name) is not None},
    )


def origin(ex: Execution, planned: Planned) -> Origin:
    """What a message of this run carries of it: its scope, its rights, how deep it is."""
    principal = ex.row["principal"]
    return Origin(
        scope=ex.row["scope"],
        run_id=ex.run_id,
        chain_depth=int(ex.row["chain_depth"]),
        principal=bytes(principal) if principal is not None else None,
        key=f"{ex.run_id}/{planned.call.id}",
    )


def look(unit: Unit, ex: Execution, planned: Planned) -> None:
    """Check a question before the run pauses for it; nothing is written.

    Raises: Refusal, whose text the model reads.
    """
    said = _speech(ex, planned)
    who = origin(ex, planned)
    _check(unit, ex.rt, said, who)
    _seconds(unit, ex, planned, accept.routes(unit, ex.rt, said))
    if said.conversation_id is not None:
        held = a2a_conversations.get(unit, said.conversation_id, who.scope)
        if held is None:
            raise ConversationNotFound(f"there is no conversation {said.conversation_id} in this scope")
        accept.refuse_full(held)


def write(unit: Unit, ex: Execution, waiting: Sequence[Planned], suspension_id: str) -> Asked:
    """Write the questions of a pause: one deadline for all, the earliest (messaging.md c.4).

    Raises: AskRefused with the reason of each that cannot be put; the transaction is rolled back then.
    """
    refused: dict[str, str] = {}
    asking = [item for one in waiting if (item := _asking(unit, ex, one, refused)) is not None]
    for conversation_id in sorted(
        {one.speech.conversation_id for one in asking if one.speech.conversation_id}
    ):
        a2a_conversations.lock(unit, conversation_id)
    seconds = min((one.reply_by_s for one in asking), default=0.0)
    deadline = admissions.database_time(unit) + timedelta(seconds=seconds)
    rows = []
    for one in asking:
        question = Question(secrets.token_urlsafe(24), deadline)
        try:
            sent = accept.accept(unit, ex.rt, one.speech, origin(ex, one.item), question)
        except Refusal as error:
            refused[one.item.call.id] = error.message
            continue
        rows.append(
            {
                "scope": ex.row["scope"],
                "reply_with": question.reply_with,
                "message_id": sent.message_id,
                "conversation_id": sent.conversation_id,
                "asker_run_id": ex.run_id,
                "suspension_id": suspension_id,
                "call_id": one.item.call.id,
                "expected": len(one.speech.receivers),
                "deadline": deadline,
            }
        )
    if refused:
        raise AskRefused(refused)
    a2a_asks.add(unit, rows)
    tokens = {str(row["call_id"]): str(row["reply_with"]) for row in rows}
    return Asked(tokens, seconds + ex.rt.settings.reply_grace_s)


def _asking(unit: Unit, ex: Execution, item: Planned, refused: dict[str, str]) -> _Asking | None:
    try:
        said = _speech(ex, item)
        _check(unit, ex.rt, said, origin(ex, item))
        return _Asking(item, said, _seconds(unit, ex, item, accept.routes(unit, ex.rt, said)))
    except Refusal as error:
        refused[item.call.id] = error.message
        return None


def _speech(ex: Execution, planned: Planned) -> Speech:
    said = speech(outgoing(ex, planned), ex.rt.settings.message_bytes)
    refuse_no_directive(said.performative)
    return said


def _check(unit: Unit, rt: Runtime, said: Speech, who: Origin) -> None:
    accept.refuse_limits(unit, rt, who)
    assert who.run_id is not None
    pairs = a2a_messages.chain(unit, who.run_id)
    for receiver in said.receivers:
        if pairs.count((str(said.sender), receiver.agent)) >= MOST_REPEATS:
            raise AskLoop(
                f"{said.sender} has asked {receiver} {MOST_REPEATS} times in this chain; it goes round in circles"
            )


def _seconds(unit: Unit, ex: Execution, planned: Planned, known: Mapping[Address, Route]) -> float:
    """How long the answers may take: as the question says, else as the slowest receiver, never past our own time."""
    assert planned.ready is not None
    own = planned.ready.values["reply_by_s"]
    if own is not None and not LEAST_S <= own <= MOST_S:
        raise InvalidArgument(f"reply_by_s is {LEAST_S:g} to {MOST_S:g}")
    usual = ex.rt.settings.reply_by_s
    receivers = [
        route.agent.reply_by_s if route.agent is not None and route.agent.reply_by_s is not None else usual
        for route in known.values()
    ]
    seconds = float(own) if own is not None else max(receivers, default=usual)
    enclosing = ex.row["ask_deadline"]
    if enclosing is None:
        return seconds
    left = float((enclosing - admissions.database_time(unit)).total_seconds()) - MARGIN_S
    if left <= 0:
        raise HopCeiling("there is no time left: whoever asked this agent does not wait long enough")
    return min(seconds, left)


def sealed_by_now(unit: Unit, message: Row) -> bool:
    """Whether nobody waits for the answer to a question any more."""
    if message["reply_with"] is None:
        return False
    ask = a2a_asks.get(unit, message["scope"], message["reply_with"])
    return ask is not None and ask["state"] != "open"

"""Runs in any state, brought there by the same transitions and rows that the engine writes.

::

    paused = factory.a_paused_run(database, ttl_s=3600)
    client.decide(factory.checkpoint_of(database, paused), approved=True)

Each function takes a migrated ``Database`` and returns the run's row as it is then. Nothing is executed: there is no
model and no tool behind these runs, only their traces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from cortex_workers.schemas.agent import AgentDefinition, ToolSpec
from cortex_workers.schemas.base import canonical_json
from cortex_workers.schemas.checkpoint import CheckpointKind
from cortex_workers.schemas.ids import CHECKPOINT, RUN, SESSION, STEP, SUSPENSION, TOOL_CALL, new_id
from cortex_workers.schemas.lease import Term
from cortex_workers.schemas.lifecycle import TERMINAL_RUN_STATES, RunState
from cortex_workers.schemas.llm import Message, ToolCall, Usage
from cortex_workers.schemas.suspension import PendingKind, SuspendReason
from cortex_workers.store import (
    admissions,
    agents,
    checkpoints,
    claims,
    clock,
    runs,
    sessions,
    suspensions,
    transcript,
    turns,
)
from cortex_workers.store.claims import Claimer
from cortex_workers.store.database import Database
from cortex_workers.store.transitions import Guard, Move, Row, base
from cortex_workers.store.unit import Unit

SCOPE = "tenant=acme"
OWNER = "worker-a"
ARGUMENTS = '{"order_id": "17", "amount_cents": 1900}'
_PARAMETERS = {
    "type": "object",
    "properties": {"order_id": {"type": "string"}, "amount_cents": {"type": "integer"}},
    "required": ["order_id", "amount_cents"],
    "additionalProperties": False,
}
AGENT = AgentDefinition(
    name="support",
    model="scripted:factory",
    tools=(
        ToolSpec(name="refund", parameters=_PARAMETERS, needs_approval=True),
        ToolSpec(name="find_order", tool_class="retry_safe", effects="none"),
        ToolSpec(name="ship", parameters=_PARAMETERS, tool_class="external"),
    ),
)
"""The agent of these runs: one tool that asks and acts, one that only reads, one that runs outside."""


def an_agent(database: Database, definition: AgentDefinition = AGENT) -> AgentDefinition:
    """Publish an agent, so that producers may name it."""
    database.run(lambda unit: agents.publish(unit, [definition]))
    return definition


def a_run(
    database: Database,
    *,
    agent: AgentDefinition = AGENT,
    scope: str = SCOPE,
    session: str | None = None,
    text: str = "Refund order 17",
    **columns: Any,
) -> Row:
    """A run that is ready to be started; with a ``session`` key it shares that conversation with others."""
    run_id = new_id(RUN)

    def work(unit: Unit) -> Row:
        agents.add_versions(unit, [agent])
        place = _place(unit, agent, scope, session)
        rank = runs.give_ranks(unit, {scope.split("/", 1)[0]: 1})[scope.split("/", 1)[0]]
        if place["shared"]:
            sessions.share(unit, place["session_id"], place["serial"])
        row = {
            "id": run_id,
            "scope": scope,
            "agent": agent.name,
            "agent_digest": agent.digest(),
            "rank": rank,
            "notified_at": clock.wall(),
            **place,
            **columns,
        }
        spec: dict[str, Any] = {
            "run_id": run_id,
            "input": text,
            "request_digest": run_id,
            "metadata": None,
            "config": {},
        }
        runs.insert_runs(unit, [row], [spec], Move())
        if place["shared"]:
            turns.recompute(unit, place["session_id"])
        return _now(unit, run_id)

    return database.run(work)


def _place(unit: Unit, agent: AgentDefinition, scope: str, session: str | None) -> dict[str, Any]:
    if session is None:
        session_id = new_id(SESSION)
        sessions.create_own(unit, [{"id": session_id, "scope": scope, "agent": agent.name}])
        return {"session_id": session_id, "session_seq": 1, "shared": False, "serial": False}
    session_id = sessions.find_or_create_key(unit, scope, agent.name, session)
    sessions.lock(unit, session_id)
    serial = agent.turns == "serial"
    seq = sessions.take_turn_seqs(unit, session_id, 1)
    return {
        "session_id": session_id,
        "session_seq": seq,
        "shared": True,
        "serial": serial,
        "wait_reason": "turn",
    }


def a_running_run(
    database: Database, *, run: Row | None = None, owner: str = OWNER, ttl_s: float = 60.0, **columns: Any
) -> Row:
    """A run under a lease of ``ttl_s`` seconds (0: over at once); ``term_of`` gives its holder's term."""
    row = run or a_run(database, **columns)
    claimer = Claimer(owner, ttl_s, row["pool"], [row["agent_digest"]])
    claimed = database.run(lambda unit: claims.claim_named(unit, claimer, row["id"]))
    assert claimed, f"{row['id']} could not be claimed: {row['state']}, {row['wait_reason']}"
    return claimed[0]


def term_of(run: Row) -> Term:
    """The term of a running run's holder."""
    return Term(run_id=run["id"], owner=run["lease_owner"], revision=run["revision"])


def a_paused_run(
    database: Database,
    *,
    run: Row | None = None,
    calls: int = 1,
    ttl_s: float | None = 3600.0,
    on_expiry: str = "fail",
    **columns: Any,
) -> Row:
    """A run that waits for the approval of ``calls`` calls of ``refund`` for ``ttl_s``.

    Zero makes it overdue at once, None gives it no deadline.
    """
    row = run or a_running_run(database, **columns)
    asked = _calls(int(row["next_step"]), calls)
    return database.run(lambda unit: _pause(unit, row, asked, PendingKind.APPROVAL, ttl_s, on_expiry))


def a_run_waiting_outside(
    database: Database,
    *,
    run: Row | None = None,
    calls: int = 1,
    ttl_s: float | None = 3600.0,
    on_expiry: str = "fail",
    **columns: Any,
) -> Row:
    """A run that waits for results of ``calls`` calls of ``ship``, which runs outside; else as ``a_paused_run``."""
    row = run or a_running_run(database, **columns)
    asked = _calls(int(row["next_step"]), calls, tool="ship")
    return database.run(lambda unit: _pause(unit, row, asked, PendingKind.EXTERNAL, ttl_s, on_expiry))


def _pause(
    unit: Unit, row: Row, asked: list[ToolCall], kind: PendingKind, ttl_s: float | None, on_expiry: str
) -> Row:
    step = int(row["next_step"])
    sessions.touch(unit, row["session_id"])
    moved = _turn(unit, row, "pause", asked, suspension_id=new_id(SUSPENSION))
    first = base(moved, _seqs(asked))
    transcript.add_waiting(unit, [_call(row, step, call, index, first) for index, call in enumerate(asked)])
    _ask(unit, moved, asked, kind, ttl_s, on_expiry)
    return _now(unit, row["id"])


def an_uncertain_run(database: Database, *, run: Row | None = None, **columns: Any) -> Row:
    """A run that waits for somebody to say what became of a call whose worker was lost."""
    row = a_run_cut_off(database, run=run, **columns)
    row = a_running_run(database, run=row, owner="worker-b")
    (asked,) = _calls(int(row["next_step"]) - 1, 1)

    def work(unit: Unit) -> Row:
        sessions.touch(unit, row["session_id"])
        what = Move(values={"suspension_id": new_id(SUSPENSION)}, worker_id=row["lease_owner"])
        moved = _must(turns.move(unit, "uncertain", row, Guard(term=term_of(row)), what), "uncertain")
        _ask(unit, moved, [asked], PendingKind.UNCERTAIN_EFFECT, None, "fail")
        return _now(unit, row["id"])

    return database.run(work)


def a_run_cut_off(database: Database, *, run: Row | None = None, **columns: Any) -> Row:
    """A reclaimable run whose worker was lost while a call of ``refund`` was under way: its start record stands."""
    row = run or a_running_run(database, ttl_s=0.0, **columns)
    step = int(row["next_step"])
    asked = _calls(step, 1)

    def work(unit: Unit) -> Row:
        what = Move(values=_progress(row), seqs=_seqs(asked), worker_id=row["lease_owner"])
        moved = _must(turns.move(unit, "lapse", row, Guard(), what), "lapse")
        first = base(moved, what.seqs)
        _answer(unit, row, step, asked, first)
        transcript.record_start(unit, term_of(row), [_call(row, step, asked[0], 0, first)])
        return _now(unit, row["id"])

    return database.run(work)


def a_reclaimable_run(
    database: Database, *, run: Row | None = None, handed_off: bool = False, **columns: Any
) -> Row:
    """A run that lost its worker by a lapse, or was handed off in good order."""
    row = run or a_running_run(database, ttl_s=60.0 if handed_off else 0.0, **columns)
    guard = Guard(term=term_of(row)) if handed_off else Guard()
    return move(database, "hand_off" if handed_off else "lapse", row, guard)


def an_answered_run(database: Database, *, run: Row | None = None, **columns: Any) -> Row:
    """A run whose pause was approved: ready, with the instruction to carry out the answer."""
    row = run or a_paused_run(database, **columns)
    guard = Guard(suspension_id=row["suspension_id"], revision=row["revision"])

    def work(unit: Unit) -> Row:
        moved = _must(turns.move(unit, "decide", row, guard, Move(actor="ops")), "decide")
        suspensions.answer_all(unit, row["suspension_id"], "ops", "decide")
        asked = checkpoints.of_pause(unit, row["suspension_id"])
        assert asked is not None
        checkpoints.close(
            unit,
            "decided",
            [checkpoints.checkpoints.c.id == asked["id"]],
            {"decision": {"approved": True, "actor": "ops"}},
            int(moved["revision"]),
        )
        return moved

    return database.run(work)


def an_admitted_run(database: Database, *, run: Row | None = None, **columns: Any) -> Row:
    """A run whose results came in from outside: ready with exactly them, and nobody has begun."""
    row = run or a_run_waiting_outside(database, **columns)
    guard = Guard(suspension_id=row["suspension_id"], revision=row["revision"])

    def work(unit: Unit) -> Row:
        calls = [call["call_id"] for call in suspensions.pending(unit, row["suspension_id"])]
        given = {"tool_results": [{"content": "shipped", "tool_call_id": call_id} for call_id in calls]}
        data = canonical_json(given).encode()
        sessions.touch(unit, row["session_id"])
        moved = _must(turns.move(unit, "admit", row, guard, Move(actor="ops")), "admit")
        suspensions.answer_all(unit, row["suspension_id"], "ops", "provide_results")
        answer = {
            "run_id": row["id"],
            "suspension_id": row["suspension_id"],
            "scope": row["scope"],
            "input": data,
            "request_digest": admissions.input_digest(data),
            "suspension_digest": row["suspension_id"],
            "run_revision": row["revision"],
            "claimed_revision": moved["revision"],
            "admitted_by": "ops",
            "door": "provide_results",
        }
        admissions.add(unit, answer)
        return moved

    return database.run(work)


def an_ended_run(database: Database, state: RunState, *, run: Row | None = None, **columns: Any) -> Row:
    """A run that is over: completed, failed or cancelled."""
    row = run or a_running_run(database, **columns)
    if state is RunState.CANCELLED:
        return move(database, "cancel_running", row, Guard(revision=row["revision"]))
    name, values = {
        RunState.COMPLETED: ("complete", {"output": "Done."}),
        RunState.FAILED: ("fail", {"error_code": "model_failed", "error_text": "The model failed."}),
    }[state]
    return move(
        database, name, row, Guard(term=term_of(row)), Move(values=values, worker_id=row["lease_owner"])
    )


def a_run_in(database: Database, state: RunState, **columns: Any) -> Row:
    """A run in a state that a transition of this release leads to, in its plainest form.

    Raises: ValueError for a state that only later rooms reach.
    """
    plainest: dict[RunState, Callable[..., Row]] = {
        RunState.READY: a_run,
        RunState.RUNNING: a_running_run,
        RunState.PAUSED: a_paused_run,
        RunState.RECLAIMABLE: a_reclaimable_run,
    }
    if state in plainest:
        return plainest[state](database, **columns)
    if state in TERMINAL_RUN_STATES and state is not RunState.INCOMPLETE:
        return an_ended_run(database, state, **columns)
    raise ValueError(f"no transition of this release leads to {state}")


def move(database: Database, name: str, run: Row, guard: Guard, what: Move = Move()) -> Row:  # noqa: B008
    """Apply one transition that has to succeed, with everything its session needs."""
    return database.run(lambda unit: _must(turns.move(unit, name, run, guard, what), name))


def checkpoint_of(database: Database, run: Row) -> str:
    """The id of the checkpoint of a run's latest pause."""
    with database.read() as unit:
        found = checkpoints.of_pause(unit, run["suspension_id"])
    assert found is not None
    return str(found["id"])


def now(database: Database, run_id: str) -> Row:
    """A run's row as it is now."""
    with database.read() as unit:
        return _now(unit, run_id)


# --- The traces of a turn --------------------------------------------------------------------------------------------


def _now(unit: Unit, run_id: str) -> Row:
    row = runs.get(unit, run_id)
    assert row is not None, run_id
    return row


def _must(row: Row | None, name: str) -> Row:
    assert row is not None, f"{name} found the run in another state or under another term"
    return row


def _calls(step: int, count: int, tool: str = "refund") -> list[ToolCall]:
    return [ToolCall(id=f"call_{step}_{index}", name=tool, arguments=ARGUMENTS) for index in range(count)]


def _seqs(asked: list[ToolCall]) -> int:
    """Ordinals of a turn: its step, its message, its calls."""
    return 2 + len(asked)


def _progress(row: Row) -> dict[str, Any]:
    return {
        "queue_class": "begun",
        "instruction": "go_on",
        "next_step": int(row["next_step"]) + 1,
        "step_count": int(row["step_count"]) + 1,
        "new_messages_from": row["new_messages_from"] or 0,
    }


def _turn(unit: Unit, row: Row, name: str, asked: list[ToolCall], **values: Any) -> Row:
    """A holder lets go with the model's answer in hand."""
    what = Move(values={**_progress(row), **values}, seqs=_seqs(asked), worker_id=row["lease_owner"])
    moved = _must(turns.move(unit, name, row, Guard(term=term_of(row)), what), name)
    _answer(unit, row, int(row["next_step"]), asked, base(moved, what.seqs))
    return moved


def _answer(unit: Unit, row: Row, step: int, asked: list[ToolCall], first: int) -> None:
    transcript.add_step(
        unit,
        {
            "run_id": row["id"],
            "step_index": step,
            "id": new_id(STEP),
            "model": AGENT.model,
            "seq": first,
            "usage": Usage().model_dump(),
            "finish_reason": "tool_calls",
            "term_revision": row["revision"],
            "started_at": clock.wall(),
        },
    )
    message = Message(role="assistant", content="", tool_calls=tuple(asked))
    transcript.add_messages(unit, row["id"], [transcript.message_row(first + 1, step, message)])


def _call(row: Row, step: int, call: ToolCall, ordinal: int, first: int) -> dict[str, Any]:
    return {
        "id": new_id(TOOL_CALL),
        "run_id": row["id"],
        "step_index": step,
        "call_id": call.id,
        "ordinal": ordinal,
        "session_id": row["session_id"],
        "provider_call_id": call.id,
        "tool": call.name,
        "class": "external" if call.name == "ship" else "mutating",
        "effects": "mutating",
        "message_seq": first + 1,
        "seq": first + 2 + ordinal,
    }


def _ask(
    unit: Unit, moved: Row, asked: list[ToolCall], kind: PendingKind, ttl_s: float | None, on_expiry: str
) -> None:
    """The pause and its pending calls; and its checkpoint, when it waits for a person."""
    outside = kind is PendingKind.EXTERNAL
    suspension_id, step = moved["suspension_id"], int(moved["next_step"]) - 1
    pending: list[Mapping[str, Any]] = [
        {
            "suspension_id": suspension_id,
            "call_id": call.id,
            "run_id": moved["id"],
            "ordinal": index,
            "kind": kind,
            "session_id": moved["session_id"],
            "answerable_by": "machine" if outside else "person",
            "payload": json.loads(call.arguments),
        }
        for index, call in enumerate(asked)
    ]
    suspension = {
        "id": suspension_id,
        "run_id": moved["id"],
        "session_id": moved["session_id"],
        "scope": moved["scope"],
        "run_revision": moved["revision"],
        "reason": SuspendReason.EXTERNAL_TOOL if outside else SuspendReason.APPROVAL,
        "step_index": step,
        "next_step": moved["next_step"],
        "messages_upto": int(moved["next_seq"]) - 1,
        "usage": moved["usage"],
        "digest": suspension_id,
        "on_expiry": on_expiry,
    }
    suspensions.add(unit, suspension, ttl_s, pending)
    if outside:
        return
    _open(unit, moved, step, uncertain=kind is PendingKind.UNCERTAIN_EFFECT)


def _open(unit: Unit, moved: Row, step: int, *, uncertain: bool) -> None:
    suspension_id = moved["suspension_id"]
    checkpoint = {
        "id": new_id(CHECKPOINT),
        "scope": moved["scope"],
        "run_id": moved["id"],
        "agent": moved["agent"],
        "suspension_id": suspension_id,
        "step_index": step,
        "kind": CheckpointKind.UNCERTAIN_EFFECT if uncertain else CheckpointKind.TOOL_APPROVAL,
        "reason": "outcome unknown of: refund" if uncertain else "approval required for: refund",
        "metadata": {
            "suspension_id": suspension_id,
            "tools": ["refund"],
            **({"why": "its worker was lost", "attempt": 1} if uncertain else {}),
        },
    }
    checkpoints.open_(unit, checkpoint, int(moved["revision"]))

"""What a run did: messages, steps and tool calls, appended under its holder's fence and never rewritten.

Content lives once, in `messages`; `tool_calls` points at it.
Source: decisions C3, R10; rulings 1, 2, 8, 57, 58.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, insert, select, update

from cortex_workers.errors import LeaseLost
from cortex_workers.schemas.lease import Term
from cortex_workers.schemas.llm import Message, ToolCall
from cortex_workers.store import clock, tables, transitions
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit

runs, messages, steps, tool_calls, specs = (
    tables.runs,
    tables.messages,
    tables.steps,
    tables.tool_calls,
    tables.run_specs,
)

UNREADABLE = (ValueError, TypeError)
"""What reading a document raises that somebody broke by hand; errors of JSON and of pydantic are kinds of these."""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message of a run with its ordinal."""

    seq: int
    step_index: int
    message: Message


def save(unit: Unit, term: Term, seqs: int, values: Mapping[str, Any]) -> Row:
    """Write progress on the run's row under the holder's fence and reserve ordinals; the revision stays.

    Returns the new row (``next_seq`` after the reservation, ``stop_requested_reason``).
    Raises: LeaseLost when the term is over; nothing is written then.
    """
    saved = (
        unit.execute(
            update(runs)
            .where(
                runs.c.id == term.run_id,
                runs.c.state == "running",
                runs.c.lease_owner == term.owner,
                runs.c.revision == term.revision,
                runs.c.lease_expires_at > clock.wall(),
            )
            .values(next_seq=runs.c.next_seq + seqs, **values)
            .returning(runs.c.next_seq, runs.c.stop_requested_reason, runs.c.session_id)
        )
        .mappings()
        .first()
    )
    if saved is None:
        raise LeaseLost(run_id=term.run_id)
    return dict(saved)


def add_messages(unit: Unit, run_id: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append messages that carry their ordinals already (see ``message_row``)."""
    if rows:
        unit.connection.execute(insert(messages), [{"run_id": run_id, **row} for row in rows])


def message_row(seq: int, step_index: int, message: Message, marked: bool = False) -> dict[str, Any]:
    """A message as a row; arguments and opaque items stay text, so they come back byte for byte (ruling 57)."""
    calls = [call.model_dump() for call in message.tool_calls]
    return {
        "seq": seq,
        "step_index": step_index,
        "role": message.role,
        "content": message.content,
        "tool_calls": json.dumps(calls, ensure_ascii=False) if calls else None,
        "tool_call_id": message.tool_call_id,
        "tool_name": message.tool_name,
        "is_error": message.is_error,
        "raw": json.dumps(message.raw, ensure_ascii=False) if message.raw is not None else None,
        "marked": marked,
    }


def to_message(row: Row) -> Message:
    """A stored message, as the engine and the model know it."""
    return Message(
        role=row["role"],
        content=row["content"],
        tool_calls=_calls_of(row["tool_calls"]),
        tool_call_id=row["tool_call_id"],
        tool_name=row["tool_name"],
        is_error=row["is_error"],
        raw=json.loads(row["raw"]) if row["raw"] is not None else None,
    )


def _calls_of(text: str | None) -> tuple[ToolCall, ...]:
    return tuple(ToolCall.model_validate(item) for item in json.loads(text or "[]"))


def add_step(unit: Unit, row: Mapping[str, Any]) -> None:
    """Append a step: one model call that was answered."""
    unit.execute(insert(steps).values(**row))


def set_system_prompt(unit: Unit, run_id: str, prompt: str) -> None:
    """Keep the assembled system prompt; written once, by the run's first fenced commit."""
    unit.execute(
        update(specs)
        .where(specs.c.run_id == run_id, specs.c.system_prompt.is_(None))
        .values(system_prompt=prompt)
    )


def load_messages(unit: Unit, run_id: str) -> list[StoredMessage]:
    """A run's own messages in order."""
    return [_stored(row) for row in _message_rows(unit, run_id)]


def readable_messages(unit: Unit, run_id: str) -> tuple[list[StoredMessage], list[int]]:
    """The same for somebody who looks: the messages that can be read, and the ordinals of those that cannot."""
    found, broken = [], []
    for row in _message_rows(unit, run_id):
        try:
            found.append(_stored(row))
        except UNREADABLE:
            broken.append(int(row["seq"]))
    return found, broken


def _message_rows(unit: Unit, run_id: str) -> list[Row]:
    statement = select(messages).where(messages.c.run_id == run_id).order_by(messages.c.seq)
    return [dict(row) for row in unit.execute(statement).mappings()]


def _stored(row: Row) -> StoredMessage:
    return StoredMessage(row["seq"], row["step_index"], to_message(row))


def load_calls(unit: Unit, run_id: str, step_index: int | None = None) -> list[Row]:
    """The call rows of a run (or of one step), in the model's order."""
    statement = select(tool_calls).where(tool_calls.c.run_id == run_id)
    if step_index is not None:
        statement = statement.where(tool_calls.c.step_index == step_index)
    statement = statement.order_by(tool_calls.c.step_index, tool_calls.c.ordinal)
    return [dict(row) for row in unit.execute(statement).mappings()]


def load_steps(unit: Unit, run_id: str) -> list[Row]:
    """The steps of a run in order."""
    statement = select(steps).where(steps.c.run_id == run_id).order_by(steps.c.step_index)
    return [dict(row) for row in unit.execute(statement).mappings()]


def arguments_of(unit: Unit, run_id: str, calls: Sequence[Row]) -> dict[str, str]:
    """The model's own argument text of calls, by call id; it stands in the message that asked for them.

    Calls of a message that cannot be read are left out.
    """
    seqs = sorted({row["message_seq"] for row in calls if row["message_seq"] is not None})
    if not seqs:
        return {}
    rows = unit.all(
        select(messages.c.tool_calls).where(messages.c.run_id == run_id, messages.c.seq.in_(seqs))
    )
    found: dict[str, str] = {}
    for row in rows:
        with suppress(*UNREADABLE):
            found.update({item.id: item.arguments for item in _calls_of(row.tool_calls)})
    return found


def record_start(unit: Unit, term: Term, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write start records: new ones, or pending calls that are about to run."""
    stamp = {"term_owner": term.owner, "term_revision": term.revision, "started_at": clock.wall()}
    for row in rows:
        if not row.get("state"):
            transitions.create_in(unit, "tool_call", "record", [{**row, **stamp}])
            continue
        name = "start" if row["state"] == "pending" else "restart"
        values = {
            "executed_args": row.get("executed_args"),
            "amended_by": row.get("amended_by"),
            "late_result": None,
        }
        attempt = row["attempt"] + (1 if name == "restart" else 0)
        transitions.apply_in(
            unit,
            "tool_call",
            name,
            _this(term.run_id, row["call_id"]),
            {**values, **stamp, "attempt": attempt, "settled_as": None},
        )


def note_amended(unit: Unit, run_id: str, call_id: str, executed_args: str, by: str | None) -> None:
    """Note what a call will run with that goes on waiting, now for its result: whoever runs it outside reads it."""
    unit.execute(
        update(tool_calls).where(*_this(run_id, call_id)).values(executed_args=executed_args, amended_by=by)
    )


def add_waiting(unit: Unit, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows of calls that wait for somebody."""
    transitions.create_in(unit, "tool_call", "wait", rows)


def finish_call(
    unit: Unit, term: Term, outcome: str, row: Mapping[str, Any], result: Mapping[str, Any]
) -> None:
    """Write a call's outcome: ``complete``, ``fail`` or ``deny``; a call without a row gets one in the same write."""
    values = {**result, "finished_at": clock.wall()}
    if row.get("state"):
        moved = transitions.apply_in(unit, "tool_call", outcome, _this(term.run_id, row["call_id"]), values)
        if not moved:
            raise RuntimeError(f"the call {row['call_id']} could not {outcome} from {row['state']}")
    else:
        stamp = {"term_owner": term.owner, "term_revision": term.revision}
        begun = {} if row.get("started_at") else {"started_at": clock.wall()}
        transitions.create_in(unit, "tool_call", f"{outcome}_at_once", [{**row, **values, **stamp, **begun}])


def close_pending(unit: Unit, run_id: str, call_ids: Sequence[str], text: str) -> None:
    """Deny calls that still wait, because their run has ended."""
    transitions.apply_in(
        unit,
        "tool_call",
        "deny",
        [tool_calls.c.run_id == run_id, tool_calls.c.call_id.in_(list(call_ids))],
        {"error": text, "finished_at": clock.wall()},
    )


def close_all_pending(unit: Unit, run_id: str, text: str) -> None:
    """Deny every call of a run that still waits, because the run has ended."""
    transitions.apply_in(
        unit,
        "tool_call",
        "deny",
        [tool_calls.c.run_id == run_id],
        {"error": text, "finished_at": clock.wall()},
    )


def settle_result(unit: Unit, run_id: str, call: Row, seq: int, text: str, by: str) -> None:
    """Write what a person says an uncertain call returned, under the run's row lock (ruling 58)."""
    message = Message(role="tool", content=text, tool_call_id=call["call_id"], tool_name=call["tool"])
    add_messages(unit, run_id, [message_row(seq, call["step_index"], message)])
    transitions.apply_in(
        unit,
        "tool_call",
        "complete",
        _this(run_id, call["call_id"]),
        {
            "result_seq": seq,
            "result_digest": result_digest(text),
            "finished_at": clock.wall(),
            "settled_as": "happened",
            "settled_by": by,
        },
    )


def note_settled(unit: Unit, run_id: str, call_id: str, settled_as: str, by: str) -> None:
    """Keep a person's word on a call whose state moves later (it runs again) or never (its run was stopped)."""
    unit.execute(
        update(tool_calls).where(*_this(run_id, call_id)).values(settled_as=settled_as, settled_by=by)
    )


def take_back(unit: Unit, term: Term, call_id: str) -> bool:
    """Undo a start record whose handler was never entered, by its own holder (ruling 4)."""
    mine = [
        *_this(term.run_id, call_id),
        tool_calls.c.term_owner == term.owner,
        tool_calls.c.term_revision == term.revision,
    ]
    return bool(transitions.apply_in(unit, "tool_call", "take_back", mine, {"started_at": None}))


def write_late_result(unit: Unit, term: Term, call_id: str, text: str) -> bool:
    """Keep what a stale holder learned of its call: evidence, never conversation (ruling 8).

    The one write outside the fence; keyed by the start record's own term.
    """
    done = unit.execute(
        update(tool_calls)
        .where(
            *_this(term.run_id, call_id),
            tool_calls.c.term_owner == term.owner,
            tool_calls.c.term_revision == term.revision,
            tool_calls.c.state.in_(["started", "unknown"]),
            tool_calls.c.late_result.is_(None),
        )
        .values(late_result=text, late_at=clock.wall())
    )
    return bool(done.rowcount)


def seconds_until_settled(unit: Unit, run_id: str, call_id: str, settle_s: float) -> float:
    """How long until a "did not happen" is believed: ``settle_s`` after the old lease's end (ruling 7).

    Counted from ``fenced_until`` where the run was taken from its holder, at least from the start record.
    """
    since = func.greatest(runs.c.fenced_until, tool_calls.c.started_at)
    left = func.extract("epoch", since - clock.wall()) + settle_s
    found = unit.scalar(
        select(left)
        .select_from(runs.join(tool_calls, tool_calls.c.run_id == runs.c.id))
        .where(*_this(run_id, call_id))
    )
    return max(0.0, float(found)) if found is not None else 0.0


def _this(run_id: str, call_id: str) -> list[Any]:
    return [tool_calls.c.run_id == run_id, tool_calls.c.call_id == call_id]


def result_digest(text: str) -> str:
    """SHA-256 of a result's text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

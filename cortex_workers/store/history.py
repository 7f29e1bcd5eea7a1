"""The conversation: a view over the messages of completed runs, and notes on the turns that failed.

Source: decision C4; rulings 11, 38; runs.md 7.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from cortex_workers.schemas.llm import Message
from cortex_workers.store import tables
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit

runs, messages, specs, tool_calls = tables.runs, tables.messages, tables.run_specs, tables.tool_calls
_ARGUMENT_CHARS = 200
_PAGE = 50


def load(unit: Unit, session_id: str, upto: int, floor: int, window: int) -> list[Message]:
    """The newest ``window`` messages of completed runs in (floor, upto], oldest first, then notes on failed turns.

    Fixed by ``upto`` and ``floor``: a run that is continued reads what it read at first.
    """
    if upto <= floor or window <= 0:
        return _notes(unit, session_id, floor, upto) if upto > floor else []
    newest: list[Message] = []
    last_completed, before = None, upto + 1
    while len(newest) < window:
        page = _completed(unit, session_id, floor, before)
        if not page:
            break
        last_completed = last_completed if last_completed is not None else page[0]["completion_seq"]
        for turn in page:
            newest = [*_of_run(unit, turn), *newest]
            if len(newest) >= window:
                break
        before = page[-1]["completion_seq"]
    since = last_completed if last_completed is not None else floor
    return [*newest[-window:], *_notes(unit, session_id, since, upto)]


def _completed(unit: Unit, session_id: str, floor: int, before: int) -> list[Row]:
    statement = (
        select(runs.c.id, runs.c.completion_seq, specs.c.input)
        .join(specs, specs.c.run_id == runs.c.id)
        .where(
            runs.c.session_id == session_id,
            runs.c.completion_seq > floor,
            runs.c.completion_seq < before,
            runs.c.state == "completed",
        )
        .order_by(runs.c.completion_seq.desc())
        .limit(_PAGE)
    )
    return [dict(row) for row in unit.execute(statement).mappings()]


def _of_run(unit: Unit, turn: Row) -> list[Message]:
    """A turn's input and what the assistant said; its tool calls are not replayed."""
    said = unit.all(
        select(messages.c.content)
        .where(messages.c.run_id == turn["id"], messages.c.role == "assistant", messages.c.content != "")
        .order_by(messages.c.seq)
    )
    return [
        Message(role="user", content=turn["input"]),
        *(Message(role="assistant", content=row.content) for row in said),
    ]


def _notes(unit: Unit, session_id: str, since: int, upto: int) -> list[Message]:
    """One generated note for each turn that ended badly since the last good one: what it was asked, what it did."""
    statement = (
        select(runs.c.id, runs.c.state, runs.c.error_code, specs.c.input)
        .join(specs, specs.c.run_id == runs.c.id)
        .where(
            runs.c.session_id == session_id,
            runs.c.completion_seq > since,
            runs.c.completion_seq <= upto,
            runs.c.state.in_(["failed", "cancelled", "incomplete"]),
        )
        .order_by(runs.c.completion_seq)
    )
    return [_note(unit, dict(row)) for row in unit.execute(statement).mappings()]


def _note(unit: Unit, turn: Row) -> Message:
    # Imported here: transcript is a sibling that does not need this module.
    from cortex_workers.store import transcript

    calls = [
        row
        for row in transcript.load_calls(unit, turn["id"])
        if row["state"] in ("completed", "started", "unknown") and row["effects"] != "none"
    ]
    arguments = transcript.arguments_of(unit, turn["id"], calls)
    lines = [
        f"[Note: an earlier turn ended as {turn['state']}"
        + (f" ({turn['error_code']})" if turn["error_code"] else "")
        + f". It was asked: {turn['input'][:2000]}"
    ]
    if not calls:
        lines.append("It took no action.")
    lines.extend(_action(row, arguments) for row in calls)
    return Message(role="user", content="\n".join(lines) + "]")


def _action(row: Row, arguments: dict[str, Any]) -> str:
    text = str(row["executed_args"] or arguments.get(row["call_id"], ""))
    shown = text if len(text) <= _ARGUMENT_CHARS else text[:_ARGUMENT_CHARS] + "…"
    state = "completed" if row["state"] == "completed" else "outcome unknown"
    return f"It called {row['tool']}({shown}): {state}."

"""The conversation: a view over the messages of completed runs, and notes on the turns that failed.

Source: decision C4; rulings 11, 38; runs.md 7.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from cortex_workers.schemas.llm import Message
from cortex_workers.store import tables, transcript
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit

runs, messages, specs, tool_calls = tables.runs, tables.messages, tables.run_specs, tables.tool_calls
_ARGUMENT_CHARS = 200
_PAGE = 50
_MOST_NOTES = 20


def load(unit: Unit, session_id: str, upto: int, floor: int, window: int) -> list[Message]:
    """The newest ``window`` messages of completed runs in (floor, upto], oldest first, then notes on failed turns.

    Fixed by ``upto`` and ``floor``: a run that is continued reads what it read at first.
    """
    if upto <= floor:
        return []
    newest: list[Message] = []
    last_completed, before = floor, upto + 1
    while len(newest) < max(window, 1):
        page = _completed(unit, session_id, floor, before)
        if not page:
            break
        last_completed = max(last_completed, page[0]["completion_seq"])
        newest = [*_turns(unit, page), *newest]
        before = page[-1]["completion_seq"]
    kept = newest[-window:] if window > 0 else []
    return [*kept, *_notes(unit, session_id, last_completed, upto)]


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


def _turns(unit: Unit, page: list[Row]) -> list[Message]:
    """The turns of a page (newest first) as messages, oldest first: each input and what the assistant said.

    Tool calls of old turns are not replayed (runs.md 7.5).
    """
    said: dict[str, list[Message]] = {turn["id"]: [] for turn in page}
    rows = unit.all(
        select(messages.c.run_id, messages.c.content)
        .where(messages.c.run_id.in_(list(said)), messages.c.role == "assistant", messages.c.content != "")
        .order_by(messages.c.run_id, messages.c.seq)
    )
    for row in rows:
        said[row.run_id].append(Message(role="assistant", content=row.content))
    return [
        message
        for turn in reversed(page)
        for message in (Message(role="user", content=turn["input"]), *said[turn["id"]])
    ]


def _notes(unit: Unit, session_id: str, since: int, upto: int) -> list[Message]:
    """One generated note for each of the newest turns that ended badly since the last good one."""
    statement = (
        select(runs.c.id, runs.c.state, runs.c.error_code, specs.c.input)
        .join(specs, specs.c.run_id == runs.c.id)
        .where(
            runs.c.session_id == session_id,
            runs.c.completion_seq > since,
            runs.c.completion_seq <= upto,
            runs.c.state.in_(["failed", "cancelled", "incomplete"]),
        )
        .order_by(runs.c.completion_seq.desc())
        .limit(_MOST_NOTES)
    )
    found = [dict(row) for row in unit.execute(statement).mappings()]
    return [_note(unit, row) for row in reversed(found)]


def _note(unit: Unit, turn: Row) -> Message:
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

"""Follow a run from any process: durable facts from rows by cursor, tokens from the capped stream beside them.

A client that hangs up changes nothing. A hand-off or a lapse does not end a stream: it goes on with the next worker.
Source: runs.md 6.12; rulings 58; bug case C10.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from cortex_workers.engine.runtime import Runtime
from cortex_workers.engine.validate import checked_id
from cortex_workers.errors import RunNotFound, WaitTimeout
from cortex_workers.ports import TokenSource
from cortex_workers.schemas.ids import RUN
from cortex_workers.schemas.stream import StreamEvent, StreamKind
from cortex_workers.store import checkpoints, runs, stream, suspensions
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit

_LOOK_S = 0.05
_MOST_LOOK_S = 0.5


def follow(
    rt: Runtime,
    run_id: str,
    scope: str,
    *,
    after: int = -1,
    timeout_s: float | None = None,
    tokens: TokenSource | None = None,
) -> Iterator[StreamEvent]:
    """Yield what happened after a cursor and what happens from now on, to the run's end or next pause.

    Raises: InvalidId, RunNotFound; WaitTimeout when nothing at all happens for ``timeout_s`` seconds.
    """
    checked_id(RUN, run_id)
    cursor, quiet_since, pause_s = after, time.monotonic(), _LOOK_S
    reader = _Tokens(tokens, run_id)
    waited = threading.Event()
    while True:
        facts, row = _look(rt, run_id, scope, cursor)
        said = False
        for event in reader.read(cursor):
            said = True
            yield event
        for event in facts:
            said, cursor = True, event.cursor
            yield event
            if event.is_terminal and _is_last(event, row, facts):
                return
        if said:
            quiet_since, pause_s = time.monotonic(), _LOOK_S
            continue
        if timeout_s is not None and time.monotonic() - quiet_since >= timeout_s:
            raise WaitTimeout(f"run {run_id} is {row['state']} and nothing happened for {timeout_s:g} s")
        waited.wait(pause_s)
        pause_s = min(pause_s * 1.5, _MOST_LOOK_S)


def _is_last(event: StreamEvent, row: Row, facts: list[StreamEvent]) -> bool:
    """A pause ends the stream only while the run is in it: one that was answered meanwhile is history."""
    if event.kind is not StreamKind.SUSPENDED:
        return True
    return bool(row["state"] == "paused") and event is facts[-1]


def _look(rt: Runtime, run_id: str, scope: str, after: int) -> tuple[list[StreamEvent], Row]:
    with rt.database.read() as unit:
        # Facts first: the row read after them is at least as new.
        rows = stream.facts(unit, run_id, after)
        row = runs.get_scoped(unit, run_id, scope)
        if row is None:
            raise RunNotFound(f"there is no run {run_id} in this scope")
        return [event for fact in rows for event in _told(unit, row, fact)], row


def _told(unit: Unit, run: Row, fact: Row) -> Iterator[StreamEvent]:
    def event(kind: StreamKind, **data: Any) -> StreamEvent:
        return StreamEvent(kind=kind, run_id=run["id"], cursor=fact["seq"], data=data)

    if fact["source"] == "step":
        yield event(StreamKind.STEP, step_id=fact["id"], index=fact["step_index"], type="generation")
    elif fact["source"] == "message":
        for call in json.loads(fact["tool_calls"]):
            yield event(
                StreamKind.TOOL_CALL, tool_name=call["name"], arguments=call["arguments"], tool_id=call["id"]
            )
    else:
        yield from _told_event(unit, run, fact, event)


def _told_event(unit: Unit, run: Row, fact: Row, event: Any) -> Iterator[StreamEvent]:
    name = str(fact["kind"]).removeprefix("run.")
    if name == "claim":
        yield event(StreamKind.RUN_STARTED, agent=run["agent"], resumed=int(fact["revision"]) > 2)
    elif name in ("pause", "uncertain"):
        yield from _told_pause(unit, run, fact, event)
    elif name == "complete":
        usage = run["usage"] or {}
        used = int(usage.get("input_tokens", 0)) + int(usage.get("output_tokens", 0))
        yield event(StreamKind.DONE, output=run["output"], tokens_used=used, duration_ms=_duration_ms(run))
    elif name in ("fail", "reject", "stop", "expire", "expire_admission"):
        yield event(StreamKind.ERROR, code=run["error_code"], message=run["error_text"])
    elif name.startswith("cancel") or name == "start_by":
        yield event(StreamKind.ERROR, code=run["error_code"] or "cancelled", message="cancelled")
    elif name == "close":
        yield event(StreamKind.INCOMPLETE, code=run["error_code"])


def _told_pause(unit: Unit, run: Row, fact: Row, event: Any) -> Iterator[StreamEvent]:
    pause = suspensions.at_revision(unit, run["id"], int(fact["revision"]))
    if pause is None:
        return
    asked = checkpoints.of_pause(unit, pause["id"])
    if asked is not None:
        yield event(
            StreamKind.CHECKPOINT, checkpoint_id=asked["id"], kind=asked["kind"], reason=asked["reason"]
        )
    pending = [
        {"id": call["call_id"], "name": call["tool"], "arguments": call["arguments"]}
        for call in suspensions.pending(unit, pause["id"])
    ]
    yield event(
        StreamKind.SUSPENDED,
        reason=pause["reason"],
        suspension_id=pause["id"],
        pending=pending,
        expires_at=pause["expires_at"].isoformat() if pause["expires_at"] else None,
    )


def _duration_ms(run: Row) -> int | None:
    if run["started_at"] is None or run["completed_at"] is None:
        return None
    return int((run["completed_at"] - run["started_at"]).total_seconds() * 1000)


class _Tokens:
    """Reads the tokens of a run and tells gaps."""

    def __init__(self, source: TokenSource | None, run_id: str) -> None:
        self._source = source
        self._run_id = run_id
        self._place: str | None = None
        self._expected: dict[int, int] = {}

    def read(self, cursor: int) -> Iterator[StreamEvent]:
        if self._source is None:
            return
        items, self._place = self._source.read(self._run_id, self._place)
        for item in items:
            wanted = self._expected.get(item.step, 0)
            if item.index > wanted:
                lost = {"step": item.step, "from": wanted, "to": item.index - 1}
                yield StreamEvent(kind=StreamKind.LOST, run_id=self._run_id, cursor=cursor, data=lost)
            self._expected[item.step] = item.index + 1
            data = {"content": item.text, "index": item.index, "step": item.step}
            yield StreamEvent(kind=StreamKind.TOKEN, run_id=self._run_id, cursor=cursor, data=data)

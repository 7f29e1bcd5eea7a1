"""Follow a run from any process: durable facts from rows by cursor, tokens from the capped stream beside them.

A client that hangs up changes nothing. A hand-off or a lapse does not end a stream: it goes on with the next worker.
Source: runs.md 6.12; ruling 58; bug case C10.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
from anyio import to_thread

from cortex_workers.engine.runtime import Runtime
from cortex_workers.engine.validate import checked_id
from cortex_workers.engine.watched_tokens import WatchedTokens
from cortex_workers.errors import RunNotFound, WaitTimeout
from cortex_workers.ports import TokenSource
from cortex_workers.schemas.ids import RUN
from cortex_workers.schemas.lifecycle import RunState, transition
from cortex_workers.schemas.stream import StreamEvent, StreamKind
from cortex_workers.schemas.suspension import PendingKind
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

    No connection and no lock is held between two looks. A pause that the cursor has passed is waited out; an end that
    it has passed is told once more. Whose ``tokens`` are read is closed at the end.
    Raises: InvalidId, RunNotFound; WaitTimeout when nothing at all happens for ``timeout_s`` seconds; StoreUnavailable
    (attach again with the last cursor).
    """
    return _follow(_Follower(rt, checked_id(RUN, run_id), scope, after, timeout_s, tokens))


def _follow(follower: _Follower) -> Iterator[StreamEvent]:
    waited = threading.Event()
    try:
        while not follower.over:
            found = follower.look()
            yield from found
            if not found:
                waited.wait(follower.pause())
    finally:
        follower.close()


def afollow(
    rt: Runtime,
    run_id: str,
    scope: str,
    *,
    after: int = -1,
    timeout_s: float | None = None,
    tokens: TokenSource | None = None,
) -> AsyncIterator[StreamEvent]:
    """The same for an event loop: each look borrows a thread for its moment, waiting takes none.

    Raises: as ``follow``.
    """
    return _afollow(_Follower(rt, checked_id(RUN, run_id), scope, after, timeout_s, tokens))


async def _afollow(follower: _Follower) -> AsyncIterator[StreamEvent]:
    try:
        while not follower.over:
            found = await to_thread.run_sync(follower.look)
            for event in found:
                yield event
            if not found:
                await anyio.sleep(follower.pause())
    finally:
        follower.close()


class _Follower:
    """One client's place in a run. ``over`` tells that the last event was given."""

    def __init__(
        self,
        rt: Runtime,
        run_id: str,
        scope: str,
        after: int,
        timeout_s: float | None,
        tokens: TokenSource | None,
    ) -> None:
        self._rt = rt
        self._run_id = run_id
        self._scope = scope
        self._cursor = after
        self._timeout_s = timeout_s
        self._source = tokens
        self._tokens: WatchedTokens | None = None
        self._state = "unknown"
        self._quiet_since = time.monotonic()
        self._pause_s = _LOOK_S
        self.over = False

    def look(self) -> list[StreamEvent]:
        """What is new, in order; empty when nothing is.

        Raises: RunNotFound.
        """
        tokens = self._watched()
        # Tokens first: whatever they belong to is committed before them, so its fact is seen below.
        tokens.fetch()
        with self._rt.database.read() as unit:
            facts = stream.facts(unit, self._run_id, self._cursor)
            row = runs.get_scoped(unit, self._run_id, self._scope)
            if row is None:
                raise RunNotFound(f"there is no run {self._run_id} in this scope")
            if not facts and row["completed_at"] is not None:
                # It may have ended since that statement; only what is still empty then was all seen before.
                end = int(row["next_seq"]) - 2
                facts = stream.facts(unit, self._run_id, self._cursor) or stream.facts(
                    unit, self._run_id, end
                )
            told = [(fact, list(_told(unit, row, fact))) for fact in facts]
        self._state = row["state"]
        found: list[StreamEvent] = []
        for fact, events in told:
            if fact["source"] == "step":
                found += tokens.end_step(fact["index"], fact["chars"], self._streams(row), self._cursor)
            found += self._give(fact, events, row, tokens)
            if self.over:
                break
        if not self.over and len(facts) < stream.PAGE:
            found += tokens.give(self._cursor)
        if found:
            self._quiet_since, self._pause_s = time.monotonic(), _LOOK_S
        return found

    def pause(self) -> float:
        """How long to wait before the next look.

        Raises: WaitTimeout.
        """
        quiet_s = time.monotonic() - self._quiet_since
        if self._timeout_s is not None and quiet_s >= self._timeout_s:
            raise WaitTimeout(
                f"run {self._run_id} is {self._state} and nothing happened for {self._timeout_s:g} s"
            )
        wait_s, self._pause_s = self._pause_s, min(self._pause_s * 1.5, _MOST_LOOK_S)
        return wait_s if self._timeout_s is None else min(wait_s, self._timeout_s - quiet_s)

    def close(self) -> None:
        """Close the source of tokens."""
        if self._source is not None:
            self._source.close()

    def _watched(self) -> WatchedTokens:
        """The reader of tokens: what belongs to steps that the cursor has passed was given before."""
        if self._tokens is None:
            closed = -1
            if self._cursor >= 0 and self._source is not None:
                with self._rt.database.read() as unit:
                    closed = stream.last_step(unit, self._run_id, self._cursor)
            self._tokens = WatchedTokens(self._source, self._run_id, closed)
        return self._tokens

    def _streams(self, row: Row) -> bool:
        definition = self._rt.versions.get(row["agent_digest"])
        return definition is not None and definition.stream

    def _give(
        self, fact: Row, events: list[StreamEvent], row: Row, tokens: WatchedTokens
    ) -> list[StreamEvent]:
        """The events of one fact. Only the last carries its ordinal, so that a cursor never passes half a fact."""
        found: list[StreamEvent] = []
        for event in events:
            if event.is_terminal and _is_last(event, row):
                found += tokens.give(self._cursor)
                self.over = True
            last = event is events[-1]
            found.append(event if last else event.model_copy(update={"cursor": fact["seq"] - 1}))
        self._cursor = max(self._cursor, fact["seq"])
        return found


def _is_last(event: StreamEvent, row: Row) -> bool:
    """A pause ends the stream only while the run is in this very one: one that was answered meanwhile is history."""
    if event.kind is not StreamKind.SUSPENDED:
        return True
    return bool(row["state"] == RunState.PAUSED and row["suspension_id"] == event.data["suspension_id"])


def _told(unit: Unit, run: Row, fact: Row) -> Iterator[StreamEvent]:
    def event(kind: StreamKind, /, **data: Any) -> StreamEvent:
        return StreamEvent(kind=kind, run_id=run["id"], cursor=fact["seq"], data=data)

    if fact["source"] == "step":
        yield event(StreamKind.STEP, step_id=fact["id"], index=fact["index"], type="generation")
    elif fact["source"] == "message":
        for call in json.loads(fact["tool_calls"]):
            yield event(
                StreamKind.TOOL_CALL, tool_name=call["name"], arguments=call["arguments"], tool_id=call["id"]
            )
    else:
        yield from _told_event(unit, run, fact, event)


def _told_event(unit: Unit, run: Row, fact: Row, event: Any) -> Iterator[StreamEvent]:
    name = str(fact["kind"]).removeprefix("run.")
    try:
        row = transition("run", name)
    except KeyError:
        return  # what a newer worker wrote
    if row.target == RunState.RUNNING:
        resumed = stream.was_begun(unit, run["id"], fact["seq"])
        yield event(StreamKind.RUN_STARTED, agent=run["agent"], resumed=resumed)
    elif row.target == RunState.PAUSED:
        yield from _told_pause(unit, run, fact, event)
    elif row.target == RunState.COMPLETED:
        usage = run["usage"] or {}
        used = int(usage.get("input_tokens", 0)) + int(usage.get("output_tokens", 0))
        yield event(StreamKind.DONE, output=run["output"], tokens_used=used, duration_ms=_duration_ms(run))
    elif row.target == RunState.INCOMPLETE:
        yield event(StreamKind.INCOMPLETE, code=run["error_code"])
    elif row.target == RunState.CANCELLED:
        yield event(StreamKind.ERROR, code=run["error_code"] or "cancelled", message="cancelled")
    elif row.ends:
        yield event(StreamKind.ERROR, code=run["error_code"], message=run["error_text"])


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
        {"id": call["call_id"], "name": call["tool"], "arguments": _to_run(call)}
        for call in suspensions.pending(unit, pause["id"])
    ]
    yield event(
        StreamKind.SUSPENDED,
        reason=pause["reason"],
        suspension_id=pause["id"],
        pending=pending,
        expires_at=pause["expires_at"].isoformat() if pause["expires_at"] else None,
    )


def _to_run(call: Row) -> str:
    """A call's arguments: those that a person changed, where it was approved before and now runs outside."""
    amended = call["executed_args"] if call["kind"] == PendingKind.EXTERNAL else None
    return str(amended or call["arguments"])


def _duration_ms(run: Row) -> int | None:
    if run["started_at"] is None or run["completed_at"] is None:
        return None
    return int((run["completed_at"] - run["started_at"]).total_seconds() * 1000)

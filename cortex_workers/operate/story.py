"""A run's traces told in order: what happened, when, by whom, and what it was about.

Each list of rows gives its own entries; the ordinals of the run put them in order, which is the order of the commits. A
call stands where its result came in, behind the end of the run that ended it, or where the term began that has left it
open.
Source: rulings 8, 48, 58.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

from pydantic import Field

from cortex_workers.operate.words import clock_time, cut, iso, span
from cortex_workers.schemas.base import Document
from cortex_workers.schemas.llm import Usage
from cortex_workers.store.overview import Traces
from cortex_workers.store.transitions import Row

_CLOSINGS = ("close_reclaimable", "close_paused", "close_running")


class Entry(Document):
    """One thing that happened. ``kind``: event, step, call or question; ``mark`` tells good from bad."""

    at: datetime
    ordinal: int
    kind: str
    what: str
    mark: str = "plain"
    details: tuple[str, ...] = ()
    data: dict[str, Any] = Field(default_factory=dict)


def entries(traces: Traces, most: int | None = 200) -> list[Entry]:
    """The story of a run; contents are cut to ``most`` characters (None: whole)."""
    found = [*_events(traces, most), *_steps(traces, most), *_calls(traces, most), *_superseded(traces)]
    # What came of an event stands behind it, whatever their clocks say.
    return sorted(found, key=lambda entry: (entry.ordinal, entry.kind != "event", entry.at))


# --- What moved the run -----------------------------------------------------------------------------------------------


def _events(traces: Traces, most: int | None) -> Iterator[Entry]:
    for row in traces.events:
        name = row["kind"].removeprefix("run.")
        say, mark = _SAID.get(name, (_plainly, "plain"))
        data = {key: row[key] for key in ("actor", "worker_id", "revision") if row[key] is not None}
        yield Entry(
            at=row["at"],
            ordinal=row["run_seq"],
            kind="event",
            what=say(row, traces),
            mark=mark,
            details=_of_event(name, row, traces, most),
            data={"name": name, **data, **(row["data"] or {}), **_asked(row, traces)},
        )


def _of_event(name: str, row: Row, traces: Traces, most: int | None) -> tuple[str, ...]:
    if name == "enqueue":
        return (f"input: {cut(traces.spec.get('input', ''), most)}",)
    if name == "complete":
        return (f"output: {cut(traces.run['output'] or '', most)}",)
    if name in ("fail", "expire", "start_by", "expire_admission", *_CLOSINGS) and traces.run["error_text"]:
        return (cut(traces.run["error_text"], most),)
    if name not in ("decide", "reject", "repeat", "settle", "stop"):
        return ()
    decision = (_question(row, traces) or {}).get("decision") or {}
    amended = decision.get("amended_arguments")
    told = [
        ("reason", decision.get("reason")),
        ("amended arguments", json.dumps(amended) if amended else None),
    ]
    return tuple(f"{what}: {cut(text, most)}" for what, text in told if text)


def _question(row: Row, traces: Traces) -> Row | None:
    """The checkpoint that an event is about: the one it names, or the one of the pause it began."""
    named = (row["data"] or {}).get("checkpoint_id")
    pause = _pause(row, traces)
    for question in traces.questions:
        if question["id"] == named or (pause is not None and question["suspension_id"] == pause["id"]):
            return question
    return None


def _pause(row: Row, traces: Traces) -> Row | None:
    if row["kind"] not in ("run.pause", "run.uncertain"):
        return None
    return next((each for each in traces.pauses if each["run_revision"] == row["revision"]), None)


def _asked(row: Row, traces: Traces) -> dict[str, Any]:
    """What a pause asks, for machines."""
    pause, question = _pause(row, traces), _question(row, traces)
    if pause is None:
        return {"decision": question["decision"]} if question is not None else {}
    return {
        "suspension_id": pause["id"],
        "checkpoint_id": question["id"] if question is not None else None,
        "expires_at": iso(pause["expires_at"]) if pause["expires_at"] else None,
        "ended_as": pause["ended_as"],
        "calls": [call["call_id"] for call in pause["pending"]],
    }


def _reason(row: Row) -> str:
    found = (row["data"] or {}).get("reason")
    return f": {found}" if found else ""


def _enqueued(row: Row, traces: Traces) -> str:
    run = traces.run
    return f"enqueued for agent {run['agent']} (version {run['agent_digest'][:8]}) in session {run['session_id']}"


def _claimed(row: Row, _: Traces) -> str:
    return f"claimed by worker {row['worker_id']} (revision {row['revision']})"


def _handed_back(row: Row, _: Traces) -> str:
    wait = (row["data"] or {}).get("wait_s")
    return f"handed back by {row['worker_id']}{_reason(row)}" + (f", for {span(wait)}" if wait else "")


def _lapsed(row: Row, traces: Traces) -> str:
    owner = (row["data"] or {}).get("owner") or "its worker"
    before = [
        each for each in traces.events if each["run_seq"] <= row["run_seq"] and each["kind"] == "run.lapse"
    ]
    return f"lease lapsed: {owner} went silent (reclaim {len(before)})"


def _cancelled(row: Row, _: Traces) -> str:
    return f"cancelled by {row['actor'] or 'unknown'}{_reason(row)}"


def _failed(row: Row, traces: Traces) -> str:
    return f"failed: {traces.run['error_code'] or 'no code'}"


def _plainly(row: Row, _: Traces) -> str:
    by = f" by {row['actor']}" if row["actor"] else ""
    return f"{row['kind'].removeprefix('run.').replace('_', ' ')}{by}{_reason(row)}"


def _paused(row: Row, traces: Traces) -> str:
    pause, question = _pause(row, traces), _question(row, traces)
    if pause is None:
        return "paused"
    tools = ", ".join(dict.fromkeys(call["tool"] for call in pause["pending"]))
    until = (
        f"until {pause['expires_at']:%Y-%m-%d %H:%M:%S} UTC" if pause["expires_at"] else "without a deadline"
    )
    if pause["next_poll_at"] is not None:
        again = clock_time(pause["next_poll_at"])
        return f"paused: the model call ({pause['deferral_kind']}) is made again after {again} UTC"
    if pause["reason"] == "external_tool":
        return f"paused: waits for results of {tools} {until}"
    if question is None:
        return "paused"
    if row["kind"] == "run.uncertain":
        return f"paused: {question['id']} asks what became of {tools}"
    about = f"a model call ({pause['deferral_kind']})" if pause["deferral_kind"] is not None else tools
    return f"paused: {question['id']} asks for approval of {about} {until}"


def _decided(row: Row, traces: Traces) -> str:
    """Who said what, and what came of it."""
    decision = (_question(row, traces) or {}).get("decision") or {}
    by, actor = decision.get("decided_by"), decision.get("actor") or row["actor"] or "unknown"
    who = f"{by} (as {actor})" if by and by != actor else actor
    approved = "approved" if decision.get("approved") else "rejected"
    verdict = {"run.decide": approved, "run.repeat": approved, "run.reject": "rejected"}
    said = (
        verdict.get(row["kind"]) or f"settled as {str(decision.get('outcome') or 'stop').replace('_', ' ')}"
    )
    then = "failed" if row["kind"] in ("run.reject", "run.stop") else "ready again"
    return f"{said} by {who}, {then}"


def _admitted(row: Row, _: Traces) -> str:
    size = (row["data"] or {}).get("bytes")
    return f"answered by {row['actor'] or 'unknown'}" + (f" ({size} bytes)" if size else "") + ", ready again"


def _given_up(row: Row, _: Traces) -> str:
    return f"failed: {row['actor'] or 'unknown'} gave up the answer, nobody had begun with it"


def _closed(row: Row, _: Traces) -> str:
    return f"closed as incomplete by {row['actor'] or 'unknown'}"


def _saying(text: str) -> Callable[[Row, Traces], str]:
    return lambda row, _traces: text + _reason(row)


_SAID: dict[str, tuple[Callable[[Row, Traces], str], str]] = {
    "enqueue": (_enqueued, "start"),
    "claim": (_claimed, "plain"),
    "hand_back": (_handed_back, "warn"),
    "hand_back_reclaimable": (_handed_back, "warn"),
    "pause": (_paused, "wait"),
    "uncertain": (_paused, "warn"),
    "slice_end": (_saying("slice ended, goes on in another task"), "plain"),
    "hand_off": (_saying("handed off"), "warn"),
    "watchdog": (_saying("handed off by the watchdog at the drain's deadline"), "warn"),
    "lapse": (_lapsed, "bad"),
    "complete": (_saying("completed"), "good"),
    "fail": (_failed, "bad"),
    "decide": (_decided, "good"),
    "reject": (_decided, "bad"),
    "repeat": (_decided, "good"),
    "admit": (_admitted, "good"),
    "poll": (_saying("ready again: the model's provider is asked once more"), "plain"),
    "expire_admission": (_given_up, "bad"),
    "settle": (_decided, "good"),
    "stop": (_decided, "bad"),
    "expire": (_saying("failed: nobody answered in time"), "bad"),
    "expire_to_model": (_saying("ready again: nobody answered in time, the model is told"), "warn"),
    "start_by": (_saying("cancelled: not started in time"), "bad"),
    "cancel_created": (_cancelled, "bad"),
    "cancel_ready": (_cancelled, "bad"),
    "cancel_reclaimable": (_cancelled, "bad"),
    "cancel_running": (_cancelled, "bad"),
    "cancel_paused": (_cancelled, "bad"),
    "close_reclaimable": (_closed, "bad"),
    "close_paused": (_closed, "bad"),
    "close_running": (_closed, "bad"),
}
"""How each transition is told, and whether it is good news. A row that is missing here is told by its name."""


# --- What the model and the tools did ---------------------------------------------------------------------------------


def _steps(traces: Traces, most: int | None) -> Iterator[Entry]:
    said = {item.step_index: item.message for item in traces.messages if item.message.role == "assistant"}
    for row in traces.steps:
        usage = Usage.model_validate(row["usage"] or {})
        message = said.get(row["step_index"])
        asked = [call.name for call in message.tool_calls] if message is not None else []
        took = span(row["completed_at"] - row["started_at"])
        tokens = f"{usage.input_tokens} in, {usage.output_tokens} out"
        text = message.content if message is not None else ""
        yield Entry(
            at=row["completed_at"],
            ordinal=row["seq"],
            kind="step",
            what=f"step {row['step_index']}: {row['model']}, {tokens}, {took}"
            + (f" → {', '.join(asked)}" if asked else ""),
            details=(f"said: {cut(text, most)}",) if text and (asked or most is None) else (),
            data={
                "step": row["step_index"],
                "model": row["model"],
                "usage": usage.model_dump(),
                "finish_reason": row["finish_reason"],
                "started_at": iso(row["started_at"]),
                "calls": asked,
            },
        )


def _calls(traces: Traces, most: int | None) -> Iterator[Entry]:
    results = {item.seq: item.message.content for item in traces.messages}
    terms = {row["revision"]: row["run_seq"] for row in traces.events if row["kind"] == "run.claim"}
    for row in traces.calls:
        arguments = row["executed_args"] or traces.arguments.get(row["call_id"], "{}")
        result = results.get(row["result_seq"])
        yield Entry(
            at=row["finished_at"] or row["started_at"] or row["created_at"],
            ordinal=row["result_seq"] or _open_at(row, traces, terms),
            kind="call",
            what=f"call {row['tool']}({cut(arguments, most)}) {_state_of(row)}",
            mark=_CALL_MARKS.get(row["state"], "plain"),
            details=tuple(_of_call(row, traces, result, most)),
            data={
                **{key: row[key] for key in _CALL_FIELDS},
                "arguments": arguments,
                "result": result if result is None else cut(result, most),
                "started_at": iso(row["started_at"]) if row["started_at"] else None,
                "finished_at": iso(row["finished_at"]) if row["finished_at"] else None,
            },
        )


def _open_at(row: Row, traces: Traces, terms: Mapping[int, int]) -> int:
    """Where a call stands that has no result: behind what ended it with the run, or where its term began."""
    began = max(row["seq"], terms.get(row["term_revision"], 0))
    if row["finished_at"] is None or not traces.events:
        return int(began)
    return int(max(began, traces.events[-1]["run_seq"]))


_CALL_MARKS = {"completed": "good", "failed": "warn", "denied": "warn", "unknown": "bad", "started": "bad"}
_CALL_FIELDS = (
    "call_id", "tool", "state", "attempt", "step_index", "amended_by", "error", "settled_as", "settled_by",
    "late_result", "term_owner", "term_revision",
)  # fmt: skip


def _state_of(row: Row) -> str:
    if row["state"] == "pending":
        return "waits"
    again = f", attempt {row['attempt']}" if row["attempt"] > 1 else ""
    if row["state"] == "started":
        return f"started{again}, no outcome yet"
    took = ""
    if row["started_at"] and row["finished_at"] and row["settled_as"] != "happened":
        took = f" in {span(max((row['finished_at'] - row['started_at']).total_seconds(), 0.0))}"
    return f"{row['state']}{took}{again}"


def _of_call(row: Row, traces: Traces, result: str | None, most: int | None) -> Iterator[str]:
    if row["executed_args"] is not None:
        proposed = cut(traces.arguments.get(row["call_id"], "{}"), most)
        yield f"amended by {row['amended_by'] or 'unknown'}; the model had asked for {proposed}"
    for attempt in range(1, row["attempt"]):
        asked = _asked_about(row["call_id"], attempt, traces)
        yield f"attempt {attempt} left no outcome" + (f"; {asked} asked what became of it" if asked else "")
    if row["error"]:
        yield f"error: {cut(row['error'], most)}"
    if result is not None and not row["error"]:
        yield f"result: {cut(result, most)}"
    if row["settled_as"]:
        yield f"settled as {row['settled_as'].replace('_', ' ')} by {row['settled_by'] or 'unknown'}"
    if row["late_result"] is not None:
        late = row["late_result"] or "never entered"
        yield f"late word of its old worker at {clock_time(row['late_at'])}: {cut(late, most)} (evidence only)"


def _asked_about(call_id: str, attempt: int, traces: Traces) -> str | None:
    """The question about one attempt of a call, where somebody was asked."""
    pauses = {
        pause["id"] for pause in traces.pauses if call_id in [each["call_id"] for each in pause["pending"]]
    }
    for question in traces.questions:
        about = question["kind"] == "uncertain_effect" and question["suspension_id"] in pauses
        if about and (question["metadata"] or {}).get("attempt") == attempt:
            return str(question["id"])
    return None


# --- What people were asked -------------------------------------------------------------------------------------------


def _superseded(traces: Traces) -> Iterator[Entry]:
    """Questions that were closed without an event of the run: no decision could reach them any more."""
    last = int(traces.run["next_seq"])
    for row in traces.questions:
        if row["closed_as"] == "superseded":
            yield Entry(
                at=row["decided_at"],
                ordinal=last + 1,
                kind="question",
                what=f"{row['id']} closed: {(row['decision'] or {}).get('reason', 'superseded')}",
                data={"checkpoint_id": row["id"], "closed_as": row["closed_as"]},
            )

"""Admit answers from outside: retained byte for byte against the exact pause, which they end in one transaction.

Two doors: every call of the pause at once, or one call after the other; the last one admits them all.
Source: seed suspension; runs.md 3.4; rulings 41 to 44; bug cases C45, C46.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cortex_workers.engine import refusals
from cortex_workers.engine.runtime import Runtime
from cortex_workers.engine.validate import checked_id, checked_json, checked_text
from cortex_workers.errors import (
    AdmissionConflict,
    InputTooLarge,
    InvalidState,
    NotAgentReplyResumable,
    NotPausedYet,
    NotSuspended,
    RequiresApproval,
    ResultsMismatch,
    RunNotFound,
    SuspensionExpired,
)
from cortex_workers.host import ResultNotEncodable, encode_result
from cortex_workers.schemas.admission import MAX_RESUME_INPUT_BYTES, ResumeAdmission, ToolResult
from cortex_workers.schemas.base import canonical_json
from cortex_workers.schemas.ids import RUN
from cortex_workers.schemas.lifecycle import TERMINAL_RUN_STATES
from cortex_workers.schemas.suspension import PendingKind, SuspendReason, Suspension
from cortex_workers.store import admissions, runs, sessions, suspensions, transcript, turns
from cortex_workers.store.transitions import Guard, Move, Row
from cortex_workers.store.unit import Unit

MOST_RESULTS = 10_000
"""More than any turn asks for."""
_ROOM = "x" * 1_000
"""What is left for each call that is still open, so that an error at least fits in."""


@dataclass(frozen=True, slots=True)
class _Pause:
    """A run, the pause that the answer is for, and the calls of that pause."""

    run: Row
    suspension: Row
    pending: list[Row]


def waits_for(rt: Runtime, run_id: str, scope: str) -> Suspension | None:
    """What a paused run waits for, its calls with what they will run with; None while it does not wait.

    Raises: InvalidId, RunNotFound.
    """
    checked_id(RUN, run_id)
    with rt.database.read() as unit:
        run = runs.get_scoped(unit, run_id, scope)
        if run is None:
            raise RunNotFound(f"there is no run {run_id} in this scope")
        if run["state"] != "paused":
            return None
        row = suspensions.get(unit, run["suspension_id"])
        return suspensions.to_suspension(row, suspensions.pending(unit, row["id"])) if row else None


def provide_results(
    rt: Runtime, run_id: str, results: Sequence[ToolResult], scope: str, actor: str
) -> ResumeAdmission:
    """Answer every call of a run's pause at once; the same bytes again return the original receipt (not fresh).

    Raises: ResultsMismatch, RequiresApproval, NotAgentReplyResumable, SuspensionExpired, NotSuspended, NotPausedYet
    (send it again), AdmissionConflict, InvalidState after a partial answer, InputTooLarge, RunNotFound, InvalidId.
    Nothing is written by a refusal.
    """
    with refusals.told("provide_results", RUN, run_id, actor):
        return _provide_results(rt, run_id, results, scope, actor)


def _provide_results(
    rt: Runtime, run_id: str, results: Sequence[ToolResult], scope: str, actor: str
) -> ResumeAdmission:
    checked_id(RUN, run_id)
    if len(results) > MOST_RESULTS:
        raise InputTooLarge(f"an answer has at most {MOST_RESULTS} results, this one has {len(results)}")
    given = [_checked(item) for item in results]
    data = _encode(given)
    pause = _find(rt, run_id, [item["tool_call_id"] for item in given], scope)
    known = _known(rt, pause, data)
    if known is not None:
        return known
    _refuse_kind(pause)
    _refuse_mismatch(pause, [item["tool_call_id"] for item in given])
    _refuse_partial(pause.pending)
    done = rt.database.run(lambda unit: _admit_whole(unit, pause, data, actor))
    return done if done is not None else _lost(rt, run_id, pause, data, scope)


def provide_result(
    rt: Runtime, run_id: str, result: ToolResult, scope: str, actor: str
) -> ResumeAdmission | None:
    """Answer one call of a run's pause; None while others are open, the admission with the last one.

    Raises: as ``provide_results``; AdmissionConflict when this call was answered otherwise.
    """
    with refusals.told("provide_result", RUN, run_id, actor):
        return _provide_result(rt, run_id, result, scope, actor)


def _provide_result(
    rt: Runtime, run_id: str, result: ToolResult, scope: str, actor: str
) -> ResumeAdmission | None:
    checked_id(RUN, run_id)
    given = _checked(result)
    pause = _find(rt, run_id, [given["tool_call_id"]], scope)
    if given["tool_call_id"] not in {call["call_id"] for call in pause.pending}:
        raise ResultsMismatch(f"no call {given['tool_call_id'][:80]!r} waits here")
    retained = _retained(rt, pause, given)
    if retained is not None:
        return retained
    data = canonical_json(given).encode()
    if _kept(pause, given["tool_call_id"], data):
        return None
    _refuse_kind(pause)
    outcome = rt.database.run(lambda unit: _partial(unit, pause, given["tool_call_id"], data, actor))
    if isinstance(outcome, ResumeAdmission) or outcome == "kept":
        return outcome if isinstance(outcome, ResumeAdmission) else None
    return _retained(rt, pause, given) or _lost(rt, run_id, pause, _encode([given]), scope)


def _checked(item: ToolResult) -> dict[str, Any]:
    """One result as it is retained: its content in JSON's own types, or its error."""
    checked_text("a call id", item.tool_call_id)
    given: dict[str, Any] = {"tool_call_id": item.tool_call_id}
    if item.error is not None:
        checked_text("an error", item.error)
        return {**given, "error": item.error}
    if isinstance(item.content, str):
        checked_text("a result", item.content)
        return {**given, "content": item.content}
    try:
        content = json.loads(encode_result(item.content))
    except ResultNotEncodable as error:
        raise ResultsMismatch(str(error).removeprefix("the tool ran, but ")) from None
    checked_json(content, "a result")
    return {**given, "content": content}


def _encode(given: Sequence[dict[str, Any]]) -> bytes:
    data = canonical_json({"tool_results": sorted(given, key=lambda item: item["tool_call_id"])}).encode()
    if len(data) > MAX_RESUME_INPUT_BYTES:
        raise InputTooLarge(f"the answer has {len(data)} bytes, the limit is {MAX_RESUME_INPUT_BYTES}")
    return data


def _find(rt: Runtime, run_id: str, call_ids: Sequence[str], scope: str) -> _Pause:
    """The pause that these calls wait or waited in: found by (run, call id), whatever became of it since."""
    with rt.database.read() as unit:
        run = runs.get_scoped(unit, run_id, scope)
        if run is None:
            raise RunNotFound(f"there is no run {run_id} in this scope")
        suspension_id = suspensions.of_calls(unit, run_id, call_ids)
        if suspension_id is None and run["state"] == "paused":
            suspension_id = run["suspension_id"]
        suspension = suspensions.get(unit, suspension_id) if suspension_id is not None else None
        pending = suspensions.pending(unit, suspension_id) if suspension_id is not None else []
        calls = transcript.load_calls(unit, run_id) if suspension is None else []
        if suspension is not None and suspension["reason"] == SuspendReason.APPROVAL:
            _refuse_early(rt, unit, run, pending, call_ids)
    if suspension is not None:
        return _Pause(run, suspension, pending)
    if run["state"] in TERMINAL_RUN_STATES:
        raise NotSuspended(f"the run has ended: {run['state']}")
    for call in calls:
        if call["call_id"] in call_ids and call["class"] != "external":
            # No pause to come will wait for it, so nobody is told to try again.
            raise NotSuspended(f"the call {call['call_id'][:80]!r} runs inside and takes no results")
    raise NotPausedYet(f"the run is {run['state']} and does not wait for this call (yet)")


def _refuse_early(rt: Runtime, unit: Unit, run: Row, pending: Sequence[Row], call_ids: Sequence[str]) -> None:
    """Calls of the turn whose results are wanted once its approvals are decided are answered too early, not wrongly.

    Raises: NotPausedYet.
    """
    agent = rt.versions.get(run["agent_digest"])
    said = [item.message for item in transcript.load_messages(unit, run["id"]) if item.message.tool_calls]
    if agent is None or not said:
        return
    no_more = {call["call_id"] for call in transcript.load_calls(unit, run["id"]) if call["finished_at"]}
    no_more |= {call["call_id"] for call in pending}
    outside = {spec.name for spec in agent.tools if spec.tool_class == "external"}
    later = {call.id for call in said[-1].tool_calls if call.name in outside} - no_more
    if call_ids and later.issuperset(call_ids):
        raise NotPausedYet("the run waits for an approval first")


def _known(rt: Runtime, pause: _Pause, data: bytes) -> ResumeAdmission | None:
    """The original receipt for the same bytes.

    Raises: AdmissionConflict for other bytes.
    """
    with rt.database.read() as unit:
        row = admissions.get(unit, pause.run["id"], pause.suspension["id"])
    if row is None:
        return None
    if row["request_digest"] != admissions.input_digest(data):
        raise AdmissionConflict(
            f"another answer was admitted at {row['admitted_at']:%Y-%m-%d %H:%M:%S} UTC by {row['admitted_by']}",
            admission=admissions.to_admission(row),
        )
    return admissions.to_admission(row)


def _retained(rt: Runtime, pause: _Pause, given: dict[str, Any]) -> ResumeAdmission | None:
    """The receipt of the whole, when it is in and holds this very result.

    Raises: AdmissionConflict when it holds another one for this call.
    """
    with rt.database.read() as unit:
        row = admissions.get(unit, pause.run["id"], pause.suspension["id"])
    if row is None:
        return None
    mine = [
        item
        for item in json.loads(bytes(row["input"]))["tool_results"]
        if item["tool_call_id"] == given["tool_call_id"]
    ]
    if canonical_json(mine) != canonical_json([given]):
        raise AdmissionConflict(f"the call {given['tool_call_id'][:80]!r} was answered otherwise before")
    return admissions.to_admission(row)


def _refuse_kind(pause: _Pause) -> None:
    """Each door sees only its own kind (ruling 44)."""
    if pause.suspension["ended_at"] is not None:
        raise _left(pause.suspension)
    reason = pause.suspension["reason"]
    if reason == SuspendReason.APPROVAL:
        raise RequiresApproval("this pause waits for an approval; decide its checkpoint")
    if reason == SuspendReason.AGENT_REPLY:
        raise NotAgentReplyResumable()
    if pause.suspension["deferral_kind"] is not None:
        raise NotSuspended("this pause waits for the model's provider and takes no results")


def _refuse_mismatch(pause: _Pause, call_ids: Sequence[str]) -> None:
    wanted = [call["call_id"] for call in pause.pending if call["kind"] == PendingKind.EXTERNAL]
    for call_id in call_ids:
        if call_id not in wanted:
            raise ResultsMismatch(f"no call {call_id[:80]!r} waits here")
        if call_ids.count(call_id) > 1:
            raise ResultsMismatch(f"the call {call_id[:80]!r} stands twice in this answer")
    missing = [call_id for call_id in wanted if call_id not in call_ids]
    if missing:
        raise ResultsMismatch(f"no result for the call {missing[0][:80]!r}")


def _refuse_partial(pending: Sequence[Row]) -> None:
    if any(call["answered_at"] is not None for call in pending):
        still = [call["call_id"] for call in pending if call["answered_at"] is None]
        raise InvalidState(
            f"calls of this pause were answered one by one; still open: {', '.join(still)[:300]}"
        )


def _admit_whole(unit: Unit, pause: _Pause, data: bytes, actor: str) -> ResumeAdmission | None:
    """Admit unless a single call was answered meanwhile: its answer was confirmed, so it may not be passed over.

    The run is judged as it is under its lock: it may have been read a moment before its pause was stored.
    """
    sessions.lock(unit, pause.run["session_id"])
    run = runs.lock(unit, pause.run["id"])
    if run is None or run["state"] != "paused" or run["suspension_id"] != pause.suspension["id"]:
        return None
    pending = suspensions.pending(unit, pause.suspension["id"])
    _refuse_partial(pending)
    return _admit(unit, _Pause(run, pause.suspension, pending), data, actor, "provide_results")


def _admit(unit: Unit, pause: _Pause, data: bytes, actor: str, door: str) -> ResumeAdmission | None:
    """Retain the answer and make the run ready, under the session's lock; None when somebody was quicker."""
    guard = Guard(suspension_id=pause.suspension["id"], revision=pause.run["revision"])
    note = {"suspension_id": pause.suspension["id"], "door": door, "bytes": len(data)}
    moved = turns.move(unit, "admit", pause.run, guard, Move(actor=actor, data=note))
    if moved is None:
        return None
    sessions.touch(unit, pause.run["session_id"])
    suspensions.answer_all(unit, pause.suspension["id"], actor, door)
    row = admissions.add(
        unit,
        {
            "run_id": pause.run["id"],
            "suspension_id": pause.suspension["id"],
            "scope": pause.run["scope"],
            "input": data,
            "request_digest": admissions.input_digest(data),
            "suspension_digest": pause.suspension["digest"],
            "run_revision": pause.run["revision"],
            "claimed_revision": moved["revision"],
            "admitted_by": actor,
            "door": door,
        },
    )
    return admissions.to_admission(row, fresh=True)


def _partial(
    unit: Unit, pause: _Pause, call_id: str, data: bytes, actor: str
) -> ResumeAdmission | str | None:
    """Keep one answer under the run's row lock; the last one admits all and empties them (ruling 43)."""
    sessions.lock(unit, pause.run["session_id"])
    run = runs.lock(unit, pause.run["id"])
    if run is None or run["state"] != "paused" or run["suspension_id"] != pause.suspension["id"]:
        return None
    suspension = suspensions.get(unit, pause.suspension["id"])
    if suspension is None or suspension["overdue"]:
        return None
    current = _Pause(run, suspension, suspensions.pending(unit, pause.suspension["id"]))
    if _kept(current, call_id, data):
        return "kept"
    others = [call["call_id"] for call in current.pending if call["answered_at"] is None]
    others.remove(call_id)
    room = [{"tool_call_id": each, "error": _ROOM} for each in others]
    kept = suspensions.kept_answers(unit, pause.suspension["id"])
    # The whole must fit: what is confirmed now could else never be admitted.
    whole = _encode([*map(json.loads, kept), json.loads(data), *room])
    if others:
        suspensions.keep_answer(unit, pause.suspension["id"], call_id, data, actor)
        return "kept"
    admitted = _admit(unit, current, whole, actor, "provide_result")
    if admitted is not None:  # else the deadline came in between, and what was kept counts
        suspensions.empty_answers(unit, pause.suspension["id"])
    return admitted


def _kept(pause: _Pause, call_id: str, data: bytes) -> bool:
    """Whether this very answer to a call of several was confirmed before; it counts, whatever became of the pause.

    Raises: AdmissionConflict when another one was.
    """
    mine = next((call for call in pause.pending if call["call_id"] == call_id), None)
    if mine is None or mine["answered_at"] is None or mine["answer_digest"] is None:
        return False
    if mine["answer_digest"] != admissions.input_digest(data):
        raise AdmissionConflict(f"the call {call_id[:80]!r} was answered otherwise before")
    return True


def _lost(rt: Runtime, run_id: str, pause: _Pause, data: bytes, scope: str) -> ResumeAdmission:
    """Why no row matched: the same answer came in meanwhile, too late, or the pause was left.

    Raises: SuspensionExpired, NotSuspended, AdmissionConflict.
    """
    known = _known(rt, pause, data)
    if known is not None:
        return known
    with rt.database.read() as unit:
        run = runs.get_scoped(unit, run_id, scope)
        suspension = suspensions.get(unit, pause.suspension["id"])
    if run is not None and run["state"] == "paused" and suspension is not None and suspension["overdue"]:
        raise _too_late(suspension)
    raise _left(suspension or pause.suspension)


def _left(suspension: Row) -> NotSuspended:
    if suspension["ended_as"] == "expired":
        return _too_late(suspension)
    return NotSuspended("this pause was left in the meantime")


def _too_late(suspension: Row) -> SuspensionExpired:
    return SuspensionExpired(
        f"the deadline of this pause was {suspension['expires_at']:%Y-%m-%d %H:%M:%S} UTC"
    )

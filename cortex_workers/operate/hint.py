"""What a run waits for and what to do about it, in one sentence derived from rows alone.

Source: tables.md (labels are views); rulings 15, 36, 47, 53.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, assert_never

from cortex_workers.operate import serving
from cortex_workers.operate.words import clock_time, many, moment, span
from cortex_workers.schemas.lifecycle import RunState, WaitReason
from cortex_workers.schemas.suspension import SuspendReason
from cortex_workers.store import overview
from cortex_workers.store.claims import READER_VERSION
from cortex_workers.store.overview import Traces
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit


def next_step_hint(unit: Unit, traces: Traces) -> str:
    """What happens next with a run, by whom, until when; for a waiting one also how to help it on."""
    run, now = traces.run, traces.now
    match RunState(run["state"]):
        case RunState.CREATED:
            return "waits for its host to release it"
        case RunState.READY | RunState.RECLAIMABLE:
            return _waiting(unit, traces)
        case RunState.RUNNING:
            return _running(run, now)
        case RunState.PAUSED:
            return _paused(traces)
        case RunState.COMPLETED | RunState.FAILED | RunState.CANCELLED | RunState.INCOMPLETE:
            return _ended(run, now)
        case never:
            assert_never(never)


def _waiting(unit: Unit, traces: Traces) -> str:
    run, now = traces.run, traces.now
    since = span(now - run["state_since"])
    if run["min_reader"] > READER_VERSION:
        return f"{run['state']} for {since}; needs a newer version of cortex-workers (document {run['min_reader']})"
    reason = WaitReason(run["wait_reason"]) if run["wait_reason"] else None
    match reason:
        case None:
            return _claimable(unit, run, now, since)
        case WaitReason.TURN:
            return f"waits for its turn in {run['session_id']} for {since}; {_turn(unit, run)}"
        case WaitReason.GATE:
            return f"waits for {since}: an operator paused session {run['session_id']}"
        case WaitReason.HOLD:
            return f"held for {since}: {run['hold_reason']}"
        case WaitReason.NO_WORKER:
            return f"ready for {since}; {_unserved(unit, run)}"
        case WaitReason.LATER:
            return f"waits until {moment(run['not_before'], now)}{_why_later(traces)}"
        case never:
            assert_never(never)


def _claimable(unit: Unit, run: Row, now: datetime, since: str) -> str:
    if run["not_before"] > now:
        return f"waits until {moment(run['not_before'], now)}"
    room = overview.room_for(unit, run["pool"], run["agent_digest"])
    if room.workers == 0:
        return f"{run['state']} for {since}; {_unserved(unit, run)}"
    workers = many(room.workers, "live worker")
    if room.free == 0:
        return f"{run['state']} for {since}; {workers} could take it, all slots are full: start more workers"
    return f"{run['state']} for {since}; {workers} with {many(room.free, 'free slot')} will take it"


def _unserved(unit: Unit, run: Row) -> str:
    why = serving.why_unserved(unit, run["pool"], run["agent"], run["agent_digest"])
    return f"{why}; start a worker with it, the run waits"


def _turn(unit: Unit, run: Row) -> str:
    holder = overview.turn_holder(unit, run["session_id"], run["id"])
    if holder is None:
        return "nobody has the turn: the next sweep gives it"
    if holder["state"] == "cancelled":
        return (
            f"{holder['id']} was cancelled; its worker may act until {clock_time(holder['fenced_until'])} UTC"
        )
    return f"{holder['id']} has it ({holder['state']})"


def _why_later(traces: Traces) -> str:
    told = [row["data"] for row in traces.events if row["data"] and row["data"].get("reason")]
    return f": {told[-1]['reason']}" if told else ""


def _running(run: Row, now: datetime) -> str:
    until = run["lease_expires_at"]
    if until <= now:
        return (
            f"its worker {run['lease_owner']} is silent, its lease ended {span(now - until)} ago; "
            "the next sweep gives the run to another worker (by hand: cortex-workers sweep)"
        )
    stop = f"; it was asked to stop: {run['stop_requested_reason']}" if run["stop_requested_at"] else ""
    return f"held by worker {run['lease_owner']} until {clock_time(until)} UTC, renewed while it lives{stop}"


def _paused(traces: Traces) -> str:
    run, now = traces.run, traces.now
    pause = next((row for row in traces.pauses if row["id"] == run["suspension_id"]), None)
    question = next((row for row in traces.questions if row["suspension_id"] == run["suspension_id"]), None)
    if pause is not None and pause["reason"] == SuspendReason.EXTERNAL_TOOL:
        return _outside(run, pause, now)
    if pause is None or question is None:
        return f"paused; its question is missing: nobody can answer; cortex-workers runs cancel {run['id']}"
    if question["kind"] == "uncertain_effect":
        return f"waits for somebody to say what became of {_tools(pause)}; {settle_help(question)}"
    each = ", or each call with --call and --reject-call" if len(pause["pending"]) > 1 else ""
    decide = f"cortex-workers checkpoints approve {question['id']} (or reject{each})"
    about = _tools(pause) if pause["deferral_kind"] is None else f"a model call ({pause['deferral_kind']})"
    return f"waits for a decision on {about}{_deadline(pause, now)}; {decide}"


def _outside(run: Row, pause: Row, now: datetime) -> str:
    """It waits for no person: for the model's provider, or for whoever runs its tools."""
    if pause["next_poll_at"] is not None:
        again = f"the first sweep after {clock_time(pause['next_poll_at'])} UTC asks again"
        return f"waits for the model's provider ({pause['deferral_kind']}){_deadline(pause, now)}; {again}"
    calls = [call["call_id"] for call in pause["pending"] if call["answered_at"] is None]
    provide = f"cortex-workers results provide {run['id']} --call {calls[0]} --content JSON" if calls else ""
    left = f" ({len(calls)} of {len(pause['pending'])} open)" if len(pause["pending"]) > 1 else ""
    return f"waits for results of {_tools(pause)}{left}{_deadline(pause, now)}; {provide}"


def settle_help(question: Mapping[str, Any]) -> str:
    """The command that settles an uncertain effect."""
    return f"cortex-workers checkpoints settle {question['id']} --happened --result JSON | --did-not-happen | --stop"


def _deadline(pause: Row, now: datetime) -> str:
    if pause["expires_at"] is None:
        return ", no deadline"
    if pause["expires_at"] <= now:
        return f"; the deadline passed {span(now - pause['expires_at'])} ago, the next sweep expires it"
    return f" until {moment(pause['expires_at'], now)}"


def _tools(pause: Row) -> str:
    return ", ".join(dict.fromkeys(call["tool"] for call in pause["pending"])) or "a call"


def _ended(run: Row, now: datetime) -> str:
    if run["state"] == RunState.CANCELLED and run["fenced_until"] is not None and run["fenced_until"] > now:
        return f"cancelled; its worker may still act until {clock_time(run['fenced_until'])} UTC"
    if run["error_code"] and run["error_code"] != run["state"]:
        return f"ended: {run['state']} ({run['error_code']})"
    return f"ended: {run['state']}"

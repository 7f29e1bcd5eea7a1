"""Ends what nobody answered or started in time; called by the sweep for one row at a time.

Source: runs.md T15, 9.2; decision R14; rulings 39, 40; bug case C26.
"""

from __future__ import annotations

from cortex_workers.engine import decide as deciding
from cortex_workers.engine.continue_run import resolved_agent
from cortex_workers.engine.runtime import Runtime
from cortex_workers.errors import RunFailure
from cortex_workers.schemas.agent import AgentDefinition
from cortex_workers.schemas.suspension import SuspendReason
from cortex_workers.store import checkpoints, runs, sessions, suspensions, transcript, turns
from cortex_workers.store.transitions import Guard, Move, Row
from cortex_workers.store.unit import Unit

SWEEPER = "cortex:sweeper"


def expire_pause(rt: Runtime, suspension_id: str) -> bool:
    """Expire one overdue pause: its run fails, or the model is told; false when somebody moved it first."""
    with rt.database.read() as unit:
        suspension = suspensions.get(unit, suspension_id)
        run = runs.get(unit, suspension["run_id"]) if suspension is not None else None
        if suspension is None or run is None or run["suspension_id"] != suspension_id:
            return False
        if not suspension["overdue"] or _asks_first(rt, unit, suspension):
            return False
        pending = suspensions.pending(unit, suspension_id)
        found = checkpoints.of_pause(unit, suspension_id)
        spec = runs.spec(unit, run["id"]) or {}
    agent = _agent(rt, {**run, "overrides": spec.get("overrides")})
    pause = deciding.Pause(found or {}, run, suspension, agent, pending)
    return rt.database.run(lambda unit: _expire(unit, pause))


def _asks_first(rt: Runtime, unit: Unit, suspension: Row) -> bool:
    """Whether the bus still has to answer this pause: it gets one whole interval more than the grace (ruling 25)."""
    if suspension["reason"] != SuspendReason.AGENT_REPLY:
        return False
    return suspensions.asks_are_open(unit, suspension, rt.settings.sweep_interval_s)


def _agent(rt: Runtime, run: Row) -> AgentDefinition:
    """The run's version; a run whose version is gone expires like any other."""
    try:
        return resolved_agent(rt, run)
    except RunFailure:
        return AgentDefinition(name=run["agent"], model="none")


def _expire(unit: Unit, pause: deciding.Pause) -> bool:
    session = sessions.lock(unit, pause.run["session_id"])
    if session is not None and session["gated_at"] is not None:
        return False
    deadline = f"{pause.suspension['expires_at']:%Y-%m-%d %H:%M:%S} UTC"
    to_model = pause.suspension["on_expiry"] == "return_to_model"
    guard = Guard(suspension_id=pause.suspension["id"])
    if to_model:
        moved = turns.move(unit, "expire_to_model", pause.run, guard, Move(actor=SWEEPER))
    else:
        text = f"nobody answered this pause ({pause.suspension['reason']}) before its deadline {deadline}"
        values = {"error_code": "suspension_expired", "error_text": text}
        moved = turns.move(unit, "expire", pause.run, guard, Move(values=values, actor=SWEEPER))
    if moved is None:
        return False
    sessions.touch(unit, pause.run["session_id"])
    note = f"nobody answered before {deadline}"
    checkpoints.close_of_run(unit, pause.run["id"], "expired", int(moved["revision"]), note)
    if pause.checkpoint:
        verdicts = {call["call_id"]: ("expired", note) for call in pause.pending}
        deciding.write_verdicts(unit, pause, verdicts, authority="mechanism", approver=SWEEPER)
    if not to_model:
        deciding.deny_waiting(unit, pause, note)
    return True


def cancel_unstarted(rt: Runtime, run_id: str) -> bool:
    """Cancel a run that nobody started before its ``start_by``; false when it was claimed first."""

    def work(unit: Unit) -> bool:
        run = runs.get(unit, run_id)
        if run is None:
            return False
        sessions.lock(unit, run["session_id"])
        values = {
            "error_code": "not_started",
            "error_text": f"not started by {run['start_by']:%Y-%m-%d %H:%M:%S} UTC",
        }
        moved = turns.move(unit, "start_by", run, Guard(), Move(values=values, actor=SWEEPER))
        if moved is not None:
            transcript.close_all_pending(unit, run_id, "the run was not started in time")
        return moved is not None

    return rt.database.run(work)


def poll(rt: Runtime, suspension_id: str) -> bool:
    """Make a run ready whose deferred model call is due to be asked again; false when somebody moved it first."""

    def work(unit: Unit) -> bool:
        suspension = suspensions.get(unit, suspension_id)
        run = runs.get(unit, suspension["run_id"]) if suspension is not None else None
        if suspension is None or run is None or suspension["next_poll_at"] is None:
            return False
        sessions.touch(unit, run["session_id"])
        guard = Guard(suspension_id=suspension_id, revision=run["revision"])
        return turns.move(unit, "poll", run, guard, Move(actor=SWEEPER)) is not None

    return rt.database.run(work)


def lapse(rt: Runtime, run_id: str) -> bool:
    """Take a run from a worker whose lease ran out; false when it was renewed or moved in time."""

    def work(unit: Unit) -> bool:
        run = runs.get(unit, run_id)
        if run is None:
            return False
        moved = turns.move(
            unit, "lapse", run, Guard(), Move(actor=SWEEPER, data={"owner": run["lease_owner"]})
        )
        return moved is not None

    return rt.database.run(work)

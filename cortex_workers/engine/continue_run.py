"""From a claimed row to its end: checks, the loop, and the one transition that each way out needs.

Every exit writes a state or leaves the run to somebody who moved it; nothing leaves it running without a holder.
Source: runs.md 3.7, 5.5; rulings 19, 29.
"""

from __future__ import annotations

from cortex_workers import telemetry
from cortex_workers.engine import authority, boundary, finish, loop, suspend
from cortex_workers.engine.execution import Execution
from cortex_workers.engine.runtime import Runtime
from cortex_workers.errors import (
    CortexError,
    InvalidContinuation,
    LeaseLost,
    ReclaimLimit,
    RefusedForNow,
    RunFailure,
    RunNotRecoverable,
    Unavailable,
    UnknownModel,
)
from cortex_workers.lease.keeper import Held
from cortex_workers.schemas.agent import AgentDefinition
from cortex_workers.schemas.lease import Term
from cortex_workers.schemas.lifecycle import Instruction
from cortex_workers.schemas.llm import Deferral, Usage
from cortex_workers.schemas.run import RunOverrides
from cortex_workers.store import a2a_messages, checkpoints, history, suspensions, transcript, turns
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit


def execute(rt: Runtime, row: Row, held: Held, slice_began: float | None = None) -> str:
    """Work on a claimed run until it leaves this worker; returns the state or reason it was left with.

    Raises: StoreUnavailable when Postgres is gone; the lease then brings the run to another worker.
    """
    term = held.term
    ex: Execution | None = None
    try:
        ex = prepare(rt, row, term, held)
        if slice_began is not None:
            ex.slice_began = slice_began
        return _work(ex)
    except RefusedForNow as error:
        # Before it was prepared: nothing of it is in hand.
        suspend.hand_back_claimed(
            rt.database.run, row, term, error.retry_in_s, rt.settings.sweep_interval_s, error.reason
        )
        telemetry.event(
            "run.handed_back", run_id=term.run_id, reason=error.reason, retry_in_s=error.retry_in_s
        )
        return error.reason
    except LeaseLost:
        return _lost(rt, term)
    except (RunFailure, UnknownModel) as error:
        return _failed(rt, row, ex, term, held, error)
    except Unavailable:
        raise
    except Exception as error:  # an unforeseen error must not leave the run to lapse four times
        telemetry.event(
            "run.broken", "error", run_id=term.run_id, error=type(error).__name__, at=telemetry.places(error)
        )
        return _failed(rt, row, ex, term, held, RunFailure(f"internal error: {type(error).__name__}"))
    finally:
        held.release()


def _work(ex: Execution) -> str:
    """The loop, and letting go in good order; what prevents that is the caller's business like any other error."""
    try:
        with telemetry.span("cortex.run", run_id=ex.run_id, revision=ex.term.revision):
            loop.run_loop(ex)
        return ex.left_as
    except boundary.HandOff as error:
        suspend.hand_off(ex, error.reason, None)
        return "handed_off"
    except boundary.SliceEnd:
        suspend.end_slice(ex)
        return "slice_end"
    except RefusedForNow as error:
        suspend.hand_back(ex, error)
        return error.reason


def prepare(rt: Runtime, row: Row, term: Term, held: Held) -> Execution:
    """The checks after a claim, outside any transaction, and the continuation assembled from rows.

    Raises: ReclaimLimit, RunNotRecoverable, InvalidContinuation, PrincipalRevoked, RefusedForNow, LeaseLost.
    """
    if int(row["reclaim_count"]) > rt.settings.reclaim_limit:
        raise ReclaimLimit(f"the run lost its worker {row['reclaim_count']} times in a row")
    agent = resolved_agent(rt, row)
    principal = authority.restore(rt.host, row["principal"], int(row["hand_backs"]))
    ex = Execution(
        rt=rt,
        row=row,
        term=term,
        held=held,
        agent=agent,
        principal=principal,
        next_step=int(row["next_step"]),
        step_count=int(row["step_count"]),
        usage=Usage.model_validate(row["usage"] or {}),
        next_seq=int(row["next_seq"]),
        stored_prompt=row["system_prompt"] is not None,
    )
    if row["origin_delivery_id"] is not None:
        with rt.database.read() as unit:
            ex.chain = tuple(sender for sender, _ in a2a_messages.chain(unit, ex.run_id))
    try:
        _load(ex)
    except ValueError as error:
        raise InvalidContinuation(
            f"what is stored of the run cannot be read: {type(error).__name__}"
        ) from error
    return ex


def resolved_agent(rt: Runtime, row: Row) -> AgentDefinition:
    """The frozen definition of the run's version with the run's own overrides.

    Raises: RunNotRecoverable when the version is gone, InvalidContinuation when it cannot be run.
    """
    definition = rt.versions.get(row["agent_digest"])
    if definition is None:
        raise RunNotRecoverable(f"the version of agent {row['agent']} this run was frozen on is gone")
    if definition.max_steps <= 0:
        raise InvalidContinuation("the frozen configuration has no step budget")
    return with_overrides(definition, RunOverrides.model_validate(row["overrides"] or {}))


def with_overrides(definition: AgentDefinition, overrides: RunOverrides) -> AgentDefinition:
    """An agent as one run changes it; a narrowed tool list stays narrow, also when it is empty."""
    changed = overrides.model_dump(exclude_none=True, exclude={"tools"})
    if overrides.tools is not None:
        changed["tools"] = tuple(spec for spec in definition.tools if spec.name in overrides.tools)
    return definition.model_copy(update=changed)


def _load(ex: Execution) -> None:
    """History as it was at the first claim, and the run's own messages."""
    row = ex.row
    upto, floor = int(row["history_upto"] or 0), int(row["history_floor"] or 0)
    window = ex.agent.history_window if ex.agent.history_window is not None else ex.rt.settings.history_window
    if upto <= floor and row["queue_class"] == "start":
        return

    def work(unit: Unit) -> None:
        ex.history = history.load(unit, row["session_id"], upto, floor, window) if upto > floor else []
        if row["queue_class"] == "start":
            return
        stored = transcript.load_messages(unit, ex.run_id)
        ex.own = [item.message for item in stored]
        ex.call_ids = {call.id for item in ex.own for call in item.tool_calls}
        said = [item for item in stored if item.message.role == "assistant"]
        if said:
            ex.last_message_seq, ex.last_step_index = said[-1].seq, said[-1].step_index

    with ex.rt.database.read() as unit:
        work(unit)
        if row["instruction"] == Instruction.REPEAT_MODEL_CALL and row["suspension_id"] is not None:
            ex.deferral = _deferral(unit, row["suspension_id"], int(row["next_step"]))


def _deferral(unit: Unit, suspension_id: str, next_step: int) -> Deferral | None:
    """What the model client is told when it is asked again (ruling 50).

    Only for the step that was put off: a lapse after it leaves the instruction, and a yes is not for the next call.
    """
    pause = suspensions.get(unit, suspension_id)
    if pause is None or pause["deferral_kind"] is None or pause["next_step"] != next_step:
        return None
    asked = checkpoints.of_pause(unit, suspension_id)
    decision = (asked or {}).get("decision") or {}
    return Deferral(
        kind=pause["deferral_kind"],
        ref=pause["deferral_ref"],
        approved=bool(decision.get("approved")),
        decided_by=decision.get("decided_by") or decision.get("actor"),
    )


def _failed(rt: Runtime, row: Row, ex: Execution | None, term: Term, held: Held, error: CortexError) -> str:
    """End a run with its reason, also when it failed before it was prepared."""
    if ex is None:
        definition = AgentDefinition(name=row["agent"], model="none")
        ex = Execution(
            rt=rt,
            row=row,
            term=term,
            held=held,
            agent=definition,
            principal=None,
            stored_prompt=True,
            next_seq=int(row["next_seq"]),
            next_step=int(row["next_step"]),
            step_count=int(row["step_count"]),
            usage=Usage.model_validate(row["usage"] or {}),
        )
    try:
        _fail(ex, error)
    except LeaseLost:
        return _lost(rt, term)
    return "failed"


def _fail(ex: Execution, error: CortexError) -> None:
    try:
        finish.fail(ex, error)
    except (LeaseLost, Unavailable):
        raise
    except Exception:  # what is in hand may be what cannot be written, and the run must end all the same
        if not ex.results:
            raise
        ex.results = []
        finish.fail(ex, error)


def _lost(rt: Runtime, term: Term) -> str:
    """Somebody else moved the run: stop, write nothing, and free the turn of a cancelled run's session."""
    telemetry.event("run.lost", "warning", run_id=term.run_id, revision=term.revision)

    rt.database.run(lambda unit: turns.let_go(unit, term.run_id, term.revision))
    return "lost"

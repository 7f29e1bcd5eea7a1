"""Running a run in the caller's process: the same door, lease and loop as a worker's.

Source: rulings 26, 54; runs.md 3.1, 3.6, K50.
"""

from __future__ import annotations

import threading

from cortex_workers.engine import cancel as cancelling
from cortex_workers.engine import enqueue as enqueueing
from cortex_workers.engine import expire, slot
from cortex_workers.engine.ahead import Claimed
from cortex_workers.engine.continue_run import execute
from cortex_workers.engine.runtime import Runtime
from cortex_workers.errors import EffectUncertain, RunInterrupted, Stopping
from cortex_workers.schemas.checkpoint import CheckpointKind
from cortex_workers.schemas.lifecycle import TERMINAL_RUN_STATES, RunState
from cortex_workers.schemas.run import EnqueueRun
from cortex_workers.store import checkpoints, runs

_LOOK_S = 0.05


def refuse_while_draining(rt: Runtime) -> None:
    """Raises: Stopping."""
    if rt.drain.is_set():
        raise Stopping()


def run(rt: Runtime, request: EnqueueRun, principal: bytes | None, on_exit: str, actor: str) -> str:
    """Store a run, without telling the fleet, and work on it here until it ended or paused; returns its id.

    In a session whose turn is somebody else's, it waits for its turn.
    Raises: Stopping, RunInterrupted when this process drains meanwhile, and as ``enqueue``.
    """
    refuse_while_draining(rt)
    made, claimed = enqueueing.enqueue_and_claim(rt, request, principal)
    try:
        for row in claimed:
            _execute(rt, Claimed(row, rt.keeper.hold(slot.term_of(row))))
        _stay(rt, made.id)
    except KeyboardInterrupt:
        if on_exit == "cancel":
            cancelling.cancel(rt, made.id, request.scope, actor, "the caller was interrupted")
        raise
    return made.id


def continue_run(rt: Runtime, run_id: str) -> None:
    """Continue one run here; one whose worker's lease is over is taken from it first (T21).

    Raises: RunNotFound, RunLeased, RunAlreadyDone, NotContinuable; EffectUncertain when the run now waits for somebody
    to say what became of a call (decision R13).
    """
    refuse_while_draining(rt)
    claimed = slot.claim_named(rt, run_id)
    if claimed is None and _lapsed(rt, run_id):
        claimed = slot.claim_named(rt, run_id)
    if claimed is None:
        slot.explain(rt, run_id)
        return
    _execute(rt, claimed)
    _stay(rt, run_id)
    _tell_uncertain(rt, run_id)


def _stay(rt: Runtime, run_id: str) -> None:
    """Work on a run whenever it may be claimed, until it ended or paused, or another process has it to the end.

    Raises: RunInterrupted when this process drains and the run goes on elsewhere.
    """
    waited = threading.Event()
    while True:
        with rt.database.read() as unit:
            row = runs.get(unit, run_id)
        if row is None or row["state"] in TERMINAL_RUN_STATES or row["state"] == RunState.PAUSED:
            return
        if rt.drain.is_set():
            raise RunInterrupted("this process drains; the run goes on elsewhere", run_id=run_id)
        if row["state"] == RunState.RUNNING:
            claimed = slot.claim_named(rt, run_id) if _lapsed(rt, run_id) else None
        else:
            claimed = slot.claim_named(rt, run_id)
        if claimed is None:
            waited.wait(_LOOK_S)
        else:
            _execute(rt, claimed)


def _lapsed(rt: Runtime, run_id: str) -> bool:
    """Take a run from a worker whose lease is over; false when there is none, or it is renewed in time."""
    with rt.database.read() as unit:
        over = runs.lease_is_over(unit, run_id)
    return over and expire.lapse(rt, run_id)


def _tell_uncertain(rt: Runtime, run_id: str) -> None:
    with rt.database.read() as unit:
        row = runs.get(unit, run_id)
        asked = checkpoints.of_pause(unit, row["suspension_id"]) if row is not None else None
    if row is None:
        return
    run = runs.to_run(row)
    if row["state"] == RunState.PAUSED and asked and asked["kind"] == CheckpointKind.UNCERTAIN_EFFECT:
        raise EffectUncertain(f"{asked['reason']}; settle {asked['id']}", run=run, checkpoint_id=asked["id"])
    if row["error_code"] == EffectUncertain.code:
        raise EffectUncertain(row["error_text"], run=run, checkpoint_id=None)


def _execute(rt: Runtime, claimed: Claimed) -> None:
    try:
        execute(rt, claimed.row, claimed.held)
    except KeyboardInterrupt:
        slot.give_back_interrupted(rt, claimed.row)
        raise

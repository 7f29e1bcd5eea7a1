"""Running a run in the caller's process: the same door, lease and loop as a worker's.

Source: rulings 26, 54; runs.md 3.1, 3.6, K50.
"""

from __future__ import annotations

import threading

from cortex_workers.engine import cancel as cancelling
from cortex_workers.engine import enqueue as enqueueing
from cortex_workers.engine import slot
from cortex_workers.engine.ahead import Claimed
from cortex_workers.engine.continue_run import execute
from cortex_workers.engine.runtime import Runtime
from cortex_workers.errors import Stopping
from cortex_workers.schemas.lifecycle import TERMINAL_RUN_STATES, RunState
from cortex_workers.schemas.run import EnqueueRun
from cortex_workers.store import runs

_LOOK_S = 0.05


def refuse_while_draining(rt: Runtime) -> None:
    """Raises: Stopping."""
    if rt.drain.is_set():
        raise Stopping()


def run(rt: Runtime, request: EnqueueRun, principal: bytes | None, on_exit: str, actor: str) -> str:
    """Store a run, without telling the fleet, and work on it here until it ended or paused; returns its id.

    In a session whose turn is somebody else's, it waits for its turn.
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
    """Continue one run here.

    Raises: RunNotFound, RunLeased, RunAlreadyDone, NotContinuable.
    """
    refuse_while_draining(rt)
    claimed = slot.claim_named(rt, run_id)
    if claimed is None:
        slot.explain(rt, run_id)
        return
    _execute(rt, claimed)
    _stay(rt, run_id)


def _stay(rt: Runtime, run_id: str) -> None:
    """Work on a run whenever it may be claimed, until it ended or paused, or another process has it to the end."""
    waited = threading.Event()
    while True:
        claimed = slot.claim_named(rt, run_id)
        if claimed is not None:
            _execute(rt, claimed)
        with rt.database.read() as unit:
            row = runs.get(unit, run_id)
        if row is None or row["state"] in TERMINAL_RUN_STATES or row["state"] == RunState.PAUSED:
            return
        refuse_while_draining(rt)
        if claimed is None:
            waited.wait(_LOOK_S)


def _execute(rt: Runtime, claimed: Claimed) -> None:
    try:
        execute(rt, claimed.row, claimed.held)
    except KeyboardInterrupt:
        slot.give_back_interrupted(rt, claimed.row)
        raise

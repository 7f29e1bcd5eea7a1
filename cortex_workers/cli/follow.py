"""Waiting for a run in a terminal: what it goes through is told on stderr, its end on stdout."""

from __future__ import annotations

import threading
import time

from cortex_workers.cli.report import DONE, REFUSED, note, print_json
from cortex_workers.client import Client
from cortex_workers.errors import WaitTimeout
from cortex_workers.operate.inspect import timeline
from cortex_workers.schemas.lifecycle import RunState
from cortex_workers.schemas.run import Run

_FIRST_LOOK_S, _LAST_LOOK_S = 0.05, 1.0


def to_the_end(
    client: Client, run_id: str, timeout_s: float | None, *, as_json: bool = False, until_paused: bool = False
) -> int:
    """Wait until a run has ended (or is paused) and tell; done when it completed (or is paused as wanted).

    Raises: WaitTimeout, RunNotFound.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    told: str | None = None
    pause_s, waited = _FIRST_LOOK_S, threading.Event()
    while True:
        run = client.get(run_id)
        if run.is_terminal or (until_paused and run.state is RunState.PAUSED):
            return _told(run, as_json)
        if run.state is RunState.PAUSED and told != run.suspension_id:
            told = run.suspension_id
            note(f"{run_id} {timeline(client.runtime, run_id, run.scope).next}")
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            raise WaitTimeout(f"run {run_id} is still {run.state} after {timeout_s:g} s")
        waited.wait(pause_s if left is None else min(pause_s, left))
        pause_s = min(pause_s * 1.5, _LAST_LOOK_S)


def _told(run: Run, as_json: bool) -> int:
    if as_json:
        print_json(run)
    elif run.state is RunState.COMPLETED:
        print(run.output or "")
    else:
        reason = f": {run.error_text or run.error_code}" if run.error_code else ""
        print(f"{run.id} {run.state}{reason}")
    return DONE if run.state in (RunState.COMPLETED, RunState.PAUSED) else REFUSED

"""Named points on the way of a run; no-ops unless a test arms one.

``CORTEX_PROBE=name[:nth][=action]`` arms one point of this process: at its n-th passing (default 1) the process kills
itself with SIGKILL (``kill``, the default), stops itself (``stop``), or touches a file and waits until it is removed
(``wait:/path``). The crash matrix of tests/fleet walks ``PROBES``; a new name enters it by itself.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

PROBES: dict[str, str] = {
    "claim.before_commit": "the claim statement ran, its transaction is open",
    "claim.after_commit": "the run is claimed, nothing of it has been done",
    "model.before": "the next request is built, nothing was sent",
    "model.after": "the model answered, nothing of the answer is stored",
    "turn.before_commit": "the turn is written, its transaction is open",
    "turn.after_commit": "the turn is stored, no tool has been called",
    "tool.before_start_record": "an unsafe call is due, its start record is not written",
    "tool.after_start_record": "the start record is stored, the handler was not entered",
    "tool.after_handler": "the handler returned, its outcome is not stored",
    "tool.after_outcome": "the outcome is stored, nothing else was dispatched",
    "message.after_commit": "a message is stored with the outcome of its call, nothing else was dispatched",
    "delivery.before_commit": "the receiver's run is written, its transaction is open",
    "delivery.after_commit": "the receiver's run is stored, no hint was sent",
    "delivery.after_call": "a peer or a handler answered, nothing of it is stored",
    "reply.before_commit": "the reply, and the answer that it may complete, are written, the transaction is open",
    "reply.after_commit": "the reply is stored, no hint was sent",
    "pause.before_commit": "the pause is written, its transaction is open",
    "pause.after_commit": "the run is paused, no hint was sent",
    "finish.before_commit": "the end is written, its transaction is open",
    "finish.after_commit": "the run has ended, no hint was sent",
    "hand_off.before_commit": "the hand-off is written, its transaction is open",
    "hand_off.after_commit": "the run is handed off, no hint was sent",
    "sweep.after_first_row": "a sweep has handled one row of its page",
}

_armed: tuple[str, int, Callable[[], None]] | None = None
_counter = itertools.count(1)
_lock = threading.Lock()


def reach(name: str) -> None:
    """Pass a named point. Costs one comparison unless something is armed."""
    if _armed is None:
        return
    armed_name, nth, action = _armed
    if armed_name != name:
        return
    with _lock:
        count = next(_counter)
    if count == nth:
        action()


def arm(name: str, action: Callable[[], None], nth: int = 1) -> None:
    """Arm one point of this process with an action, at its n-th passing.

    Raises: KeyError for a name that is not in PROBES.
    """
    global _armed, _counter
    if name not in PROBES:
        raise KeyError(name)
    _counter = itertools.count(1)
    _armed = (name, nth, action)


def disarm() -> None:
    """Make every point a no-op again."""
    global _armed
    _armed = None


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    # A signal to the process may be taken by another thread, with this one running on for a moment, past the point.
    if "gevent.monkey" in sys.modules:
        os.kill(os.getpid(), signal.SIGSTOP)  # where a thread's id is a greenlet's
    else:
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def _wait_at(path: Path) -> Callable[[], None]:
    def wait() -> None:
        path.touch()
        pause = threading.Event()
        while path.exists():
            pause.wait(0.01)

    return wait


def arm_from_environment() -> None:
    """Arm what ``CORTEX_PROBE`` names; called when a worker process starts."""
    text = os.environ.get("CORTEX_PROBE", "")
    if not text:
        return
    spec, _, action = text.partition("=")
    name, _, nth = spec.partition(":")
    chosen: Callable[[], None]
    if action.startswith("wait:"):
        chosen = _wait_at(Path(action.removeprefix("wait:")))
    elif action == "stop":
        chosen = _stop
    else:
        chosen = _kill
    arm(name, chosen, int(nth or 1))

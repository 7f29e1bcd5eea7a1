"""Two files for the platform's probes: ready (this worker takes messages) and live (its consumer loop turns).

``CORTEX_READY_FILE`` exists between the first connection to the broker and the beginning of a drain;
``CORTEX_LIVE_FILE`` is touched every few seconds by the loop itself, never by a thread beside it, so it stops when the
loop is stuck.
Source: celery.md 6.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

READY_VARIABLE = "CORTEX_READY_FILE"
LIVE_VARIABLE = "CORTEX_LIVE_FILE"
TOUCH_S = 5.0


def touch_live() -> None:
    """Say that the consumer loop turns."""
    _touch(LIVE_VARIABLE)


def set_ready() -> None:
    """Say that this worker takes messages."""
    _touch(READY_VARIABLE)


def clear_ready() -> None:
    """Say that this worker takes no more messages."""
    name = os.environ.get(READY_VARIABLE)
    if name:
        with contextlib.suppress(OSError):
            Path(name).unlink()


def _touch(variable: str) -> None:
    name = os.environ.get(variable)
    if name:
        # A full or missing disk must not stop a worker; its absence is what the probe reports.
        with contextlib.suppress(OSError):
            Path(name).touch()

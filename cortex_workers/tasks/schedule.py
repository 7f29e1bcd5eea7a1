"""What beat sends: one entry, the sweep. Everything periodic is a named pass of it (ruling 24).

Source: celery.md 19; bug case C41 (a clock that jumps must not stop beat, nor make it fire without pause).
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

from celery.schedules import schedule

from cortex_workers.settings import Settings
from cortex_workers.tasks.routes import SWEEP_EXPIRED

_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


def steady_now() -> datetime:
    """A date that only ever moves forward, at the pace of the monotonic clock; good for intervals alone."""
    return _EPOCH + timedelta(seconds=time.monotonic())


def beat_schedule(settings: Settings) -> dict[str, dict[str, Any]]:
    """The entries of beat.

    ``expires`` is the interval: sweeps that nobody took in time are dropped unread, so a backlog cannot build up.
    """
    interval = timedelta(seconds=settings.sweep_interval_s)
    return {
        "sweep": {
            "task": SWEEP_EXPIRED,
            "schedule": schedule(interval, nowfun=steady_now),
            "options": {"expires": settings.sweep_interval_s},
        }
    }

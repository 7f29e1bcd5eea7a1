"""Terms and workers.

Source: runs.md 5; rulings 26 to 31.
"""

from __future__ import annotations

from datetime import datetime

from cortex_workers.schemas.base import Document, Model


class Term(Model):
    """One holder's term of one run: the fence of everything it writes."""

    run_id: str
    owner: str
    revision: int


class WorkerInfo(Document):
    """A worker process as its row tells it."""

    id: str
    version: str
    reader_version: int
    agents: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()
    slots: int = 0
    slots_used: int = 0
    pool: str = "main"
    started_at: datetime
    heartbeat_at: datetime
    draining_at: datetime | None = None
    drain_requested_at: datetime | None = None
    drain_requested_by: str | None = None
    drain_reason: str | None = None
    ended_at: datetime | None = None
    ended_as: str | None = None
    alive: bool = True

"""A run as producers and operators see it, and what a producer sends.

Source: runs.md 2.4, tables.md (runs, run_specs), rulings 55, 58.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Field

from cortex_workers.schemas.base import Document, Model, RowDocument
from cortex_workers.schemas.lifecycle import TERMINAL_RUN_STATES, Instruction, RunState
from cortex_workers.schemas.llm import Usage

LATEST_START_S = 10 * 365 * 86_400
"""A run may wait for its start for ten years; the database's calendar ends where a timedelta does not."""


class RunOverrides(Model):
    """What one run changes of its agent; absent fields keep the agent's value. Times are seconds."""

    model: str | None = None
    instructions: str | None = None
    max_steps: int | None = Field(default=None, ge=1, le=10_000)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    tools: tuple[str, ...] | None = None
    budget_s: float | None = Field(default=None, gt=0)


class EnqueueRun(Model):
    """One request for a run. ``run_id`` or ``key`` make it idempotent; ``start_by_s`` counts from now."""

    agent: str
    input: str
    scope: str
    run_id: str | None = None
    key: str | None = None
    session: str | None = None
    overrides: RunOverrides | None = None
    metadata: dict[str, Any] | None = None
    workload: str | None = None
    start_by_s: float | None = Field(default=None, gt=0, le=LATEST_START_S)


class Run(RowDocument):
    """A run's row. Times are the database's, in UTC; ``leased_time_s`` counts only while a worker held it."""

    id: str
    scope: str
    agent: str
    agent_digest: str
    workload: str | None = None
    session_id: str
    state: RunState
    state_since: datetime
    revision: int
    lease_owner: str | None = None
    lease_expires_at: datetime | None = None
    fenced_until: datetime | None = None
    instruction: Instruction
    suspension_id: str | None = None
    queue_class: str
    pool: str
    not_before: datetime
    wait_reason: str | None = None
    notified_at: datetime | None = None
    handed_off: bool = False
    reclaim_count: int = 0
    reclaim_total: int = 0
    step_count: int = 0
    next_step: int = 0
    usage: Usage = Field(default_factory=Usage)
    leased_time_s: float = 0.0
    output: str | None = None
    error_code: str | None = None
    error_text: str | None = None
    created_at: datetime
    started_at: datetime | None = None
    completed_at: datetime | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether the run has ended."""
        return self.state in TERMINAL_RUN_STATES


class Enqueued(Document):
    """What a producer gets back; ``fresh`` is false when the same request was enqueued before."""

    id: str
    state: RunState
    session_id: str
    revision: int
    fresh: bool = True

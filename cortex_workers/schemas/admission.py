"""Answers from outside: what a caller sends, and the ledger that retains it against the exact pause.

Source: seed suspension (ClaimVersion, ResumeAdmission, ResumeStart, ResumeExpiry, ResumeClosure); runs.md 2.14, 2.15;
rulings 41 to 43.
"""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Any

from pydantic import Field, field_serializer, field_validator

from cortex_workers.schemas.base import Document, Model, digest

MAX_RESUME_INPUT_BYTES = 8 << 20
"""The largest retained answer, encoded (seed: MaxResumeInputBytes)."""


class ToolResult(Model):
    """What became of one call that ran outside: its content, or an error that the model reads."""

    tool_call_id: str
    content: Any = None
    error: str | None = None


class ClaimVersion(Model):
    """Identifies exactly the pause that was validated; a later pause of the same run never matches."""

    run_id: str
    suspension_id: str
    run_revision: int


class ResumeAdmissionRequest(Document):
    """The exact answer bound to the exact pause. ``input`` stays bytes, so that storage cannot normalise it."""

    scope: str
    version: ClaimVersion
    input: bytes

    @field_serializer("input")
    def _encoded(self, value: bytes) -> str:
        return base64.b64encode(value).decode()

    @field_validator("input", mode="before")
    @classmethod
    def _decoded(cls, value: object) -> object:
        return base64.b64decode(value) if isinstance(value, str) else value


class ResumeAdmission(Document):
    """An answer retained by the transaction that left the pause. ``fresh`` tells whether this call wrote it."""

    schema_version: int = 1
    request: ResumeAdmissionRequest
    request_digest: str
    suspension_digest: str
    claimed_revision: int
    admitted_at: datetime
    admitted_by: str | None = None
    door: str = ""
    fresh: bool = Field(default=False, exclude=True)


class ResumeStart(Document):
    """The record that a worker began to go on with an admitted answer; seeing it grants nothing."""

    schema_version: int = 1
    version: ClaimVersion
    scope: str
    request_digest: str
    started_at: datetime
    fresh: bool = Field(default=False, exclude=True)

    def digest(self) -> str:
        """Binds a retained start without what is transient."""
        return digest(self.model_dump(mode="json"))


class ResumeExpiry(Document):
    """Proof that an admitted answer was given up before anybody began with it."""

    schema_version: int = 1
    version: ClaimVersion
    scope: str
    request_digest: str
    event_id: str
    run_revision: int
    expired_at: datetime
    fresh: bool = Field(default=False, exclude=True)


class ResumeAdmissionPage(Document):
    """Admissions of one run in order, and the cursor of the next page."""

    admissions: tuple[ResumeAdmission, ...] = ()
    next: str | None = None

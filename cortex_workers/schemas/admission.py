"""Answers from outside: what a caller sends, and the ledger that retains it against the exact pause.

Source: seed suspension (ClaimVersion, ResumeAdmission, ResumeStart, ResumeExpiry, ResumeClosure); runs.md 2.14, 2.15;
rulings 41 to 43.
"""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_serializer, field_validator, model_validator

from cortex_workers.schemas.base import Document, Model, digest
from cortex_workers.schemas.ids import EVENT, RUN, SUSPENSION, is_id
from cortex_workers.schemas.scope import Scope

MAX_RESUME_INPUT_BYTES = 8 << 20
"""The largest retained answer, encoded (seed: MaxResumeInputBytes)."""

BOTH = "a result has a content or an error, not both"


def _utc(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("a time needs a zone")
    return value.astimezone(UTC)


def _storable(value: str) -> str:
    if "\x00" in value:
        raise ValueError("holds a NUL character")
    return value


Instant = Annotated[datetime, AfterValidator(_utc)]
"""A time in UTC, whatever zone a database connection shows it in: digests are made of it."""
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Word = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_storable)]


class ToolResult(Model):
    """What became of one call that ran outside: its content, or an error that the model reads."""

    tool_call_id: str
    content: Any = None
    error: str | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> ToolResult:
        if self.content is not None and self.error is not None:
            raise ValueError(BOTH)
        return self


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
    admitted_at: Instant
    admitted_by: str | None = None
    door: str = ""
    fresh: bool = Field(default=False, exclude=True)

    def digest(self) -> str:
        """Binds a retained answer without what is transient."""
        return digest(self.model_dump(mode="json"))


class ResumeStart(Document):
    """The record that a worker began to go on with an admitted answer; seeing it grants nothing."""

    schema_version: int = 1
    version: ClaimVersion
    scope: str
    request_digest: str
    started_at: Instant
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
    expired_at: Instant
    fresh: bool = Field(default=False, exclude=True)


class ResumeAdmissionPage(Document):
    """Admissions of one run in order, and the cursor of the next page."""

    admissions: tuple[ResumeAdmission, ...] = ()
    next: str | None = None


class ResumeClosureRequest(Model):
    """Asks to end an uncertain start as incomplete, with a proof that nobody works on it any more and nobody will.

    ``proof_ref`` and ``proof_digest`` name what the host's authorizer checks, ``issuer`` and ``issuer_revision`` who
    vouches for it; it counts from ``observed_at`` until (not at) ``expires_at``. A request proves nothing by itself.
    """

    schema_version: Literal[1] = 1
    scope: str
    version: ClaimVersion
    admission_digest: Digest
    start_digest: Digest
    run_revision: int = Field(ge=1)
    actor: Word
    issuer: Word
    issuer_revision: Word
    proof_ref: Word
    proof_digest: Digest
    observed_at: Instant
    expires_at: Instant

    @field_validator("scope")
    @classmethod
    def _exact_scope(cls, value: str) -> str:
        return Scope.parse(value).text

    @model_validator(mode="after")
    def _fits(self) -> ResumeClosureRequest:
        if not is_id(RUN, self.version.run_id) or not is_id(SUSPENSION, self.version.suspension_id):
            raise ValueError("the version names a run and a suspension by their ids")
        if self.observed_at >= self.expires_at:
            raise ValueError("the proof expires before it was observed")
        return self

    def freeze(self) -> ResumeClosureRequest:
        """Check every field again and return a detached copy; authenticates nothing.

        Raises: ValueError.
        """
        return ResumeClosureRequest.model_validate(dict(self))

    def digest(self) -> str:
        """Binds the whole request: a retry has the same."""
        return digest(self.model_dump(mode="json"))


class ResumeClosure(Document):
    """The receipt of an incomplete end, written with it. It grants nothing and permits no repetition."""

    request: ResumeClosureRequest
    request_digest: str
    event_id: str
    run_revision: int
    closed_at: Instant
    fresh: bool = Field(default=False, exclude=True)

    def verify(self) -> None:
        """Check that the receipt fits its own request.

        Raises: ValueError.
        """
        request = self.request.freeze()
        if self.request_digest != request.digest():
            raise ValueError("the digest is not that of the request")
        if not is_id(EVENT, self.event_id):
            raise ValueError("the receipt names no event")
        if self.run_revision != request.run_revision + 1:
            raise ValueError("the receipt is not of the revision after the request")
        if not request.observed_at <= self.closed_at < request.expires_at:
            raise ValueError("the proof did not count when the run was closed")

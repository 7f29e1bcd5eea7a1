"""The bodies of our messages, both ways: what a producer puts in and what a worker takes out.

Keyword arguments only, ids only. A reader ignores what it does not know and fills in what is missing, so that two
releases understand each other; a body whose ``v`` is newer than the reader is dropped, never guessed at.
Source: celery.md 14, 26; ruling 60.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

Id = Annotated[str, Field(min_length=1, max_length=64)]
"""No id of ours is longer; the limit keeps every message under its size."""


class Message(BaseModel):
    """What every body has: the version of its form."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    READS: ClassVar[int] = 1

    v: Annotated[int, Field(ge=1)] = 1

    def body(self) -> dict[str, Any]:
        """The keyword arguments to send."""
        return self.model_dump(exclude_none=True)


class ContinueRunMessage(Message):
    """Wake up for runs of a kind; ``run_id`` is the one to prefer, ``revision`` is where it was when this was sent."""

    run_id: Id | None = None
    revision: int | None = None
    kind: Literal["start", "begun"] = "begun"


class ResumeMessage(Message):
    """Continue a run with exactly the answer that was admitted for one pause."""

    run_id: Id
    suspension_id: Id
    revision: int | None = None


class DeliverMessage(Message):
    """Do whatever one delivery is due for."""

    delivery_id: Id


class SweepExpiredMessage(Message):
    """Sweep: every pass, or those named."""

    passes: list[Annotated[str, Field(max_length=40)]] | None = Field(default=None, max_length=20)

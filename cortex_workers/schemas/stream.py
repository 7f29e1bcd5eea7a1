"""What a client sees of a run while it happens.

Durable facts come from rows and carry a cursor; tokens come from a capped stream beside them and may be lost, which is
told (``lost``) and never hidden.
Source: runs.md 6.12; ruling 58.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field

from cortex_workers.schemas.base import Model


class StreamKind(StrEnum):
    """The seed's events, and ``lost`` for a window of tokens that is gone.

    Its data: ``step``, and the indexes ``from`` and ``to`` (None: all that followed in this step).
    """

    RUN_STARTED = "run_started"
    STEP = "step"
    TOKEN = "token"
    TOOL_CALL = "tool_call"
    CHECKPOINT = "checkpoint"
    SUSPENDED = "suspended"
    INCOMPLETE = "incomplete"
    SAFETY_BLOCK = "safety_block"
    DONE = "done"
    ERROR = "error"
    LOST = "lost"


TERMINAL_KINDS = frozenset(
    {
        StreamKind.SUSPENDED,
        StreamKind.INCOMPLETE,
        StreamKind.SAFETY_BLOCK,
        StreamKind.DONE,
        StreamKind.ERROR,
    }
)


class StreamEvent(Model):
    """One event. ``cursor`` is the ordinal of the newest fact that was given whole: attach again and miss nothing.

    Of a fact that is several events (the calls of one answer), who attaches in their midst gets all of them again.
    """

    kind: StreamKind
    run_id: str
    cursor: int
    data: dict[str, Any] = Field(default_factory=dict)

    @property
    def is_terminal(self) -> bool:
        """Whether the stream ends with it."""
        return self.kind in TERMINAL_KINDS

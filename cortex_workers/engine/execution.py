"""One worker's work on one run during one term: what is known, what is stored, what is still in hand.

Source: runs.md 2.10 (every field of a continuation is here, assembled from rows); rulings 1, 2.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cortex_workers.engine.runtime import Runtime
from cortex_workers.host import ParsedArguments, Tool
from cortex_workers.lease.keeper import Held
from cortex_workers.schemas.agent import AgentDefinition, ToolSpec
from cortex_workers.schemas.lease import Term
from cortex_workers.schemas.llm import Deferral, Message, ToolCall, Usage
from cortex_workers.schemas.suspension import PendingKind
from cortex_workers.store.transitions import Row


@dataclass(slots=True)
class Planned:
    """One call of the current turn: what the model asked, what the gates said, what its row holds.

    ``row`` is the stored call, empty before it has one; ``ready`` are arguments that passed the tool's schema.
    """

    call: ToolCall
    ordinal: int
    step_index: int
    message_seq: int | None
    spec: ToolSpec | None = None
    tool: Tool | None = None
    ready: ParsedArguments | None = None
    row: dict[str, Any] = field(default_factory=dict)
    provider_call_id: str | None = None
    executed_args: str | None = None
    amended_by: str | None = None
    ttl_s: float | None = None
    waits_for: PendingKind | None = None
    granted: bool = False
    adjudicated: bool = False

    @property
    def safe(self) -> bool:
        """Whether it may simply run again after a crash."""
        return self.spec is not None and self.spec.retry_safe

    @property
    def control(self) -> bool:
        """Whether the engine itself carries it out, in one transaction with its outcome."""
        return self.spec is not None and self.spec.tool_class == "control"

    def as_it_ran(self, text: str) -> str:
        """A result of the call, with what really ran where a person changed its arguments."""
        return as_it_ran(text, self.executed_args, self.amended_by)


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one call: ``complete``, ``fail`` or ``deny``, and the text the model reads."""

    planned: Planned
    outcome: str
    text: str
    marked: bool = False
    error: str | None = None


@dataclass(slots=True)
class Answered:
    """A model's answer that is not stored yet."""

    message: Message
    usage: Usage
    model: str
    finish_reason: str
    started_at: Any
    marked: bool = False


@dataclass(slots=True)
class Execution:
    """The state of one term. ``history`` and the input come before ``own``, the run's own messages."""

    rt: Runtime
    row: Row
    term: Term
    held: Held
    agent: AgentDefinition
    principal: Any
    history: list[Message] = field(default_factory=list)
    own: list[Message] = field(default_factory=list)
    call_ids: set[str] = field(default_factory=set)
    results: list[Result] = field(default_factory=list)
    next_step: int = 0
    step_count: int = 0
    usage: Usage = field(default_factory=Usage)
    steps_here: int = 0
    acted: bool = False
    stored_prompt: bool = False
    began: float = field(default_factory=time.monotonic)
    slice_began: float = field(default_factory=time.monotonic)
    last_message_seq: int | None = None
    last_step_index: int = 0
    left_as: str = "done"
    next_seq: int = 0
    deferral: Deferral | None = None
    chain: tuple[str, ...] = ()

    @property
    def run_id(self) -> str:
        """The run."""
        return self.term.run_id

    @property
    def run(self) -> Mapping[str, Any]:
        """The row as claimed."""
        return self.row

    def conversation(self) -> tuple[Message, ...]:
        """Everything the model reads: history, this run's input, its own messages, results in hand."""
        given = Message(role="user", content=str(self.row["input"]))
        in_hand = [result_message(item) for item in self.results]
        return (*self.history, given, *self.own, *in_hand)


def as_it_ran(text: str, executed_args: str | None, amended_by: str | None) -> str:
    """Tell the model what ran in place of what it asked for; its own message is never rewritten (bug case C24)."""
    if executed_args is None:
        return text
    by = f" by {amended_by}" if amended_by else ""
    return f"[The arguments were changed{by} before the call ran; it ran with {executed_args}]\n{text}"


def result_message(result: Result) -> Message:
    """A call's result as the model reads it."""
    return Message(
        role="tool",
        content=result.text,
        tool_call_id=result.planned.call.id,
        tool_name=result.planned.call.name,
        is_error=result.outcome != "complete",
    )

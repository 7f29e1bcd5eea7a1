"""What the engine says to a model and hears from it; nothing of a provider's library.

Source: decision S6, runs.md 2.7, ruling 59.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from cortex_workers.schemas.base import Document

Role = Literal["user", "assistant", "tool"]


class Usage(Document):
    """Tokens of one model call, or their sum over a run."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    requests: int = 0

    @property
    def total_tokens(self) -> int:
        """Input plus output."""
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in Usage.model_fields})


class ToolCall(Document):
    """A call the model asks for. ``arguments`` is the model's own JSON text, byte for byte."""

    id: str
    name: str
    arguments: str = "{}"


class Message(Document):
    """One message of a conversation. ``raw`` keeps a provider's opaque items so that it can be sent back verbatim."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    tool_name: str | None = None
    is_error: bool = False
    raw: dict[str, Any] | None = None


class ToolDefinition(Document):
    """What the model is told of a tool. ``parameters`` is a JSON schema of an object."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})


class Deferral(Document):
    """What became of a deferred call, for the client that makes it again.

    ``approved``: a person said yes (then ``decided_by``); otherwise the client's own poll is due. ``ref`` is its handle.
    """

    kind: str
    ref: str | None = None
    approved: bool = False
    decided_by: str | None = None


class ModelRequest(Document):
    """One model call. ``temperature`` absent means the provider's default. Times are seconds."""

    model: str
    system: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[ToolDefinition, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    timeout_s: float | None = None
    run_id: str = ""
    step: int = 0
    deferral: Deferral | None = None


class ModelReply(Document):
    """What the model answered. An empty ``tool_calls`` means a final answer."""

    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage = Field(default_factory=Usage)
    finish_reason: str = "stop"
    model: str = ""
    raw: dict[str, Any] | None = None


class ModelDelta(Document):
    """A piece of a streamed answer; the last one carries the whole ``reply``."""

    content: str = ""
    reply: ModelReply | None = None

"""Agents as workers publish them: an immutable, content-addressed version with the schemas of its tools.

Source: ruling 53.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from cortex_workers.schemas.base import Document, digest
from cortex_workers.schemas.llm import ToolDefinition

ToolClass = Literal["retry_safe", "mutating", "external", "ask", "control"]
Effects = Literal["none", "mutating"]
OnExpiry = Literal["fail", "return_to_model"]
OnRejection = Literal["fail", "return_to_model"]
OnUncertain = Literal["ask", "fail"]
Turns = Literal["serial", "parallel"]


class ToolSpec(Document):
    """One tool of an agent version. Times are seconds; None means the setting's default or no limit."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    tool_class: ToolClass = "mutating"
    effects: Effects = "mutating"
    needs_approval: bool = False
    approval_ttl_s: float | None = None
    external_ttl_s: float | None = None
    timeout_s: float | None = None
    on_expiry: OnExpiry | None = None
    has_lookup: bool = False

    @property
    def retry_safe(self) -> bool:
        """Whether a started call may simply run again after a crash."""
        return self.tool_class == "retry_safe"

    def definition(self) -> ToolDefinition:
        """What the model is told."""
        return ToolDefinition(name=self.name, description=self.description, parameters=self.parameters)


class AgentDefinition(Document):
    """Everything that is frozen when a run is enqueued. Times are seconds, budgets count leased time only."""

    name: str
    model: str
    instructions: str = ""
    tools: tuple[ToolSpec, ...] = ()
    max_steps: int = Field(default=25, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    model_settings: dict[str, Any] = Field(default_factory=dict)
    model_timeout_s: float | None = None
    model_attempts: int | None = None
    stream: bool = False
    turns: Turns = "serial"
    suspension_ttl_s: float | None = None
    on_expiry: OnExpiry = "fail"
    on_rejection: OnRejection = "fail"
    on_uncertain_effect: OnUncertain = "ask"
    budget_s: float | None = None
    history_window: int | None = None
    reply_by_s: float | None = None
    pool: str = "main"

    def digest(self) -> str:
        """The identity of this version: SHA-256 over its canonical JSON (without the pool, which is routing)."""
        return digest(self.model_dump(mode="json", exclude={"pool"}))

    def tool(self, name: str) -> ToolSpec | None:
        """The tool of that name, or None."""
        return next((tool for tool in self.tools if tool.name == name), None)

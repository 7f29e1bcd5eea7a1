"""What a host or a floor above supplies, as Protocols; and the one in-transaction hook."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from cortex_workers.schemas.llm import ModelDelta, ModelReply, ModelRequest

if TYPE_CHECKING:
    from cortex_workers.host import ToolContext


@runtime_checkable
class ModelClient(Protocol):
    """Calls one provider. ``complete`` and ``stream`` may be plain or async.

    An async answer is cancelled after ``request.timeout_s``; a plain ``complete`` holds its slot and keeps to that by
    itself.

    Raises (from either): ModelUnavailable for what a retry in the step may cure (with ``retry_after_s``),
    ModelFailed for what it cannot.
    Source: decision S6.
    """

    def complete(self, request: ModelRequest) -> ModelReply | Awaitable[ModelReply]:
        """Answer one request."""
        ...

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """Answer one request piece by piece; the last delta carries the whole reply."""
        ...


class PrincipalCodec(Protocol):
    """Turns the host's principal into bytes for the run's row, and back on another worker.

    ``decode`` raises PrincipalUndecodable ("not right now": the run waits) or PrincipalRevoked (the run fails).
    Source: runs.md 2.3, ruling 56.
    """

    def encode(self, principal: Any) -> bytes:
        """Encode a principal (never None)."""
        ...

    def decode(self, data: bytes) -> Any:
        """Decode a stored principal."""
        ...


class ToolAuthorizer(Protocol):
    """Decides which tools a run may see and call, under the run's own scope and principal.

    Source: runs.md 6.3, 8.8; decision R15.
    """

    def visible(self, ctx: ToolContext, tools: Sequence[str]) -> Sequence[str]:
        """The names of the tools the model is shown; asked once a step."""
        ...

    def authorize(self, ctx: ToolContext, tool: str, arguments: dict[str, Any], approved: bool) -> None:
        """Allow one dispatch by returning.

        ``arguments`` are the ones that will run; ``approved`` tells that a person approved this very call.
        Raises: RequiresApproval (optionally with ``ttl``) to escalate; any other exception denies, its text is
        what the model reads.
        """
        ...


class HintDepth(Protocol):
    """How many messages wait in a queue (ruling 17)."""

    def depth(self, queue: str) -> int | None:
        """The number of waiting messages, or None when it is not known."""
        ...


TransitionHook = Callable[..., None]
"""``on_transition(unit, row, before, after)``, in the transaction, for every row of the run machine (ruling 69)."""

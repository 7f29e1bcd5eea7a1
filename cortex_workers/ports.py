"""What a host or a floor above supplies, as Protocols; and the one in-transaction hook."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from cortex_workers.schemas.a2a import Address, Envelope
from cortex_workers.schemas.admission import ResumeClosureRequest
from cortex_workers.schemas.llm import ModelDelta, ModelReply, ModelRequest

if TYPE_CHECKING:
    from cortex_workers.host import ToolContext


@runtime_checkable
class ModelClient(Protocol):
    """Calls one provider. ``complete`` and ``stream`` may be plain or async.

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


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of a streamed answer: its run, step, index within the step (from 0), and text."""

    run_id: str
    step: int
    index: int
    text: str


class TokenSink(Protocol):
    """Takes tokens as they come; never blocks, never raises."""

    def push(self, token: Token) -> None:
        """Take one token."""
        ...


class TokenSource(Protocol):
    """Gives the tokens that are still kept."""

    def read(self, run_id: str, place: str | None) -> tuple[Sequence[Token], str | None]:
        """Tokens after a place, and the next place; nothing while they cannot be had. Never raises."""
        ...

    def close(self) -> None:
        """Give back what reading took."""
        ...


class ResumeClosureAuthorizer(Protocol):
    """Authenticates who closes an uncertain run and what proves that its work has stopped.

    Asked before every closing, a retry of a closed one included: a receipt or a digest is no permission. Workers are
    named by what is retained of the run, not by how agents are configured now.
    Source: seed suspension.
    """

    def authorize_resume_closure(self, request: ResumeClosureRequest) -> None:
        """Allow by returning.

        Raises: anything, which refuses; a text is told to whoever asks.
        """
        ...


class ResumeClosureFence(Protocol):
    """Keeps every worker and tool of a run still, for good, while it is closed.

    That includes remote workers, callbacks under way and actions that are delayed; one stopped process is enough only
    where nothing else could act. It has 30 seconds; what it allows later is refused.
    Source: seed suspension.
    """

    def with_resume_closure(
        self, request: ResumeClosureRequest, close: Callable[[ResumeClosureRequest], None]
    ) -> None:
        """Call ``close`` once, with this very request, and hold what was checked until it returns.

        Raises: anything, which refuses.
        """
        ...


@dataclass(frozen=True, slots=True)
class PeerReply:
    """A peer has the message; with ``content`` it has answered as well."""

    content: str | None = None
    performative: str = "inform"


@dataclass(frozen=True, slots=True)
class PeerTask:
    """A peer works on the message; ask it again after so many seconds."""

    task_id: str
    poll_after_s: float = 2.0


class Transport(Protocol):
    """Carries messages to agents elsewhere. Called by workers, outside any transaction; the first that handles wins.

    Raises (from ``deliver`` and ``poll``): TransportBusy when the peer has surely begun nothing, TransportFailed or
    anything else when it failed or nobody knows: then whoever asked is told at once.
    Source: messaging.md (f).
    """

    def handles(self, address: Address) -> bool:
        """Whether it carries messages to this address."""
        ...

    def deliver(self, envelope: Envelope, receiver: Address, delivery_id: str) -> PeerReply | PeerTask:
        """Hand a message over. ``delivery_id`` is the same each time, for peers that recognise a repeat."""
        ...

    def poll(self, task_id: str, receiver: Address) -> PeerReply | PeerTask:
        """Ask how far the peer is."""
        ...


@dataclass(frozen=True, slots=True)
class Assignment:
    """A structured assignment for an agent of this fleet; ``run_id`` is the run that would carry it out."""

    scope: str
    message_id: str
    sender: str
    receiver: str
    body: dict[str, Any]
    run_id: str


@dataclass(frozen=True, slots=True)
class Admitted:
    """The assignment is taken; the receiver's run starts."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The assignment is refused; whoever gave it reads the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Deferred:
    """Not now; the handler is asked again after so many seconds."""

    seconds: float


class HandoffHandler(Protocol):
    """Admits structured assignments; the same one must get the same answer. Without a handler all are refused.

    Source: messaging.md d.6.
    """

    def assign(self, assignment: Assignment) -> Admitted | Rejected | Deferred:
        """Decide about one assignment."""
        ...


class HintDepth(Protocol):
    """How many messages wait in a queue (ruling 17)."""

    def depth(self, queue: str) -> int | None:
        """The number of waiting messages, or None when it is not known."""
        ...


TransitionHook = Callable[..., None]
"""``on_transition(unit, row, before, after)``, in the transaction, for every row of the run machine (ruling 69)."""

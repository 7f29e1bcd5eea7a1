"""A model client that asks a person before an expensive call: the one deferrer that needs no provider's help.

Source: decision S6 (a client may raise the deferral); rulings 50; issue: requests above an estimate wait for a person.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

from cortex_workers.errors import DeferredModelCall, Misconfiguration
from cortex_workers.llm.resolve import checked_name, resolve
from cortex_workers.ports import ModelClient
from cortex_workers.schemas.base import canonical_json
from cortex_workers.schemas.llm import ModelDelta, ModelRequest

KIND = "spend"
CHARS_PER_TOKEN = 4
"""A cautious rule of thumb, where the client cannot count by itself."""


def estimate_tokens(request: ModelRequest) -> int:
    """Tokens of a request by its length, the answer's limit included."""
    sent = len(request.system) + sum(
        len(item.content) + sum(len(call.arguments) for call in item.tool_calls) for item in request.messages
    )
    tools = sum(len(tool.description) + len(canonical_json(tool.parameters)) for tool in request.tools)
    return (sent + tools) // CHARS_PER_TOKEN + (request.max_tokens or 0)


class SpendGate:
    """Wraps a client, or the model of a name; what is above ``max_tokens`` or ``max_cost`` waits for a person.

    A name is like ``openai:gpt-5-mini``; its client is built where a call is made, and looked for when a worker starts.
    ``max_cost`` is in the unit of ``cost``, which turns estimated tokens into money. ``ttl`` is the deadline of the
    question. An approved call goes through once; the next expensive one asks again.

    Raises: Misconfiguration for a gate without a limit, or around something that is no client; UnknownModel for a text
    that names no model.
    """

    def __init__(
        self,
        client: ModelClient | str,
        *,
        max_tokens: int | None = None,
        max_cost: float | None = None,
        cost: Callable[[ModelRequest, int], float] | None = None,
        ttl: timedelta | None = None,
    ) -> None:
        if max_tokens is None and max_cost is None:
            raise Misconfiguration("a spend gate needs max_tokens or max_cost")
        if max_cost is not None and cost is None:
            raise Misconfiguration("a spend gate with max_cost needs cost=, which turns tokens into money")
        self._source = checked_name(client) if isinstance(client, str) else _checked_client(client)
        self._max_tokens = max_tokens
        self._max_cost = max_cost
        self._cost = cost
        self._ttl = ttl

    def resolve_model(self) -> ModelClient:
        """The client behind the gate.

        Raises: as ``resolve``.
        """
        return resolve(self._source) if isinstance(self._source, str) else self._source

    def complete(self, request: ModelRequest) -> Any:
        """Answer, or defer.

        Raises: DeferredModelCall (kind ``spend``).
        """
        self._check(request)
        return self.resolve_model().complete(request)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """Answer piece by piece, or defer.

        Raises: DeferredModelCall (kind ``spend``).
        """
        self._check(request)
        async for delta in self.resolve_model().stream(request):
            yield delta

    def count_tokens(self, request: ModelRequest) -> int:
        """Tokens of a request: the client's own count where it has one, else an estimate."""
        count = getattr(self.resolve_model(), "count_tokens", None)
        if count is None or inspect.iscoroutinefunction(count):
            return estimate_tokens(request)
        return int(count(request))

    def _check(self, request: ModelRequest) -> None:
        asked = request.deferral
        if asked is not None and (asked.approved or asked.kind != KIND):
            # Approved here, or put off by the client behind this gate, to which it had let the call through.
            return
        tokens = self.count_tokens(request)
        if self._max_tokens is not None and tokens > self._max_tokens:
            self._defer(f"about {tokens} tokens, the limit is {self._max_tokens}")
        if self._max_cost is not None and self._cost is not None:
            cost = self._cost(request, tokens)
            if cost > self._max_cost:
                self._defer(f"about {cost:.4g}, the limit is {self._max_cost:.4g}")

    def _defer(self, why: str) -> None:
        raise DeferredModelCall(
            "this model call waits for a person", kind=KIND, reason=f"model call of {why}", ttl=self._ttl
        )


def _checked_client(client: object) -> ModelClient:
    if isinstance(client, ModelClient) and not isinstance(client, type):
        return client
    raise Misconfiguration(
        "a spend gate wraps a ModelClient (complete and stream) or the name of a model, like openai:gpt-5-mini, "
        f"not {client!r:.80}"
    )

"""``Host``: the agents and tools of one application, by name."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from cortex_workers.errors import (
    DuplicateTool,
    Misconfiguration,
    PrincipalCodecRequired,
    UnknownModel,
    UnknownTool,
)
from cortex_workers.host.agents import AgentEntry, ToolReference, make_agent
from cortex_workers.host.messaging import MESSAGING_TOOLS, messaging_tools
from cortex_workers.host.tool import AnyFunction, LookupHook, Tool, make_tool
from cortex_workers.ports import HandoffHandler, ModelClient, PrincipalCodec, ToolAuthorizer, Transport
from cortex_workers.schemas.agent import AgentDefinition, Effects, OnExpiry, OnRejection, OnUncertain, Turns
from cortex_workers.schemas.notifications import KINDS

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
ModelSource = ModelClient | Callable[[], ModelClient]


class ToolFunction(Protocol[P, R]):
    """A registered function: called as before, and ``@function.lookup`` registers its lookup."""

    lookup: LookupHook

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself."""
        ...


class Host:
    """The agents and tools of an application, its authorizer, principal codec and model clients.

    ``models`` gives names of your own to model clients, or to functions that build one (once per process); an
    agent then says ``model="that-name"``. ``messaging`` gives every agent the tools `agent_send`, `agent_ask` and
    `agent_inbox`; ``transports`` carry messages to agents elsewhere; ``handoff`` admits structured assignments.
    """

    def __init__(
        self,
        *,
        authorizer: ToolAuthorizer | None = None,
        codec: PrincipalCodec | None = None,
        models: Mapping[str, ModelSource] | None = None,
        messaging: bool = False,
        transports: Sequence[Transport] = (),
        handoff: HandoffHandler | None = None,
    ) -> None:
        self.authorizer = authorizer
        self.codec = codec
        self.messaging = messaging
        self.transports = tuple(transports)
        self.handoff = handoff
        self.tools: dict[str, Tool] = messaging_tools() if messaging else {}
        self._agents: dict[str, AgentEntry] = {}
        self._models: dict[str, ModelSource] = dict(models or {})
        self.subscribers: list[tuple[tuple[str, ...], Callable[[Any], None]]] = []
        self._retry_safe: set[str] = set()
        self._clients: dict[tuple[int, str], ModelClient] = {}
        self._lock = threading.RLock()

    @overload
    def tool(self, function: Callable[P, R], /) -> ToolFunction[P, R]: ...

    @overload
    def tool(
        self,
        function: None = None,
        /,
        *,
        name: str | None = None,
        retry_safe: bool = False,
        effects: Effects = "mutating",
        needs_approval: bool = False,
        approval_ttl: timedelta | None = None,
        timeout: timedelta | None = None,
        on_expiry: OnExpiry | None = None,
    ) -> Callable[[Callable[P, R]], ToolFunction[P, R]]: ...

    def tool(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        retry_safe: bool = False,
        effects: Effects = "mutating",
        needs_approval: bool = False,
        approval_ttl: timedelta | None = None,
        timeout: timedelta | None = None,
        on_expiry: OnExpiry | None = None,
    ) -> Any:
        """Register a plain or async function as a tool; the function stays what it was.

        The model is told the name, the first paragraph of the docstring, and the parameters with their types
        and the texts of an ``Args:`` section. A parameter annotated ToolContext is filled by the worker.
        ``retry_safe``: a started call may simply run again after a crash. ``effects="none"``: it only reads.
        ``approval_ttl`` zero means an approval without a deadline; None the agent's or the setting's.
        Raises: DuplicateTool, InvalidTool.
        """

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            tool = make_tool(
                function,
                name,
                retry_safe=retry_safe,
                effects=effects,
                needs_approval=needs_approval,
                approval_ttl=approval_ttl,
                timeout=timeout,
                on_expiry=on_expiry,
            )
            if tool.name in self.tools:
                raise DuplicateTool(f"a tool named {tool.name!r} is registered already")
            self.tools[tool.name] = tool
            _hang_lookup(tool)
            return function

        return register if function is None else register(function)

    def external_tool(
        self,
        function: Callable[..., Any],
        /,
        *,
        name: str | None = None,
        ttl: timedelta | None = None,
        needs_approval: bool = False,
        approval_ttl: timedelta | None = None,
        effects: Effects = "mutating",
        on_expiry: OnExpiry | None = None,
    ) -> Callable[..., Any]:
        """Register a tool that runs outside: a signature without a body. A call of it pauses the run for its result.

        ``ttl``: how long the run waits for the result; zero no deadline, None the agent's or the setting's.
        Raises: DuplicateTool, InvalidTool.
        """
        tool = make_tool(
            function,
            name,
            retry_safe=False,
            effects=effects,
            needs_approval=needs_approval,
            approval_ttl=approval_ttl,
            timeout=None,
            on_expiry=on_expiry,
        )
        if tool.name in self.tools:
            raise DuplicateTool(f"a tool named {tool.name!r} is registered already")
        tool.set_external(ttl)
        self.tools[tool.name] = tool
        return function

    def lookup(self, tool: str) -> Callable[[AnyFunction], AnyFunction]:
        """Register the lookup of a tool by name; the same as ``@function.lookup``.

        Raises: UnknownTool, DuplicateTool, InvalidTool.
        """
        if tool not in self.tools:
            raise UnknownTool(f"there is no tool named {tool!r} to look up")

        def register(function: AnyFunction) -> AnyFunction:
            self.tools[tool].set_lookup(function)
            return function

        return register

    def mark_retry_safe(self, *names: str) -> None:
        """Say of tools by name that a started call may simply run again; ``check`` refuses unknown names."""
        self._retry_safe.update(names)

    def agent(
        self,
        name: str,
        *,
        model: str | ModelSource,
        instructions: str = "",
        tools: Sequence[ToolReference] = (),
        max_steps: int = 25,
        max_tokens: int | None = None,
        temperature: float | None = None,
        model_settings: Mapping[str, Any] | None = None,
        model_timeout: timedelta | None = None,
        model_attempts: int | None = None,
        stream: bool = False,
        turns: Turns = "serial",
        suspension_ttl: timedelta | None = None,
        on_expiry: OnExpiry = "fail",
        on_rejection: OnRejection = "fail",
        on_uncertain_effect: OnUncertain = "ask",
        budget: timedelta | None = None,
        history_window: int | None = None,
        reply_by: timedelta | None = None,
        pool: str = "main",
    ) -> None:
        """Register an agent. Tools are named, or given as the registered functions; order does not matter.

        ``model`` is a name ("openai:gpt-5-mini", "scripted:FILE", one of ``Host(models=…)``), a ModelClient,
        or a function that builds one, called once per process. ``suspension_ttl`` zero means no deadline.
        ``reply_by``: how long another agent that asks this one waits for its answer.
        Raises: Misconfiguration.
        """
        options = {
            key: value for key, value in locals().items() if key not in ("self", "name", "model", "tools")
        }
        if name in self._agents:
            raise Misconfiguration(f"an agent named {name!r} is registered already")
        text = model if isinstance(model, str) else f"host:{name}"
        entry = make_agent(name, text, tools, options)
        if not isinstance(model, str):
            self._models[text] = _model_source(name, model)
        self._agents[name] = entry

    def on(self, *kinds: str) -> Callable[[AnyFunction], AnyFunction]:
        """Tell a function of committed facts, in every process that has this host: ``@host.on("CheckpointCreated")``.

        It gets the notification (ids only), after the commit and in the thread that committed, so it must be quick;
        what it raises is logged and changes nothing. No kind means all. A fact may be told more than once.
        Raises: Misconfiguration for a kind that does not exist.
        """
        unknown = sorted(set(kinds) - set(KINDS))
        if unknown:
            raise Misconfiguration(f"there is no notification {unknown[0]!r:.60}; known: {', '.join(KINDS)}")

        def register(function: AnyFunction) -> AnyFunction:
            self.subscribers.append((kinds, function))
            return function

        return register

    def check(self) -> None:
        """Refuse a host that cannot work; a worker calls this when it starts.

        Raises: PrincipalCodecRequired, UnknownTool, Misconfiguration.
        """
        if self.authorizer is not None and self.codec is None:
            raise PrincipalCodecRequired()
        if not self.messaging and (self.transports or self.handoff is not None):
            raise Misconfiguration("transports and a hand-off handler need Host(messaging=True)")
        for name in sorted(self._retry_safe):
            if name not in self.tools:
                raise UnknownTool(
                    f"mark_retry_safe names {name!r}, which is no tool of this host{self._known_tools()}"
                )
            self.tools[name].set_retry_safe()
        self.definitions()

    def definitions(self) -> dict[str, AgentDefinition]:
        """Every agent with the schemas of its tools, by name.

        Raises: UnknownTool.
        """
        for name in self._retry_safe & self.tools.keys():
            self.tools[name].set_retry_safe()
        return {name: self._resolved(entry) for name, entry in self._agents.items()}

    def model_client(self, model: str) -> ModelClient | None:
        """The host's own client for an agent's model text, or None for a name that the model layer resolves.

        One per process and text; ``llm.resolve.client_for`` asks here first.
        Raises: UnknownModel for a host's own model that it does not have or cannot build.
        """
        if model not in self._models:
            if not model.startswith("host:"):
                return None
            raise UnknownModel(
                f"this host gives no model client to the agent {model.removeprefix('host:')!r}"
            )
        key = (os.getpid(), model)
        with self._lock:
            if key not in self._clients:
                self._clients[key] = _build(model, self._models[model])
            return self._clients[key]

    def _resolved(self, entry: AgentEntry) -> AgentDefinition:
        specs = tuple(self._referenced(entry.definition.name, reference).spec for reference in entry.tools)
        if self.messaging:
            # Every agent talks, whatever tools it names.
            named = {spec.name for spec in specs}
            specs += tuple(self.tools[name].spec for name in MESSAGING_TOOLS if name not in named)
        names = [spec.name for spec in specs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise Misconfiguration(f"agent {entry.definition.name!r} names the tool {twice[0]!r} twice")
        return entry.definition.model_copy(update={"tools": specs})

    def _referenced(self, agent: str, reference: ToolReference) -> Tool:
        if isinstance(reference, str):
            if reference in self.tools:
                return self.tools[reference]
            raise UnknownTool(
                f"agent {agent!r} names the tool {reference!r}, which is not registered{self._known_tools()}"
            )
        # Compared with ==: a bound method is another object each time it is looked at.
        for tool in self.tools.values():
            if tool.function == reference:
                return tool
        shown = getattr(reference, "__name__", type(reference).__name__)
        raise UnknownTool(f"agent {agent!r} names the function {shown!r}, which is not registered as a tool")

    def _known_tools(self) -> str:
        return f"; known: {', '.join(sorted(self.tools)[:20])}" if self.tools else "; it has no tools"


def _hang_lookup(tool: Tool) -> None:
    """Put ``lookup`` on the function, where a function takes attributes (a bound method does not)."""
    hook = getattr(tool.function, "lookup", None)
    if not isinstance(hook, LookupHook):
        hook = LookupHook()
        try:
            tool.function.lookup = hook  # type: ignore[attr-defined]
        except AttributeError:
            return
    hook.add(tool)


def _model_source(agent: str, model: ModelSource) -> ModelSource:
    is_client = isinstance(model, ModelClient) and not isinstance(model, type)
    if is_client or callable(model):
        return model
    raise Misconfiguration(
        f"agent {agent!r}: model is a name, a ModelClient (complete and stream) or a function that builds "
        f"one, not a {type(model).__name__}"
    )


def _build(name: str, source: ModelSource) -> ModelClient:
    if isinstance(source, ModelClient) and not isinstance(source, type):
        return source
    if not callable(source):
        raise UnknownModel(
            f"model {name!r} is neither a ModelClient (complete and stream) nor a function that builds one"
        )
    try:
        client = source()
    except Misconfiguration:
        raise
    except Exception as error:
        # The host's own code, called when a worker starts.
        raise UnknownModel(
            f"model {name!r} cannot be built: {type(error).__name__}: {str(error)[:300]}"
        ) from error
    if not isinstance(client, ModelClient):
        raise UnknownModel(
            f"what builds the model {name!r} returned a {type(client).__name__}, not a ModelClient"
        )
    return client

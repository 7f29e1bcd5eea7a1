"""From an agent's model text to the client that answers: one per process and text."""

from __future__ import annotations

import difflib
import os
import re
import threading
from collections.abc import Iterable
from functools import partial
from typing import Protocol, runtime_checkable

from cortex_workers.errors import CortexError, Misconfiguration, UnknownModel
from cortex_workers.host import Host
from cortex_workers.llm.scripted import ScriptedModel
from cortex_workers.ports import ModelClient

# Providers whose package is an extra of ours, by the extra of pydantic-ai-slim.
OUR_EXTRAS = frozenset({"openai", "anthropic", "google", "groq", "mistral", "bedrock"})
# Where somebody may have meant another; pydantic-ai has more, which go by their own prefixes.
_BEST_KNOWN = (*sorted(OUR_EXTRAS), "openai-chat", "openai-responses", "ollama", "azure", "scripted")
_EXTRA = re.compile(r"pydantic-ai-slim\[([\w-]+)\]")

_clients: dict[tuple[int, str], ModelClient] = {}
_lock = threading.Lock()


def resolve(model: str) -> ModelClient:
    """The client for ``provider:name``, or ``scripted:FILE``.

    Every provider of pydantic-ai goes by its own prefix; ``openai:`` speaks the Responses protocol, ``openai-chat:``
    chat completions. The key is the process too: connections do not survive a fork.
    Raises: UnknownModel, naming what to install where a package is missing; Misconfiguration where the provider
    lacks its key or a script is wrong.
    """
    key = (os.getpid(), model)
    with _lock:
        if key not in _clients:
            _clients[key] = _build(model)
        return _clients[key]


def client_for(host: Host, model: str) -> ModelClient:
    """The client for the model text of an agent's definition: the host's own first.

    Raises: as ``resolve``.
    """
    return host.model_client(model) or resolve(model)


def check_models(host: Host, agents: Iterable[str] | None = None) -> None:
    """Build the client of every agent, so that a missing package or key shows when a worker starts.

    Raises: as ``resolve``, naming the agent.
    """
    definitions = host.definitions()
    for name in definitions if agents is None else agents:
        try:
            client = client_for(host, definitions[name].model)
            while isinstance(client, _Behind):
                client = client.resolve_model()
        except Misconfiguration as error:
            raise type(error)(f"agent {name!r}: {error.message}") from error


@runtime_checkable
class _Behind(Protocol):
    """A client that has another one behind it, which it knows by name."""

    def resolve_model(self) -> ModelClient: ...


def checked_name(model: str) -> str:
    """A text that may name a model.

    Raises: UnknownModel.
    """
    provider, _, name = model.partition(":")
    if not provider or not name:
        raise UnknownModel(f"model {model[:100]!r}: a model is named provider:name, like openai:gpt-5-mini")
    return model


def _build(model: str) -> ModelClient:
    provider, _, name = checked_name(model).partition(":")
    if provider == "scripted":
        return ScriptedModel.from_file(name)
    return _from_provider(model, provider)


def _from_provider(model: str, provider: str) -> ModelClient:
    try:
        from pydantic_ai.exceptions import UserError
        from pydantic_ai.models import infer_model

        from cortex_workers.llm.pydantic_ai import PydanticAIClient
    except ModuleNotFoundError as error:
        extra = f"llm-{provider}" if provider in OUR_EXTRAS else "llm"
        meant = "" if provider in _BEST_KNOWN else _meant(provider)
        raise UnknownModel(
            f"model {model!r} needs: pip install 'cortex-workers[{extra}]'{meant and f'; {meant}'}"
        ) from error
    try:
        return PydanticAIClient(partial(infer_model, model), provider)
    except UserError as error:
        if str(error).startswith("Unknown model"):
            raise UnknownModel(_no_such_provider(model, provider)) from error
        raise Misconfiguration(f"model {model!r}: {str(error)[:300]}") from error
    except ImportError as error:
        raise UnknownModel(f"model {model!r} needs: pip install '{_package(error)}'") from error
    except CortexError:
        raise
    except Exception as error:
        # Each provider's library checks its own configuration with errors of its own.
        raise Misconfiguration(
            f"model {model!r} cannot be set up: {type(error).__name__}: {str(error)[:300]}"
        ) from error


def _no_such_provider(model: str, provider: str) -> str:
    known = f"known are {', '.join(_BEST_KNOWN)} and the other providers of pydantic-ai"
    told = [f"model {model!r}: there is no provider {provider!r}", _meant(provider), known]
    return "; ".join(filter(None, told))


def _meant(provider: str) -> str:
    close = difflib.get_close_matches(provider.lower(), _BEST_KNOWN, n=1)
    return f"did you mean {close[0]!r}?" if close else ""


def _package(error: ImportError) -> str:
    found = _EXTRA.search(str(error))
    if found is None:
        return error.name or "the provider's package"
    return f"cortex-workers[llm-{found[1]}]" if found[1] in OUR_EXTRAS else f"pydantic-ai-slim[{found[1]}]"

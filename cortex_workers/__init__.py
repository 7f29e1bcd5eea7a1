"""Durable LLM agent runs on Celery, Redis and Postgres.

Names are loaded on first use, so that a producer does not pay for what it does not touch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cortex_workers.client import Client
    from cortex_workers.errors import (
        CortexError,
        DeferredModelCall,
        EffectUncertain,
        ModelFailed,
        ModelUnavailable,
        PrincipalRevoked,
        PrincipalUndecodable,
        Refusal,
        RequiresApproval,
        RunFailure,
        Unavailable,
    )
    from cortex_workers.host import (
        DidNotHappen,
        Happened,
        Host,
        JsonPrincipalCodec,
        ToolContext,
        Unknown,
    )
    from cortex_workers.schemas.admission import ToolResult
    from cortex_workers.schemas.checkpoint import CallDecision
    from cortex_workers.schemas.run import EnqueueRun, Run, RunOverrides
    from cortex_workers.settings import Settings

_HOMES = {
    "CallDecision": "schemas.checkpoint",
    "Client": "client",
    "CortexError": "errors",
    "DeferredModelCall": "errors",
    "DidNotHappen": "host",
    "EffectUncertain": "errors",
    "EnqueueRun": "schemas.run",
    "Happened": "host",
    "Host": "host",
    "JsonPrincipalCodec": "host",
    "ModelFailed": "errors",
    "ModelUnavailable": "errors",
    "PrincipalRevoked": "errors",
    "PrincipalUndecodable": "errors",
    "Refusal": "errors",
    "RequiresApproval": "errors",
    "Run": "schemas.run",
    "RunFailure": "errors",
    "RunOverrides": "schemas.run",
    "Settings": "settings",
    "ToolContext": "host",
    "ToolResult": "schemas.admission",
    "Unavailable": "errors",
    "Unknown": "host",
}

__all__ = [
    "CallDecision",
    "Client",
    "CortexError",
    "DeferredModelCall",
    "DidNotHappen",
    "EffectUncertain",
    "EnqueueRun",
    "Happened",
    "Host",
    "JsonPrincipalCodec",
    "ModelFailed",
    "ModelUnavailable",
    "PrincipalRevoked",
    "PrincipalUndecodable",
    "Refusal",
    "RequiresApproval",
    "Run",
    "RunFailure",
    "RunOverrides",
    "Settings",
    "ToolContext",
    "ToolResult",
    "Unavailable",
    "Unknown",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

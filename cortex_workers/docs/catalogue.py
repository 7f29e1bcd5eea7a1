"""Every generated block, by name."""

from __future__ import annotations

from functools import partial

from cortex_workers.docs.blocks import Render
from cortex_workers.docs.commands import commands
from cortex_workers.docs.errors import errors
from cortex_workers.docs.invariants import invariants
from cortex_workers.docs.lifecycle import lifecycle
from cortex_workers.docs.names import client_verbs, notifications, public_names
from cortex_workers.docs.settings import settings
from cortex_workers.docs.telemetry import events, metrics, probes, spans

BLOCKS: dict[str, Render] = {
    "client-verbs": client_verbs,
    "commands": commands,
    "errors": errors,
    "events": events,
    "invariants": invariants,
    "lifecycle-ask": partial(lifecycle, "ask"),
    "lifecycle-checkpoint": partial(lifecycle, "checkpoint"),
    "lifecycle-delivery": partial(lifecycle, "delivery"),
    "lifecycle-run": partial(lifecycle, "run"),
    "lifecycle-tool-call": partial(lifecycle, "tool_call"),
    "metrics": metrics,
    "notifications": notifications,
    "probes": probes,
    "public-names": public_names,
    "settings": settings,
    "spans": spans,
}

"""The one catalogue of log events and metrics; docs are made from it.

Logs carry ids, counts, durations and codes, never content.
Source: house.md principle 21; celery.md 23.
"""

from __future__ import annotations

import logging
import sys
import traceback
from contextlib import AbstractContextManager
from typing import Any

import structlog
from opentelemetry import trace
from prometheus_client import Counter, Gauge, Histogram

EVENTS: dict[str, str] = {
    "run.enqueued": "a run was stored",
    "run.claimed": "this worker took a run",
    "run.paused": "a run waits for somebody",
    "run.completed": "a run gave its answer",
    "run.failed": "a run ended with a reason",
    "run.cancelled": "a run was cancelled",
    "run.closed": "a run was closed as incomplete",
    "run.handed_off": "a run goes on elsewhere",
    "run.handed_back": "a run cannot go on now and waits",
    "run.refused": "a hint met a run that needs nothing",
    "run.lost": "this worker lost a run and stopped before its next side effect",
    "run.broken": "a run could not be worked on; it was failed or left to its lease",
    "model.retry": "a model call failed and is tried again",
    "tool.abandoned": "a tool passed its timeout and was left behind",
    "tool.late_result": "a tool returned after its run had moved on",
    "loop.lagging": "an event loop is blocked by a tool or client that does not yield",
    "hint.published": "a hint was sent",
    "hint.failed": "a hint was not sent; the sweeper repeats it",
    "hint.dropped": "a hint was dropped on purpose",
    "tokens.failed": "tokens were not sent; who watches is told of the gap",
    "hook.failed": "a subscriber of a notification failed",
    "lease.renewed": "the leases of this process were renewed",
    "lease.unconfirmed": "a lease was not confirmed; boundaries wait when trust ends",
    "lease.lost": "a lease belongs to somebody else now",
    "worker.started": "this worker is ready",
    "worker.draining": "this worker takes no new work and hands off what it runs",
    "worker.stopped": "this worker has ended",
    "worker.watchdog": "the drain's deadline passed",
    "worker.unheard": "this worker's heartbeat could not be written",
    "worker.heard": "this worker's heartbeat is written again",
    "worker.starving": "messages wait, slots are free and nothing arrives",
    "message.sent": "somebody outside sent a message to agents",
    "delivery.begun": "a message started a run of its receiver",
    "delivery.ended": "a delivery is over; its reply, if any, is stored",
    "delivery.failed": "a message could not be carried; whoever asked is told",
    "sweep.done": "a sweep has ended",
    "sweep.row_failed": "one row of a sweep failed; the others went on",
    "sweep.fallback": "beat is silent; this worker sweeps by itself",
    "thread.died": "a thread of this process ended by an error",
    "store.retry": "a database connection was lost before commit; tried once more",
}

SPANS: dict[str, str] = {
    "cortex.run": "one term of a run on this worker",
    "cortex.model_call": "one model call, its tries included",
    "cortex.tool_call": "one handler",
    "cortex.sweep": "one pass of the sweep",
}

RUNS_ENDED = Counter("cw_runs_ended_total", "Runs that ended here", ["state"])
CLAIMS = Counter("cw_claims_total", "Runs claimed here", ["from_state"])
REFUSED_HINTS = Counter("cw_hints_refused_total", "Hints that met a run needing nothing", ["code"])
FENCED_WRITES = Counter("cw_fence_rejections_total", "Writes refused because the run had moved")
HAND_OFFS = Counter("cw_hand_offs_total", "Runs handed off here", ["why"])
RECLAIMS = Counter("cw_reclaims_total", "Leases found lapsed by sweeps here")
PUBLISHED = Counter("cw_hints_published_total", "Hints sent", ["task"])
PUBLISH_FAILURES = Counter("cw_publish_failures_total", "Hints not sent")
PUBLISH_DROPPED = Counter("cw_publish_dropped_total", "Hints dropped before sending", ["why"])
UNKNOWN_MESSAGES = Counter(
    "cw_unknown_messages_total", "Messages refused: unknown task, version or form", ["why"]
)
MODEL_CALLS = Counter("cw_model_calls_total", "Model calls", ["outcome"])
TOOL_CALLS = Counter("cw_tool_calls_total", "Tool calls", ["tool", "outcome"])
DELIVERIES = Counter("cw_deliveries_ended_total", "Deliveries that ended here", ["how"])
ABANDONED_TOOLS = Gauge("cw_abandoned_tools", "Tool threads left behind by timeouts")
SLOTS_USED = Gauge("cw_slots_used", "Slots that execute a run")
HELD_RUNS = Gauge("cw_held_runs", "Runs whose lease this process renews")
RENEW_SECONDS = Histogram("cw_lease_renew_seconds", "Duration of one renewal statement")
SWEEP_SECONDS = Histogram("cw_sweep_seconds", "Duration of one sweep pass", ["sweep"])
SWEEP_ROWS = Counter("cw_sweep_rows_total", "Rows a sweep moved", ["sweep"])
LOOP_LAG = Gauge("cw_loop_lag_seconds", "How late an event loop wakes up", ["loop"])
HOOK_FAILURES = Counter("cw_hook_failures_total", "Subscribers that failed", ["kind"])

tracer = trace.get_tracer("cortex_workers")
_log = structlog.get_logger("cortex_workers")
_plain = logging.getLogger("cortex_workers")


def span(name: str, **attributes: str | int) -> AbstractContextManager[Any]:
    """A span of the catalogue around a block; ids and counts only.

    Raises: KeyError for a name that is not in SPANS.
    """
    SPANS[name]
    return tracer.start_as_current_span(
        name, attributes={f"cortex.{key}": item for key, item in attributes.items()}
    )


def event(name: str, level: str = "info", **fields: Any) -> None:
    """Log one event of the catalogue.

    In a process that set up no structlog (a producer's) it goes to Python's logging, under ``cortex_workers``: what is
    shown there is that process's choice, by default warnings on stderr.
    Raises: KeyError for a name that is not in EVENTS.
    """
    EVENTS[name]
    if structlog.is_configured():
        getattr(_log, level)(name, **fields)
        return
    exc_info = fields.pop("exc_info", None)
    _plain.log(logging.getLevelNamesMapping()[level.upper()], "%s %s", name, fields, exc_info=exc_info)


def places(error: BaseException) -> list[str]:
    """Where an error was raised: files, lines and functions, innermost last; never its text, which may hold content."""
    frames = traceback.extract_tb(error.__traceback__)[-5:]
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]


def configure_logging(log_format: str = "auto", level: str = "info") -> None:
    """Set up structlog for a process: readable on a terminal, one JSON object a line elsewhere."""
    pretty = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    renderer: Any = structlog.dev.ConsoleRenderer() if pretty else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )

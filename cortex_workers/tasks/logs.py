"""One form for all lines of a worker: ours, and those of Celery and of the host's libraries.

Source: house.md principle 21.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from cortex_workers import telemetry
from cortex_workers.settings import Settings


def configure(settings: Settings, loglevel: Any = None) -> None:
    """Send Python's logging where our events go, in the same form; ``loglevel`` is Celery's `-l`."""
    telemetry.configure_logging(settings.log_format, settings.log_level)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_logger_name,
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.format_exc_info,
            ],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _renderer(settings)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(loglevel or logging.WARNING)


def _renderer(settings: Settings) -> Any:
    pretty = settings.log_format == "console" or (settings.log_format == "auto" and sys.stderr.isatty())
    return structlog.dev.ConsoleRenderer() if pretty else structlog.processors.JSONRenderer()

"""Where the life of a worker meets ours: start, ready, drain, end. What is wrong at the start ends it with a sentence.

Threads and gevent have everything in one process; prefork has it in each child and checks in the parent first.
Source: rulings 31, 32; celery.md 5, 6.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import prometheus_client
from celery import concurrency, signals
from celery.concurrency.prefork import TaskPool as Prefork

from cortex_workers import probes, telemetry
from cortex_workers.errors import CortexError, InvalidSettings
from cortex_workers.settings import Settings, load_settings
from cortex_workers.tasks import events, health, logs, process

_settings: Settings | None = None
_queues: tuple[str, ...] = ()


@signals.setup_logging.connect  # type: ignore[untyped-decorator]
def on_setup_logging(loglevel: Any = None, **_: Any) -> None:
    """Log in one form, our lines and Celery's; being here keeps Celery from setting up its own."""
    logs.configure(_settings or load_settings(), loglevel)


@signals.worker_init.connect  # type: ignore[untyped-decorator]
def on_worker_init(sender: Any, **_: Any) -> None:
    """Check what was configured, then build and start; celery passes over errors of a handler, so they end here."""
    global _settings, _queues
    try:
        _refuse_other_shutdowns(sender.app.conf)
        _settings = load_settings()
        telemetry.configure_logging(_settings.log_format, _settings.log_level)
        _queues = tuple(sender.app.amqp.queues.consume_from)
        if _is_prefork(sender.pool_cls):
            _settings = _settings.model_copy(update={"slots": 1})
            _check(_settings)
        else:
            _settings = _settings.model_copy(update={"slots": _slots(sender)})
            process.begin(_settings, _queues, consumes=True)
            _serve_metrics(_settings)
            probes.arm_from_environment()
    except CortexError as error:
        _give_up(error)


@signals.worker_process_init.connect  # type: ignore[untyped-decorator]
def on_worker_process_init(**_: Any) -> None:
    """Build and start in a child of a prefork worker; the solo pool calls this too, where all is there already."""
    if _settings is None or process.here() is not None:
        return
    try:
        process.begin(_settings, _queues)
        probes.arm_from_environment()
    except CortexError as error:
        _give_up(error)


@signals.worker_ready.connect  # type: ignore[untyped-decorator]
def on_worker_ready(sender: Any, **_: Any) -> None:
    """Tell the platform and the log."""
    health.set_ready()
    found = process.here()
    telemetry.event(
        "worker.started",
        worker_id=found.rt.worker_id if found else None,
        hostname=sender.hostname,
        pid=os.getpid(),
    )


@signals.worker_shutting_down.connect  # type: ignore[untyped-decorator]
def on_worker_shutting_down(**_: Any) -> None:
    """Set the byte and start the watchdog's thread; nothing else belongs into a signal handler (celery.md 5)."""
    process.drain()


@signals.worker_shutdown.connect  # type: ignore[untyped-decorator]
def on_worker_shutdown(**_: Any) -> None:
    """Leave the fleet; the pool has ended."""
    health.clear_ready()
    process.end()
    events.flush()
    telemetry.event("worker.stopped", pid=os.getpid())


@signals.worker_process_shutdown.connect  # type: ignore[untyped-decorator]
def on_worker_process_shutdown(**_: Any) -> None:
    """Leave the fleet, for a child of a prefork worker."""
    process.end()


@signals.task_unknown.connect  # type: ignore[untyped-decorator]
def on_task_unknown(**_: Any) -> None:
    """Count a message whose task this release does not know (bug case C38)."""
    telemetry.UNKNOWN_MESSAGES.labels("task").inc()


@signals.task_rejected.connect  # type: ignore[untyped-decorator]
def on_task_rejected(**_: Any) -> None:
    """Count a message that is none, or in a form that is not accepted."""
    telemetry.UNKNOWN_MESSAGES.labels("form").inc()


def _check(settings: Settings) -> None:
    """Build once in the parent of a prefork worker, so that what is wrong is said once and not by every child."""
    from cortex_workers import wiring
    from cortex_workers.store import migrate

    wiring.build(settings, role="worker").database.dispose()
    migrate.require_current(settings.require_database())


def _serve_metrics(settings: Settings) -> None:
    """Open the Prometheus page of this process; children of a prefork worker have none.

    Raises: InvalidSettings when somebody has the port.
    """
    if settings.metrics_port is None:
        return
    try:
        prometheus_client.start_http_server(settings.metrics_port)
    except OSError as error:
        raise InvalidSettings(
            f"CORTEX_METRICS_PORT {settings.metrics_port} cannot be opened: {error.strerror}"
        ) from error


def _slots(worker: Any) -> int:
    """The slots of this process: what Celery runs at once, `-c` included."""
    return int(worker.concurrency) if str(worker.concurrency).isdigit() else os.cpu_count() or 1


def _is_prefork(pool: Any) -> bool:
    return issubclass(concurrency.get_implementation(pool), Prefork)


def _refuse_other_shutdowns(conf: Any) -> None:
    """Celery's cold and soft shutdown break threads and gevent and lose work; only the drain hands it off.

    Raises: InvalidSettings.
    """
    if os.environ.get("REMAP_SIGTERM"):
        raise InvalidSettings(
            "REMAP_SIGTERM is set; unset it: a worker drains on SIGTERM and hands its runs off"
        )
    if conf.worker_soft_shutdown_timeout:
        raise InvalidSettings(
            "worker_soft_shutdown_timeout is set; leave it at 0: a worker drains on SIGTERM"
        )


def _give_up(error: CortexError) -> NoReturn:
    print(f"cortex-workers: {error}", file=sys.stderr, flush=True)  # noqa: T201  the one sentence an operator reads
    raise SystemExit(1) from None

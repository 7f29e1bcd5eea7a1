"""The Celery app, and every setting of it with its reason.

`app` is what `celery -A cortex_workers.tasks.app worker` loads. Its settings come from ``CORTEX_*`` when they are first
used, not at import: a producer that imports this needs none of them.
Source: celery.md 32 (with the sections named below); rulings 21, 22.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Literal

import celery

from cortex_workers.tasks.version import require_celery

require_celery(celery.__version__)

from celery import Celery  # noqa: E402  after the check, so that an old Celery gets one clear sentence
from celery.exceptions import CeleryCommandException  # noqa: E402
from kombu.entity import Exchange, Queue  # noqa: E402

from cortex_workers.errors import InvalidSettings, Misconfiguration  # noqa: E402
from cortex_workers.settings import Settings, load_settings  # noqa: E402
from cortex_workers.tasks.routes import QUEUES, TASK_QUEUES, QueueKind  # noqa: E402
from cortex_workers.tasks.schedule import beat_schedule  # noqa: E402

Role = Literal["worker", "api"]
"""A *worker* waits for the broker as long as it takes; an *api* process must never wait long for it."""

MODULES = (
    "cortex_workers.tasks.continue_run",
    "cortex_workers.tasks.resume",
    "cortex_workers.tasks.deliver_a2a",
    "cortex_workers.tasks.sweep_expired",
    "cortex_workers.tasks.signals",
)
_FOREIGN = ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL")


def celery_settings(settings: Settings, role: Role = "worker") -> dict[str, Any]:
    """Everything Celery is told.

    Raises: InvalidSettings when CORTEX_BROKER_URL is not set, or Celery's own variables name another broker.
    """
    url = settings.require_broker()
    _refuse_foreign_broker(url)
    transport = _amqp_transport(role) if is_amqp(settings) else _redis_transport(settings, role)
    return {
        # One broker for both directions, and named for both: Celery prefers its own environment to `broker_url`.
        "broker_url": url,
        "broker_read_url": url,
        "broker_write_url": url,
        "broker_transport_options": transport,
        "beat_schedule": beat_schedule(settings),
        **_messages(settings),
        **_worker(settings),
        **_connection(),
        **_watching(),
    }


def is_amqp(settings: Settings) -> bool:
    """Whether the broker is RabbitMQ; else it is Redis, Valkey or their Sentinel."""
    return settings.require_broker().startswith("amqp")


def queue(settings: Settings, kind: QueueKind, pool: str | None = None) -> Queue:
    """The declaration of one queue; on RabbitMQ a quorum queue, which survives the loss of a node (celery.md 10)."""
    name = settings.queue_for(kind, pool)
    arguments = {"x-queue-type": "quorum"} if is_amqp(settings) else None
    exchange = Exchange(settings.queue_prefix, type="direct")  # type: ignore[no-untyped-call]
    return Queue(name, exchange, routing_key=name, queue_arguments=arguments)  # type: ignore[no-untyped-call]


def _messages(settings: Settings) -> dict[str, Any]:
    return {
        # JSON only: whoever can write pickle to the broker runs code in the worker (celery.md 14).
        "task_serializer": "json",
        "accept_content": ["json"],
        "result_accept_content": ["json"],
        "event_serializer": "json",
        # A run's outcome is in its row; results would be a write per task that nobody reads (celery.md 13).
        "result_backend": None,
        "task_ignore_result": True,
        "task_store_errors_even_if_ignored": False,
        # A queue is declared here or it does not exist: a typo must not make one that nobody reads (celery.md 25).
        "task_queues": [queue(settings, kind) for kind in QUEUES],
        "task_create_missing_queues": False,
        "task_default_queue": settings.queue_for("resume"),
        # Routes name the queue and nothing else. The message then goes through the anonymous exchange straight to
        # the list of that name; through a named one it would be lost silently after FLUSHALL (ruling 21).
        "task_routes": {name: {"queue": settings.queue_for(kind)} for name, kind in TASK_QUEUES.items()},
        # What a stranger puts into a message must not be copied into logs, events and Flower (celery.md 14).
        "task_repr_maxlevels": 1,
    }


def _worker(settings: Settings) -> dict[str, Any]:
    return {
        # Agent runs wait for models and tools; hundreds fit into a process as threads (celery.md 1).
        "worker_pool": "threads",
        "worker_concurrency": settings.slots,
        # The row decides, so one mode everywhere: acknowledged when a slot takes it, never redelivered (ruling 22).
        "task_acks_late": False,
        # No hints parked behind runs that last minutes (celery.md 2). The switch exists for Redis; on RabbitMQ
        # `consumer.py` takes one message per queue.
        "worker_prefetch_multiplier": 1,
        "worker_disable_prefetch": not is_amqp(settings),
        # Would shrink what a worker takes after each reconnect; with the two lines above there is nothing to shrink.
        "worker_enable_prefetch_count_reduction": False,
        # Nothing here has an ETA; this fuse bounds what a stranger's message could make a worker hold (celery.md 4).
        "worker_eta_task_limit": 50,
        # Celery's soft and cold shutdown break threads and gevent; our drain hands runs off (celery.md 5).
        "worker_soft_shutdown_timeout": 0.0,
        # A lost broker says nothing about a leased row (celery.md 8).
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        # Liveness while reconnecting; without mingle, gossip and delayed delivery (celery.md 8, ruling 22).
        "worker_consumer": "cortex_workers.tasks.consumer:FleetConsumer",
        # We have no rate limits, and their buckets would be asked for each message.
        "worker_disable_rate_limits": True,
        # Per-consumer limits, as quorum queues demand (celery.md 10).
        "worker_detect_quorum_queues": True,
        # Logging is set up in `signals.py`; what a host prints stays what it printed.
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
    }


def _connection() -> dict[str, Any]:
    return {
        # A worker waits for its broker for ever, at start and later; runs go on meanwhile (celery.md 8).
        "broker_connection_retry": True,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_channel_error_retry": True,
        "broker_pool_limit": 10,
        "broker_heartbeat": 30,
        # For `celery call` and beat: one quick second try, then the error (celery.md 9).
        "task_publish_retry": True,
        "task_publish_retry_policy": {
            "max_retries": 1,
            "interval_start": 0,
            "interval_step": 0.2,
            "interval_max": 0.5,
        },
    }


def _watching() -> dict[str, Any]:
    return {
        # Flower's view of workers and tasks. For eyes only: events are lossy and no logic depends on them.
        "worker_send_task_events": True,
        "task_send_sent_event": True,
        # A reader that is gone or slow leaves nothing behind (celery.md 21).
        "event_queue_expires": 60,
        "event_queue_ttl": 5,
        "timezone": "UTC",
        "enable_utc": True,
        # In memory: beat has one interval to remember, and a file would carry a wrong clock over a restart
        # (celery.md 19, bug case C41).
        "beat_scheduler": "celery.beat:Scheduler",
        "beat_max_loop_interval": 5,
        # `celery inspect ping -d celerybeat@…` is beat's liveness probe.
        "beat_enable_remote_control": True,
    }


_AT_ONCE = {"max_retries": 0, "interval_start": 0, "interval_step": 0, "interval_max": 0}
"""Kombu would try to connect for ever; who is in a hurry wants to know at once (`link.py` decides what then)."""


def _redis_transport(settings: Settings, role: Role) -> dict[str, Any]:
    quick = role == "api"
    return {
        **(_AT_ONCE if quick else {}),
        # The shortest in use on a database wins for everybody, so producers name it too (celery.md 4).
        "visibility_timeout": settings.visibility_timeout_s,
        # Unacknowledged messages of a killed worker come back on time; the default looks every 100 s.
        "unacked_restore_interval": 10,
        "unacked_restore_throttle": 1,
        # Our keys, events and remote control apart from whatever else lives on this database.
        "global_keyprefix": f"{settings.queue_prefix}:",
        # Hints have no priorities, so one list per queue instead of four (ruling 17).
        "priority_steps": [0],
        # A half-open connection blocks for ever without these (celery.md 9). While a broker is frozen the consumer's
        # loop stands still for a few of them in a row, and the live file with it: 30 made 90 s of that.
        "socket_timeout": 3 if quick else 10,
        "socket_connect_timeout": 2 if quick else 5,
        "socket_keepalive": True,
        "health_check_interval": 25,
    }


def _amqp_transport(role: Role) -> dict[str, Any]:
    # Without confirms a broker under pressure drops silently (celery.md 9).
    options: dict[str, Any] = {"confirm_publish": True}
    if role == "api":
        options |= {"connect_timeout": 2, "read_timeout": 3, "write_timeout": 3, **_AT_ONCE}
    return options


def _refuse_foreign_broker(url: str) -> None:
    for name in _FOREIGN:
        if os.environ.get(name, url) != url:
            raise InvalidSettings(
                f"{name} names another broker than CORTEX_BROKER_URL and Celery would use it; unset {name} here"
            )


class _FromEnvironment(Mapping[str, Any]):
    """Our Celery settings, read from the environment when the first of them is asked for."""

    @cached_property
    def _values(self) -> dict[str, Any]:
        try:
            return celery_settings(load_settings())
        except Misconfiguration as error:
            # Celery's commands print this one as a sentence and exit 1.
            raise CeleryCommandException(str(error), exit_code=1) from error

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class FleetCelery(Celery):  # type: ignore[misc]  # Celery ships no types
    """Celery with our worker program, with events that never block, and without results."""

    events_cls = "cortex_workers.tasks.events:FleetEvents"

    # Said here because Celery prefers its environment to the setting.
    backend_cls = "disabled"

    @cached_property
    def Worker(self) -> Any:  # noqa: N802  Celery's name
        """The program behind `celery worker`."""
        return self.subclass_with_self("cortex_workers.tasks.worker:FleetWorker")


def make_app(settings: Settings | None = None, role: Role = "worker") -> FleetCelery:
    """A Celery app of the fleet; without settings it reads them from the environment on first use.

    It never becomes the current app of the process: that one belongs to the host.
    """
    made = FleetCelery("cortex_workers", set_as_current=False, include=MODULES)
    made.config_from_object(_FromEnvironment() if settings is None else celery_settings(settings, role))
    return made


app = make_app()

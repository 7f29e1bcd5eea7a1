"""Celery's consumer, cut to what we use: liveness, one table claim per connection, one message per queue on RabbitMQ.

Source: celery.md 6, 8; rulings 16, 22.
"""

from __future__ import annotations

from typing import Any, ClassVar

from celery import bootsteps
from celery.worker.consumer import Consumer
from celery.worker.state import maybe_shutdown

from cortex_workers.tasks import health
from cortex_workers.tasks.continue_run import claim_from_table
from cortex_workers.tasks.routes import takes_runs

_OURS = "cortex_workers.tasks.consumer"
_TASKS = "celery.worker.consumer.tasks:Tasks"


class FleetConsumer(Consumer):  # type: ignore[misc]  # Celery ships no types
    """The consumer of a fleet worker."""

    class Blueprint(Consumer.Blueprint):  # type: ignore[misc]
        """Celery's steps without delayed delivery, which would declare 28 exchanges for ETAs we never use; and ours."""

        default_steps: ClassVar[list[str]] = [
            *(step for step in Consumer.Blueprint.default_steps if not step.endswith("DelayedDelivery")),
            f"{_OURS}:LiveFile",
            f"{_OURS}:OneMessagePerQueue",
            f"{_OURS}:TableClaim",
        ]

    def __init__(self, *args: Any, worker_options: dict[str, Any] | None = None, **options: Any) -> None:
        # Mingle and gossip share revokes and clocks, which mean nothing here, and cost N² messages (celery.md 8).
        quiet = {"without_mingle": True, "without_gossip": True}
        super().__init__(*args, worker_options={**(worker_options or {}), **quiet}, **options)

    def ensure_connected(self, conn: Any) -> Any:
        """Connect, trying for as long as it takes, and stay alive for the platform meanwhile.

        A worker whose broker is away still works on its runs; a liveness probe must not kill it for that.
        """
        connect = conn.ensure_connection

        def connect_and_touch(errback: Any, max_retries: int | None, callback: Any = None) -> Any:
            def between_tries() -> None:
                health.touch_live()
                (callback or maybe_shutdown)()

            return connect(errback, max_retries, callback=between_tries)

        conn.ensure_connection = connect_and_touch
        return super().ensure_connected(conn)


class LiveFile(bootsteps.StartStopStep):  # type: ignore[misc]
    """Touch the live file from the consumer's own timer."""

    requires = (_TASKS,)

    def __init__(self, consumer: Any, **options: Any) -> None:
        self._timer: Any = None
        super().__init__(consumer, **options)

    def start(self, consumer: Any) -> None:
        """Begin with this connection; the loop cancels its own timers when a connection ends."""
        health.touch_live()
        self._timer = consumer.timer.call_repeatedly(health.TOUCH_S, health.touch_live)

    def stop(self, consumer: Any) -> None:
        """Stop touching."""
        if self._timer is not None:
            consumer.timer.cancel(self._timer)
            self._timer = None


class OneMessagePerQueue(bootsteps.Step):  # type: ignore[misc]
    """On RabbitMQ: at most one message of each queue waits in this worker for a slot (ruling 22)."""

    requires = (_TASKS,)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        if consumer.app.conf.broker_url.startswith("amqp"):
            # Read by the Tasks step, at each connection, as the limit of each consumer.
            consumer.initial_prefetch_count = 1


class TableClaim(bootsteps.StartStopStep):  # type: ignore[misc]
    """After each connection to the broker, look into the table once: its hints may have been lost (ruling 16)."""

    requires = (_TASKS,)

    def start(self, consumer: Any) -> None:
        """Hand one claim to the pool as soon as the loop turns; it ends at once when nothing waits.

        A worker that `-Q` keeps away from runs is not given any this way either.
        """
        if takes_runs(consumer.app.amqp.queues.consume_from):
            consumer.call_soon(consumer.pool.apply_async, claim_from_table, callback=_ignore)


def _ignore(_outcome: Any) -> None:
    """A pool without a callback fails on every result."""

"""The program behind `celery worker`: a name of its own for each process, and one sentence for a wrong queue."""

from __future__ import annotations

import os
from typing import Any

from celery.apps.worker import Worker
from celery.exceptions import CeleryCommandException, ImproperlyConfigured
from celery.utils.nodenames import default_nodename, nodesplit
from celery.utils.text import str_to_list


class FleetWorker(Worker):  # type: ignore[misc]  # Celery ships no types
    """Celery's worker program, for many on one machine."""

    def __init__(self, app: Any = None, hostname: str | None = None, **options: Any) -> None:
        super().__init__(app=app, hostname=_unique(hostname), **options)

    def setup_queues(self, include: Any, exclude: Any = None) -> None:
        """Take the queues of `-Q` and `-X`; an unknown one ends the start."""
        try:
            super().setup_queues(include, exclude)
        except ImproperlyConfigured:
            known, named = ", ".join(sorted(self.app.amqp.queues)), ", ".join(str_to_list(include or exclude))
            raise CeleryCommandException(
                f"{named}: there is no such queue; this worker knows {known}", exit_code=1
            ) from None


def _unique(hostname: str | None) -> str:
    """The name given with `-n`, else one with the process id: two workers of one name are one row in Flower."""
    default: str = default_nodename(None)
    if hostname not in (None, default):
        return str(hostname)
    _, host = nodesplit(default)
    return f"worker-{os.getpid()}@{host}"

"""The oldest Celery we run on."""

from __future__ import annotations

import re

from cortex_workers.errors import UnsupportedCelery

OLDEST = (5, 7)


def require_celery(version: str) -> None:
    """Refuse a Celery whose shutdown and reconnect bugs we lean on being fixed (celery.md 0).

    Raises: UnsupportedCelery.
    """
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < OLDEST:
        raise UnsupportedCelery(
            f"Celery {version} is too old; 5.7 or newer is needed: pip install 'celery[redis]>=5.7,<5.8'"
        )

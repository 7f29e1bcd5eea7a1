"""The runtime of this process: built once, never shared across a fork.

Source: ruling 32; house.md 3.3 (`tasks/base.py`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cortex_workers.errors import Stopping

if TYPE_CHECKING:
    from cortex_workers.engine.runtime import Runtime

_held: tuple[int, Runtime] | None = None


def hold(rt: Runtime) -> None:
    """Make this the runtime of this process."""
    global _held
    _held = (os.getpid(), rt)


def held() -> Runtime | None:
    """The runtime of this process; None when it has none, as in a child of the one that has."""
    return _held[1] if _held is not None and _held[0] == os.getpid() else None


def release() -> Runtime | None:
    """Forget the runtime of this process and return it."""
    global _held
    rt, _held = held(), None
    return rt


def runtime() -> Runtime:
    """The runtime that the tasks of this process work with.

    Raises: Stopping when there is none: this process does not run tasks yet, or does not any more.
    """
    rt = held()
    if rt is None:
        raise Stopping("this process has no runtime: it has not started, or it has stopped")
    return rt

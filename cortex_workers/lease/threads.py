"""Threads of the operating system, whatever the pool made of the name.

Who vouches for work must not share a scheduler with it: under gevent ``threading.Thread`` is a greenlet, which a busy
tool starves.
Source: celery.md 1; rulings 32, 33.
"""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable
from typing import Any

from cortex_workers import telemetry


def is_patched() -> bool:
    """Whether gevent replaced this process's threads."""
    monkey: Any = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def start_real(name: str, work: Callable[[], None]) -> None:
    """Start a daemon thread of the operating system without waiting for it to run, as a signal handler must.

    ``threading.Thread.start`` waits for the new thread, which is refused inside gevent's hub.
    """
    begin: Callable[..., Any] = _thread.start_new_thread
    monkey: Any = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        begin = monkey.get_original("_thread", "start_new_thread")

    def run() -> None:
        threading.current_thread().name = name
        try:
            work()
        except Exception as error:  # noqa: BLE001  the thread's own edge: nobody else would hear of it
            telemetry.event("thread.died", level="error", thread=name, error=repr(error))

    begin(run, ())

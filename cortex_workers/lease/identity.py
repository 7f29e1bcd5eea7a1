"""The name of this process as a holder of runs.

Unique per process *start*: host and pid alone come back, and then an old holder's runs would look held by a new one.
Source: celery.md 29.
"""

from __future__ import annotations

import os
import socket
import uuid

_ids: dict[int, str] = {}
# A grandchild may be given the pid of a dead ancestor, whose entry it inherited.
os.register_at_fork(after_in_child=_ids.clear)


def holder_id() -> str:
    """A name of its own for a client that may hold runs: it must never speak for the worker of its process."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


def worker_id() -> str:
    """The owner that this process writes into leases, "host:pid:boot"; a forked child has another."""
    pid = os.getpid()
    # setdefault is one step: of two threads that ask first, both get the same.
    return _ids.get(pid) or _ids.setdefault(pid, holder_id())

"""Which process is meant: a pid alone may belong to somebody else tomorrow."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortex_workers.embedded import wheels

# A process's start time is derived from the boot time, which the kernel rounds: two readings may differ.
_START_TOLERANCE_S = 2.0

_POLL_S = 0.01


@dataclass(frozen=True)
class ProcessIdentity:
    """A process by pid and start time (seconds since the epoch)."""

    pid: int
    started: float

    @classmethod
    def own(cls) -> "ProcessIdentity":
        """Return the calling process."""
        return cls(os.getpid(), wheels.module("psutil").Process().create_time())

    def is_alive(self) -> bool:
        """Say whether this very process still runs; a zombie does not."""
        psutil = wheels.module("psutil")
        try:
            process = psutil.Process(self.pid)
            return _runs(process) and abs(process.create_time() - self.started) <= _START_TOLERANCE_S
        except psutil.Error:
            return False


def servers_at_work_in(data: Path, name: str) -> list[Any]:
    """Find the servers of that program name whose working folder is this data folder.

    PostgreSQL (each backend too) and Valkey move into their data folder, so this finds what a killed owner left
    behind even when every note about it is gone.
    """
    psutil = wheels.module("psutil")
    found, data = [], data.resolve()  # the kernel knows no links
    for process in psutil.process_iter(["name"]):
        with suppress(psutil.Error):
            if process.info["name"] == name and Path(process.cwd()) == data:
                found.append(process)
    return found


def family_of(pid: int) -> list[Any]:
    """Return the process and all its descendants, the process first."""
    psutil = wheels.module("psutil")
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def send(processes: list[Any], signal: int) -> None:
    """Signal each process that is still there."""
    psutil = wheels.module("psutil")
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal)


def wait_gone(processes: list[Any], deadline_s: float) -> list[Any]:
    """Wait until the processes have ended and return those that have not.

    A zombie has ended: it holds nothing any more, and whoever is its parent may take a while to notice.
    """
    deadline = time.monotonic() + deadline_s
    while (alive := [each for each in processes if _runs(each)]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)  # they may be nobody's children here, so there is nothing to wait on
    return alive


def _runs(process: Any) -> bool:
    psutil = wheels.module("psutil")
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False

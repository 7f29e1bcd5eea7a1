"""The demo's processes: plain Celery commands, each with a log of its own, none of which outlives the demo."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cortex_workers.cli.demo.failure import DemoFailed, LogEnd
from cortex_workers.embedded import launch, ports
from cortex_workers.tasks.health import READY_VARIABLE

FLOWER_PORT = 5555
FLOWER = "flower"
APP = "cortex_workers.tasks.app"
_STOP_S = 20.0
_END_S = 4.0
"""Nothing of the demo is needed afterwards, so what takes its time is killed."""
_TAIL = 12


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the fleet."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    ready: Path

    @property
    def pid(self) -> int:
        """The id of the Celery process itself."""
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether it exists."""
        return self.process.poll() is None

    @property
    def is_ready(self) -> bool:
        """Whether a worker takes messages."""
        return self.ready.exists()

    def last_words(self) -> LogEnd:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return LogEnd(self.name, self.log, "\n".join(lines[-_TAIL:]))


class Fleet:
    """Workers, beat and Flower. Start them from the main thread: on Linux they end with the thread that did."""

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        self._logs = logs
        self._logs.mkdir(parents=True, exist_ok=True)
        self._environment = dict(environment)
        self.workers: list[Member] = []
        self._others: list[Member] = []
        self._ended: set[int] = set()
        self.flower_url: str | None = None

    def start_worker(self) -> Member:
        """Start one more worker; `wait_ready` tells when it works."""
        name = f"worker-{len(self.workers) + 1}"
        worker = self._start(name, "worker", "-n", f"{name}@demo", "-l", "info")
        self.workers.append(worker)
        return worker

    def start_beat(self) -> None:
        """Start what triggers the sweeps."""
        self._others.append(self._start("beat", "beat", "-l", "info"))

    def start_flower(self) -> None:
        """Start Flower on its usual port, or a free one; without the extra there is none."""
        if importlib.util.find_spec("flower") is None:
            return
        port = ports.pick(None, FLOWER_PORT)
        options = [f"--port={port}", f"--address={ports.LOOPBACK}", "--read_only", "--persistent=False"]
        columns = "--tasks_columns=name,uuid,state,kwargs,result,received,runtime,worker"
        self._others.append(self._start(FLOWER, "flower", *options, columns))
        self.flower_url = f"http://{ports.LOOPBACK}:{port}"

    @property
    def lost_flower(self) -> Path | None:
        """The log of a Flower that ended by itself."""
        lost = [each for each in self._others if each.name == FLOWER and not each.is_running]
        return lost[0].log if lost else None

    def by_pid(self, pid: int) -> Member | None:
        """The worker whose process that is."""
        return next((worker for worker in self.workers if worker.pid == pid), None)

    def name_of(self, worker_id: str | None) -> str | None:
        """A worker's short name, from the id that it writes into rows (host:pid:boot)."""
        parts = (worker_id or "").split(":")
        found = self.by_pid(int(parts[-2])) if len(parts) > 2 and parts[-2].isdigit() else None
        return found.name if found is not None else worker_id

    def check(self) -> None:
        """Find out that a process ended which nobody ended; without Flower the fleet works as well.

        Raises: DemoFailed with its last words.
        """
        for member in (*self.workers, *self._others):
            if member.name != FLOWER and not member.is_running and member.pid not in self._ended:
                raise DemoFailed(
                    f"{member.name} ended with code {member.process.returncode}: see {member.log}"
                )

    def wait_ready(self, deadline_s: float) -> None:
        """Wait until every running worker takes messages.

        Raises: DemoFailed.
        """
        end = time.monotonic() + deadline_s
        while late := [each.name for each in self.workers if each.is_running and not each.is_ready]:
            self.check()
            if time.monotonic() > end:
                raise DemoFailed(f"{', '.join(late)} did not get ready within {deadline_s:.0f} s")
            time.sleep(0.05)  # a file of another process: nothing to wait on

    def kill(self, worker: Member) -> None:
        """End a worker with SIGKILL: it writes nothing, says nothing, hands nothing off."""
        self._ended.add(worker.pid)
        worker.process.kill()
        worker.process.wait()

    def ask_to_stop(self, worker: Member) -> int:
        """End a worker as a deploy does, with SIGTERM, and return its exit code.

        Raises: DemoFailed when it does not end.
        """
        self._ended.add(worker.pid)
        worker.process.terminate()
        try:
            return worker.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"{worker.name} did not stop within {_STOP_S:.0f} s of SIGTERM") from None

    def end(self) -> None:
        """End every process that still runs: politely, then for certain."""
        left = [each for each in (*self._others, *self.workers) if each.is_running]
        for each in left:
            each.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + _END_S
        for each in left:
            try:
                each.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                each.process.kill()
                each.process.wait()

    def last_words(self) -> list[LogEnd]:
        """The ends of everybody's logs."""
        return [each.last_words() for each in (*self.workers, *self._others)]

    def _start(self, name: str, *arguments: str) -> Member:
        log = self._logs / f"{name}.log"
        # The launcher has the kernel end the process when the demo itself is killed; SIGKILL, because by then the
        # servers are gone too and there is nothing to hand off to.
        launcher = [
            sys.executable,
            "-I",
            "-S",
            launch.__file__,
            str(os.getpid()),
            str(int(signal.SIGKILL)),
            "-",
        ]
        command = [sys.executable, "-m", "celery", "-A", APP, *arguments]
        ready = log.with_suffix(".ready")
        with log.open("wb") as words:
            process = subprocess.Popen(
                launcher + command,
                env={**self._environment, READY_VARIABLE: str(ready)},
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is the demo's to handle
            )
        return Member(name, process, log, ready)

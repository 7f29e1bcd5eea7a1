"""Workers and beat as processes of the operating system, to be killed, frozen, stopped and watched by a test.

Each has the methods of a container, so that pytest-celery's nodes and clusters drive it without a container engine:
``CeleryTestWorker(WorkerProcess(folder, environment).start(), app)``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal as signals
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from cortex_workers.embedded import launch

APP = "cortex_workers.tasks.app"
READY_DEADLINE_S = 60.0
STOP_DEADLINE_S = 90.0
_POLL_S = 0.01
_NOT_INHERITED = ("CORTEX_", "CELERY_", "FLOWER_")


class FleetError(AssertionError):
    """A process of the fleet did not do what was asked of it; its last words are in the text."""


class FleetProcess:
    """One of Celery's commands, with a process group, a name and a log of its own.

    It sees the settings it is given and none of its parent's, and ends when its parent is killed. Give ``folder`` to
    as many processes as you like: names do not repeat.
    """

    command: ClassVar[str]
    ready_prompt: ClassVar[str]
    """What it writes when it has started."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], *arguments: str, name: str | None = None
    ) -> None:
        """Describe the process; nothing is started. ``environment``: its ``CORTEX_…``, and whatever its host needs."""
        self.name = name or _free_name(folder, self.command)
        self.arguments = arguments
        self.environment = dict(environment)
        self._log = folder / f"{self.name}.log"
        self._log.touch()
        self._process: subprocess.Popen[bytes] | None = None
        self._start_of_log = 0
        self._frozen = False

    # --- For tests ----------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the process; a running one is left alone."""
        if not self.is_running:
            self._start_of_log = self._log.stat().st_size
            self._frozen = False
            self._process = _spawn(self._command_line(), self._environment(), self._log)
        return self

    def wait_ready(self, timeout_s: float = READY_DEADLINE_S) -> Self:
        """Wait until it has started.

        Raises: FleetError when it ended instead, or took too long.
        """
        deadline = time.monotonic() + timeout_s
        while not self._is_ready():
            if not self.is_running:
                raise FleetError(
                    f"{self.name} ended with {self.exit_code} before it was ready: {self.logs()}"
                )
            if time.monotonic() > deadline:
                raise FleetError(f"{self.name} was not ready after {timeout_s:g} s: {self.logs()}")
            time.sleep(_POLL_S)  # a file of another process: nothing to wait on
        return self

    @property
    def pid(self) -> int:
        """Its process id; it stays what it was after the end."""
        return self._started.pid

    @property
    def is_running(self) -> bool:
        """Whether the process exists; a frozen one does."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """As the operating system tells it: negative is the signal that ended it, None while it runs."""
        return self._process.poll() if self._process is not None else None

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Send a signal. SIGKILL takes its children too and returns when it is gone, as a power cut would."""
        number = signals.Signals[signal] if isinstance(signal, str) else signals.Signals(signal)
        if not self.is_running:
            return
        if number is not signals.SIGKILL:
            self._started.send_signal(number)
            return
        self._signal_group(number)
        self.wait()

    def stop(self, timeout_s: float = STOP_DEADLINE_S) -> int:
        """Ask it to end (SIGTERM), wait for that, and return the exit code.

        Raises: FleetError when it takes longer.
        """
        self.thaw()
        self.kill("SIGTERM")
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = STOP_DEADLINE_S) -> int:
        """Wait for its end and return the exit code.

        Raises: FleetError when it takes longer.
        """
        try:
            return self._started.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise FleetError(f"{self.name} did not end within {timeout_s:g} s: {self.logs()}") from None

    def freeze(self) -> None:
        """Stop its clock (SIGSTOP): it holds what it holds and does nothing."""
        self._signal_group(signals.SIGSTOP)
        self._frozen = True

    def thaw(self) -> None:
        """Let a frozen process go on."""
        if self._frozen and self.is_running:
            self._signal_group(signals.SIGCONT)
        self._frozen = False

    def logs(self) -> str:
        """All it has written since it was started last."""
        with self._log.open("rb") as log:
            log.seek(self._start_of_log)
            return log.read().decode(errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Its log lines of one event (`telemetry.event`), oldest first."""
        found = []
        for line in self.logs().splitlines():
            if line.startswith("{") and f'"{name}"' in line:
                try:
                    fields = json.loads(line)
                except ValueError:
                    continue  # half a line: it was killed, or is writing it now
                if fields.get("event") == name:
                    found.append(fields)
        return found

    def __enter__(self) -> Self:
        """Start it and wait until it is ready."""
        return self.start().wait_ready()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill it."""
        self.teardown()

    # --- What a container has besides ---------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """A text that names this process among all."""
        return f"{self.pid:012d}"

    @property
    def status(self) -> str:
        """``created``, ``running``, ``paused`` or ``exited``."""
        if self._process is None:
            return "created"
        if not self.is_running:
            return "exited"
        return "paused" if self._frozen else "running"

    @property
    def celeryconfig(self) -> dict[str, Any]:
        """Where its broker is, seen from inside and outside: the same."""
        url = self.environment.get("CORTEX_BROKER_URL", "")
        return {"url": url, "host_url": url}

    def ready(self) -> bool:
        """Wait until it has started.

        Raises: FleetError.
        """
        self.wait_ready()
        return True

    def restart(self, timeout: float = STOP_DEADLINE_S) -> None:
        """End it in good order within ``timeout`` seconds, else kill it, and start it again."""
        try:
            if self.is_running:
                self.stop(timeout)
        except FleetError:
            self.kill()
        self.start().wait_ready()

    def reload(self) -> None:
        """A container's description is a copy that ages; this one is always fresh."""

    def teardown(self) -> None:
        """Kill it and what it started."""
        self.kill()

    # --- Inside -------------------------------------------------------------------------------------------------------

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise FleetError(f"{self.name} was not started")
        return self._process

    def _command_line(self) -> list[str]:
        # The launcher ends it with its parent, whatever kills that.
        launcher = [
            sys.executable,
            "-I",
            "-S",
            launch.__file__,
            str(os.getpid()),
            str(int(signals.SIGKILL)),
            "-",
        ]
        return [
            *launcher,
            sys.executable,
            "-m",
            "celery",
            "-A",
            APP,
            self.command,
            *self._options(),
            *self.arguments,
        ]

    def _options(self) -> list[str]:
        return []

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
        return {**kept, "CORTEX_LOG_FORMAT": "json", **self.environment}

    def _is_ready(self) -> bool:
        return self.ready_prompt in self.logs()

    def _signal_group(self, number: signals.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.killpg(self.pid, number)


class WorkerProcess(FleetProcess):
    """`celery worker`: further arguments are its options, like ``"-c", "4"``."""

    command = "worker"
    ready_prompt = " ready."

    def _options(self) -> list[str]:
        return ["--loglevel", self.log_level()]

    def _environment(self) -> dict[str, str]:
        self._ready_file.unlink(missing_ok=True)
        return {"CORTEX_READY_FILE": str(self._ready_file), **super()._environment()}

    @property
    def _ready_file(self) -> Path:
        return self._log.with_suffix(".ready")

    def _is_ready(self) -> bool:
        return self._ready_file.exists()

    @property
    def worker_id(self) -> str:
        """Its id in the rows, once it has started.

        Raises: FleetError for the parent of a prefork worker, whose children have one each.
        """
        for line in self.events("worker.registered"):
            if line.get("worker_id"):
                return str(line["worker_id"])
        raise FleetError(f"{self.name} named no worker id: {self.logs()}")

    # What `CeleryTestWorker` asks of its container.

    @staticmethod
    def version() -> str:
        """The Celery it runs."""
        import celery

        return str(celery.__version__)

    @staticmethod
    def log_level() -> str:
        """How much it writes."""
        return "info"

    def worker_name(self) -> str:
        """Its name before the @."""
        return self.name

    def worker_queue(self) -> str:
        """The queues it takes messages from, by `-Q`; all when empty."""
        return self.arguments[self.arguments.index("-Q") + 1] if "-Q" in self.arguments else ""


class BeatProcess(FleetProcess):
    """`celery beat`."""

    command = "beat"
    ready_prompt = "beat: Starting..."

    def _options(self) -> list[str]:
        return ["--loglevel", "info"]


def _free_name(folder: Path, command: str) -> str:
    number = 1
    while (folder / f"{command}-{number}.log").exists():
        number += 1
    return f"{command}-{number}"


def _spawn(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as words:
        return (
            _spawner(os.getpid())
            .submit(
                subprocess.Popen,
                command,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            .result()
        )


@cache
def _spawner(owner: int) -> ThreadPoolExecutor:
    # Linux tells a child of the end of the *thread* that started it, so one that lasts starts them all; keyed by pid,
    # because a forked child has none of its parent's threads.
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="fleet-spawner")

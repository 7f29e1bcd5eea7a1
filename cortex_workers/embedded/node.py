"""One server process: start, stop, freeze, thaw."""

import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import IO, Any

from cortex_workers.embedded import identity, launch, ports
from cortex_workers.embedded.errors import EmbeddedError
from cortex_workers.embedded.place import Place

_START_DEADLINE_S = 60.0
_STOP_DEADLINE_S = 20.0
_POLL_S = 0.02
_LOG_KEPT_BYTES = 8 * 1024 * 1024


class Node(ABC):
    """A server of the folder as an operating-system process; not safe to share between threads."""

    name: str
    program: str
    """What the operating system calls the process."""
    polite_stop: signal.Signals
    """Ends the server in good order without waiting for its clients."""

    def __init__(self, place: Place, durable: bool) -> None:
        """Describe the server; nothing is started."""
        self._place = place
        self._durable = durable
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        """Given by the first start and kept by every later one."""

    @property
    def data(self) -> Path:
        """The server's data folder."""
        return self._place.data / self.name

    @property
    def pid(self) -> int:
        """The server's process id.

        Raises: EmbeddedError when it does not run.
        """
        if self._process is None or self._process.poll() is not None:
            raise EmbeddedError(f"the embedded {self.name} does not run")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process exists; a frozen one does."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server and wait until it answers; a running one is left alone.

        Raises: PortInUse, DataUnusable, EmbeddedError with the server's own last words.
        """
        if self.is_running:
            return
        self.clear_leftovers()
        self.prepare()
        if not ports.is_free(self.port):
            raise ports.in_use(self.port)
        log = self._place.log(self.name)
        start_of_log = trim_log(log)
        self._process = spawn(self.command(), self._place, log, self.polite_stop)
        self._await_ready(log, start_of_log)

    def stop(self, with_signal: int | None = None) -> None:
        """End the server and wait until every process of it is gone.

        SIGKILL takes all its processes at once, as a power cut would; anything else goes to the server, which is
        killed only if it has not ended by the deadline. A frozen server is thawed first.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = None
            return
        family = identity.family_of(self._process.pid)
        if with_signal == signal.SIGKILL:
            identity.send(family, signal.SIGKILL)
        else:
            self.thaw()
            self._process.send_signal(with_signal or self.polite_stop)
        try:
            self._process.wait(_STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        _end(family, patience_s=1.0)

    def restart(self, with_signal: int | None = None) -> None:
        """Stop and start again on the same port with the same data."""
        self.stop(with_signal)
        self.start()

    def freeze(self) -> None:
        """Stop the server's clock: connections stay open and nothing answers."""
        identity.send(identity.family_of(self.pid), signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen server go on; one that runs is not disturbed."""
        identity.send(identity.family_of(self.pid), signal.SIGCONT)

    def clear_leftovers(self) -> None:
        """End what a killed owner left running in this data folder."""
        leftovers = identity.servers_at_work_in(self.data, self.program)
        identity.send(leftovers, signal.SIGCONT)
        identity.send(leftovers, self.polite_stop)
        _end(leftovers, patience_s=_STOP_DEADLINE_S)

    @abstractmethod
    def prepare(self) -> None:
        """Make the data folder, or check that these programs can open it."""

    @abstractmethod
    def command(self) -> list[str]:
        """Return the command line of the server."""

    @abstractmethod
    def answers(self) -> bool:
        """Say whether the server takes clients now."""

    def _await_ready(self, log: Path, start_of_log: int) -> None:
        deadline = time.monotonic() + _START_DEADLINE_S
        while not self.answers():
            if not self.is_running:
                self._process = None
                if not ports.is_free(self.port):
                    raise ports.in_use(self.port)
                raise EmbeddedError(
                    f"the embedded {self.name} ended at once: {last_words(log, start_of_log)}"
                )
            if time.monotonic() > deadline:
                self.stop(signal.SIGKILL)
                raise EmbeddedError(
                    f"the embedded {self.name} did not answer within {_START_DEADLINE_S:.0f} s: see {log}"
                )
            time.sleep(_POLL_S)  # a server is ready when it answers


def spawn(
    command: list[str], place: Place, log: Path, end_signal: signal.Signals, stdin: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program as the servers' account, its words appended to the log.

    It gets a session of its own (Ctrl-C in a terminal is the owner's to handle) and, on Linux, `end_signal` when
    this process dies.
    """
    account = "-" if place.account is None else "{}:{}".format(*place.account)
    launcher = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), str(int(end_signal)), account]
    with log.open("ab") as words:
        return (
            _spawner(os.getpid())
            .submit(
                subprocess.Popen,
                launcher + command,
                stdin=stdin or subprocess.DEVNULL,
                stdout=words,
                stderr=subprocess.STDOUT,
                cwd=place.data,
                env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
                start_new_session=True,
            )
            .result()
        )


@cache
def _spawner(owner: int) -> ThreadPoolExecutor:
    # Linux sends the signal of the owner's death when the *thread* that started the child ends. So one thread, which
    # lasts as long as the process, starts them all. Keyed by pid: a forked child has none of its parent's threads.
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="cortex-embedded")


def _end(processes: list[Any], patience_s: float) -> None:
    alive = identity.wait_gone(processes, patience_s)
    identity.send(alive, signal.SIGKILL)
    identity.wait_gone(alive, _STOP_DEADLINE_S)


def trim_log(log: Path) -> int:
    """Set an overgrown log aside and return where the next words will begin."""
    size = log.stat().st_size if log.exists() else 0
    if size <= _LOG_KEPT_BYTES:
        return size
    log.replace(log.with_suffix(".old.log"))
    return 0


def last_words(log: Path, start: int) -> str:
    """Return the last line that a program wrote since `start`, and where the rest is."""
    lines = log.read_bytes()[start:].decode(errors="replace").strip().splitlines()
    return f"{lines[-1]} (all of it: {log})" if lines else f"it said nothing (see {log})"

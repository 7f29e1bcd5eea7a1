"""Celery's own commands as processes of the operating system, looked at from outside."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
CELERY = Path(sys.executable).with_name("celery")


class CeleryProcess:
    """`celery -A cortex_workers.tasks.app …`, with its output in a file."""

    def __init__(self, folder: Path, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self._output = folder / f"{'-'.join(arguments[:1])}-{len(list(folder.iterdir()))}.log"
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("CORTEX_", "CELERY_"))
        }
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [CELERY, "-A", "cortex_workers.tasks.app", *arguments],
                env={**kept, "PYTHONPATH": str(ROOT), "CORTEX_LOG_FORMAT": "json", **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
            )

    @property
    def output(self) -> str:
        """All it has written so far."""
        return self._output.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def until(self, text: str) -> Self:
        """Wait until it has written a text; fail at once when it ends without."""
        wait_until(
            lambda: text in self.output or self.process.poll() is not None, what=f"{text!r} in the output"
        )
        assert text in self.output, self.output
        return self

    def end(self, how: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=60)
        if error is not None:
            print(self.output)


def free_port() -> int:
    """A port that nobody has a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

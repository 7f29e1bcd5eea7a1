"""`cortex-workers up`: the whole stack in one terminal, and its end in good order.

Servers are started where no address is set; workers, beat and Flower are the plain Celery commands of the Procfile,
each line they print with a name before it. The first Ctrl-C (or SIGTERM) sends them SIGTERM, so that runs are handed
off; a second one ends them at once. Then the servers stop.
Source: decision S8; ruling 73.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

from cortex_workers.cli import here
from cortex_workers.cli.report import DONE, REFUSED
from cortex_workers.embedded import EmbeddedServers, FolderInUse, PortInUse, launch, ports
from cortex_workers.errors import InvalidSettings
from cortex_workers.host import load_host
from cortex_workers.settings import Settings, load_settings, mask_url
from cortex_workers.store import migrate

APP = "cortex_workers.tasks.app"
_COLOURS = ("cyan", "green", "magenta", "blue", "yellow")
_LOOK_S = 0.2
_GRACE_S = 10.0
_START_S = 5.0
"""Who ends sooner than this after its start will end again."""


def up(host: str | None, workers: int, flower_port: int | None) -> int:
    """Run the stack until Ctrl-C, SIGTERM or the end of one of its processes.

    Raises: Misconfiguration with one sentence: no host, a folder or port that is taken, a host that does not load.
    """
    settings = load_settings(**({"host": host} if host else {}))
    if settings.host is None:
        raise InvalidSettings("no agents are named: pass --host shop.agents:host or set CORTEX_HOST")
    _refuse_a_second(Path(settings.data_dir))
    agents = load_host(settings.host).definitions()
    what_is_missing = [] if agents else [f"{settings.host} has no agents: its workers have nothing to run"]
    if flower_port is not None and importlib.util.find_spec("flower") is None:
        what_is_missing.append("no Flower: it is not installed (pip install 'cortex-workers[flower]')")
        flower_port = None
    _refuse_a_taken_port(flower_port)
    stack = Stack(settings)
    with ExitStack() as undo, stack.signals():
        environment = undo.enter_context(_servers(settings, stack))
        # After the servers, so that it comes before them on the way out: a worker needs both to hand its runs off.
        undo.callback(stack.end)
        ready = []
        for name, command in _commands(workers, flower_port):
            if stack.stopped:
                return DONE
            if command[0] == "worker":
                ready.append(Path(settings.data_dir) / f"{name}.ready")
                ready[-1].unlink(missing_ok=True)
                environment = {**environment, "CORTEX_READY_FILE": str(ready[-1])}
            stack.start(name, command, environment)
        if flower_port is not None:
            stack.say(f"Flower: http://{ports.LOOPBACK}:{flower_port}")
        for missing in what_is_missing:
            stack.say(missing, "yellow")
        return stack.watch(ready)


def _refuse_a_second(folder: Path) -> None:
    """Say that another `up` is here before its port is blamed; the folder's lock decides between two at once."""
    running = here.running_up(folder)
    if running is not None:
        raise FolderInUse(
            f"another `cortex-workers up` runs in {folder} (process {running.pid}): "
            "stop it first, or name another folder with CORTEX_DATA_DIR"
        )


def _refuse_a_taken_port(flower_port: int | None) -> None:
    if flower_port is not None and not ports.is_free(flower_port):
        raise PortInUse(f"port {flower_port}, meant for Flower, is in use: pass --flower-port or --no-flower")


@contextmanager
def _servers(settings: Settings, stack: Stack) -> Iterator[dict[str, str]]:
    """Start the servers that nobody named, migrate, and give the environment of everything else."""
    folder = Path(settings.data_dir)
    wanted = {"postgres": settings.database_url is None, "valkey": settings.broker_url is None}
    with ExitStack() as undo:
        if any(wanted.values()):
            stack.say(
                f"starting {' and '.join(_TITLES[name] for name, yes in wanted.items() if yes)} in {folder}"
            )
            servers = undo.enter_context(EmbeddedServers(folder, **wanted))
            stack.servers = {_TITLES[name]: getattr(servers, name) for name, yes in wanted.items() if yes}
        database = settings.require_database() if not wanted["postgres"] else servers.database_url
        broker = settings.require_broker() if not wanted["valkey"] else servers.broker_url
        before, after = migrate.current(database), migrate.upgrade(database)
        stack.say(f"schema at {after}" + (f" (was at {before or 'nothing'})" if before != after else ""))
        for name, url, ours in (
            ("CORTEX_DATABASE_URL", database, wanted["postgres"]),
            ("CORTEX_BROKER_URL", broker, wanted["valkey"]),
        ):
            # What was started here is for programs in other terminals to copy; what was given may hold a password.
            stack.say(f"export {name}={url}" if ours else f"using {name}, {mask_url(url)}")
        folder.mkdir(parents=True, exist_ok=True)
        here.announce(folder, database, broker)
        undo.callback(here.withdraw, folder)
        yield {
            **os.environ,
            "CORTEX_DATABASE_URL": database,
            "CORTEX_BROKER_URL": broker,
            "CORTEX_HOST": str(settings.host),
            "CORTEX_LOG_FORMAT": os.environ.get("CORTEX_LOG_FORMAT", "console"),
            "PYTHONUNBUFFERED": "1",
        }


_TITLES = {"postgres": "PostgreSQL", "valkey": "Valkey"}


def _commands(workers: int, flower_port: int | None) -> Iterator[tuple[str, list[str]]]:
    for number in range(1, workers + 1):
        name = "worker" if workers == 1 else f"worker-{number}"
        yield name, ["worker", "-n", f"{name}@%h", "-l", "warning"]
    yield "beat", ["beat", "-l", "warning"]
    if flower_port is not None:
        columns = "--tasks_columns=name,uuid,state,kwargs,result,received,runtime,worker"
        address = [f"--port={flower_port}", f"--address={ports.LOOPBACK}"]
        yield (
            "flower",
            ["flower", *address, "--read_only", "--persistent=False", columns, "--logging=error"],
        )


@dataclass(slots=True)
class _Child:
    """One process of the stack, what started it, and the thread that prints what it says."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    colour: str
    process: subprocess.Popen[bytes]
    reader: threading.Thread
    began: float


def _workers(children: Sequence[_Child]) -> list[_Child]:
    return [child for child in children if child.name.startswith("worker")]


class Stack:
    """The processes of one `up`. Start them from the main thread: on Linux they end with the thread that did."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.servers: dict[str, Any] = {}
        self._children: list[_Child] = []
        self._asked = 0
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._printing = threading.Lock()

    @property
    def stopped(self) -> bool:
        """Whether somebody wants it to end."""
        return self._asked > 0

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM: the first asks for the end, the next one insists."""

        def ask(_number: int, _frame: FrameType | None) -> None:
            self._asked += 1

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start one Celery command; what it says is printed with its name."""
        colour = _COLOURS[len(self._children) % len(_COLOURS)]
        self._children.append(self._started(name, command, environment, colour))

    def _started(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], colour: str
    ) -> _Child:
        # The launcher has the kernel end it when this process is killed.
        launcher = [
            sys.executable,
            "-I",
            "-S",
            launch.__file__,
            str(os.getpid()),
            str(int(signal.SIGTERM)),
            "-",
        ]
        process = subprocess.Popen(
            [*launcher, sys.executable, "-m", "celery", "-q", "-A", APP, *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal is ours to pass on
        )
        reader = threading.Thread(target=self._print_all, args=(name, colour, process.stdout), daemon=True)
        reader.start()
        return _Child(name, command, environment, colour, process, reader, time.monotonic())

    def watch(self, ready: Sequence[Path]) -> int:
        """Keep it running until somebody wants the end or one cannot start; returns the exit code.

        It is up when its workers have made the files ``ready``: before that, nobody knows their agents.
        """
        pause, told = threading.Event(), False
        while not self.stopped:
            if not told and all(file.exists() for file in ready):
                told = True
                self.say("up; Ctrl-C ends it, cortex-workers commands in this folder use it")
            ended = [child for child in self._children if child.process.poll() is not None]
            if any(not self._goes_on(child) for child in ended):
                return REFUSED
            if _workers(ended) and not _workers(self._children):
                self.say(
                    "no worker is left; the rest goes on until Ctrl-C, the next `up` has workers again",
                    "yellow",
                )
            self._revive_servers()
            pause.wait(_LOOK_S)
        return DONE

    def _revive_servers(self) -> None:
        """Start a server of ours again that was killed, at its old address and with its data."""
        for title, node in self.servers.items():
            if not node.is_running:
                self.say(f"{title} has ended; starting it again", style="yellow")
                node.start()

    def _goes_on(self, child: _Child) -> bool:
        """After a process has ended: asked to, it stays away; killed, it starts anew; false when it cannot start."""
        child.reader.join(1.0)
        self._children.remove(child)
        code, lived = child.process.returncode, time.monotonic() - child.began
        if code == 0:
            self.say(f"{child.name} has ended as it was asked to")
            return True
        if lived < _START_S:
            self.say(
                f"{child.name} ended with code {code} as soon as it was started; stopping the rest",
                style="red",
            )
            return False
        self.say(f"{child.name} ended with code {code}; starting it again", style="yellow")
        self._children.append(self._started(child.name, child.command, child.environment, child.colour))
        return True

    def end(self) -> None:
        """End every process: SIGTERM, then SIGKILL for what is left after the drain, or at once if asked again."""
        left = [child for child in self._children if child.process.poll() is None]
        if left:
            self.say("stopping; runs are handed off (Ctrl-C again: at once)")
        for child in left:
            child.process.terminate()
        deadline = time.monotonic() + self._settings.drain_s + _GRACE_S
        asked, pause = max(self._asked, 1), threading.Event()
        while any(child.process.poll() is None for child in left):
            if self._asked > asked or time.monotonic() > deadline:
                for child in left:
                    child.process.kill()
            pause.wait(0.05)
        for child in self._children:
            child.reader.join(1.0)

    def say(self, text: str, style: str = "bold") -> None:
        """Print a line of our own."""
        self._print("up", "bold", Text(text, style=style))

    def _print_all(self, name: str, colour: str, stream: Any) -> None:
        for line in stream:
            self._print(name, colour, Text.from_ansi(line.decode(errors="replace").rstrip()))

    def _print(self, name: str, colour: str, text: Text) -> None:
        with self._printing:
            self._console.print(Text.assemble((f"{name:<9}│ ", colour), text))

"""PostgreSQL as an embedded server."""

import shutil
import signal
from typing import IO

from cortex_workers.embedded import place as places
from cortex_workers.embedded import ports
from cortex_workers.embedded.errors import DataUnusable, EmbeddedError
from cortex_workers.embedded.node import Node, last_words, spawn, trim_log
from cortex_workers.embedded.place import Place

USER = "cortex"
DATABASE = "cortex"

_SETUP_DEADLINE_S = 120.0

# The line of postmaster.pid that tells the server's state, and what it says once clients are let in.
_STATUS_LINE = 7
_STATUS_READY = "ready"

_SETTINGS = {
    "listen_addresses": ports.LOOPBACK,
    "unix_socket_directories": "",  # their path is limited to 107 bytes, a project's is not
    "max_connections": "200",
    "shared_buffers": "64MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
}

# Only a crash of the whole machine can tell the difference: a killed server's writes are with the kernel. So
# synchronous_commit stays on, without which a killed server forgets commits.
_NOT_DURABLE = {"fsync": "off", "full_page_writes": "off"}


class PostgresNode(Node):
    """A PostgreSQL whose superuser `cortex` may log in from this machine without a password."""

    name = "postgres"
    program = "postgres"
    polite_stop = signal.SIGINT  # "fast": ends sessions; SIGTERM would wait for them

    def __init__(self, place: Place, durable: bool) -> None:
        """Describe the server; nothing is started."""
        super().__init__(place, durable)
        self._home = places.postgres_programs(place)

    @property
    def url(self) -> str:
        """The address of the database `cortex`."""
        return f"postgresql://{USER}@{ports.LOOPBACK}:{self.port}/{DATABASE}"

    def prepare(self) -> None:
        """Make the cluster and the database `cortex`, or check that the cluster fits these programs.

        Raises: DataUnusable for a folder that is no cluster, or one of another major version.
        """
        if not self.data.exists():
            self._make()
        version_file = self.data / "PG_VERSION"
        if not version_file.exists():
            raise DataUnusable(f"{self.data} is not a PostgreSQL data folder: move it away and start again")
        found, mine = version_file.read_text().strip(), self._major_version()
        if found != mine:
            raise DataUnusable(
                f"the data in {self.data} was made by PostgreSQL {found}, and PostgreSQL {mine} is installed: "
                "move the folder away, or install the former version"
            )
        # No server works here any more (the leftovers were cleared), so the note of one is stale. PostgreSQL itself
        # would refuse to start if the pid in it has been given to another process.
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    def command(self) -> list[str]:
        """Return the command line of the server."""
        settings = dict(_SETTINGS)
        if (self._home / "lib" / "pg_stat_statements.so").exists():
            settings["shared_preload_libraries"] = "pg_stat_statements"
        if not self._durable:
            settings |= _NOT_DURABLE
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [self._program("postgres"), "-D", str(self.data), "-p", str(self.port), *options]

    def answers(self) -> bool:
        """Say whether the server takes clients now."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        mine = self.is_running and lines[:1] == [str(self.pid)]
        return mine and len(lines) > _STATUS_LINE and lines[_STATUS_LINE].strip() == _STATUS_READY

    def _make(self) -> None:
        # Made under another name and renamed when complete: a set-up that was cut off leaves nothing that looks whole.
        draft = self.data.with_suffix(".new")
        shutil.rmtree(draft, ignore_errors=True)
        locale = ["--encoding=UTF8", "--no-locale"]
        self._run(
            "initdb", "-D", str(draft), "-U", USER, "--auth=trust", "--no-sync", "--no-instructions", *locale
        )
        statement = self._place.folder / "setup.sql"
        statement.write_text(f"CREATE DATABASE {DATABASE}\n")
        with statement.open("rb") as reader:
            self._run("postgres", "--single", "-D", str(draft), "template1", stdin=reader)
        statement.unlink()
        draft.rename(self.data)

    def _run(self, program: str, *arguments: str, stdin: IO[bytes] | None = None) -> None:
        log = self._place.log("postgres-setup")
        start_of_log = trim_log(log)
        process = spawn([self._program(program), *arguments], self._place, log, signal.SIGKILL, stdin)
        if process.wait(_SETUP_DEADLINE_S) != 0:
            raise EmbeddedError(f"{program} could not set up {self.data}: {last_words(log, start_of_log)}")

    def _program(self, name: str) -> str:
        return str(self._home / "bin" / name)

    def _major_version(self) -> str:
        # The first line of the bootstrap file says for which major version it was made: no process is needed.
        with (self._home / "share" / "postgres.bki").open() as bootstrap:
            return bootstrap.readline().split()[-1]

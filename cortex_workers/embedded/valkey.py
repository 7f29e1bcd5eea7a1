"""Valkey as an embedded server."""

import signal
import socket

from cortex_workers.embedded import place as places
from cortex_workers.embedded import ports
from cortex_workers.embedded.errors import DataUnusable
from cortex_workers.embedded.node import Node
from cortex_workers.embedded.place import Place

DATABASES = 1024
"""How many numbered databases the server has: a test takes one of its own."""

_PROBE_TIMEOUT_S = 1.0


class ValkeyNode(Node):
    """A Valkey that listens on this machine only; durable, it keeps an append-only file."""

    name = "valkey"
    program = "valkey-server"
    polite_stop = signal.SIGTERM

    def __init__(self, place: Place, durable: bool) -> None:
        """Describe the server; nothing is started."""
        super().__init__(place, durable)
        self._binary = places.valkey_program(place)

    @property
    def url(self) -> str:
        """The address of database 0."""
        return f"redis://{ports.LOOPBACK}:{self.port}/0"

    def prepare(self) -> None:
        """Make the data folder."""
        if self.data.exists() and not self.data.is_dir():
            raise DataUnusable(f"{self.data} is not a folder: move it away and start again")
        self.data.mkdir(exist_ok=True)
        self._place.hand_over(self.data)

    def command(self) -> list[str]:
        """Return the command line of the server."""
        options = {
            "port": str(self.port),
            "bind": ports.LOOPBACK,
            "dir": str(self.data),
            "databases": str(DATABASES),
            "save": "",
            "appendonly": "yes" if self._durable else "no",
            # A broker that evicts keys loses messages without a word.
            "maxmemory-policy": "noeviction",
        }
        return [
            str(self._binary),
            *(part for name, value in options.items() for part in (f"--{name}", value)),
        ]

    def answers(self) -> bool:
        """Say whether the server answers a PING; while it loads its data it answers with an error."""
        try:
            with socket.create_connection(
                (ports.LOOPBACK, self.port), timeout=_PROBE_TIMEOUT_S
            ) as connection:
                connection.sendall(b"PING\r\n")
                return self.is_running and connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False

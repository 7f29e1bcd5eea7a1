"""The pair of servers of one folder."""

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from cortex_workers.embedded import place as places
from cortex_workers.embedded import ports
from cortex_workers.embedded.errors import EmbeddedError, PortInUse
from cortex_workers.embedded.lock import OwnerLock
from cortex_workers.embedded.node import Node
from cortex_workers.embedded.postgres import PostgresNode
from cortex_workers.embedded.valkey import ValkeyNode

_PORT_TRIES = 3

N = TypeVar("N", bound=Node)


class EmbeddedServers:
    """A real PostgreSQL and a real Valkey in a folder, owned by the process that starts them.

    They listen on the loopback address without passwords: for development and tests, not for data that other users
    of this machine must not see. What they hold is there again at the next start.
    """

    def __init__(
        self,
        folder: Path,
        *,
        postgres: bool = True,
        valkey: bool = True,
        pg_port: int | None = None,
        valkey_port: int | None = None,
        durable: bool = True,
    ) -> None:
        """Describe the servers; nothing is started.

        A port that is not given is chosen once and remembered in the folder. `durable=False` gives up what only a
        crash of the whole machine could lose in PostgreSQL, and everything Valkey holds when it stops.
        """
        self._folder = folder.absolute()
        self._lock = OwnerLock(self._folder)
        self._wanted = ({"postgres": pg_port} if postgres else {}) | (
            {"valkey": valkey_port} if valkey else {}
        )
        self._durable = durable
        self._owned = False
        self._postgres: PostgresNode | None = None
        self._valkey: ValkeyNode | None = None

    @property
    def postgres(self) -> PostgresNode:
        """The PostgreSQL process. Raises: EmbeddedError before the first start, or when there is none."""
        return _present(self._postgres, "PostgreSQL")

    @property
    def valkey(self) -> ValkeyNode:
        """The Valkey process. Raises: EmbeddedError before the first start, or when there is none."""
        return _present(self._valkey, "Valkey")

    @property
    def database_url(self) -> str:
        """The address of PostgreSQL's database `cortex`."""
        return self.postgres.url

    @property
    def broker_url(self) -> str:
        """The address of Valkey's database 0."""
        return self.valkey.url

    def start(self) -> Self:
        """Take the folder and start the servers; all of them answer when this returns, or none runs.

        Raises: FolderInUse, PortInUse, DataUnusable, ExtraMissing, EmbeddedError.
        """
        self._own_the_folder()
        with ExitStack() as undo:
            undo.callback(self.stop)
            remembered = self._remembered_ports()
            for node in self._nodes(places.prepare(self._folder)):
                self._start(node, remembered.get(node.name))
            self._remember_ports()
            undo.pop_all()
        return self

    def stop(self) -> None:
        """Stop the servers in good order and give the folder up; stopping twice is harmless."""
        if self._owned:
            self._stop_nodes()
            self._lock.release()
            self._owned = False

    def remove_data(self) -> None:
        """Stop the servers and delete everything they hold.

        Raises: FolderInUse.
        """
        if not self._owned:
            self._own_the_folder()
        place = places.prepare(self._folder)
        self._stop_nodes()
        for node in self._nodes(place):
            node.clear_leftovers()  # of a killed owner
        places.remove(place)  # the owner's file goes with the rest
        self._owned = False

    def __enter__(self) -> Self:
        """Start the servers."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the servers."""
        self.stop()

    def _stop_nodes(self) -> None:
        for node in (self._valkey, self._postgres):
            if node is not None:
                node.stop()

    def _own_the_folder(self) -> None:
        places.make_folder(self._folder)
        self._lock.take()
        self._owned = True

    def _nodes(self, place: places.Place) -> list[Node]:
        if "postgres" in self._wanted:
            self._postgres = PostgresNode(place, self._durable)
        if "valkey" in self._wanted:
            self._valkey = ValkeyNode(place, self._durable)
        return [node for node in (self._postgres, self._valkey) if node is not None]

    def _start(self, node: Node, remembered: int | None) -> None:
        wanted = self._wanted[node.name]
        for tries_left in reversed(range(_PORT_TRIES)):
            node.port = ports.pick(wanted, remembered)
            try:
                node.start()
                return
            except PortInUse:
                # Somebody took it between the look and the start.
                if wanted is not None or not tries_left:
                    raise

    @property
    def _ports_file(self) -> Path:
        return self._folder / "ports.json"

    def _remembered_ports(self) -> dict[str, int]:
        try:
            content = json.loads(self._ports_file.read_text())
            return {str(name): int(port) for name, port in content.items()}
        except (FileNotFoundError, ValueError, AttributeError, TypeError):
            return {}

    def _remember_ports(self) -> None:
        chosen = self._remembered_ports()
        for node in (self._postgres, self._valkey):
            # A port that the caller named is the caller's to remember.
            if node is not None and self._wanted[node.name] is None:
                chosen[node.name] = node.port
        draft = self._ports_file.with_suffix(".new")
        draft.write_text(json.dumps(chosen))
        draft.replace(self._ports_file)


def _present(node: N | None, what: str) -> N:
    if node is None:
        raise EmbeddedError(f"there is no embedded {what} here: it was not asked for, or not started yet")
    return node

"""The PostgreSQL and the broker that all tests of a run share, and what each test gets of them for itself."""

import json
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from cortex_workers.embedded import EmbeddedServers
from cortex_workers.embedded.valkey import DATABASES
from cortex_workers.store.migrate import upgrade
from tests.waiting import wait_until

DATABASE_VARIABLE = "CORTEX_TEST_DATABASE_URL"
BROKER_VARIABLE = "CORTEX_TEST_BROKER_URL"

# Redis has 16 databases unless it was told otherwise; ours has more.
_DATABASES_ELSEWHERE = 16

_TEMPLATE_LOCK = 7_266_483


@dataclass(frozen=True)
class Addresses:
    """Where the shared servers of a test run are."""

    database: str
    broker: str
    broker_databases: int
    run: str
    """Begins the name of every database that this test run makes."""


class SharedServers:
    """The servers of one test run: those that the environment names, else embedded ones.

    The process that distributes the tests owns them, since it outlives its helpers; all read the addresses from a
    file in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._starting: threading.Thread | None = None
        self._database = os.environ.get(DATABASE_VARIABLE)
        self._broker = os.environ.get(BROKER_VARIABLE)
        self._servers = EmbeddedServers(
            folder / "embedded", postgres=not self._database, valkey=not self._broker, durable=False
        )

    def start(self) -> None:
        """Start them in the background: the tests are being collected meanwhile, and may need none."""
        if self._starting is None:
            self._starting = threading.Thread(target=self._start)
            self._starting.start()

    def stop(self) -> None:
        """Put away what the run's tests have left and stop what was started."""
        if self._starting is not None:
            self._starting.join()
            with self._failure_aside():
                _drop_databases(read_addresses(self.folder))
            self._servers.remove_data()

    def _start(self) -> None:
        content: dict[str, object]
        try:
            self._servers.start()
            content = asdict(
                Addresses(
                    database=self._database or self._servers.database_url,
                    broker=self._broker or self._servers.broker_url,
                    broker_databases=_DATABASES_ELSEWHERE if self._broker else DATABASES,
                    run=f"cortex_test_{uuid.uuid4().hex[:12]}",
                )
            )
        except Exception as error:  # noqa: BLE001  told to whoever reads the addresses
            content = {"error": f"{type(error).__name__}: {error}"}
        draft = self.folder / "addresses.new"
        draft.write_text(json.dumps(content))
        draft.rename(self.folder / "addresses.json")

    @contextmanager
    def _failure_aside(self) -> Iterator[None]:
        try:
            yield
        except (psycopg.Error, RuntimeError) as error:
            print(f"the databases of this test run could not be dropped: {error}")


def read_addresses(folder: Path) -> Addresses:
    """Wait until the servers have been started and return where they are."""
    file = folder / "addresses.json"
    wait_until(file.exists, what="the servers of this test run")
    content = json.loads(file.read_text())
    if "error" in content:
        raise RuntimeError(f"the servers of this test run did not start: {content['error']}")
    return Addresses(**content)


def ensure_template(addresses: Addresses) -> str:
    """Return the name of the migrated database that every test's database is a copy of; made once in a run."""
    template = f"{addresses.run}_template"
    with _administrator(addresses.database) as connection:
        connection.execute("SELECT pg_advisory_lock(%s)", (_TEMPLATE_LOCK,))
        row = connection.execute(
            "SELECT datallowconn FROM pg_database WHERE datname = %s", (template,)
        ).fetchone()
        # Closed to connections when it was complete: a copy needs that, and it tells a half-made one.
        if row is None or row[0]:
            drop_database(addresses, template)
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(template)))
            upgrade(_url_of(addresses, template))
            connection.execute(
                sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(sql.Identifier(template))
            )
    return template


@contextmanager
def fresh_database(addresses: Addresses, template: str | None) -> Iterator[str]:
    """Give the address of a database of one's own: a copy of the template, or empty without one."""
    name = f"{addresses.run}_{uuid.uuid4().hex[:12]}"
    with _administrator(addresses.database) as connection:
        connection.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
                sql.Identifier(name), sql.Identifier(template or "template0")
            )
        )
    try:
        yield _url_of(addresses, name)
    finally:
        drop_database(addresses, name)


def drop_database(addresses: Addresses, name: str) -> None:
    """Drop a database, whoever is still connected to it."""
    with _administrator(addresses.database) as connection:
        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def _drop_databases(addresses: Addresses) -> None:
    with _administrator(addresses.database) as connection:
        rows = connection.execute(
            "SELECT datname FROM pg_database WHERE starts_with(datname, %s)", (addresses.run,)
        )
        names = [name for (name,) in rows.fetchall()]
    for name in names:
        drop_database(addresses, name)


def _administrator(database: str) -> psycopg.Connection[tuple[object, ...]]:
    return psycopg.connect(database, autocommit=True)


def _url_of(addresses: Addresses, database: str) -> str:
    return urlsplit(addresses.database)._replace(path=f"/{database}").geturl()

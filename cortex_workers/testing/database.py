"""A PostgreSQL for the tests of an application, from a wheel: nothing has to be installed or running."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cortex_workers.embedded import EmbeddedServers
from cortex_workers.store import migrate


@contextmanager
def own_database() -> Iterator[str]:
    """The address of a real PostgreSQL with the tables made, for as long as a block lasts; nothing of it stays.

    Its start takes seconds: one for a whole test session is enough, since scopes keep tests apart.
    Raises: ExtraMissing without the extra `embedded`.
    """
    servers = EmbeddedServers(Path(tempfile.mkdtemp(prefix="cortex-workers-")), valkey=False, durable=False)
    try:
        servers.start()
        migrate.upgrade(servers.database_url)
        yield servers.database_url
    finally:
        servers.remove_data()

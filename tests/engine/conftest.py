"""The world of an engine test."""

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from cortex_workers.store import tables
from tests.engine.world import World
from tests.servers import Addresses, fresh_database


@pytest.fixture(scope="session")
def shared_database_url(addresses: Addresses, template_database: str) -> Iterator[str]:
    """One database for all worlds of this process: a copy for each of so many tests would cost more than they do."""
    with fresh_database(addresses, template_database) as url:
        yield url


@pytest.fixture
def world(shared_database_url: str) -> Iterator[World]:
    """An empty database with a shop in it."""
    made = World(shared_database_url)
    try:
        yield made
    finally:
        made.close()
        with psycopg.connect(shared_database_url, autocommit=True) as connection:
            for table in tables.metadata.sorted_tables:
                connection.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(table.name)))

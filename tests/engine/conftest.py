"""The world of an engine test."""

from collections.abc import Iterator

import pytest
from sqlalchemy import delete

from cortex_workers.settings import load_settings
from cortex_workers.store import tables
from cortex_workers.store.database import Database
from tests.engine.world import Onlooker, World
from tests.servers import Addresses, fresh_database


@pytest.fixture(scope="session")
def onlooker(addresses: Addresses, template_database: str) -> Iterator[Onlooker]:
    """One database for all worlds of this process: a copy for each of so many tests would cost more than they do."""
    with fresh_database(addresses, template_database) as url:
        database = Database(load_settings(database_url=url), lambda _: None)
        yield Onlooker(url, database)
        database.dispose()


@pytest.fixture
def world(onlooker: Onlooker) -> Iterator[World]:
    """An empty database with a shop in it."""
    made = World(onlooker)
    try:
        yield made
    finally:
        made.close()
        with onlooker.database.transaction() as unit:
            for table in tables.metadata.sorted_tables:
                unit.execute(delete(table))

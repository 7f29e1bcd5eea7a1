"""A database for the tests of one module that look at their own rows only, and one of each test's own."""

from collections.abc import Iterator

import pytest

from cortex_workers.schemas.notifications import Notification
from cortex_workers.settings import load_settings
from cortex_workers.store.database import Database
from tests.contract.meeting import Referee
from tests.engine.world import World
from tests.servers import Addresses, fresh_database


class Told(list[Notification]):
    """What was published, in order."""

    def take(self) -> list[Notification]:
        """Return what was published since the last time."""
        taken = list(self)
        self.clear()
        return taken


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def database(database_url: str, told: Told) -> Iterator[Database]:
    """A database of this test's own."""
    database = Database(load_settings(database_url=database_url), told.append)
    yield database
    database.dispose()


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    """The whole engine over a database of this test's own, with a scripted model."""
    world = World(database_url)
    yield world
    world.close()


@pytest.fixture(scope="module")
def common_url(addresses: Addresses, template_database: str) -> Iterator[str]:
    with fresh_database(addresses, template_database) as url:
        yield url


@pytest.fixture(scope="module")
def common_told() -> Told:
    return Told()


@pytest.fixture(scope="module")
def common_database(common_url: str, common_told: Told) -> Iterator[Database]:
    """A database that the tests of a module share: each makes its own runs and looks at nothing else."""
    database = Database(load_settings(database_url=common_url), common_told.append)
    yield database
    database.dispose()


@pytest.fixture
def fresh_world(common_url: str) -> Iterator[World]:
    """A host, a worker and a client of this test's own in the database that its module shares."""
    world = World(common_url)
    yield world
    world.close()


@pytest.fixture(scope="module")
def common_world(common_url: str) -> Iterator[World]:
    """The same for the tests of a module that look at their own rows only."""
    world = World(common_url)
    yield world
    world.close()


@pytest.fixture(scope="module")
def common_referee(common_url: str) -> Iterator[Referee]:
    referee = Referee(common_url)
    yield referee
    referee.close()


@pytest.fixture
def referee(database_url: str) -> Iterator[Referee]:
    """Somebody who holds locks and watches."""
    referee = Referee(database_url)
    yield referee
    referee.close()

"""Servers, databases, markers and profiles that every floor shares; tests/README.md tells how to use them."""

import itertools
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import hypothesis
import pytest
import redis

from cortex_workers.embedded import EmbeddedServers, PostgresNode, ValkeyNode
from cortex_workers.store.migrate import upgrade
from tests.servers import Addresses, SharedServers, ensure_template, fresh_database, read_addresses

FLOORS = {"contract", "engine", "fleet"}
FLEET_TIMEOUT_S = 300

_shared = pytest.StashKey[SharedServers]()


def pytest_configure(config: pytest.Config) -> None:
    """Begin without the settings of whoever runs the tests, and name the shared servers."""
    for name in list(os.environ):
        if name.startswith("CORTEX_") and not name.startswith("CORTEX_TEST_"):
            del os.environ[name]
    hypothesis.settings.register_profile(
        "ci",
        max_examples=50,
        deadline=None,
        # Shrinking an example on a real database takes minutes; `large` does it.
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate],
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.function_scoped_fixture,
        ],
        print_blob=True,
    )
    hypothesis.settings.register_profile(
        "large", hypothesis.settings.get_profile("ci"), max_examples=1000, phases=list(hypothesis.Phase)
    )
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
    if not hasattr(config, "workerinput"):
        config.stash[_shared] = SharedServers(Path(tempfile.mkdtemp(prefix="cortex-tests-")))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Start the servers when the first helper of pytest-xdist is set up, and tell each helper where to look."""
    shared = node.config.stash[_shared]
    shared.start()
    node.workerinput["cortex_servers"] = str(shared.folder)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the servers after the last helper has gone."""
    shared = config.stash.get(_shared, None)
    if shared is not None:
        shared.stop()
        shutil.rmtree(shared.folder, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test by the floor it stands on."""
    for item in items:
        floor = item.path.relative_to(Path(__file__).parent).parts[0]
        if floor in FLOORS:
            item.add_marker(floor)
        if item.get_closest_marker("fleet") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(FLEET_TIMEOUT_S))


@pytest.fixture(scope="session")
def addresses(request: pytest.FixtureRequest) -> Addresses:
    """Where the servers of this test run are; the first to ask waits for their start."""
    helper = getattr(request.config, "workerinput", None)
    if helper is not None:
        return read_addresses(Path(helper["cortex_servers"]))
    shared = request.config.stash[_shared]
    shared.start()
    return read_addresses(shared.folder)


@pytest.fixture(scope="session")
def template_database(addresses: Addresses) -> str:
    """The migrated database that is copied for each test."""
    return ensure_template(addresses)


@pytest.fixture
def database_url(addresses: Addresses, template_database: str) -> Iterator[str]:
    """A migrated database of this test's own, dropped afterwards."""
    with fresh_database(addresses, template_database) as url:
        yield url


@pytest.fixture
def empty_database_url(addresses: Addresses) -> Iterator[str]:
    """A database of this test's own without a table in it."""
    with fresh_database(addresses, None) as url:
        yield url


@pytest.fixture(scope="session")
def broker_databases(addresses: Addresses, worker_id: str) -> Iterator[int]:
    """The numbered databases of the broker that this helper may use, in turn for ever."""
    helpers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    share = addresses.broker_databases // helpers
    first = share * int(worker_id.removeprefix("gw")) if worker_id.startswith("gw") else 0
    return itertools.cycle(range(first, first + share))


@pytest.fixture
def broker_url(addresses: Addresses, broker_databases: Iterator[int]) -> Iterator[str]:
    """A numbered database of this test's own, empty; on RabbitMQ the shared address (see `queue_prefix`)."""
    if urlsplit(addresses.broker).scheme not in {"redis", "rediss"}:
        yield addresses.broker
        return
    for number in itertools.islice(broker_databases, addresses.broker_databases):
        url = urlsplit(addresses.broker)._replace(path=f"/{number}").geturl()
        with redis.Redis.from_url(url) as connection:
            # One that holds something is somebody's: a stranger's, or a straggler's of an earlier test.
            if connection.dbsize() == 0:
                yield url
                connection.flushdb()
                return
    pytest.fail("no numbered database of the broker is empty: this test would have to delete somebody's data")


@pytest.fixture
def queue_prefix() -> str:
    """A queue prefix of this test's own, for a broker that others use too."""
    return f"cw-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def own_postgres(tmp_path: Path) -> Iterator[PostgresNode]:
    """A PostgreSQL of this test's own, migrated, to be stopped, killed and frozen at will."""
    servers = EmbeddedServers(tmp_path / "own-postgres", valkey=False, durable=False)
    try:
        servers.start()
        upgrade(servers.database_url)
        yield servers.postgres
    finally:
        servers.remove_data()


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[ValkeyNode]:
    """A Valkey of this test's own, to be flushed, stopped, killed and frozen at will."""
    servers = EmbeddedServers(tmp_path / "own-broker", postgres=False, durable=False)
    try:
        servers.start()
        yield servers.valkey
    finally:
        servers.remove_data()

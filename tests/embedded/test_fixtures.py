"""What conftest.py promises to every test."""

from collections.abc import Iterator
from urllib.parse import urlsplit

import psycopg
import pytest
import redis

from cortex_workers.embedded import PostgresNode, ValkeyNode
from tests.servers import Addresses


@pytest.mark.parametrize("turn", range(3))
def test_each_test_gets_a_migrated_database_of_its_own(database_url: str, turn: int) -> None:
    with psycopg.connect(database_url) as connection:
        tables = connection.execute("SELECT count(*) FROM pg_tables WHERE tablename = 'runs'").fetchone()
        connection.execute("CREATE TABLE mine (id int)")
    assert tables == (1,)


def test_an_empty_database_has_no_tables(empty_database_url: str) -> None:
    with psycopg.connect(empty_database_url) as connection:
        row = connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone()
    assert row == (0,)


@pytest.mark.parametrize("turn", range(3))
def test_each_test_gets_an_empty_broker_of_its_own(broker_url: str, turn: int) -> None:
    with redis.Redis.from_url(broker_url) as connection:
        assert connection.dbsize() == 0
        connection.set("mine", turn)


def test_a_postgres_of_ones_own_keeps_its_rows_when_it_is_killed(own_postgres: PostgresNode) -> None:
    with psycopg.connect(own_postgres.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE mine AS SELECT 17 AS id")
    own_postgres.restart(9)
    with psycopg.connect(own_postgres.url) as connection:
        assert connection.execute("SELECT id FROM mine").fetchone() == (17,)


def test_a_broker_of_ones_own_forgets_everything_when_it_restarts(own_broker: ValkeyNode) -> None:
    with redis.Redis.from_url(own_broker.url) as connection:
        connection.set("mine", 1)
    own_broker.restart()
    with redis.Redis.from_url(own_broker.url) as connection:
        assert connection.dbsize() == 0


def test_a_numbered_database_that_holds_something_is_passed_over(
    addresses: Addresses, broker_databases: Iterator[int], request: pytest.FixtureRequest
) -> None:
    following = next(broker_databases) + 1
    occupied = urlsplit(addresses.broker)._replace(path=f"/{following}").geturl()
    with redis.Redis.from_url(occupied) as connection:
        connection.set("a stranger's", 1)
        given = request.getfixturevalue("broker_url")
        assert urlsplit(given).path == f"/{following + 1}"
        assert connection.delete("a stranger's") == 1

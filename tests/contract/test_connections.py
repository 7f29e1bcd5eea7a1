"""Connections that a restart of Postgres has closed are passed over: nobody gets an error for it."""

import signal

import pytest
from sqlalchemy import text

from cortex_workers.embedded import PostgresNode
from cortex_workers.errors import StoreUnavailable
from cortex_workers.settings import Settings
from cortex_workers.store.database import Database
from cortex_workers.store.unit import Unit


def one(unit: Unit) -> int:
    return int(unit.one(text("select 1 as one")).one)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["stopped", "killed"])
@pytest.mark.parametrize("lease", [False, True], ids=["work", "lease"])
def test_the_first_read_and_the_first_transaction_after_a_restart_work(
    own_postgres: PostgresNode, how: signal.Signals, lease: bool
) -> None:
    database = Database(Settings(database_url=own_postgres.url), lambda _: None)
    try:
        # Two connections lie in the pool.
        with database.read(lease=lease) as outer, database.read(lease=lease) as inner:
            assert (one(outer), one(inner)) == (1, 1)
        own_postgres.restart(how)
        with database.read(lease=lease) as unit:
            assert one(unit) == 1
        own_postgres.restart(how)
        with database.transaction(lease=lease) as unit:
            assert one(unit) == 1
        assert database.run(one, lease=lease) == 1
    finally:
        database.dispose()


def test_a_connection_in_good_order_is_kept(database_url: str) -> None:
    database = Database(Settings(database_url=database_url), lambda _: None)
    try:
        pids = set()
        for _ in range(20):
            with database.read() as unit:
                pids.add(unit.one(text("select pg_backend_pid() as pid")).pid)
        assert len(pids) == 1
    finally:
        database.dispose()


def test_a_server_that_takes_no_writes_is_an_outage_and_the_next_connections_are_new(
    own_postgres: PostgresNode,
) -> None:
    """After a switch-over the old server is a standby: what leads to it must not be kept."""
    database = Database(Settings(database_url=own_postgres.url), lambda _: None)

    def write(unit: Unit) -> None:
        unit.execute(text("create table if not exists proof (id int)"))

    def read_only(on: bool) -> None:
        with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("set default_transaction_read_only = off"))
            connection.execute(text(f"alter role current_user set default_transaction_read_only = {on}"))

    try:
        read_only(True)
        database.dispose()
        with pytest.raises(StoreUnavailable, match=r"takes no writes now: .*read-only"):
            database.run(write)
        read_only(False)
        database.run(write)
    finally:
        database.dispose()


def test_a_lock_that_is_not_had_in_time_is_told_as_what_it_is(database_url: str) -> None:
    database = Database(Settings(database_url=database_url, db_lock_timeout_s=0.1), lambda _: None)
    try:
        with database.transaction() as unit:
            unit.execute(text("lock table runs in access exclusive mode"))
            with (
                pytest.raises(StoreUnavailable, match=r"ended a statement: .*lock timeout"),
                database.read() as other,
            ):
                other.execute(text("select 1 from runs"))
    finally:
        database.dispose()

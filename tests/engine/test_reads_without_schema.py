"""A database that nobody migrated is said to be one, by every verb; and no error of the store tells what it carried."""

from __future__ import annotations

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from cortex_workers import Client, EnqueueRun, telemetry
from cortex_workers.errors import SchemaBehind
from cortex_workers.settings import load_settings


def test_every_read_of_an_empty_database_names_the_command(empty_database_url: str) -> None:
    with Client(load_settings(database_url=empty_database_url), scope="tenant=acme") as client:
        for read in (client.runs, client.checkpoints, client.sessions):
            with pytest.raises(SchemaBehind, match="cortex-workers migrate"):
                read()
        with pytest.raises(SchemaBehind):
            client.enqueue_many([EnqueueRun(agent="a", input="x", scope="tenant=acme")])


def test_an_error_of_the_store_tells_no_parameters(database_url: str) -> None:
    with Client(load_settings(database_url=database_url), scope="tenant=acme") as client:
        with pytest.raises(DBAPIError) as caught, client.runtime.database.read() as unit:
            unit.execute(text("select cast(:secret as integer) / 0"), {"secret": "7"})
        assert "'7'" not in str(caught.value)
        assert all("secret" not in place for place in telemetry.places(caught.value))

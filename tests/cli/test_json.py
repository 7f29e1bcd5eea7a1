"""What machines read has one form: a time is UTC with a T, microseconds and a Z, wherever it stands."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import make_url, text

from cortex_workers.schemas.lifecycle import RunState
from cortex_workers.store.database import Database
from cortex_workers.testing import factory
from tests.cli.conftest import Commands, a_worker

_LIKE_A_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d")
_OUR_FORM = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value


@pytest.fixture
def somewhere_east(database: Database, database_url: str) -> None:
    """A server whose own time zone is not UTC."""
    with database.transaction() as unit:
        unit.execute(text(f"alter database {make_url(database_url).database} set timezone = 'Asia/Kolkata'"))
    database.dispose()


def test_every_time_of_the_command_line_has_one_form(
    cw: Commands, database: Database, somewhere_east: None
) -> None:
    worker = a_worker(database)
    run = factory.an_uncertain_run(database)
    asked, held = factory.checkpoint_of(database, run), factory.a_running_run(database)
    factory.an_ended_run(database, RunState.COMPLETED)
    documents = [
        ("runs", "list"), ("runs", "show", run["id"]), ("runs", "cancel", held["id"]),
        ("runs", "wait", run["id"], "--until-paused"),
        ("checkpoints", "list"), ("checkpoints", "show", asked), ("checkpoints", "settle", asked, "--stop"),
        ("checkpoints", "approve", asked), ("sessions", "list"), ("sessions", "show", run["session_id"]),
        ("workers", "list"), ("workers", "drain", worker), ("doctor",),
    ]  # fmt: skip
    times = {
        " ".join(words[:2]): [one for one in _texts(cw(*words, "--json").json) if _LIKE_A_TIME.match(one)]
        for words in documents
    }
    assert {name for name, found in times.items() if not found} <= {
        "workers drain",
        "doctor",
        "checkpoints approve",
    }
    assert [
        (name, one) for name, found in times.items() for one in found if not _OUR_FORM.fullmatch(one)
    ] == []

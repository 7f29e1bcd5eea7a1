"""The world of an engine test."""

from collections.abc import Iterator

import pytest

from tests.engine.world import World


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    made = World(database_url)
    try:
        yield made
    finally:
        made.close()

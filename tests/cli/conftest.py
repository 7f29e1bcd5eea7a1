"""The command line in this process, on a database and a broker of the test's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog
from typer.testing import CliRunner

from cortex_workers import telemetry
from cortex_workers.cli.app import app
from cortex_workers.schemas.agent import AgentDefinition
from cortex_workers.settings import load_settings
from cortex_workers.store import workers
from cortex_workers.store.database import Database
from cortex_workers.testing import factory


@dataclass(frozen=True)
class Said:
    """What a command answered."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Stdout, which is one JSON document."""
        return json.loads(self.out)


class Commands:
    """Calls commands as a shell would, in a terminal of a hundred columns."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment

    def __call__(self, *words: str, input: str | None = None, **environment: str) -> Said:
        env = {**self.environment, **environment}
        result = CliRunner().invoke(app, list(words), input=input, env=env)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Said(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def cw(
    database_url: str, broker_url: str, queue_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Commands]:
    monkeypatch.chdir(tmp_path)
    yield Commands(
        {
            "CORTEX_DATABASE_URL": database_url,
            "CORTEX_BROKER_URL": broker_url,
            "CORTEX_QUEUE_PREFIX": queue_prefix,
            "CORTEX_SCOPE": factory.SCOPE,
            "CORTEX_ACTOR": "cli:ann",
            "COLUMNS": "100",
        }
    )
    # A command sets up logging for its own stderr, which ends with it.
    structlog.reset_defaults()
    telemetry._log = structlog.get_logger("cortex_workers")


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    made = Database(load_settings(database_url=database_url), lambda _: None)
    yield made
    made.dispose()


def a_worker(
    database: Database, worker_id: str = "host-1:77:abcdef01", agent: AgentDefinition = factory.AGENT
) -> str:
    """A live worker that serves an agent."""
    digest = [agent.digest()]
    database.run(
        lambda unit: workers.register(
            unit, worker_id, version="1", reader_version=1, slots=10, agents=digest, own_agents=digest
        )
    )
    return worker_id

"""A host hears of committed facts in every process that has it."""

from __future__ import annotations

import pytest

from cortex_workers import Client, Host
from cortex_workers.errors import Misconfiguration
from cortex_workers.schemas.notifications import KINDS, Notification
from cortex_workers.settings import load_settings
from cortex_workers.testing.model import ScriptedModel


def test_a_host_hears_of_a_run_of_its_own_process(database_url: str) -> None:
    host = Host()
    host.agent("greeter", model=ScriptedModel([{"say": "hello"}]))
    heard: list[Notification] = []

    @host.on("RunCompleted")
    def completed(fact: Notification) -> None:
        heard.append(fact)

    @host.on()
    def broken(fact: Notification) -> None:
        raise RuntimeError(fact.kind)

    with Client(load_settings(database_url=database_url), scope="tenant=acme", host=host) as client:
        run = client.run("greeter", "hi")
    assert [(fact.kind, fact.run_id) for fact in heard] == [("RunCompleted", run.id)]


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(Misconfiguration, match="CheckpointCreated"):
        Host().on("RunFinished")
    assert "RunReclaimable" in KINDS

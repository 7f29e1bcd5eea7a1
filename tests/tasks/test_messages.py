"""Messages are small, carry ids only, and are read with patience: unknown is ignored, newer is dropped."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import REGISTRY

from cortex_workers.errors import (
    CortexError,
    InvalidSettings,
    LeaseLost,
    MaxSteps,
    RunLeased,
    StoreUnavailable,
    all_errors,
)
from cortex_workers.schemas.notifications import RunReady
from cortex_workers.schemas.outcomes import Continued, HandedOff, Outcome, Refused
from cortex_workers.settings import Settings
from cortex_workers.tasks.base import OUTCOMES, TaskBroken, work_off
from cortex_workers.tasks.messages import ContinueRunMessage, SweepExpiredMessage
from cortex_workers.tasks.publish import CeleryPublisher
from tests.tasks.conftest import Queue

BODY_LIMIT, MESSAGE_LIMIT = 512, 1536
LONGEST = "r" * 64
GREATEST = 2**63 - 1


def refused_messages(why: str) -> float:
    return REGISTRY.get_sample_value("cw_unknown_messages_total", {"why": why}) or 0.0


def read(kwargs: dict[str, Any]) -> tuple[list[Any], Outcome]:
    seen: list[Any] = []

    def body(message: Any) -> Outcome:
        seen.append(message)
        return Continued(run_id=message.run_id, last_state="completed")

    return seen, work_off(ContinueRunMessage, body, (), kwargs)


@pytest.mark.invariant("I10")
def test_the_longest_message_stays_under_its_limits(broker_url: str) -> None:
    publish = CeleryPublisher(Settings(broker_url=broker_url, queue_prefix="x" * 20, pool="p" * 40))
    publish(RunReady(run_id=LONGEST, revision=GREATEST, why="reclaim", pool="p" * 40))
    assert publish.flush()
    publish.close()
    (raw,) = Queue(broker_url, f"{'x' * 20}.resume.{'p' * 40}").raw()
    message = json.loads(raw)
    hostname = message["headers"]["origin"].partition("@")[2]
    assert len(raw) - len(hostname) + 64 < MESSAGE_LIMIT, "on a machine with the longest of names"
    assert (
        len(json.dumps(ContinueRunMessage(run_id=LONGEST, revision=GREATEST, kind="begun").body()))
        < BODY_LIMIT
    )


@pytest.mark.invariant("I10")
def test_flower_is_shown_the_id_and_nothing_else(broker_url: str, ready: Callable[..., RunReady]) -> None:
    fact = ready()
    publish = CeleryPublisher(Settings(broker_url=broker_url))
    publish(fact)
    assert publish.flush()
    publish.close()
    (raw,) = Queue(broker_url, "cw.continue").raw()
    headers = json.loads(raw)["headers"]
    assert (headers["argsrepr"], headers["kwargsrepr"]) == ("()", f"run_id={fact.run_id}")


def test_no_message_has_a_time_in_it(broker_url: str, ready: Callable[..., RunReady]) -> None:
    publish = CeleryPublisher(Settings(broker_url=broker_url))
    publish(ready())
    assert publish.flush()
    publish.close()
    (raw,) = Queue(broker_url, "cw.continue").raw()
    headers = json.loads(raw)["headers"]
    assert {headers[name] for name in headers if name in ("expires", "eta")} == {None}


def test_unknown_arguments_are_ignored_and_missing_ones_filled_in() -> None:
    seen, _ = read({"run_id": "arun_1", "tenant": "acme", "priority": 3})
    assert seen == [ContinueRunMessage(v=1, run_id="arun_1", revision=None, kind="begun")]
    seen, _ = read({})
    assert seen == [ContinueRunMessage()]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"run_id": 17},
        {"run_id": ""},
        {"run_id": "r" * 65},
        {"run_id": {"$ne": None}},
        {"run_id": "arun_\x00"},
        {"run_id": "arun_\ud800"},
        {"run_id": "arun_1\n"},
        {"kind": "urgent"},
        {"v": "two"},
        {"v": 0},
        {"revision": "latest"},
    ],
    ids=str,
)
def test_a_malformed_body_is_refused_and_counted(kwargs: dict[str, Any]) -> None:
    before = refused_messages("form")
    seen, outcome = read(kwargs)
    assert (seen, outcome.outcome, getattr(outcome, "code", "")) == ([], "refused", "invalid_message")
    assert refused_messages("form") == before + 1


def test_a_newer_version_is_dropped_whatever_it_says() -> None:
    before = refused_messages("version")
    seen, outcome = read({"v": 99, "run_id": "arun_1", "kind": "a kind of the future"})
    assert (seen, outcome) == ([], Refused(run_id="arun_1", code="newer_version"))
    assert refused_messages("version") == before + 1


def test_positional_arguments_are_refused() -> None:
    outcome = work_off(ContinueRunMessage, lambda _: Continued(run_id=None, last_state=""), ("arun_1",), {})
    assert outcome == Refused(run_id=None, code="invalid_message")


def test_a_sweep_may_name_its_passes() -> None:
    assert SweepExpiredMessage.model_validate({"passes": ["lapses"], "by": "somebody"}).passes == ["lapses"]
    assert SweepExpiredMessage().passes is None


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RunLeased(), Refused(run_id="arun_1", code="run_leased")),
        (LeaseLost(), HandedOff(run_id="arun_1", code="lease_lost")),
        (MaxSteps(), Continued(run_id="arun_1", last_state="failed")),
        (StoreUnavailable(), Refused(run_id="arun_1", code="store_unavailable")),
        (InvalidSettings(), Refused(run_id="arun_1", code="invalid_settings")),
    ],
)
def test_each_family_of_errors_has_an_outcome(error: CortexError, outcome: Outcome) -> None:
    def body(message: Any) -> Outcome:
        raise error

    assert work_off(ContinueRunMessage, body, (), {"run_id": "arun_1"}) == outcome


def test_no_error_of_ours_is_without_a_family() -> None:
    families = tuple(family for family, _, _ in OUTCOMES)
    assert [
        error for error in all_errors() if error is not CortexError and not issubclass(error, families)
    ] == []


def test_any_other_error_is_a_failure_without_its_text() -> None:
    def body(message: Any) -> Outcome:
        raise KeyError("the customer's secret")

    with pytest.raises(TaskBroken) as caught:
        work_off(ContinueRunMessage, body, (), {"run_id": "arun_1"})
    assert "secret" not in repr(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__

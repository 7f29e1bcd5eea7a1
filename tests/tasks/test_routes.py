"""Every notification has its row: a task and a queue, or the note that no task acts on it."""

import typing
from typing import Any

import pytest

from cortex_workers.schemas.notifications import Notification, RunReady, RunReclaimable, Why
from cortex_workers.settings import Settings
from cortex_workers.tasks.app import celery_settings
from cortex_workers.tasks.routes import (
    CONTINUE_RUN,
    DELIVER_A2A,
    RESUME,
    ROUTES,
    SWEEP_EXPIRED,
    TOLD_ONLY,
    route,
)

UNION = typing.get_args(typing.get_args(Notification)[0])
WHYS = typing.get_args(Why)


def kind_of(model: Any) -> str:
    return str(model.model_fields["kind"].default)


def test_every_kind_of_notification_is_routed_or_told_only() -> None:
    routed = {kind for kind, _ in ROUTES}
    assert routed | TOLD_ONLY == {kind_of(model) for model in UNION}
    assert not routed & TOLD_ONLY


def test_every_reason_to_be_ready_has_a_row() -> None:
    assert {why for kind, why in ROUTES if kind == "RunReady"} == set(WHYS)


@pytest.mark.parametrize("model", UNION, ids=kind_of)
def test_a_notification_goes_where_the_table_says(model: Any) -> None:
    ids = {
        "run_id": "arun_1",
        "revision": 1,
        "checkpoint_id": "acp_1",
        "closed_as": "decided",
        "suspension_id": "sus_1",
        "delivery_id": "dlv_1",
        "message_id": "msg_1",
        "conversation_id": "conv_1",
        "performative": "inform",
    }
    found = route(model(**{name: value for name, value in ids.items() if name in model.model_fields}))
    assert (found is None) == (kind_of(model) in TOLD_ONLY)


@pytest.mark.parametrize("why", WHYS)
def test_only_a_run_that_never_began_goes_to_continue(why: Why) -> None:
    found = route(RunReady(run_id="arun_1", revision=1, why=why))
    assert found is not None
    way, _ = found
    assert (way.queue, way.kind) == (("continue", "start") if why == "start" else ("resume", "begun"))
    assert way.task == CONTINUE_RUN


def test_a_reclaimed_run_has_begun() -> None:
    found = route(RunReclaimable(run_id="arun_1", revision=1))
    assert found is not None
    assert (found[0].task, found[0].queue, found[0].kind) == (CONTINUE_RUN, "resume", "begun")


def test_each_task_has_a_queue_of_its_own_to_go_to_without_a_route() -> None:
    conf = celery_settings(Settings(broker_url="redis://nowhere/0", queue_prefix="x", pool="gpu"))
    assert conf["task_routes"] == {
        CONTINUE_RUN: {"queue": "x.resume.gpu"},
        RESUME: {"queue": "x.resume.gpu"},
        DELIVER_A2A: {"queue": "x.a2a.gpu"},
        SWEEP_EXPIRED: {"queue": "x.sweep"},
    }
    assert [queue.name for queue in conf["task_queues"]] == [
        "x.continue.gpu",
        "x.resume.gpu",
        "x.a2a.gpu",
        "x.sweep",
    ]

"""What Celery is told, on each broker; and what is refused, with a sentence."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from cortex_workers.errors import InvalidSettings, UnsupportedCelery
from cortex_workers.settings import Settings
from cortex_workers.tasks.app import celery_settings, make_app
from cortex_workers.tasks.consumer import FleetConsumer
from cortex_workers.tasks.schedule import beat_schedule, steady_now
from cortex_workers.tasks.version import require_celery

CELERY = Path(sys.executable).with_name("celery")
REDIS = Settings(broker_url="redis://nowhere/0")
RABBIT = Settings(broker_url="amqp://nowhere//")


def celery(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CORTEX_", "CELERY_"))}
    return subprocess.run(
        [CELERY, "-A", "cortex_workers.tasks.app", *arguments],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("settings", [REDIS, RABBIT], ids=["redis", "rabbitmq"])
def test_messages_are_acknowledged_early_on_every_broker(settings: Settings) -> None:
    conf = celery_settings(settings)
    assert conf["task_acks_late"] is False
    assert (conf["worker_prefetch_multiplier"], conf["worker_soft_shutdown_timeout"]) == (1, 0)


def test_only_json_is_accepted_and_no_result_is_kept() -> None:
    conf = celery_settings(REDIS)
    assert (conf["accept_content"], conf["task_serializer"], conf["event_serializer"]) == (
        ["json"],
        "json",
        "json",
    )
    assert (conf["result_backend"], conf["task_ignore_result"]) == (None, True)


def test_redis_is_not_prefetched_and_everybody_names_the_visibility_timeout() -> None:
    worker, api = celery_settings(REDIS), celery_settings(REDIS, role="api")
    assert worker["worker_disable_prefetch"] is True
    for conf in (worker, api):
        assert conf["broker_transport_options"]["visibility_timeout"] == REDIS.visibility_timeout_s
    assert api["broker_transport_options"]["socket_timeout"] == 3
    assert api["broker_transport_options"]["socket_connect_timeout"] == 2


def test_rabbitmq_gets_quorum_queues_and_confirmed_publishing() -> None:
    conf = celery_settings(RABBIT)
    assert {queue.queue_arguments["x-queue-type"] for queue in conf["task_queues"]} == {"quorum"}
    assert conf["broker_transport_options"]["confirm_publish"] is True
    assert conf["worker_disable_prefetch"] is False


def test_the_consumer_has_no_delayed_delivery() -> None:
    assert not [step for step in FleetConsumer.Blueprint.default_steps if "Delayed" in step]


def test_another_broker_in_the_environment_of_celery_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://elsewhere/3")
    with pytest.raises(InvalidSettings, match="unset CELERY_BROKER_URL"):
        celery_settings(REDIS)


def test_results_stay_off_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY_RESULT_BACKEND", "redis://elsewhere/3")
    assert type(make_app(REDIS).backend).__name__ == "DisabledBackend"


def test_our_app_is_not_the_current_one_of_a_producer() -> None:
    from celery import current_app

    assert make_app(REDIS) is not current_app._get_current_object()
    code = (
        "from celery import Celery, current_app; mine = Celery('mine'); import cortex_workers.tasks.app;"
        " assert current_app._get_current_object() is mine"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("version", ["5.6.2", "5.6.0rc1", "4.4.7"])
def test_an_old_celery_is_refused(version: str) -> None:
    with pytest.raises(UnsupportedCelery, match=r"5\.7 or newer"):
        require_celery(version)


@pytest.mark.parametrize("version", ["5.7.0", "5.7.1", "5.10.0", "6.0"])
def test_a_newer_celery_is_welcome(version: str) -> None:
    require_celery(version)


def test_an_old_celery_ends_the_import_with_a_sentence() -> None:
    code = "import celery; celery.__version__ = '5.6.2'; import cortex_workers.tasks.app"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .endswith("Celery 5.6.2 is too old; 5.7 or newer is needed: pip install 'celery[redis]>=5.7,<5.8'")
    )


@pytest.mark.parametrize(
    "command", [["worker"], ["beat"], ["call", "cortex.sweep_expired"], ["flower"]], ids=str
)
def test_a_command_without_settings_says_which_one_is_missing(command: list[str]) -> None:
    done = celery(*command)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "Error: CORTEX_BROKER_URL is not set; it names the Redis or RabbitMQ that carries hints"
    )


def test_a_wrong_setting_names_the_variable() -> None:
    done = celery("worker", CORTEX_BROKER_URL="redis://nowhere/0", CORTEX_SLOTS="-3")
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("Error: CORTEX_SLOTS: Input should be greater than or equal to 1")


def test_importing_the_app_needs_no_settings() -> None:
    subprocess.run([sys.executable, "-c", "import cortex_workers.tasks.app"], check=True, timeout=60)


def test_beat_sends_one_thing_and_each_expires_with_its_interval() -> None:
    (entry,) = beat_schedule(Settings(sweep_interval_s=7)).values()
    assert entry["task"] == "cortex.sweep_expired"
    assert entry["schedule"].run_every == timedelta(seconds=7)
    assert entry["options"] == {"expires": 7}


def test_beat_measures_its_interval_on_a_clock_that_cannot_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = beat_schedule(Settings(sweep_interval_s=7)).values()
    now = steady_now()
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert entry["schedule"].is_due(now - timedelta(seconds=8)).is_due
    assert not entry["schedule"].is_due(now - timedelta(seconds=3)).is_due

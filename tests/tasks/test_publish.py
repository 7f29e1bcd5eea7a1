"""The publisher sends in the background and never makes anybody wait, whatever the broker does."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import REGISTRY

from cortex_workers.embedded import ValkeyNode
from cortex_workers.errors import StoreUnavailable
from cortex_workers.schemas.ids import RUN, new_id
from cortex_workers.schemas.notifications import RunCompleted, RunReady, RunReclaimable
from cortex_workers.settings import Settings
from cortex_workers.tasks.publish import CeleryPublisher, Target
from tests.tasks.conftest import Queue
from tests.waiting import wait_until

Ready = Callable[..., RunReady]
Make = Callable[..., CeleryPublisher]

# A put takes microseconds; a network call to a frozen broker takes seconds.
AT_ONCE_S = 0.2


@pytest.fixture
def publisher() -> Iterator[Make]:
    """Publishers that are closed afterwards."""
    made: list[CeleryPublisher] = []

    def make(url: str, target: Target | None = None, **settings: object) -> CeleryPublisher:
        made.append(CeleryPublisher(Settings(broker_url=url, **settings), target))
        return made[-1]

    yield make
    for each in made:
        each.close()


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_a_ready_run_becomes_one_message_with_its_id(broker_url: str, publisher: Make, ready: Ready) -> None:
    fact = ready()
    publish = publisher(broker_url)
    publish(fact)
    assert publish.flush()
    assert Queue(broker_url, "cw.continue").bodies() == [
        {"v": 1, "run_id": fact.run_id, "revision": fact.revision, "kind": "start"}
    ]


def test_what_has_begun_goes_to_its_own_queue(broker_url: str, publisher: Make, ready: Ready) -> None:
    publish = publisher(broker_url)
    publish(ready(why="answer"))
    publish(RunReclaimable(run_id=new_id(RUN), revision=3))
    assert publish.flush()
    assert {body["kind"] for body in Queue(broker_url, "cw.resume").bodies()} == {"begun"}
    assert len(Queue(broker_url, "cw.resume")) == 2
    assert len(Queue(broker_url, "cw.continue")) == 0


def test_a_run_of_another_pool_goes_to_the_queue_of_that_pool(
    broker_url: str, publisher: Make, ready: Ready
) -> None:
    publish = publisher(broker_url)
    publish(ready(pool="gpu"))
    assert publish.flush()
    assert len(Queue(broker_url, "cw.continue.gpu")) == 1


def test_a_finished_run_sends_nothing(broker_url: str, publisher: Make) -> None:
    publish = publisher(broker_url)
    publish(RunCompleted(run_id=new_id(RUN), revision=9))
    assert publish.flush()
    assert Queue(broker_url, "cw.continue").client.dbsize() == 0


def test_after_flushall_a_publish_on_the_live_connection_arrives(
    own_broker: ValkeyNode, publisher: Make, ready: Ready
) -> None:
    publish = publisher(own_broker.url)
    publish(ready())
    assert publish.flush()
    there = Queue(own_broker.url, "cw.continue")
    there.client.flushall()
    publish(ready())
    assert publish.flush()
    assert len(there) == 1


def test_a_frozen_broker_delays_nobody(own_broker: ValkeyNode, publisher: Make, ready: Ready) -> None:
    publish = publisher(own_broker.url)
    publish(ready())
    assert publish.flush()
    own_broker.freeze()
    try:
        began = time.monotonic()
        for _ in range(1000):
            publish(ready())
        assert time.monotonic() - began < AT_ONCE_S
        assert not publish.flush(0.1)
    finally:
        own_broker.thaw()


def test_whoever_ends_after_a_wait_in_vain_does_not_wait_again(
    own_broker: ValkeyNode, publisher: Make, ready: Ready
) -> None:
    publish = publisher(own_broker.url)
    publish(ready())
    assert publish.flush()
    own_broker.freeze()
    try:
        publish(ready())
        assert not publish.flush_finally(0.1)
        began = time.monotonic()
        publish.close()
        assert time.monotonic() - began < AT_ONCE_S
    finally:
        own_broker.thaw()


def test_a_broker_that_is_away_is_left_alone_after_one_failure(
    own_broker: ValkeyNode, publisher: Make, ready: Ready
) -> None:
    own_broker.stop(signal.SIGKILL)
    publish = publisher(own_broker.url)
    before = counted("cw_publish_failures_total")
    publish(ready())
    wait_until(lambda: counted("cw_publish_failures_total") == before + 1, what="the first failure")
    publish(ready())
    began = time.monotonic()
    assert not publish.flush()
    assert time.monotonic() - began < AT_ONCE_S
    assert counted("cw_publish_failures_total") == before + 1


def test_what_a_broker_missed_is_sent_when_it_is_back(
    own_broker: ValkeyNode, publisher: Make, ready: Ready
) -> None:
    publish = publisher(own_broker.url, breaker_s=0.3)
    before = counted("cw_publish_failures_total")
    own_broker.stop(signal.SIGKILL)
    facts = [ready() for _ in range(3)]
    for fact in facts:
        publish(fact)
    wait_until(lambda: counted("cw_publish_failures_total") > before, what="a failure")
    own_broker.start()
    there = Queue(own_broker.url, "cw.continue")
    wait_until(lambda: len(there) == 3, what="the three messages")
    assert [body["run_id"] for body in there.bodies()] == [fact.run_id for fact in facts]


def test_a_restarted_broker_costs_no_failure(own_broker: ValkeyNode, publisher: Make, ready: Ready) -> None:
    publish = publisher(own_broker.url)
    publish(ready())
    assert publish.flush()
    own_broker.restart()
    before = counted("cw_publish_failures_total")
    publish(ready())
    assert publish.flush()
    assert counted("cw_publish_failures_total") == before


def test_a_full_queue_drops_the_oldest_and_counts(
    own_broker: ValkeyNode, publisher: Make, ready: Ready
) -> None:
    publish = publisher(own_broker.url, publish_queue=10, breaker_s=0.3)
    own_broker.stop(signal.SIGKILL)
    failures = counted("cw_publish_failures_total")
    dropped = counted("cw_publish_dropped_total", why="queue_full")
    publish(ready())
    wait_until(lambda: counted("cw_publish_failures_total") > failures, what="the breaker to open")
    facts = [ready() for _ in range(14)]
    for fact in facts:
        publish(fact)
    own_broker.start()
    there = Queue(own_broker.url, "cw.continue")
    wait_until(lambda: len(there) >= 10, what="the ten newest")
    assert publish.flush()
    assert [body["run_id"] for body in there.bodies()] == [fact.run_id for fact in facts[-10:]]
    assert counted("cw_publish_dropped_total", why="queue_full") == dropped + 5


def test_hints_stop_at_the_target(broker_url: str, publisher: Make, ready: Ready) -> None:
    publish = publisher(broker_url, lambda pool: {"continue": 3, "resume": 1})
    dropped = counted("cw_publish_dropped_total", why="target_depth")
    for _ in range(20):
        publish(ready())
        publish(ready(why="answer"))
    assert publish.flush()
    assert len(Queue(broker_url, "cw.continue")) == 3
    assert len(Queue(broker_url, "cw.resume")) == 1
    assert counted("cw_publish_dropped_total", why="target_depth") == dropped + 36


def test_a_first_hint_asks_nobody_how_many_are_useful(broker_url: str, publisher: Make, ready: Ready) -> None:
    asked: list[str] = []

    def target(pool: str) -> dict[str, int]:
        asked.append(pool)
        return {"continue": 0}

    publish = publisher(broker_url, target)
    publish(ready())
    assert publish.flush()
    assert (len(Queue(broker_url, "cw.continue")), asked) == (1, [])


def test_without_an_answer_about_the_target_everything_is_sent(
    broker_url: str, publisher: Make, ready: Ready
) -> None:
    def target(pool: str) -> dict[str, int]:
        raise StoreUnavailable()

    publish = publisher(broker_url, target)
    for _ in range(5):
        publish(ready())
    assert publish.flush()
    assert len(Queue(broker_url, "cw.continue")) == 5


def test_an_error_that_is_none_of_ours_does_not_end_the_sender(
    broker_url: str, publisher: Make, ready: Ready
) -> None:
    answers = iter([ValueError("unexpected"), None])

    def target(pool: str) -> dict[str, int]:
        error = next(answers, None)
        if error is not None:
            raise error
        return {"continue": 10}

    publish = publisher(broker_url, target)
    publish(ready())
    assert publish.flush()
    publish(ready())
    assert publish.flush()
    publish(ready())
    assert publish.flush()
    assert len(Queue(broker_url, "cw.continue")) == 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_a_sender_of_its_own(broker_url: str, publisher: Make, ready: Ready) -> None:
    publish = publisher(broker_url)
    publish(ready())
    assert publish.flush()
    fact = ready(why="slice")
    child = os.fork()
    if child == 0:
        publish(fact)
        os._exit(0 if publish.flush() else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert [body["run_id"] for body in Queue(broker_url, "cw.resume").bodies()] == [fact.run_id]
    publish(ready())
    assert publish.flush()
    assert len(Queue(broker_url, "cw.continue")) == 2


def test_a_closed_publisher_begins_again_when_it_is_used(
    broker_url: str, publisher: Make, ready: Ready
) -> None:
    publish = publisher(broker_url)
    publish(ready())
    publish.close()
    publish(ready())
    assert publish.flush()
    assert len(Queue(broker_url, "cw.continue")) == 2


def test_a_producer_that_just_ends_has_sent_its_hint(broker_url: str) -> None:
    code = (
        "from cortex_workers.settings import Settings\n"
        "from cortex_workers.tasks.publish import CeleryPublisher\n"
        "from cortex_workers.schemas.notifications import RunReady\n"
        f"publish = CeleryPublisher(Settings(broker_url={broker_url!r}))\n"
        "publish(RunReady(run_id='arun_1', revision=1))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert [body["run_id"] for body in Queue(broker_url, "cw.continue").bodies()] == ["arun_1"]


def test_a_producer_loads_celery_only_when_it_sends() -> None:
    code = (
        "import sys, cortex_workers.tasks.publish; assert not {'celery', 'kombu', 'redis'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

"""How many messages wait: known on a live broker, unknown on a silent one, never a reason to wait long."""

import signal
import time
from collections.abc import Callable

from cortex_workers.embedded import ValkeyNode
from cortex_workers.schemas.notifications import RunReady
from cortex_workers.settings import Settings
from cortex_workers.tasks.depth import BrokerDepth
from cortex_workers.tasks.publish import CeleryPublisher


def test_an_empty_queue_has_none_and_messages_are_counted(
    broker_url: str, ready: Callable[..., RunReady]
) -> None:
    settings = Settings(broker_url=broker_url)
    depth = BrokerDepth(settings)
    assert depth.depth("cw.continue") == 0
    publish = CeleryPublisher(settings)
    for _ in range(3):
        publish(ready())
    assert publish.flush()
    publish.close()
    assert (depth.depth("cw.continue"), depth.depth("cw.resume")) == (3, 0)
    depth.close()


def test_a_broker_that_is_away_is_unknown_and_then_left_alone(own_broker: ValkeyNode) -> None:
    depth = BrokerDepth(Settings(broker_url=own_broker.url, breaker_s=0.2))
    assert depth.depth("cw.continue") == 0
    own_broker.stop(signal.SIGKILL)
    assert depth.depth("cw.continue") is None
    began = time.monotonic()
    for _ in range(1000):
        depth.depth("cw.continue")
    assert time.monotonic() - began < 2
    depth.close()


def test_a_restarted_broker_is_known_at_once(own_broker: ValkeyNode) -> None:
    depth = BrokerDepth(Settings(broker_url=own_broker.url))
    assert depth.depth("cw.continue") == 0
    own_broker.restart()
    assert depth.depth("cw.continue") == 0
    depth.close()

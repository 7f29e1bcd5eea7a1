"""When beat or the broker is silent a worker notices, and helps itself."""

import os
import signal

import pytest

from cortex_workers.tasks.standby import Starvation


class Depths:
    """A depth that the test sets: None is a broker that does not answer."""

    def __init__(self) -> None:
        self.waiting: int | None = 5

    def depth(self, queue: str) -> int | None:
        return self.waiting


def watch(depths: Depths, free: int = 1, patience_s: float = 0.0) -> tuple[Starvation, list[int], list[str]]:
    received, drained = [0], []
    return (
        Starvation(
            depths,
            ["cw.continue"],
            free=lambda: free,
            received=lambda: received[0],
            patience_s=patience_s,
            drain=lambda: drained.append("drained"),
        ),
        received,
        drained,
    )


def test_messages_that_wait_and_never_arrive_end_the_worker() -> None:
    starvation, _, drained = watch(Depths())
    starvation.look()
    assert drained == ["drained"]


def test_a_message_starts_the_patience_anew() -> None:
    starvation, received, drained = watch(Depths())
    for _ in range(5):
        received[0] += 1
        starvation.look()
    assert drained == []
    starvation.look()
    assert drained == ["drained"]


def test_neither_a_full_house_nor_an_empty_queue_nor_a_silent_broker_is_starvation() -> None:
    depths = Depths()
    full, _, drained_full = watch(depths, free=0)
    full.look()
    empty, _, drained_empty = watch(depths)
    for waiting in (0, None):
        depths.waiting = waiting
        empty.look()
    assert (drained_full, drained_empty) == ([], [])


def test_patience_is_counted_from_the_last_good_sign() -> None:
    patient, _, drained = watch(Depths(), patience_s=3600)
    for _ in range(3):
        patient.look()
    assert drained == []


def test_its_end_is_the_ordinary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, how: sent.append((pid, how)))
    starvation = Starvation(Depths(), ["cw.continue"], free=lambda: 1, received=lambda: 0, patience_s=0)
    starvation.look()
    assert sent == [(os.getpid(), signal.SIGTERM)]

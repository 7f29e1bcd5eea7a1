"""Workers come and go, politely and not, in the middle of everything: all runs end once.

Bug cases C11, C51.
"""

import random

import pytest

from tests.fleet.bench import Bench, call, now, say
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("runs", "rounds"), [(60, 8), pytest.param(200, 40, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
def test_all_runs_end_once_whatever_happens_to_their_workers(bench: Bench, runs: int, rounds: int) -> None:
    bench.worker().kill()  # so that the agent is known
    turns = (
        call("note", text="a"),
        call("charge", amount=1),
        call("note", text="b"),
        call("charge", amount=2),
        say(),
    )
    wanted = [bench.enqueue(*turns) for _ in range(runs)]
    chance = random.Random(20_260_703)
    ends = []
    for number in range(rounds):
        worker = bench.worker()
        end = now() + chance.uniform(0, 0.3)
        wait_until(lambda end=end: now() >= end, "its moment")
        if number % 2:
            worker.kill()
        else:
            ends.append(worker.stop())
    assert set(ends) == {0}
    bench.worker(slots=20)
    # A run that was lost twice rests half a minute, one that was lost three times two minutes (ruling 29).
    rows = bench.completed(wanted, deadline_s=240)
    assert bench.did() == {"charge": 2 * runs}
    lost = sum(row["reclaim_total"] for row in rows)
    lapses = bench.rows("SELECT FROM events WHERE kind = 'run.lapse'")
    assert lost == len(lapses)

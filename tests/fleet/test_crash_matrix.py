"""A worker is killed at every named point of a run's way; another one continues, and nothing happens twice."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cortex_workers import probes
from cortex_workers.testing.fleet import WorkerProcess
from tests.fleet.bench import Bench, by_key, call, calls, say
from tests.fleet.test_messages import OF_MESSAGES
from tests.waiting import wait_until

# So that what a dead worker left is found soon: the runs of this walk last a fraction of a lease.
QUICK = {
    "CORTEX_SWEEP_INTERVAL_S": "0.3",
    "CORTEX_LEASE_TTL_S": "2",
    "CORTEX_LEASE_RENEW_S": "0.6",
    "CORTEX_LEASE_TRUST_S": "1.4",
}

# Points that a run passes more than once, in different company: the first and, here, the later times.
AGAIN = {
    "claim.after_commit": (2,),
    "model.after": (4,),
    "turn.before_commit": (2,),
    "turn.after_commit": (3,),
    "tool.before_start_record": (2,),
    "tool.after_start_record": (2, 3),
    "tool.after_handler": (2,),
    "tool.after_outcome": (3,),
}
# Points of messages between agents are walked in `test_messages.py`.
MINE = [name for name in probes.PROBES if name not in OF_MESSAGES]
CASES = [(name, nth) for name in MINE for nth in (1, *AGAIN.get(name, ()))]

WALK = (
    call("note", text="one"),
    call("charge", amount=1),
    calls(call("note", text="two"), call("charge", amount=2)),
    call("refund", amount=3),
    say("all is done"),
)
"""Safe, unsafe at the head of a turn, unsafe behind a safe one, an approval, and the end."""


class Walks:
    """Everything a run can do, one after the other, until the armed worker has died of it."""

    def __init__(self, bench: Bench, armed: WorkerProcess) -> None:
        self.bench, self.armed = bench, armed
        self.runs: list[str] = []

    def until_death(self) -> None:
        for walk in (self.work, self.expire, self.hand_off):
            walk()
            if not self.armed.is_running:
                return
        pytest.fail(f"no walk passes this point: {self.armed.arguments}")

    def or_dead(self, happened: Callable[[], object], what: str) -> None:
        wait_until(lambda: happened() or not self.armed.is_running, what)

    def work(self) -> None:
        run = self._enqueue(*WALK)
        self.or_dead(lambda: self.bench.question(run), "the run to ask")
        if self.armed.is_running:
            self.approve(run)
            self.or_dead(lambda: self.bench.row(run)["state"] == "completed", "the run to end")
        if self.bench.row(run)["state"] == "completed":
            # It may still be on its way to the point behind the end.
            self.or_dead(
                lambda: not self.bench.rows("SELECT FROM workers WHERE slots_used > 0"), "it to rest"
            )

    def expire(self) -> None:
        """Nobody answers, so that a sweep has something to do."""
        run = self._enqueue(call("refund_soon", amount=1), say("too late"))
        self.or_dead(lambda: self.bench.row(run)["state"] == "completed", "the pause to expire")

    def hand_off(self) -> None:
        with self.bench.gate():
            self._enqueue(call("wait_at", gate="gate"), call("charge", amount=1), say())
            self.or_dead(lambda: self.bench.lines("gate.entered"), "the run to be under way")
            self.armed.kill("SIGTERM")
        self.armed.wait()

    def approve(self, run: str) -> None:
        self.bench.client.decide(self.bench.asked(run), approved=True)

    def _enqueue(self, *turns: dict[str, object]) -> str:
        self.runs.append(self.bench.enqueue(*turns))
        return self.runs[-1]


@pytest.mark.invariant("I7")
@pytest.mark.parametrize(("probe", "nth"), CASES, ids=lambda value: str(value))
def test_another_worker_continues_after_a_kill_at(bench: Bench, probe: str, nth: int) -> None:
    armed = bench.worker(CORTEX_PROBE=f"{probe}:{nth}", **QUICK)
    walks = Walks(bench, armed)
    walks.until_death()
    assert armed.exit_code == -signal.SIGKILL
    held = bench.held_by(armed)

    bench.worker(**QUICK)
    for run in walks.runs:
        wait_until(
            lambda run=run: bench.row(run)["state"] == "completed" or bench.question(run), "it to go on"
        )
        if bench.question(run):
            walks.approve(run)
    rows = bench.completed(walks.runs)

    # A reclaim is counted for what was held at the death, and for nothing else.
    assert {row["id"]: row["reclaim_total"] for row in rows} == {run: int(run in held) for run in walks.runs}
    assert bench.did(walks.runs[0]) == {"charge": 2, "refund": 1}
    for row in rows:
        written = [line for line in bench.lines("notes") if line["run"] == row["id"]]
        assert all(count <= 1 + row["reclaim_total"] for count in by_key(written).values())
        asked = [line for line in bench.lines("model") if line["run"] == row["id"]]
        assert len(asked) <= row["next_step"] + row["reclaim_total"]


@pytest.mark.invariant("I7")
@pytest.mark.parametrize(
    ("probe", "happened"), [("tool.after_start_record", False), ("tool.after_handler", True)], ids=str
)
def test_what_nobody_can_look_up_is_asked_and_what_they_say_is_done(
    bench: Bench, probe: str, happened: bool
) -> None:
    armed = bench.worker(CORTEX_PROBE=probe, **QUICK)
    run = bench.enqueue(call("pay", amount=5), say("paid"))
    assert armed.wait() == -signal.SIGKILL
    assert bench.did() == ({"pay": 1} if happened else {})

    bench.worker(**QUICK)
    asked = bench.client.checkpoint(bench.asked(run))
    assert asked.kind == "uncertain_effect"
    if happened:
        bench.client.settle(asked.id, "happened", result="paid 5")
    else:
        bench.client.settle(asked.id, "did_not_happen")
    (row,) = bench.completed(run)
    assert bench.did() == {"pay": 1}
    assert row["reclaim_total"] == 1
    (result,) = bench.rows("SELECT content FROM messages WHERE run_id = %s AND role = 'tool'", run)
    assert result["content"] == "paid 5"


def test_an_uncertain_run_that_somebody_stops_has_failed(bench: Bench) -> None:
    armed = bench.worker(CORTEX_PROBE="tool.after_handler", **QUICK)
    run = bench.enqueue(call("pay", amount=5), say("paid"))
    armed.wait()
    bench.worker(**QUICK)
    bench.client.settle(bench.asked(run), "stop", reason="enough")
    (row,) = bench.finished(run)
    assert row["state"] == "failed"
    assert bench.did() == {"pay": 1}


def test_every_point_is_in_the_matrix_and_named_in_the_code() -> None:
    assert {name for name, _ in CASES} | set(OF_MESSAGES) == set(probes.PROBES)
    package = Path(probes.__file__).parent
    text = "".join(file.read_text() for file in package.rglob("*.py") if file.name != "probes.py")
    assert [name for name in probes.PROBES if f'reach("{name}")' not in text] == []

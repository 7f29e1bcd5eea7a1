"""The race matrix of a run once more, with a process for each side: APIs, sweepers, hosts, the run's holder.

Each pair meets at a dozen runs. Whatever came of it, each refusal is a stable code, the run ends as one of the two
said, and the bench checks afterwards that its history is one the machine allows (I1 to I6).
"""

import os
from collections.abc import Callable
from itertools import combinations_with_replacement
from typing import Any

import pytest

from tests.fleet.bench import TTL_S, Bench, Row, call, say
from tests.fleet.contest import Act, contests
from tests.waiting import wait_until

ROUNDS = 12
FIRST = "call_0_0"
REFUSED = {
    "invalid_state", "not_suspended", "suspension_expired", "admission_conflict", "requires_approval",
    "run_not_continuable", "run_leased", "run_already_done", "skipped",
}  # fmt: skip
ENDS = {
    "approve": ("completed", None),
    "reject": ("failed", "checkpoint_rejected"),
    "expire": ("failed", "suspension_expired"),
    "results": ("completed", None),
    "other results": ("completed", None),
    "result": ("completed", None),
    "continue": ("completed", None),
    "lapse": ("completed", None),
    "finish": ("completed", None),
    "cancel": ("cancelled", "cancelled"),
}
SAME = {frozenset(pair) for pair in (["approve"], ["reject"], ["results"], ["result"], ["results", "result"])}
"""Both say the same, so both get the one receipt."""


def deeds(run_id: str) -> dict[str, Act]:
    answer = {"tool_call_id": FIRST, "content": "12 EUR"}
    return {
        "results": {"with": [answer]},
        "other results": {"do": "results", "with": [{**answer, "content": "13 EUR"}]},
        "result": {"with": answer},
        "finish": {"with": run_id},
    }


def meet(
    bench: Bench, where: list[Act], pairs: list[tuple[str, str]]
) -> list[tuple[Act, str, str, str, str]]:
    """Let each pair meet at its runs; what each came to, run by run."""
    os.environ["FLEET_FOLDER"] = str(bench.folder)  # for the tools of those who continue
    settings = {"database_url": bench.database_url, "broker_url": bench.broker_url}
    sides: tuple[list[Act], list[Act]] = ([], [])
    names = [pair for pair in pairs for _ in range(ROUNDS)]
    for act, pair in zip(where, names, strict=True):
        for side, name in zip(sides, pair, strict=True):
            side.append({"do": name, **act, **deeds(act.get("gate", "")).get(name, {})})
    told = contests(settings, *sides)
    return [(act, *pair, *outcome) for act, pair, outcome in zip(where, names, told, strict=True)]


def check(bench: Bench, met: list[tuple[Act, str, str, str, str]]) -> None:
    """Who was through, and that the run ended so."""
    rows = bench.finished([act["run"] for act, *_ in met])
    for row, (_, first, second, one, two) in zip(rows, met, strict=True):
        about = (first, one, second, two, row["state"], row["error_code"])
        assert {one, two} <= {"done", *REFUSED}, about
        through = [name for name, outcome in ((first, one), (second, two)) if outcome == "done"]
        if "cancel" in through:
            assert row["state"] == "cancelled", about
        elif through:
            assert (row["state"], row["error_code"]) in [ENDS[name] for name in through], about
        check_through(first, second, through, about)


def check_through(first: str, second: str, through: list[str], about: Any) -> None:
    """At least one goes through, and two only where the second may follow the first."""
    assert through, about
    if frozenset((first, second)) in SAME:
        assert len(through) == 2, about
    elif not {"cancel", "continue", "lapse", "finish"} & {first, second}:
        assert len(through) == 1, about


def paused(bench: Bench, turn: Row, count: int) -> list[Act]:
    """Runs that wait, with their pauses, and nobody who would go on with them."""
    worker = bench.worker(slots=8)
    runs = [bench.enqueue(turn, say("{last_result}")) for _ in range(count)]
    query = "SELECT id, suspension_id FROM runs WHERE state = 'paused'"
    wait_until(lambda: len(bench.rows(query)) == count, "all to wait", 60)
    worker.stop()
    pauses = {row["id"]: row["suspension_id"] for row in bench.rows(query)}
    return [{"run": run_id, "pause": pauses[run_id]} for run_id in runs]


def deadlines(bench: Bench, where: list[Act]) -> None:
    """Let the deadline of each pause be the instant at which two meet about it."""
    query = (
        "UPDATE suspensions SET expires_at = clock_timestamp() + make_interval(secs => %s) WHERE id = %s"
        " RETURNING extract(epoch FROM expires_at)::float8 AS at"
    )
    for number, act in enumerate(where):
        (row,) = bench.rows(query, 4 + number * 0.08, act["pause"])
        act["at"] = row["at"]


Arranged = Callable[[Bench, int], list[Act]]


def approval(bench: Bench, count: int) -> list[Act]:
    where = paused(bench, call("refund", amount=1), count)
    asked = {row["run_id"]: row["id"] for row in bench.rows("SELECT id, run_id FROM checkpoints")}
    return [{**act, "checkpoint": asked[act["run"]]} for act in where]


def outside(bench: Bench, count: int) -> list[Act]:
    return paused(bench, call("quote", item="desk"), count)


@pytest.mark.invariant("I2")
@pytest.mark.parametrize(
    ("arranged", "names"),
    [
        pytest.param(approval, ["approve", "reject", "cancel"], id="approval"),
        pytest.param(outside, ["results", "other results", "result", "cancel"], id="outside"),
    ],
)
def test_every_two_who_answer_or_cancel(bench: Bench, arranged: Arranged, names: list[str]) -> None:
    pairs = [pair for pair in combinations_with_replacement(names, 2) if pair != ("cancel", "cancel")]
    pairs.remove(("other results", "other results")) if "other results" in names else None
    met = meet(bench, arranged(bench, ROUNDS * len(pairs)), pairs)
    bench.worker(slots=8)
    check(bench, met)


@pytest.mark.invariant("I2")
@pytest.mark.parametrize(
    ("arranged", "names"),
    [
        pytest.param(approval, ["approve", "reject", "cancel", "expire"], id="approval"),
        pytest.param(outside, ["results", "result", "cancel", "expire"], id="outside"),
    ],
)
def test_whoever_meets_the_sweep_at_the_deadline(bench: Bench, arranged: Arranged, names: list[str]) -> None:
    """Who is a moment early finds no deadline, who is late no pause; a sweep that is early looks again."""
    pairs = [(name, "expire") for name in names]
    where = arranged(bench, ROUNDS * len(pairs))
    deadlines(bench, where)
    met = meet(bench, where, pairs)
    bench.worker(slots=8)
    bench.beat()
    rows = bench.finished([act["run"] for act in where])
    for row, (_, first, second, one, two) in zip(rows, met, strict=True):
        about = (first, one, two, row["state"], row["error_code"])
        assert {one, two} <= {"done", *REFUSED}, about
        if one == "done" and first != "expire":
            assert two == "skipped", about
            assert (row["state"], row["error_code"]) == ENDS[first], about
        else:  # the sweep's, or that of the one that came after both
            assert (row["state"], row["error_code"]) == ENDS[second], about
            assert (one, two) != ("done", "done"), about


@pytest.mark.invariant("I2")
def test_whoever_continues_meets_whoever_answers_or_cancels(bench: Bench) -> None:
    pairs = [("approve", "continue"), ("reject", "continue")]
    met = meet(bench, approval(bench, ROUNDS * len(pairs)), pairs)
    bench.worker(slots=8)
    check(bench, met)


@pytest.mark.invariant("I2")
def test_of_a_run_that_is_ready_one_process_takes_hold(bench: Bench) -> None:
    pairs = [("continue", "continue"), ("continue", "cancel")]
    where = approval(bench, ROUNDS * len(pairs))
    for act in where:
        bench.client.decide(act["checkpoint"], approved=True)
    met = meet(bench, where, pairs)
    bench.worker(slots=8)
    check(bench, met)
    for _, first, second, one, two in met:
        if first == second:
            assert [one, two].count("done") == 1, (one, two)


@pytest.mark.invariant("I2")
def test_of_a_run_whose_worker_is_dead_one_process_counts_the_lapse(bench: Bench) -> None:
    pairs = [("lapse", "lapse"), ("lapse", "continue"), ("lapse", "cancel"), ("continue", "cancel")]
    worker = bench.worker(slots=2 * ROUNDS * len(pairs))  # some are kept for begun runs
    with bench.gate():
        runs = [bench.enqueue(call("wait_at", gate="gate"), say()) for _ in range(ROUNDS * len(pairs))]
        bench.entered(count=len(runs))
        worker.kill()
    over = "SELECT id FROM runs WHERE state = 'running' AND lease_expires_at <= now()"
    wait_until(lambda: len(bench.rows(over)) == len(runs), "all leases to end", TTL_S + 30)
    met = meet(bench, [{"run": run_id} for run_id in runs], pairs)
    bench.worker(slots=8)
    check(bench, met)
    lapses = {row["id"]: row["reclaim_total"] for row in bench.rows("SELECT id, reclaim_total FROM runs")}
    for act, first, second, one, two in met:
        assert lapses[act["run"]] <= 1
        if first == second:
            assert [one, two].count("done") == 1, (one, two)


@pytest.mark.invariant("I2")
def test_a_cancel_meets_the_last_write_of_the_runs_holder(bench: Bench) -> None:
    bench.worker(slots=2 * ROUNDS)
    gates = [f"gate-{number}" for number in range(ROUNDS)]
    for gate in gates:
        (bench.folder / gate).touch()
    runs = [bench.enqueue(call("wait_at", gate=gate), say()) for gate in gates]
    for gate in gates:
        bench.entered(gate)
    where = [
        {"run": run_id, "gate": str(bench.folder / gate)} for run_id, gate in zip(runs, gates, strict=True)
    ]
    met = meet(bench, where, [("finish", "cancel")])
    for row, (*_, cancelled) in zip(bench.finished(runs), met, strict=True):
        assert row["state"] == ("cancelled" if cancelled == "done" else "completed")
        assert cancelled in ("done", "invalid_state")

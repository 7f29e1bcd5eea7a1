"""The race matrix with two API processes: whoever comes first has said it, the other is told so (C01, C45)."""

from collections import Counter
from typing import Any

import pytest

from tests.fleet.bench import Bench, call, calls, say
from tests.fleet.contest import Act, contests

ROUNDS = 40
REFUSED = {"invalid_state", "not_suspended", "admission_conflict"}
FIRST, SECOND, THIRD = "call_0_0", "call_0_1", "call_0_2"


def settings(bench: Bench) -> dict[str, Any]:
    return {"database_url": bench.database_url, "broker_url": bench.broker_url}


def asking(bench: Bench) -> list[Act]:
    """Runs that wait for a decision."""
    runs = [bench.enqueue(call("refund", amount=1), say()) for _ in range(ROUNDS)]
    return [{"run": run_id, "checkpoint": bench.asked(run_id)} for run_id in runs]


def outside(bench: Bench, count: int) -> list[Act]:
    """Runs that wait for results."""
    turn = calls(*(call("quote", item=f"item {index}") for index in range(count)))
    runs = [bench.enqueue(turn, say("{last_result}")) for _ in range(ROUNDS)]
    for run_id in runs:
        bench.paused(run_id)
    return [{"run": run_id} for run_id in runs]


def both(acts: list[Act], first: dict[str, Any], second: dict[str, Any]) -> tuple[list[Act], list[Act]]:
    return [{**act, **first} for act in acts], [{**act, **second} for act in acts]


ENDS = {"approve": "completed", "reject": "failed", "cancel": "cancelled"}


@pytest.mark.invariant("I2")
@pytest.mark.parametrize(
    ("first", "second"), [("approve", "reject"), ("reject", "cancel"), ("approve", "approve")]
)
def test_of_two_that_decide_at_once_one_has_decided(bench: Bench, first: str, second: str) -> None:
    bench.worker(slots=8)
    acts = asking(bench)
    told = contests(settings(bench), *both(acts, {"do": first}, {"do": second}))
    rows = bench.finished([act["run"] for act in acts])
    for row, outcome in zip(rows, told, strict=True):
        if first == second:
            assert outcome == ("done", "done")
            assert row["state"] == ENDS[first]
            continue
        assert sorted(word == "done" for word in outcome) == [False, True], outcome
        assert set(outcome) <= {"done", *REFUSED}
        winner = first if outcome[0] == "done" else second
        assert row["state"] == ENDS[winner]
    assert bench.did() == Counter(refund=len([row for row in rows if row["state"] == "completed"]))


@pytest.mark.invariant("I2")
def test_a_cancel_and_an_approval_at_once_leave_one_end(bench: Bench) -> None:
    """An approved run may still be cancelled, so both may be done; then the run is cancelled."""
    bench.worker(slots=8)
    acts = asking(bench)
    told = contests(settings(bench), *both(acts, {"do": "approve"}, {"do": "cancel"}))
    rows = bench.finished([act["run"] for act in acts])
    for row, (approved, cancelled) in zip(rows, told, strict=True):
        assert {approved, cancelled} <= {"done", *REFUSED}
        assert "done" in (approved, cancelled)
        if cancelled == "done":
            assert row["state"] == "cancelled"
        else:
            assert row["state"] == "completed"


@pytest.mark.invariant("I2")
@pytest.mark.parametrize("door", ["results", "result"])
def test_a_cancel_and_an_answer_from_outside_at_once_leave_one_end(bench: Bench, door: str) -> None:
    """An answered run may still be cancelled, so both may be done; then the run is cancelled."""
    bench.worker(slots=8)
    acts = outside(bench, 1)
    given = {"tool_call_id": FIRST, "content": "12 EUR"}
    answer = {"do": door, "with": [given] if door == "results" else given}
    told = contests(settings(bench), *both(acts, answer, {"do": "cancel"}))
    rows = bench.finished([act["run"] for act in acts])
    for row, (answered, cancelled) in zip(rows, told, strict=True):
        assert {answered, cancelled} <= {"done", *REFUSED}
        assert "done" in (answered, cancelled)
        if cancelled == "done":
            assert row["state"] == "cancelled"
        else:
            assert (row["state"], row["output"]) == ("completed", "12 EUR")


@pytest.mark.invariant("I2")
def test_of_two_different_answers_at_once_the_first_stands(bench: Bench) -> None:
    bench.worker(slots=8)
    acts = outside(bench, 1)
    one = {"do": "results", "with": [{"tool_call_id": FIRST, "content": "one"}]}
    two = {"do": "results", "with": [{"tool_call_id": FIRST, "content": "two"}]}
    told = contests(settings(bench), *both(acts, one, two))
    rows = bench.completed([act["run"] for act in acts])
    for row, outcome in zip(rows, told, strict=True):
        assert sorted(outcome) == ["admission_conflict", "done"]
        assert row["output"] == ("one" if outcome[0] == "done" else "two")


@pytest.mark.invariant("I2")
def test_results_of_one_pause_from_several_apis_at_once_are_all_kept(bench: Bench) -> None:
    """C45: 1, 3 and a second 1 with other content at the same instant, 2 later."""
    bench.worker(slots=8)
    acts = outside(bench, 3)
    given = [
        {"do": "result", "with": {"tool_call_id": FIRST, "content": "one"}},
        {"do": "result", "with": {"tool_call_id": THIRD, "content": "three"}},
        {"do": "result", "with": {"tool_call_id": FIRST, "content": "another one"}},
    ]
    told = contests(settings(bench), *([{**act, **each} for act in acts] for each in given))
    assert {row["state"] for row in bench.rows("SELECT state FROM runs")} == {"paused"}
    last = {"do": "result", "with": {"tool_call_id": SECOND, "content": "two"}}
    again = contests(settings(bench), *both(acts, last, last))
    rows = bench.completed([act["run"] for act in acts])
    for row, (one, three, other), ends in zip(rows, told, again, strict=True):
        assert three == "done"
        assert sorted([one, other]) == ["admission_conflict", "done"]
        assert ends == ("done", "done")
        stored = bench.rows(
            "SELECT content FROM messages WHERE run_id = %s AND role = 'tool' ORDER BY seq", row["id"]
        )
        first = "one" if one == "done" else "another one"
        assert [each["content"] for each in stored] == [first, "two", "three"]
        resumed = bench.rows("SELECT id FROM events WHERE run_id = %s AND kind = 'run.admit'", row["id"])
        assert len(resumed) == 1

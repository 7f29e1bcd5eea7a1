"""A thousand runs wait for answers of every kind while their workers and the broker come and go."""

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from cortex_workers import EnqueueRun
from cortex_workers.embedded import ValkeyNode
from tests.fleet.bench import SCOPE, Bench, Row, call, calls, say, script
from tests.waiting import wait_until

EACH = 125
FIRST, SECOND, THIRD = "call_0_0", "call_0_1", "call_0_2"
NOT_OURS = "tenant=other"


@dataclass
class Kind:
    """A kind of pause: what its runs do, who answers, and how they end."""

    name: str
    turns: list[Row]
    answers: list[Row]
    ends: tuple[str, str | None] = ("completed", None)
    effects: dict[str, int] = field(default_factory=dict)
    says: str = "done"
    agent: str = "clerk"
    wrong: list[Row] = field(default_factory=list)


def decision(**values: Any) -> Row:
    return {"way": "decide", "decision": values}


def content(call_id: str, text: str) -> Row:
    return {"tool_call_id": call_id, "content": text}


QUOTED = {"way": "results", "results": [content(FIRST, "12 EUR")]}
HEAR = say("{last_result}")
NO_SUCH_CALL = decision(calls={"nobody": {"approved": True}})
WRONG_CALL = {"way": "results", "results": [content("nobody", "0 EUR")]}

KINDS = [
    Kind(
        "approved",
        [call("refund", amount=1), HEAR],
        [decision(approved=True)],
        effects={"refund": 1},
        says="refunded 1",
        wrong=[NO_SUCH_CALL, {**QUOTED}],
    ),
    Kind(
        "rejected",
        [call("refund", amount=1), HEAR],
        [decision(approved=False)],
        ends=("failed", "checkpoint_rejected"),
        wrong=[decision(approved=True, amended_arguments={"amount": "much"})],
    ),
    Kind(
        "by call",
        [calls(*(call("refund", amount=amount) for amount in (1, 2, 3))), say("ok")],
        [
            decision(
                calls={
                    FIRST: {"approved": True},
                    SECOND: {"approved": True, "amended_arguments": {"amount": 99}},
                    THIRD: {"approved": False, "reason": "too much"},
                }
            )
        ],
        effects={"refund": 2},
        says="ok",
        wrong=[decision(approved=True, calls={FIRST: {"approved": True}}), NO_SUCH_CALL],
    ),
    Kind(
        "outside",
        [call("quote", item="desk"), HEAR],
        [QUOTED],
        says="12 EUR",
        wrong=[WRONG_CALL, {**QUOTED, "scope": NOT_OURS}],
    ),
    Kind(
        "outside, one by one",
        [calls(*(call("quote", item=item) for item in ("desk", "chair", "lamp"))), say("ok")],
        [{"way": "result", "result": content(each, f"{each} EUR")} for each in (FIRST, SECOND, THIRD)],
        says="ok",
        wrong=[WRONG_CALL],
    ),
    Kind(
        "mixed",
        [calls(call("charge", amount=1), call("refund", amount=2), call("quote", item="desk")), HEAR],
        [
            decision(approved=True),
            {"way": "results", "results": [content(THIRD, "12 EUR")], "later_if": "requires_approval"},
        ],
        effects={"charge": 1, "refund": 1},
        says="12 EUR",
        wrong=[WRONG_CALL, NO_SUCH_CALL],
    ),
    Kind(
        "deferred",
        [say("worth it")],
        [{**decision(approved=True), "kind": "deferred_model_call"}],
        says="worth it",
        agent="careful",
        wrong=[WRONG_CALL],
    ),
    Kind(
        "too late",
        [call("quote_soon", item="desk"), HEAR],
        [],
        ends=("failed", "suspension_expired"),
        wrong=[QUOTED, WRONG_CALL],
    ),
]
REFUSALS = {
    "invalid_decision", "invalid_state", "results_mismatch", "requires_approval", "not_suspended",
    "suspension_expired", "run_not_found", "checkpoint_not_found", "admission_conflict", "wrong_answer",
}  # fmt: skip
"""What a wrong or late answer may be told; each is documented where its verb is."""


def _request(kind: Kind) -> EnqueueRun:
    return EnqueueRun(scope=SCOPE, agent=kind.agent, input=script(*kind.turns))


def enqueue(bench: Bench) -> dict[str, Kind]:
    """A number of runs of each kind, mixed."""
    kinds = KINDS * EACH
    requests = [_request(kind) for kind in kinds]
    return dict(zip([made.id for made in bench.client.enqueue_many(requests)], kinds, strict=True))


def count(bench: Bench, states: Iterable[str]) -> int:
    return int(bench.rows("SELECT count(*) AS n FROM runs WHERE state = ANY(%s)", list(states))[0]["n"])


class Answerers:
    """Processes that answer, each with an order of its own."""

    def __init__(self, bench: Bench, name: str, answers: list[Row], how_many: int) -> None:
        file = bench.folder / name
        file.write_text("".join(json.dumps(each) + "\n" for each in answers))
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.fleet.answerer", str(file), f"{name}-{number}"],
                env={**bench.environment, "CORTEX_SCOPE": "tenant=acme", "PATH": ""},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for number in range(how_many)
        ]

    def ended(self) -> None:
        for each in self._processes:
            said, _ = each.communicate(timeout=240)
            assert each.returncode == 0, said.decode()[-3000:]


def to_give(runs: dict[str, Kind], wrong: bool) -> list[Row]:
    return [
        {"run": run_id, "name": f"{kind.name} {'wrong' if wrong else 'right'} {number}", **answer}
        for run_id, kind in runs.items()
        for number, answer in enumerate(kind.wrong if wrong else kind.answers)
    ]


@pytest.mark.invariant("I1")
@pytest.mark.invariant("I2")
def test_a_thousand_pauses_of_every_kind_end_as_their_scripts_say(
    own_broker: ValkeyNode, bench: Bench
) -> None:
    first, second = bench.worker(slots=8), bench.worker(slots=8)
    bench.beat()
    runs = enqueue(bench)
    late = [run_id for run_id, kind in runs.items() if kind.name == "too late"]
    wait_until(
        lambda: count(bench, ["paused"]) == len(runs) - len(late) and count(bench, ["failed"]) == len(late),
        "all runs to wait, and the late ones to be over",
        120,
    )
    right = Answerers(bench, "right", to_give(runs, wrong=False), 3)
    wrong = Answerers(bench, "wrong", to_give(runs, wrong=True), 1)
    done = ["completed", "failed"]
    wait_until(lambda: count(bench, done) > len(runs) // 4, "a quarter of the runs to end", 120)
    first.restart()
    own_broker.stop(signal.SIGKILL)
    own_broker.start()
    wait_until(lambda: count(bench, done) > len(runs) // 2, "half of the runs to end", 120)
    second.kill()
    bench.worker(slots=8)
    right.ended()
    wrong.ended()
    rows = bench.finished(list(runs), 120)
    for row in rows:
        kind = runs[row["id"]]
        assert (row["state"], row["error_code"]) == kind.ends, (kind.name, row)
        if row["state"] == "completed":
            assert kind.says in row["output"], (kind.name, row["output"])
    did: dict[str, Counter[str]] = {}
    for line in bench.effects():
        did.setdefault(line["run"], Counter())[line["tool"]] += 1
    assert {run_id: dict(did.get(run_id, {})) for run_id in runs} == {
        run_id: kind.effects for run_id, kind in runs.items()
    }
    amended = {line["amount"] for line in bench.effects() if runs[line["run"]].name == "by call"}
    assert amended == {1, 99}
    told(bench, runs)


def told(bench: Bench, runs: dict[str, Kind]) -> None:
    """Each right answer was taken by each who gave it, and took effect once; each wrong one was told why."""
    lines = bench.lines("answered")
    came_to: dict[str, Counter[str]] = {}
    for line in lines:
        came_to.setdefault(line["name"], Counter())[line["came_to"]] += 1
    for name, outcomes in came_to.items():
        if " wrong " in name:
            assert set(outcomes) <= REFUSALS, (name, outcomes)
        else:
            assert set(outcomes) <= {"done", "fresh", "again", "kept"}, (name, outcomes)
            assert sum(outcomes.values()) == 3 * EACH
    outside = [name for name in came_to if name.startswith("outside right")]
    assert [came_to[name]["fresh"] for name in outside] == [EACH]


def test_answers_after_the_end_change_nothing(bench: Bench) -> None:
    """The contrary of what was answered, and the same once more, when all is over."""
    bench.worker(slots=8)
    kinds = [kind for kind in KINDS if kind.answers]
    runs = {made.id: kind for kind in kinds for made in bench.client.enqueue_many([_request(kind)] * 2)}
    Answerers(bench, "right", to_give(runs, wrong=False), 2).ended()
    bench.finished(list(runs))
    before = bench.rows("SELECT id, state, revision, output FROM runs ORDER BY id")
    contrary = [
        {**each, **decision(approved=not each["decision"].get("approved", False))}
        if each["way"] == "decide"
        else {**QUOTED, "run": each["run"], "results": [content(FIRST, "something else")]}
        for each in to_give(runs, wrong=False)
    ]
    Answerers(bench, "contrary", [{**each, "name": "contrary"} for each in contrary], 1).ended()
    Answerers(bench, "again", [{**each, "name": "again"} for each in to_give(runs, wrong=False)], 1).ended()
    assert bench.rows("SELECT id, state, revision, output FROM runs ORDER BY id") == before
    lines = bench.lines("answered")
    assert {line["came_to"] for line in lines if line["name"] == "contrary"} <= {
        "invalid_state", "admission_conflict", "results_mismatch", "not_suspended"
    }  # fmt: skip
    assert {line["came_to"] for line in lines if line["name"] == "again"} <= {"done", "again", "kept"}

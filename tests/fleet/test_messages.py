"""Agents talk while workers are killed at every point of a message's way and the broker forgets everything."""

import json
import signal
from typing import Any

import pytest
import redis

from cortex_workers import probes
from cortex_workers.embedded import ValkeyNode
from cortex_workers.settings import Settings
from cortex_workers.tasks.app import make_app
from tests.fleet.bench import Bench, call, calls, say, script
from tests.waiting import wait_until

TALK = {"CORTEX_HOST": "tests.fleet.talkers:host"}
QUICK = {
    **TALK,
    "CORTEX_SWEEP_INTERVAL_S": "0.3",
    "CORTEX_LEASE_TTL_S": "2",
    "CORTEX_LEASE_RENEW_S": "0.6",
    "CORTEX_LEASE_TRUST_S": "1.4",
    "CORTEX_DELIVERY_LEASE_S": "2",
}
OF_MESSAGES = (
    "message.after_commit",
    "delivery.before_commit",
    "delivery.after_commit",
    "delivery.after_call",
    "reply.before_commit",
    "reply.after_commit",
)
ON_THE_WAY = (
    "claim.after_commit",
    "model.after",
    "turn.after_commit",
    "tool.after_handler",
    "pause.before_commit",
    "pause.after_commit",
    "finish.before_commit",
    "finish.after_commit",
)
TWICE = ("delivery.after_commit", "reply.before_commit", "reply.after_commit", "pause.after_commit")
CASES = [(name, 1) for name in (*OF_MESSAGES, *ON_THE_WAY)] + [(name, 2) for name in TWICE]

PLAN = (
    call("agent_send", to="second", content="A plan is made."),
    calls(
        call("agent_ask", to="first", content=script(call("refund", amount=3), say("refunded"))),
        call("agent_ask", to="second", content=script(call("charge", amount=2), say("charged"))),
    ),
    say("{last_result}"),
)
"""The first expert waits for a person, the second one does something that may happen once."""


def approve_what_is_asked(bench: Bench) -> None:
    for row in bench.rows("SELECT id FROM checkpoints WHERE state = 'pending'"):
        bench.client.decide(row["id"], approved=True)


def answers(bench: Bench, run: str) -> list[Any]:
    found = bench.rows("SELECT content FROM messages WHERE run_id = %s AND role = 'tool' ORDER BY seq", run)
    return [json.loads(row["content"]) for row in found]


def all_quiet(bench: Bench) -> None:
    wait_until(
        lambda: not bench.rows("SELECT FROM a2a_deliveries WHERE NOT state = 'delivered'"),
        "every delivery to be over",
    )


@pytest.mark.parametrize(("probe", "nth"), CASES, ids=lambda value: str(value))
def test_the_planner_gets_both_answers_once_after_a_kill_at(bench: Bench, probe: str, nth: int) -> None:
    """g25, g27, g28, g61, g72, g73: deliveries, questions, seals and admissions."""
    armed = bench.worker(CORTEX_PROBE=f"{probe}:{nth}", **QUICK)
    bench.client.send(
        "second", script(say("taken")), sender="boss", performative="request", assignment={"order": 17}
    )
    run = bench.client.enqueue("planner", script(*PLAN)).id

    def dead_or_done() -> bool:
        if armed.is_running:
            approve_what_is_asked(bench)
        return not armed.is_running

    wait_until(dead_or_done, f"the worker to die at {probe}")
    assert armed.exit_code == -signal.SIGKILL
    bench.worker(**QUICK)

    def over() -> bool:
        approve_what_is_asked(bench)
        return bool(bench.row(run)["state"] == "completed")

    wait_until(over, "the planner to end")
    all_quiet(bench)
    told, first, second = answers(bench, run)
    assert [item["receiver"] for item in told["deliveries"]] == [{"agent": "second"}]
    for reply, sender, content in ((first, "first", "refunded"), (second, "second", "charged")):
        assert reply["complete"] is True
        assert [(item["sender"], item["content"]) for item in reply["replies"]] == [(sender, content)]
    assert bench.did() == {"refund": 1, "charge": 1}
    once_each(bench, run)


def once_each(bench: Bench, run: str) -> None:
    """Two questions, two replies, one admission; one run for each directive and the assignment."""
    asked = bench.rows("SELECT state, seal_kind FROM a2a_asks WHERE asker_run_id = %s", run)
    assert [(row["state"], row["seal_kind"]) for row in asked] == [("sealed", "answered")] * 2
    assert len(bench.rows("SELECT FROM resume_admissions WHERE run_id = %s", run)) == 1
    assert len(bench.rows("SELECT FROM a2a_answers")) == 2
    assert len(bench.rows("SELECT FROM runs WHERE origin = 'delivery'")) == 3
    replies = bench.rows(
        "SELECT sender FROM a2a_messages WHERE answers_delivery_id IS NOT NULL ORDER BY sender"
    )
    assert [row["sender"] for row in replies] == ["first", "second", "second"]
    assert len({line["run"] for line in bench.lines("assigned")}) == 1


def test_every_point_of_a_message_is_walked() -> None:
    assert set(OF_MESSAGES) == {
        name for name in probes.PROBES if name.startswith(("message.", "delivery.", "reply."))
    }


@pytest.mark.parametrize("count", [500])
def test_five_hundred_deliveries_are_carried_once_after_a_flush_and_with_hints_to_spare(
    own_broker: ValkeyNode, bench: Bench, count: int
) -> None:
    """g19, g35; issue 3: nobody hears of them but the sweep, and then everybody hears of them twice."""
    first = bench.worker(slots=8, **TALK)
    first.stop()
    for number in range(count):
        bench.client.send(
            "second",
            script(call("charge", amount=number), say("done")),
            sender="boss",
            performative="request",
        )
    with redis.Redis.from_url(bench.broker_url) as broker:
        broker.flushall()
    ids = [row["id"] for row in bench.rows("SELECT id FROM a2a_deliveries")]
    assert len(ids) == count
    bench.beat(**TALK)
    bench.worker(slots=8, **TALK)
    bench.worker(slots=8, **TALK)
    app = make_app(Settings(database_url=bench.database_url, broker_url=bench.broker_url), role="api")
    for delivery_id in ids[: count // 2] * 2:
        app.send_task("cortex.deliver_a2a", kwargs={"delivery_id": delivery_id}, queue="cw.a2a")
    wait_until(
        lambda: (
            len(bench.rows("SELECT FROM a2a_deliveries WHERE state = 'delivered' AND kind = 'directive'"))
            == count
        ),
        "all deliveries to be over",
        180,
    )
    assert bench.did() == {"charge": count}
    assert len(bench.rows("SELECT FROM runs WHERE origin = 'delivery'")) == count
    assert len(bench.client.inbox("boss", limit=1000)) == count

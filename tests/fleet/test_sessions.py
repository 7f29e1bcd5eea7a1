"""One conversation, several producers, workers that die: its turns are taken one after the other.

Bug cases C42, C60.
"""

import subprocess
import sys

import pytest

from tests.fleet.bench import Bench, call, calls, say, script
from tests.waiting import wait_until

PRODUCER = """
import json, os, pathlib, sys, threading
from cortex_workers import Client

barrier, texts = pathlib.Path(sys.argv[1]), sys.argv[2:]
with Client(scope="tenant=acme") as client:
    client.runs(limit=1)
    barrier.with_name(f"at-{os.getpid()}").touch()
    while barrier.exists():
        threading.Event().wait(0.001)
    for text in texts:
        print(client.enqueue("clerk", text, session="a-chat").id, flush=True)
"""


def test_messages_from_two_producers_at_one_instant_are_answered_in_order(bench: Bench) -> None:
    bench.worker(slots=8)
    bench.worker(slots=8)
    barrier = bench.folder / "barrier"
    barrier.touch()
    given = [[script(call("charge", amount=number), say(f"answer {number}"))] for number in (1, 2)]
    given[0].append(script(call("charge", amount=3), say("answer 3")))
    producers = [
        subprocess.Popen(
            [sys.executable, "-c", PRODUCER, str(barrier), *texts],
            env=bench.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for texts in given
    ]
    wait_until(lambda: len(list(bench.folder.glob("at-*"))) == 2, "the producers to be there")
    barrier.unlink()
    runs = [line for producer in producers for line in producer.communicate(timeout=60)[0].split()]
    assert [producer.returncode for producer in producers] == [0, 0]
    rows = sorted(bench.completed(runs), key=lambda row: row["session_seq"])
    assert len({row["session_id"] for row in rows}) == 1

    # The order of the answers is that of the questions, and each one has heard all before it.
    assert [row["completion_seq"] for row in rows] == sorted(row["completion_seq"] for row in rows)
    heard = {line["run"]: line["heard"] for line in bench.lines("model") if line["turn"] == 0}
    for number, row in enumerate(rows):
        assert heard[row["id"]] == [each["output"] for each in rows[:number]]
    assert bench.did() == {"charge": 3}


def test_a_paused_run_does_not_keep_its_session_from_going_on(bench: Bench) -> None:
    bench.worker()
    first = bench.enqueue(call("refund", amount=1), say("refunded"), session="a-chat")
    question = bench.asked(first)
    others = [bench.enqueue(say(f"answer {number}"), session="a-chat") for number in range(3)]
    bench.completed(others)
    assert bench.row(first)["state"] == "paused"
    bench.client.decide(question, approved=True)
    bench.completed(first)


@pytest.mark.parametrize("point", ["tool.after_outcome", "tool.after_start_record:2"])
def test_a_crash_between_calls_of_one_turn_repeats_none_and_spoils_no_conversation(
    bench: Bench, point: str
) -> None:
    armed = bench.worker(CORTEX_PROBE=point)
    three = calls(*(call("charge", amount=number) for number in range(3)))
    first = bench.enqueue(three, say("charged"), session="a-chat")
    armed.wait()
    second = bench.enqueue(say("hello again"), session="a-chat")
    bench.worker()
    rows = bench.completed([first, second])
    assert bench.did() == {"charge": 3}
    assert rows[0]["completion_seq"] < rows[1]["completion_seq"]
    heard = [line["heard"] for line in bench.lines("model") if line["run"] == second]
    assert heard == [["charged"]]

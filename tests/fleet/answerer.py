"""A process that answers: `python -m tests.fleet.answerer ANSWERS SEED`.

Each line of ANSWERS is one answer to one run. They are given in an order that the seed decides; one that comes before
its question is given again later. What each came to is a line of the file `answered` in `FLEET_FOLDER`.
"""

import json
import os
import random
import sys
from collections import deque
from pathlib import Path
from threading import Event
from typing import Any

from cortex_workers import Client
from cortex_workers.errors import CortexError, NotPausedYet
from cortex_workers.schemas.admission import ToolResult

Answer = dict[str, Any]


class TooEarly(Exception):
    """Nothing is asked yet that this would answer."""


def answer(client: Client, what: Answer) -> str:
    """Give one answer; returns what it came to."""
    try:
        return str(WAYS[what["way"]](client, what))
    except (NotPausedYet, TooEarly):
        raise TooEarly() from None
    except CortexError as error:
        if error.code == what.get("later_if"):
            raise TooEarly() from None
        return error.code


def decide(client: Client, what: Answer) -> str:
    """A decision on the question of one kind that a run asks."""
    asked = client.checkpoints(run_id=what["run"], pending_only=False, scope=what.get("asked_in"))
    mine = [each for each in asked if each.kind == what.get("kind", "tool_approval")]
    if not mine:
        raise TooEarly()
    client.decide(mine[0].id, scope=what.get("scope"), reason=what.get("reason"), **what["decision"])
    return "done"


def results(client: Client, what: Answer) -> str:
    """The results of all calls that wait outside."""
    given = [ToolResult(**each) for each in what["results"]]
    admitted = client.provide_results(what["run"], given, patience_s=0, scope=what.get("scope"))
    return "fresh" if admitted.fresh else "again"


def result(client: Client, what: Answer) -> str:
    """The result of one call of several."""
    given = ToolResult(**what["result"])
    admitted = client.provide_result(what["run"], given, patience_s=0, scope=what.get("scope"))
    return "kept" if admitted is None else "fresh" if admitted.fresh else "again"


WAYS = {"decide": decide, "results": results, "result": result}


def main(answers: str, seed: str) -> None:
    """Give all answers, each until it was taken or refused."""
    lines = [json.loads(line) for line in Path(answers).read_text().splitlines()]
    random.Random(seed).shuffle(lines)
    waiting, pause = deque(lines), Event()
    early = 0
    with (
        Client(actor=f"answerer-{seed}") as client,
        (Path(os.environ["FLEET_FOLDER"]) / "answered").open("a") as told,
    ):
        while waiting:
            what = waiting.popleft()
            try:
                came_to = answer(client, what)
            except TooEarly:
                waiting.append(what)
                early += 1
                pause.wait(0.05 if early > len(waiting) else 0)
                continue
            early = 0
            told.write(
                json.dumps({"run": what["run"], "name": what["name"], "came_to": came_to, "by": seed}) + "\n"
            )
            told.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

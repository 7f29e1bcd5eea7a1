"""Processes that act on the same run in the same instant, contest by contest: APIs, sweepers, hosts."""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from cortex_workers import Client
from cortex_workers.engine import expire
from cortex_workers.errors import CortexError
from cortex_workers.host import load_host
from cortex_workers.schemas.admission import ToolResult
from cortex_workers.settings import Settings

Act = dict[str, Any]
"""``do`` names one of DEEDS; ``run``, ``checkpoint`` and ``pause`` say where, ``with`` what else it takes.

``at`` is when, where the instant itself is what it is about: a deadline.
"""
PATIENCE_S = 60.0
HOST = "tests.fleet.hosts:host"

DEEDS: dict[str, Callable[[Client, Act], Any]] = {
    "approve": lambda client, act: client.decide(act["checkpoint"], approved=True),
    "reject": lambda client, act: client.decide(act["checkpoint"], approved=False),
    "cancel": lambda client, act: client.cancel(act["run"]),
    "results": lambda client, act: client.provide_results(
        act["run"], [ToolResult(**each) for each in act["with"]], patience_s=0
    ),
    "result": lambda client, act: client.provide_result(act["run"], ToolResult(**act["with"]), patience_s=0),
    "continue": lambda client, act: client.continue_run(act["run"]),
    "expire": lambda client, act: expire.expire_pause(client.runtime, act["pause"]),
    "lapse": lambda client, act: expire.lapse(client.runtime, act["run"]),
    "finish": lambda client, act: Path(act["with"]).unlink(),
}
"""``expire`` and ``lapse`` are what a sweeper does to a row; ``finish`` lets a run's holder come to its last write."""


def _process(settings: dict[str, Any], acts: list[Act], barrier: Barrier, answers: Any) -> None:
    told: list[str] = []
    with Client(Settings(**settings), scope="tenant=acme", actor="an-api", host=load_host(HOST)) as client:
        client.count_checkpoints()  # connected before the first contest
        for act in acts:
            barrier.wait(PATIENCE_S)
            time.sleep(
                max(0.0, act.get("at", 0.0) - time.time())
            )  # both act at a deadline, not at each other
            try:
                told.append("skipped" if DEEDS[act["do"]](client, act) is False else "done")
            except CortexError as error:
                told.append(error.code)
        answers.put((acts[0]["side"], told))


def contests(settings: dict[str, Any], *sides: Sequence[Act]) -> list[tuple[str, ...]]:
    """Let each side act, all sides at once, act after act; what each came to, contest by contest."""
    spawn = multiprocessing.get_context("spawn")
    barrier, answers = spawn.Barrier(len(sides)), spawn.Queue()
    processes = [
        spawn.Process(
            target=_process, args=(settings, [{**act, "side": side} for act in acts], barrier, answers)
        )
        for side, acts in enumerate(sides)
    ]
    for each in processes:
        each.start()
    try:
        told = dict(answers.get(timeout=PATIENCE_S * 2) for _ in processes)
    finally:
        for each in processes:
            each.join(PATIENCE_S)
            each.kill()
    return list(zip(*(told[side] for side in range(len(sides))), strict=True))

"""Two API processes that act on the same run in the same instant, contest by contest."""

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Barrier
from typing import Any

from cortex_workers import Client
from cortex_workers.errors import CortexError
from cortex_workers.schemas.admission import ToolResult
from cortex_workers.settings import Settings

Act = dict[str, Any]
"""``do`` names one of DEEDS; ``run`` and ``checkpoint`` say where, ``with`` what else it takes."""
PATIENCE_S = 60.0

DEEDS: dict[str, Callable[[Client, Act], Any]] = {
    "approve": lambda client, act: client.decide(act["checkpoint"], approved=True),
    "reject": lambda client, act: client.decide(act["checkpoint"], approved=False),
    "cancel": lambda client, act: client.cancel(act["run"]),
    "results": lambda client, act: client.provide_results(
        act["run"], [ToolResult(**each) for each in act["with"]], patience_s=0
    ),
    "result": lambda client, act: client.provide_result(act["run"], ToolResult(**act["with"]), patience_s=0),
}


def _process(settings: dict[str, Any], acts: list[Act], barrier: Barrier, answers: Any) -> None:
    told: list[str] = []
    with Client(Settings(**settings), scope="tenant=acme", actor="an-api") as client:
        client.count_checkpoints()  # connected before the first contest
        for act in acts:
            barrier.wait(PATIENCE_S)
            try:
                DEEDS[act["do"]](client, act)
                told.append("done")
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

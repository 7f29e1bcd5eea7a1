"""The end of a run: its last step or its reason, the conversation's order, one transaction.

Source: runs.md T30, T31, 7.10; rulings 2, 38.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cortex_workers import probes, telemetry
from cortex_workers.engine import persist, storable
from cortex_workers.engine.batch import Batch
from cortex_workers.engine.execution import Answered, Execution
from cortex_workers.errors import CortexError, LeaseLost
from cortex_workers.store import checkpoints, transcript, transitions, turns
from cortex_workers.store.transitions import Guard, Move, Row
from cortex_workers.store.unit import Unit


def complete(ex: Execution, answered: Answered) -> Row:
    """The model gave its answer.

    Raises: LeaseLost (nothing is written).
    """
    said = [item for item in (*ex.own, answered.message) if item.role == "assistant" and item.content]
    output = answered.message.content
    data = {"empty_output": True} if not output else None
    return _end(ex, "complete", Batch(ex, answered), {"output": output}, data, messages=1 + len(said))


def fail(ex: Execution, failure: CortexError) -> Row:
    """The run ends with a reason; results in hand are kept.

    Raises: LeaseLost (nothing is written).
    """
    values = {"error_code": failure.code, "error_text": storable.text(failure.message[:4000])}
    return _end(ex, "fail", Batch(ex), values, {"code": failure.code})


def _end(
    ex: Execution,
    name: str,
    batch: Batch,
    values: Mapping[str, Any],
    data: Mapping[str, Any] | None,
    messages: int = 0,
) -> Row:
    def work(unit: Unit) -> tuple[Row, int]:
        what = Move(
            values={**batch.values(), **values},
            seqs=batch.seqs,
            worker_id=ex.rt.worker_id,
            data=data,
            session_messages=messages,
        )
        row = turns.move(unit, name, ex.row, Guard(term=ex.term), what)
        if row is None:
            telemetry.FENCED_WRITES.inc()
            raise LeaseLost(run_id=ex.run_id)
        base = transitions.base(row, batch.seqs)
        batch.write(unit, base)
        if name == "fail":
            checkpoints.close_of_run(unit, ex.run_id, "superseded", int(row["revision"]), "the run failed")
            transcript.close_all_pending(unit, ex.run_id, "the run failed")
        probes.reach("finish.before_commit")
        return row, base

    with ex.held.ending():
        row, _ = persist.write(ex, work, persist.moved_by(ex, name, batch.seqs))
    ex.left_as = str(row["state"])
    telemetry.RUNS_ENDED.labels(row["state"]).inc()
    telemetry.event(
        f"run.{row['state']}",
        run_id=ex.run_id,
        steps=row["step_count"],
        code=row["error_code"],
        level="warning" if data else "info",
    )
    probes.reach("finish.after_commit")
    return row

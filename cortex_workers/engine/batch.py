"""What one fenced transaction of a holder carries: results in hand, a step with its answer, start records.

The holder's row is written first (progress or a transition, both under the fence), then this, numbered from the
ordinals that statement reserved.
Source: rulings 1, 2, 58.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cortex_workers import probes, telemetry
from cortex_workers.engine import persist
from cortex_workers.engine.execution import Answered, Execution, Planned, Result, result_message
from cortex_workers.schemas.ids import STEP, TOOL_CALL, new_id
from cortex_workers.store import checkpoints, transcript
from cortex_workers.store.unit import Unit


class Batch:
    """Collects rows; ``seqs`` says how many ordinals they need, ``write`` inserts them from ``base`` on."""

    def __init__(
        self,
        ex: Execution,
        answered: Answered | None = None,
        starts: Sequence[Planned] = (),
        waits: Sequence[Planned] = (),
        turn_results: Sequence[Result] = (),
    ) -> None:
        self.ex = ex
        self.results: list[Result] = list(ex.results)
        self.answered = answered
        self.starts = list(starts)
        self.waits = list(waits)
        self.turn_results = list(turn_results)

    @property
    def seqs(self) -> int:
        """Ordinals needed: one a message, a step, a new call row."""
        results = [*self.results, *self.turn_results]
        rows = [item.planned for item in results] + self.starts + self.waits
        fresh = {id(item) for item in rows if not item.row}
        return len(results) + len(fresh) + (2 if self.answered is not None else 0)

    def values(self) -> dict[str, Any]:
        """What the run's row says after this."""
        ex = self.ex
        sets: dict[str, Any] = {"queue_class": "begun"}
        if self.answered is not None:
            sets.update(
                # A turn commit consumes whatever the claim was told to do (ruling 20).
                instruction="go_on",
                next_step=ex.next_step + 1,
                step_count=ex.step_count + 1,
                usage=(ex.usage + self.answered.usage).model_dump(),
            )
        if ex.row["new_messages_from"] is None:
            sets["new_messages_from"] = len(ex.history)
        return sets

    def write(self, unit: Unit, base: int) -> None:
        """Insert everything, in order: results of the turn before, the step, its message, calls that wait or start."""
        seq = _Counter(base)
        for result in self.results:
            self._write_result(unit, result, seq, result.planned.message_seq)
        message_seq = self._write_answer(unit, seq) if self.answered is not None else self.ex.last_message_seq
        for result in self.turn_results:
            self._write_result(unit, result, seq, message_seq)
        self._write_waits(unit, seq, message_seq)
        self._write_starts(unit, seq, message_seq)
        if not self.ex.stored_prompt:
            transcript.set_system_prompt(unit, self.ex.run_id, self.ex.agent.instructions)

    def _write_result(self, unit: Unit, result: Result, seq: _Counter, message_seq: int | None) -> None:
        planned = result.planned
        row = planned.row or self._row(planned, seq.take(), message_seq)
        result_seq = seq.take()
        message = result_message(result)
        transcript.add_messages(
            unit,
            self.ex.run_id,
            [transcript.message_row(result_seq, planned.step_index, message, result.marked)],
        )
        # A started call that is denied when it would run again has failed: it is past waiting.
        outcome = "fail" if result.outcome == "deny" and row.get("state") == "started" else result.outcome
        transcript.finish_call(
            unit,
            self.ex.term,
            outcome,
            row,
            {
                "result_seq": result_seq,
                "result_digest": transcript.result_digest(result.text),
                "error": result.error,
                **self._executed(planned),
            },
        )
        if planned.granted or planned.adjudicated:
            refused = result.outcome == "deny"
            disposition = "refused_by_engine" if refused else "authorized"
            checkpoints.dispose(
                unit, self.ex.run_id, planned.call.id, disposition, "denied" if refused else None
            )
        telemetry.TOOL_CALLS.labels(planned.call.name if planned.spec else "unknown", result.outcome).inc()

    def _executed(self, planned: Planned) -> dict[str, Any]:
        """What ran in place of the model's arguments; a safe call has no start record that tells."""
        if planned.executed_args is None:
            return {}
        return {"executed_args": planned.executed_args, "amended_by": planned.amended_by}

    def _write_answer(self, unit: Unit, seq: _Counter) -> int:
        answered, ex = self.answered, self.ex
        assert answered is not None
        step_seq, message_seq = seq.take(), seq.take()
        transcript.add_step(
            unit,
            {
                "run_id": ex.run_id,
                "step_index": ex.next_step,
                "id": new_id(STEP),
                "model": answered.model,
                "usage": answered.usage.model_dump(),
                "finish_reason": answered.finish_reason,
                "term_revision": ex.term.revision,
                "seq": step_seq,
                "started_at": answered.started_at,
            },
        )
        row = transcript.message_row(message_seq, ex.next_step, answered.message, answered.marked)
        transcript.add_messages(unit, ex.run_id, [row])
        return message_seq

    def _write_waits(self, unit: Unit, seq: _Counter, message_seq: int | None) -> None:
        fresh = [self._row(item, seq.take(), message_seq) for item in self.waits if not item.row]
        transcript.add_waiting(unit, fresh)

    def _write_starts(self, unit: Unit, seq: _Counter, message_seq: int | None) -> None:
        rows = []
        for item in self.starts:
            row = dict(item.row) if item.row else self._row(item, seq.take(), message_seq)
            rows.append({**row, "executed_args": item.executed_args, "amended_by": item.amended_by})
        transcript.record_start(unit, self.ex.term, rows)

    def _row(self, planned: Planned, seq: int, message_seq: int | None) -> dict[str, Any]:
        spec = planned.spec
        return {
            "id": new_id(TOOL_CALL),
            "run_id": self.ex.run_id,
            "step_index": planned.step_index,
            "call_id": planned.call.id,
            "ordinal": planned.ordinal,
            "session_id": self.ex.row["session_id"],
            "provider_call_id": planned.provider_call_id,
            "tool": planned.call.name[:200],
            "class": spec.tool_class if spec else "retry_safe",
            "effects": spec.effects if spec else "none",
            "message_seq": planned.message_seq if planned.message_seq is not None else message_seq,
            "executed_args": planned.executed_args,
            "amended_by": planned.amended_by,
            "seq": seq,
        }

    def settle(self, base: int) -> None:
        """Take over in memory what the commit made true; call it after the commit only."""
        ex = self.ex
        ex.next_seq = base + self.seqs
        ex.own.extend(result_message(item) for item in self.results)
        ex.results = [item for item in ex.results if item not in self.results]
        ex.acted, ex.stored_prompt = True, True
        ex.row = {**ex.row, "new_messages_from": ex.row["new_messages_from"] or len(ex.history)}
        if self.answered is not None:
            ex.own.append(self.answered.message)
            ex.last_message_seq = base + self.seqs_before_answer() + 1
            ex.last_step_index = ex.next_step
            ex.next_step += 1
            ex.step_count += 1
            ex.steps_here += 1
            ex.usage = ex.usage + self.answered.usage
        ex.own.extend(result_message(item) for item in self.turn_results)
        for item in self.starts:
            again = bool(item.row) and item.row["state"] == "started"
            attempt = int(item.row.get("attempt", 1)) + (1 if again else 0)
            item.row = {**item.row, "state": "started", "attempt": attempt, "call_id": item.call.id}

    def seqs_before_answer(self) -> int:
        """Ordinals that the results use up before the step and its message."""
        return sum(1 if item.planned.row else 2 for item in self.results)


class _Counter:
    def __init__(self, base: int) -> None:
        self._next = base

    def take(self) -> int:
        value = self._next
        self._next += 1
        return value


def save(ex: Execution, batch: Batch, first: Callable[[Unit], None] | None = None) -> None:
    """Store a batch as progress: one fenced transaction; the revision stays.

    ``first`` is done before the run's row is taken, in the same transaction.
    A stop request that it reads back is obeyed at the next boundary (ruling 30).
    Raises: LeaseLost when the term is over (nothing is written).
    """
    values, seqs = batch.values(), batch.seqs

    def work(unit: Unit) -> tuple[int, str | None]:
        if first is not None:
            first(unit)
        row = transcript.save(unit, ex.term, seqs, values)
        base = int(row["next_seq"]) - seqs
        batch.write(unit, base)
        if batch.answered is not None:
            probes.reach("turn.before_commit")
        return base, row["stop_requested_reason"]

    base, stop = persist.write(ex, work, persist.saved_by(ex, seqs))
    batch.settle(base)
    if stop is not None:
        ex.held.note_stop(stop)

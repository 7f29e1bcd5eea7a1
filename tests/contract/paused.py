"""Runs that wait in every way there is, and everybody who may come to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cortex_workers import Client
from cortex_workers.engine import expire, slot
from cortex_workers.schemas.admission import ResumeAdmission, ToolResult
from cortex_workers.schemas.checkpoint import CheckpointKind
from cortex_workers.schemas.ids import CHECKPOINT, SUSPENSION, new_id
from cortex_workers.schemas.lease import Term
from cortex_workers.schemas.suspension import SuspendReason
from cortex_workers.store import admissions, checkpoints, claims, sessions, suspensions, turns
from cortex_workers.store.claims import Claimer
from cortex_workers.store.database import Database
from cortex_workers.store.transitions import Guard, Move, Row
from cortex_workers.store.unit import Unit
from cortex_workers.testing import factory
from tests.engine.world import World

TTL_S = 60.0


# --- How a run waits --------------------------------------------------------------------------------------------------


def approval(database: Database) -> Row:
    """For a person's approval of one call."""
    return factory.a_paused_run(database, ttl_s=TTL_S)


def outside(database: Database, calls: int = 1) -> Row:
    """For results, after an approval was given earlier: its question is there, and decided."""
    run = factory.a_running_run(database, run=factory.an_answered_run(database))
    return factory.a_run_waiting_outside(database, run=run, calls=calls, ttl_s=TTL_S)


def two_outside(database: Database) -> Row:
    """For the results of two calls."""
    return outside(database, 2)


def deferral(database: Database) -> Row:
    """For a person who says whether a model call may be made."""
    return _deferred(database, polls=False)


def polled(database: Database) -> Row:
    """For the provider of its model, who is asked again from time to time."""
    return _deferred(database, polls=True)


def _deferred(database: Database, polls: bool) -> Row:
    row = factory.a_running_run(database)

    def work(unit: Unit) -> Row:
        sessions.touch(unit, row["session_id"])
        what = Move(values={"suspension_id": new_id(SUSPENSION)}, worker_id=row["lease_owner"])
        moved = turns.move(unit, "pause", row, Guard(term=factory.term_of(row)), what)
        assert moved is not None
        _ask_model(unit, moved, polls)
        return moved

    return database.run(work)


def _ask_model(unit: Unit, run: Row, polls: bool) -> None:
    pause = {
        "id": run["suspension_id"],
        "run_id": run["id"],
        "session_id": run["session_id"],
        "scope": run["scope"],
        "run_revision": run["revision"],
        "reason": SuspendReason.EXTERNAL_TOOL if polls else SuspendReason.APPROVAL,
        "step_index": run["next_step"],
        "next_step": run["next_step"],
        "messages_upto": int(run["next_seq"]) - 1,
        "usage": run["usage"],
        "digest": run["suspension_id"],
        "on_expiry": "fail",
        "deferral_kind": "batch" if polls else "budget",
        "deferral_ref": "b-1",
    }
    suspensions.add(unit, pause, TTL_S, [], 30.0 if polls else None)
    if polls:
        return
    question = {
        "id": new_id(CHECKPOINT),
        "scope": run["scope"],
        "run_id": run["id"],
        "agent": run["agent"],
        "suspension_id": run["suspension_id"],
        "step_index": run["next_step"],
        "kind": CheckpointKind.DEFERRED_MODEL_CALL,
        "reason": "too dear",
        "metadata": {"kind": "deferred_model_call", "deferral_kind": "budget"},
    }
    checkpoints.open_(unit, question, int(run["revision"]))


def asked_by_host(database: Database) -> Row:
    """For results; and its host has asked a question of its own beside it."""
    run = factory.a_run_waiting_outside(database, ttl_s=TTL_S)
    question = {
        "id": new_id(CHECKPOINT),
        "scope": run["scope"],
        "run_id": run["id"],
        "agent": run["agent"],
        "step_index": int(run["next_step"]),
        "kind": CheckpointKind.HOST,
        "reason": "is it fine?",
        "metadata": {},
    }
    database.run(lambda unit: checkpoints.open_(unit, question, int(run["revision"])))
    return run


def running(database: Database) -> Row:
    """Not yet: its worker is about to let it wait."""
    return factory.a_running_run(database)


def admitted(database: Database) -> Row:
    """For a worker, with results that were admitted."""
    return factory.an_admitted_run(database, run=factory.a_run_waiting_outside(database, ttl_s=None))


def begun(database: Database) -> Row:
    """For nobody: a worker has begun with its results."""
    return factory.a_running_run(database, run=admitted(database))


def silent(database: Database) -> Row:
    """The worker that began with its results is not heard of any more; nobody has noticed."""
    return factory.a_running_run(database, run=admitted(database), ttl_s=0.0)


def cut_off(database: Database) -> Row:
    """For another worker: the one that began with its results was lost."""
    return factory.a_reclaimable_run(database, run=silent(database))


def uncertain(database: Database) -> Row:
    """For somebody who knows what became of a call after its results."""
    return factory.an_uncertain_run(database, run=silent(database))


# --- Who comes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Visitors:
    """Everybody who may come to one run, by name; each is one public door or one use case."""

    world: World
    client: Client
    run: Row
    """As it was when it came to wait."""

    def act(self, name: str) -> Callable[[], Any]:
        door: Callable[[], Any] = getattr(self, name)
        return door

    @cached_property
    def question(self) -> str:
        found = self.client.checkpoints(run_id=self.run["id"], pending_only=False)
        return found[-1].id if found else ""

    @cached_property
    def calls(self) -> list[str]:
        asked = [row["call_id"] for row in self.world.pending(self.run["suspension_id"])]
        return asked or ["call_0_0"]

    @cached_property
    def holder(self) -> Term:
        """Who holds it, or held it last."""
        events = self.world.events(self.run["id"])
        claimed = [event for event in events if event["kind"] == "run.claim"][-1]
        return Term(run_id=self.run["id"], owner=claimed["worker_id"], revision=claimed["revision"])

    def _results(self, content: str) -> ResumeAdmission:
        given = [ToolResult(tool_call_id=call_id, content=content) for call_id in self.calls]
        return self.client.provide_results(self.run["id"], given, patience_s=0.0)

    def _result(self, call_id: str, content: str) -> Any:
        given = ToolResult(tool_call_id=call_id, content=content)
        done = self.client.provide_result(self.run["id"], given, patience_s=0.0)
        return done if done is not None else "kept"

    def results(self) -> Any:
        return self._results("shipped")

    def other_results(self) -> Any:
        return self._results("lost")

    def result(self) -> Any:
        return self._result(self.calls[0], "shipped")

    def other_result(self) -> Any:
        return self._result(self.calls[0], "lost")

    def last_result(self) -> Any:
        return self._result(self.calls[-1], "shipped")

    def approve(self) -> Any:
        return self.client.decide(self.question, approved=True)

    def approve_otherwise(self) -> Any:
        return self.client.decide(self.question, approved=True, reason="go on")

    def reject(self) -> Any:
        return self.client.decide(self.question, approved=False)

    def reject_otherwise(self) -> Any:
        return self.client.decide(self.question, approved=False, reason="never")

    def cancel(self) -> Any:
        return self.client.cancel(self.run["id"])

    def settle(self) -> Any:
        return self.client.settle(self.question, "happened", result="shipped")

    def sweep(self) -> bool:
        return expire.expire_pause(self.client.runtime, self.run["suspension_id"] or new_id(SUSPENSION))

    def poll(self) -> bool:
        return expire.poll(self.client.runtime, self.run["suspension_id"] or new_id(SUSPENSION))

    def lapse(self) -> bool:
        return expire.lapse(self.client.runtime, self.run["id"])

    def claim(self) -> Any:
        return self.take("worker-x")

    def rival(self) -> Any:
        return self.take("worker-y")

    def take(self, owner: str, ttl_s: float = 60.0) -> Any:
        """What a task does with a run it is told of: claim it, or say why not."""
        claimer = Claimer(owner, ttl_s, "main", [self.run["agent_digest"]])
        found = self.world.database.run(lambda unit: claims.claim_named(unit, claimer, self.run["id"]))
        if not found:
            slot.explain(self.client.runtime, self.run["id"])
        return found

    def pause(self) -> Any:
        """Its worker lets it wait for results."""
        return factory.a_run_waiting_outside(self.world.database, run=self.run, ttl_s=TTL_S)

    def write(self) -> Any:
        """Whoever holds it, or held it last, ends it."""
        guard = Guard(term=self.holder)
        return self.world.database.run(
            lambda unit: turns.move(unit, "complete", self.run, guard, Move(values={"output": "Done."}))
        )

    def give_up(self) -> Any:
        with self.world.database.read() as unit:
            row = admissions.latest(unit, self.run["id"])
        assert row is not None
        return self.client.expire_admission(self.run["id"], row["suspension_id"], row["request_digest"])

    def close(self) -> Any:
        """Close it as incomplete; the workers that were lost are declared dead, and no other."""
        lost = {event["worker_id"] for event in self.world.events(self.run["id"]) if event["worker_id"]}
        return self.client.close_uncertain(self.run["id"], sorted(lost & {"worker-a", "worker-b"}))

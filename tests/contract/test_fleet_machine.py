"""Any order of everything that can happen to a few runs, on a real PostgreSQL, held against a model of the rules.

Every claim ever won and every pause ever seen is kept and tried again later: that is how a stale holder is found.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import select, text

from cortex_workers.errors import LeaseLost
from cortex_workers.schemas.ids import SUSPENSION, new_id
from cortex_workers.schemas.lease import Term
from cortex_workers.schemas.lifecycle import RUN, Fence, transition
from cortex_workers.schemas.suspension import PendingKind
from cortex_workers.store import claims, due, leases, sessions, tables, transcript, transitions, turns, waits
from cortex_workers.store.claims import Claimer
from cortex_workers.store.database import Database
from cortex_workers.store.transitions import Guard, Move, Row
from cortex_workers.store.unit import Unit
from cortex_workers.testing import factory
from cortex_workers.testing.clock import StoppedClock, stopped_clock
from tests.contract import fleet_model as model
from tests.contract.conftest import Told
from tests.contract.fleet_model import World

TTL_S = 10.0
SHARED = "one conversation"
OWNERS = st.sampled_from(["worker-a", "worker-b"])
MAX_RUNS = 7
LETTING_GO = ["slice_end", "hand_off", "hand_back", "watchdog"]
PAUSE_MOVES = [
    row.name for row in RUN if row.fence in (Fence.LIVE_PAUSE, Fence.THIS_PAUSE, Fence.OVERDUE_PAUSE)
]
CANCELS = {row.sources[0]: row.name for row in RUN if row.fence is Fence.REVISION}


@dataclass(frozen=True)
class Claim:
    """A claim that was won once, and what the run was before it."""

    term: Term
    before: str


class Fleet(RuleBasedStateMachine):
    """Workers, people, sweeps and a clock around a few runs."""

    def __init__(self, database: Database, told: Told) -> None:
        super().__init__()
        self.database, self.told = database, told
        told.clear()
        self.claims: list[Claim] = []
        self.pauses: list[tuple[str, str, int]] = []
        self.order: list[str] = []
        self._stopped = stopped_clock()
        self.clock: StoppedClock = self._stopped.__enter__()
        with database.transaction() as unit:
            # Quicker than TRUNCATE, which makes new files for every table and index.
            unit.execute(text("; ".join(f"delete from {name}" for name in tables.metadata.tables)))
        self.world = self.look()

    def teardown(self) -> None:
        self._stopped.__exit__(None, None, None)

    # --- Looking ------------------------------------------------------------------------------------------------------

    def look(self) -> World:
        with self.database.read() as unit:
            return World(
                at=self.clock.at,
                runs=_by_id(unit, tables.runs),
                pauses=_by_id(unit, tables.suspensions),
                sessions=_by_id(unit, tables.sessions),
                events=list(_by_id(unit, tables.events).values()),
            )

    def step(self, run_id: str, expected: bool, work: Callable[[Unit], Any], name: str) -> Any:
        """Do something to one run that should go through, or should change nothing at all."""
        before = self.world
        result = self.database.run(work)
        assert bool(result) is expected, f"{name}: expected {expected}, got {result}"
        self.world = self.look()
        assert expected or self.told == [], "a refusal tells nobody"
        model.check_only_this_moved(before, self.world, run_id if expected else None)
        self.check(before, quietly=run_id if name.startswith("hand_back") else None)
        if expected:
            assert self.world.runs[run_id]["state"] == transition("run", name).target
        return result

    def check(self, before: World, quietly: str | None = None) -> None:
        model.check_laws(before, self.world)
        model.check_told(before, self.world, self.told, quietly)
        self.told.clear()
        # No two steps in one instant: the order of whatever begins then would be anybody's guess.
        self.time_passes(0.005)

    def move(self, name: str, run_id: str, guard: Guard, what: Move, after: Any = None) -> Row | None:
        """Try a transition as everybody does, and say what the model expects of it."""
        run = self.world.runs[run_id]
        expected = model.allows(transition("run", name), run, guard, self.world)

        def work(unit: Unit) -> Row | None:
            moved = turns.move(unit, name, run, guard, what)
            if moved is not None and after is not None:
                after(unit, moved)
            return moved

        moved: Row | None = self.step(run_id, expected, work, name)
        return moved

    def any_run(self, data: st.DataObject) -> Row:
        return self.world.runs[data.draw(st.sampled_from(self.order), label="run")]

    # --- Producers ----------------------------------------------------------------------------------------------------

    @initialize()
    def a_fleet_at_work(self) -> None:
        """Two turns of one conversation, one of them held, and two runs of their own, of which one is paused."""
        for shared in (True, True, False, False):
            self.enqueue(shared, None)
        for _ in range(3):
            self.claim_next("worker-a")
        paused = self.claims[-1].term
        self.pause_under("pause", paused, 100.0)

    @precondition(lambda self: len(self.world.runs) < MAX_RUNS)
    @rule(shared=st.booleans(), start_by=st.none() | st.sampled_from([5, 100]))
    def enqueue(self, shared: bool, start_by: int | None) -> None:
        before = self.world
        later = {"start_by": self.clock.at + timedelta(seconds=start_by)} if start_by is not None else {}
        run = factory.a_run(self.database, session=SHARED if shared else None, **later)
        self.order.append(run["id"])
        self.world = self.look()
        self.check(before)

    # --- Workers ------------------------------------------------------------------------------------------------------

    @rule(data=st.data(), owner=OWNERS)
    def claim_named(self, data: st.DataObject, owner: str) -> None:
        run = self.any_run(data)
        found = self.step(
            run["id"],
            model.claimable(run, self.clock.at),
            lambda unit: claims.claim_named(unit, _claimer(owner), run["id"]),
            "claim",
        )
        self.remember(owner, found)

    @rule(owner=OWNERS)
    def claim_next(self, owner: str) -> None:
        expected = model.best(self.world)
        found = self.step(
            expected or "",
            expected is not None,
            lambda unit: claims.claim_next(unit, _claimer(owner), starts=True),
            "claim",
        )
        assert [row["id"] for row in found] == ([expected] if expected else [])
        self.remember(owner, found)

    def remember(self, owner: str, found: list[Row]) -> None:
        self.claims += [
            Claim(Term(run_id=row["id"], owner=owner, revision=row["revision"]), row["before"])
            for row in found
        ]

    @rule(data=st.data())
    def claim_by_a_revision_read_long_ago(self, data: st.DataObject) -> None:
        run = self.any_run(data)
        if run["revision"] == 1:
            return
        read = data.draw(st.integers(1, run["revision"] - 1), label="revision read")
        what = Move(owner="worker-a", lease_ttl_s=TTL_S)
        self.step(
            run["id"],
            False,
            lambda unit: transitions.apply(unit, "claim", run["id"], Guard(revision=read), what),
            "claim",
        )

    @rule(data=st.data(), ttl_s=st.none() | st.sampled_from([0.0, 5.0, 100.0]))
    def a_holder_pauses(self, data: st.DataObject, ttl_s: float | None) -> None:
        name = data.draw(st.sampled_from(["pause", "uncertain"]), label="transition")
        self.pause_under(name, self.any_claim(data).term, ttl_s)

    @rule(data=st.data(), name=st.sampled_from(LETTING_GO), delay_s=st.sampled_from([0.0, 5.0, 60.0]))
    def a_holder_lets_go(self, data: st.DataObject, name: str, delay_s: float) -> None:
        claim = self.any_claim(data)
        if name == "hand_back" and claim.before == "reclaimable":
            name = "hand_back_reclaimable"
        delays = name in ("hand_back", "hand_back_reclaimable", "slice_end") and delay_s > 0
        values = turns.delay(delay_s, 10.0) if delays else {}
        self.move(name, claim.term.run_id, Guard(term=claim.term), Move(values=values, seqs=1))

    @rule(data=st.data(), name=st.sampled_from(["complete", "fail"]))
    def a_holder_ends_its_run(self, data: st.DataObject, name: str) -> None:
        term = self.any_claim(data).term
        self.move(name, term.run_id, Guard(term=term), Move())

    def pause_under(self, name: str, term: Term, ttl_s: float | None) -> None:
        values = {"suspension_id": new_id(SUSPENSION)}
        moved = self.move(name, term.run_id, Guard(term=term), Move(values=values, seqs=1), _pause(ttl_s))
        if moved is not None:
            self.pauses.append((moved["id"], moved["suspension_id"], moved["revision"]))

    def any_claim(self, data: st.DataObject) -> Claim:
        """Any claim that was ever won, the newest ones more often."""
        latest = list({claim.term.run_id: claim for claim in self.claims}.values())
        return data.draw(st.sampled_from(latest) | st.sampled_from(self.claims), label="claim")

    @precondition(lambda self: self.stale_claims())
    @rule()
    def former_holders_try_everything(self) -> None:
        """By every claim on a run that is running again, most of all when the same worker holds it again."""
        for claim in self.stale_claims()[-3:]:
            for row in RUN:
                if row.fence in (Fence.OWNER, Fence.TERM):
                    values = {"suspension_id": new_id(SUSPENSION)} if row.target == "paused" else {}
                    assert not self.move(
                        row.name, claim.term.run_id, Guard(term=claim.term), Move(values=values)
                    )
            self.save(claim.term)
            self.renew([claim.term])

    def stale_claims(self) -> list[Claim]:
        running = {run_id for run_id, run in self.world.runs.items() if run["state"] == "running"}
        return [
            claim
            for claim in self.claims
            if claim.term.run_id in running
            and not model.holds(self.world.runs[claim.term.run_id], claim.term)
        ]

    @precondition(lambda self: self.former_pauses())
    @rule()
    def former_pauses_are_answered_in_every_way(self) -> None:
        for run_id, suspension_id, _ in self.former_pauses()[-3:]:
            seen = self.world.runs[run_id]["revision"]
            for name in PAUSE_MOVES:
                guard = Guard(suspension_id=suspension_id, revision=seen)
                assert not self.move(name, run_id, guard, Move(actor="ops"))

    def former_pauses(self) -> list[tuple[str, str, int]]:
        """The pauses that were left, of runs that are paused again."""
        paused = {
            run_id: run["suspension_id"]
            for run_id, run in self.world.runs.items()
            if run["state"] == "paused"
        }
        return [item for item in self.pauses if paused.get(item[0], item[1]) != item[1]]

    @rule(data=st.data())
    def a_holder_saves_progress(self, data: st.DataObject) -> None:
        self.save(self.any_claim(data).term)

    def save(self, term: Term) -> None:
        run = self.world.runs[term.run_id]
        mine = model.holds(run, term) and run["lease_expires_at"] > self.clock.at
        values = {"step_count": run["step_count"] + 1}
        try:
            self.database.run(lambda unit: transcript.save(unit, term, 3, values))
            assert mine, "a stale holder saved"
        except LeaseLost:
            assert not mine, "a holder could not save"
        changed = {**values, "next_seq": run["next_seq"] + 3} if mine else {}
        self.changes_only({term.run_id: changed})

    @rule(owner=OWNERS)
    def a_worker_renews_all_it_ever_held(self, owner: str) -> None:
        self.renew([claim.term for claim in self.claims if claim.term.owner == owner])

    def renew(self, terms: list[Term]) -> None:
        if not terms:
            return
        held = {term.run_id for term in terms if model.holds(self.world.runs[term.run_id], term)}
        renewed = self.database.run(lambda unit: leases.renew(unit, terms[0].owner, terms, TTL_S))
        assert set(renewed) == held
        until = self.clock.at + timedelta(seconds=TTL_S)
        self.changes_only({run_id: {"lease_expires_at": until} for run_id in held})

    def changes_only(self, changes: dict[str, dict[str, Any]]) -> None:
        """What was just done changed these columns, no revision, and told nobody."""
        before, self.world = self.world, self.look()
        expected = {run_id: {**run, **changes.get(run_id, {})} for run_id, run in before.runs.items()}
        assert self.world.runs == expected
        assert self.told == []
        self.check(before)

    @rule(data=st.data())
    def a_holder_lets_a_cancelled_run_go(self, data: st.DataObject) -> None:
        term = self.any_claim(data).term
        before = self.world
        self.database.run(lambda unit: turns.let_go(unit, term.run_id, term.revision))
        self.world = self.look()
        run = before.runs[term.run_id]
        if run["state"] != "cancelled" or run["revision"] != term.revision + 1:
            assert self.world == before
        self.check(before)

    # --- People and sweeps --------------------------------------------------------------------------------------------

    @rule(data=st.data(), name=st.sampled_from(PAUSE_MOVES), fresh=st.booleans())
    def somebody_answers(self, data: st.DataObject, name: str, fresh: bool) -> None:
        """Also a pause that was left long ago; with the revision it had, or the one the run has now."""
        run_id, suspension_id, revision = data.draw(st.sampled_from(self.pauses), label="pause")
        seen = self.world.runs[run_id]["revision"] if fresh else revision
        self.move(name, run_id, Guard(suspension_id=suspension_id, revision=seen), Move(actor="ops"))

    @rule(data=st.data(), back=st.sampled_from([0, 0, 0, 1, 2]))
    def cancel(self, data: st.DataObject, back: int) -> None:
        run = self.any_run(data)
        name = data.draw(st.sampled_from([*CANCELS.values(), "cancel_paused"]), label="cancel")
        if back == 0:
            name = CANCELS.get(run["state"], name)
        guard = Guard(
            revision=run["revision"] - back, suspension_id=run["suspension_id"] or new_id(SUSPENSION)
        )
        self.move(name, run["id"], guard, Move(actor="ops"))

    @rule(data=st.data(), name=st.sampled_from(["lapse", "start_by"]))
    def the_sweep_looks_at_a_run(self, data: st.DataObject, name: str) -> None:
        self.move(name, self.any_run(data)["id"], Guard(), Move(actor="cortex:sweeper"))

    @rule(to_model=st.booleans())
    def the_sweep_handles_all_that_is_due(self, to_model: bool) -> None:
        """What the finders find is what the model calls due, and all of it goes through."""
        with self.database.read() as unit:
            lapsed = [item.id for item in due.lapsed_across_scopes(unit, None, 100)]
            pauses = [item.id for item in due.overdue_pauses_across_scopes(unit, None, 100)]
            starts = [item.id for item in due.overdue_starts_across_scopes(unit, None, 100)]
        assert (set(lapsed), set(pauses), set(starts)) == model.due(self.world)
        for run_id in lapsed:
            assert self.move("lapse", run_id, Guard(), Move())
        for suspension_id in pauses:
            run_id = self.world.pauses[suspension_id]["run_id"]
            guard = Guard(suspension_id=suspension_id)
            assert not self.move("decide", run_id, guard, Move()), "a person is too late"
            assert self.move("expire_to_model" if to_model else "expire", run_id, guard, Move())
        for run_id in starts:
            assert self.move("start_by", run_id, Guard(), Move())

    @rule()
    def the_sweep_ends_waits(self) -> None:
        before = self.world
        with self.database.read() as unit:
            cut_off = [item for item, _ in due.cut_off_across_scopes(unit, None, 100)]
            over = due.sessions_with_a_wait_over_across_scopes(unit, None, 100)
        for item in cut_off:
            revision = before.runs[item.id]["revision"]
            self.database.run(
                lambda unit, item=item, revision=revision: turns.let_go(unit, item.id, revision - 1)
            )
        self.database.run(lambda unit: waits.end_later(unit, 100))
        self.database.run(lambda unit: waits.end_fences(unit, 100))
        self.database.run(lambda unit: turns.recompute_many(unit, over))
        self.world = self.look()
        self.check(before)
        for run in self.world.runs.values():
            waits_for_nothing = run["wait_reason"] == "later" and run["not_before"] <= self.clock.at
            assert not waits_for_nothing
            assert (
                run["state"] != "cancelled" or not run["fenced_until"] or run["fenced_until"] > self.clock.at
            )

    @rule(seconds=st.sampled_from([1, 4, 10, 31, 130]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.world = replace(self.world, at=self.clock.at)


def _by_id(unit: Unit, table: Any) -> dict[str, Row]:
    return {row["id"]: dict(row) for row in unit.execute(select(table)).mappings()}


def _claimer(owner: str) -> Claimer:
    return Claimer(owner, TTL_S, "main", [factory.AGENT.digest()])


def _pause(ttl_s: float | None) -> Callable[[Unit, Row], None]:
    def write(unit: Unit, moved: Row) -> None:
        sessions.lock(unit, moved["session_id"])
        factory._ask(unit, moved, [], PendingKind.APPROVAL, ttl_s, "fail")

    return write


@pytest.mark.invariant("I1")
@pytest.mark.invariant("I2")
@pytest.mark.invariant("I4")
@pytest.mark.invariant("I5")
@pytest.mark.timeout(300)
def test_no_order_of_events_breaks_a_law(database: Database, told: Told) -> None:
    settings = hypothesis.settings(max_examples=40, stateful_step_count=30)
    run_state_machine_as_test(lambda: Fleet(database, told), settings=settings)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_no_order_of_events_breaks_a_law_in_many_more_examples(database: Database, told: Told) -> None:
    large = hypothesis.settings.get_profile("large")
    settings = hypothesis.settings(large, max_examples=800, stateful_step_count=60)
    run_state_machine_as_test(lambda: Fleet(database, told), settings=settings)

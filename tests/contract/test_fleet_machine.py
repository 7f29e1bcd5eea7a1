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
OWNERS = st.sampled_from(["worker-a", "worker-a", "worker-b"])
MAX_RUNS = 7
_EVENT = tables.events.c
EVENTS_WRITTEN = select(_EVENT.run_id, _EVENT.run_seq, _EVENT.revision).order_by(
    _EVENT.run_id, _EVENT.run_seq
)

# Hypothesis takes the first of a list more often than the others.
EVENTS = [
    *["work_goes_on"] * 8,
    *["people_answer"] * 3,
    *["the_sweep_comes"] * 2,
    "somebody_acts_by_a_claim_of_old",
    "somebody_answers_a_pause_of_old",
    "somebody_enqueues",
    "a_worker_claims_by_name",
    "a_worker_renews_all_it_ever_held",
    "somebody_ends_it",
    "a_while_passes",
]
HOLDERS_DO = ["slice_end", "hand_off", "pause", "hand_back", "watchdog", "uncertain", "complete", "fail"]
PAUSE_MOVES = [
    row.name for row in RUN if row.fence in (Fence.LIVE_PAUSE, Fence.THIS_PAUSE, Fence.OVERDUE_PAUSE)
]
BY_REVISION = {row.name: row.sources for row in RUN if row.fence is Fence.REVISION}


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
                events=[tuple(row) for row in unit.all(EVENTS_WRITTEN)],
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
            model.check_moved(transition("run", name), before.runs[run_id], self.world.runs[run_id])
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

    @rule(data=st.data())
    def something_happens(self, data: st.DataObject) -> None:
        """One rule for all, so that what matters happens more often than what does not."""
        what = data.draw(st.sampled_from(EVENTS), label="what")
        getattr(self, what)(data)

    def somebody_enqueues(self, data: st.DataObject) -> None:
        if len(self.world.runs) < MAX_RUNS:
            self.enqueue(data.draw(st.booleans()), data.draw(st.sampled_from([None, None, 5, 100])))

    def enqueue(self, shared: bool, start_by: int | None) -> None:
        before = self.world
        later = {"start_by": self.clock.at + timedelta(seconds=start_by)} if start_by is not None else {}
        run = factory.a_run(self.database, session=SHARED if shared else None, **later)
        self.order.append(run["id"])
        self.world = self.look()
        self.check(before)

    # --- Workers ------------------------------------------------------------------------------------------------------

    def work_goes_on(self, data: st.DataObject) -> None:
        """Each holder does something with its run, or is busy; then workers claim all there is, the best first."""
        self.holders_act(data)
        while model.best(self.world):
            self.claim_next(data.draw(OWNERS, label="owner"))
        self.claim_next("worker-a")

    def a_worker_claims_by_name(self, data: st.DataObject) -> None:
        run, owner = self.any_run(data), data.draw(OWNERS, label="owner")
        found = self.step(
            run["id"],
            model.claimable(run, self.clock.at),
            lambda unit: claims.claim_named(unit, _claimer(owner), run["id"]),
            "claim",
        )
        self.won(owner, found)

    def claim_next(self, owner: str) -> None:
        expected = model.best(self.world)
        found = self.step(
            expected or "",
            expected is not None,
            lambda unit: claims.claim_next(unit, _claimer(owner), starts=True),
            "claim",
        )
        assert [row["id"] for row in found] == ([expected] if expected else [])
        self.won(owner, found)

    def won(self, owner: str, found: list[Row]) -> None:
        for row in found:
            former = [claim.term for claim in self.claims if claim.term.run_id == row["id"]]
            self.claims.append(
                Claim(Term(run_id=row["id"], owner=owner, revision=row["revision"]), row["before"])
            )
            self.former_holders_try_everything(row["id"], former[-1:])

    def former_holders_try_everything(self, run_id: str, former: list[Term]) -> None:
        """By earlier claims on a run that was claimed again, perhaps by the same worker; and a claim read long ago."""
        run, before = self.world.runs[run_id], self.world

        def work(unit: Unit) -> None:
            for term in former:
                for row in RUN:
                    if row.fence in (Fence.OWNER, Fence.TERM):
                        values = {"suspension_id": new_id(SUSPENSION)} if row.target == "paused" else {}
                        moved = turns.move(unit, row.name, run, Guard(term=term), Move(values=values))
                        assert moved is None, f"a former holder went through with {row.name}"
                with pytest.raises(LeaseLost):
                    transcript.save(unit, term, 3, {})
                assert not leases.renew(unit, term.owner, [term], TTL_S)
                turns.let_go(unit, run_id, term.revision)
            again = Move(owner="worker-b", lease_ttl_s=TTL_S)
            assert (
                transitions.apply(unit, "claim", run_id, Guard(revision=run["revision"] - 1), again) is None
            )

        self.changes_nothing(work, before)

    def changes_nothing(self, work: Callable[[Unit], None], before: World) -> None:
        self.database.run(work)
        assert self.look() == before
        assert self.told == []

    # --- Holders ------------------------------------------------------------------------------------------------------

    def holders_act(self, data: st.DataObject) -> None:
        for claim in self.held():
            action = data.draw(st.sampled_from([*HOLDERS_DO, "save", "think"]), label="action")
            if action == "save":
                self.save(claim.term)
            elif action != "think":
                self.act(data, action, claim)

    def somebody_acts_by_a_claim_of_old(self, data: st.DataObject) -> None:
        action = data.draw(st.sampled_from(HOLDERS_DO), label="action")
        claim = data.draw(st.sampled_from(self.claims), label="claim")
        self.act(data, action, claim)
        self.save(claim.term)

    def a_worker_renews_all_it_ever_held(self, data: st.DataObject) -> None:
        owner = data.draw(OWNERS, label="owner")
        self.renew([claim.term for claim in self.claims if claim.term.owner == owner])

    def held(self) -> list[Claim]:
        return [claim for claim in self.claims if model.holds(self.world.runs[claim.term.run_id], claim.term)]

    def act(self, data: st.DataObject, name: str, claim: Claim) -> None:
        if transition("run", name).target == "paused":
            ttl_s = data.draw(st.sampled_from([None, 0.0, 5.0, 100.0]), label="ttl_s")
            self.pause_under(name, claim.term, ttl_s)
            return
        if name == "hand_back" and claim.before == "reclaimable":
            name = "hand_back_reclaimable"
        values = {}
        if name in ("hand_back", "hand_back_reclaimable", "slice_end"):
            delay_s = data.draw(st.sampled_from([0.0, 0.0, 5.0, 60.0]), label="delay_s")
            values = turns.delay(delay_s, 10.0) if delay_s else {}
        self.move(name, claim.term.run_id, Guard(term=claim.term), Move(values=values, seqs=1))

    def pause_under(self, name: str, term: Term, ttl_s: float | None) -> None:
        values = {"suspension_id": new_id(SUSPENSION)}
        moved = self.move(name, term.run_id, Guard(term=term), Move(values=values, seqs=1), _pause(ttl_s))
        if moved is not None:
            former = [item for item in self.pauses if item[0] == moved["id"]]
            self.pauses.append((moved["id"], moved["suspension_id"], moved["revision"]))
            self.former_pauses_are_answered(moved["id"], former[-2:])

    def former_pauses_are_answered(self, run_id: str, former: list[tuple[str, str, int]]) -> None:
        """In every way, while the run waits on a later pause."""
        run, before = self.world.runs[run_id], self.world

        def work(unit: Unit) -> None:
            for _, suspension_id, _ in former:
                guard = Guard(suspension_id=suspension_id, revision=run["revision"])
                for name in PAUSE_MOVES:
                    moved = turns.move(unit, name, run, guard, Move(actor="ops"))
                    assert moved is None, f"a former pause was answered: {name}"

        self.changes_nothing(work, before)

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

    def let_go(self, term: Term) -> None:
        """A holder that finds its run cancelled says that it has stopped."""
        before = self.world
        self.database.run(lambda unit: turns.let_go(unit, term.run_id, term.revision))
        self.world = self.look()
        run = before.runs[term.run_id]
        if run["state"] != "cancelled" or run["revision"] != term.revision + 1:
            assert self.world == before
        else:
            assert self.world.runs[term.run_id] == {**run, "fenced_until": None}
        self.check(before)

    # --- People and sweeps --------------------------------------------------------------------------------------------

    def people_answer(self, data: st.DataObject) -> None:
        """What waits for them, in a fitting way or not, or they let it wait."""
        for run_id in self.order:
            run = self.world.runs[run_id]
            if run["state"] == "paused":
                name = data.draw(st.sampled_from([*PAUSE_MOVES, "wait", "wait"]), label="answer")
                guard = Guard(suspension_id=run["suspension_id"], revision=run["revision"])
                if name != "wait":
                    self.move(name, run_id, guard, Move(actor="ops"))

    def somebody_answers_a_pause_of_old(self, data: st.DataObject) -> None:
        """With the revision it had, or the one the run has now."""
        name, fresh = data.draw(st.sampled_from(PAUSE_MOVES), label="answer"), data.draw(st.booleans())
        run_id, suspension_id, revision = data.draw(st.sampled_from(self.pauses), label="pause")
        seen = self.world.runs[run_id]["revision"] if fresh else revision
        self.move(name, run_id, Guard(suspension_id=suspension_id, revision=seen), Move(actor="ops"))

    def somebody_ends_it(self, data: st.DataObject) -> None:
        """Cancelled, given up or closed, by the revision that the run has, or had."""
        run, back = self.any_run(data), data.draw(st.sampled_from([0, 0, 0, 1, 2]), label="back")
        fitting = [name for name, sources in BY_REVISION.items() if run["state"] in sources]
        names = fitting if fitting and back == 0 else [*BY_REVISION, "cancel_paused"]
        name = data.draw(st.sampled_from(sorted(names)), label="end")
        guard = Guard(
            revision=run["revision"] - back, suspension_id=run["suspension_id"] or new_id(SUSPENSION)
        )
        moved = self.move(name, run["id"], guard, Move(actor="ops"))
        held = [claim.term for claim in self.claims if claim.term.run_id == run["id"]]
        if moved is not None and held and data.draw(st.booleans(), label="they stop"):
            for term in held[-2:]:
                self.let_go(term)

    def the_sweep_comes(self, data: st.DataObject) -> None:
        """After a while, for what nobody has renewed, answered or started, and then for waits."""
        self.time_passes(data.draw(st.sampled_from([0, 5, 11, 130]), label="seconds"))
        self.changes_nothing(self.sweep_what_is_not_due, self.world)
        lost = data.draw(st.sampled_from(["lapse", "lapse", "close_running"]), label="lost")
        self.sweep_all_that_is_due(lost, data.draw(st.booleans(), label="to the model"))
        self.end_waits()

    def sweep_what_is_not_due(self, unit: Unit) -> None:
        for run in self.world.runs.values():
            for name in ("lapse", "close_running", "start_by"):
                if not model.allows(transition("run", name), run, Guard(), self.world):
                    assert turns.move(unit, name, run, Guard(), Move()) is None

    def sweep_all_that_is_due(self, lost: str, to_model: bool) -> None:
        """What the finders find is what the model calls due, and all of it goes through.

        ``lost`` is what becomes of a run whose lease is over: it may be closed before anybody takes it back.
        """
        with self.database.read() as unit:
            lapsed = [item.id for item in due.lapsed_across_scopes(unit, None, 100)]
            pauses = [item.id for item in due.overdue_pauses_across_scopes(unit, None, 100)]
            starts = [item.id for item in due.overdue_starts_across_scopes(unit, None, 100)]
        assert (set(lapsed), set(pauses), set(starts)) == model.due(self.world)
        for run_id in lapsed:
            assert self.move(lost, run_id, Guard(), Move())
        for suspension_id in pauses:
            run_id = self.world.pauses[suspension_id]["run_id"]
            guard = Guard(suspension_id=suspension_id)
            assert not self.move("decide", run_id, guard, Move()), "a person is too late"
            assert self.move("expire_to_model" if to_model else "expire", run_id, guard, Move())
        for run_id in starts:
            assert self.move("start_by", run_id, Guard(), Move())

    def end_waits(self) -> None:
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

    def a_while_passes(self, data: st.DataObject) -> None:
        self.time_passes(data.draw(st.sampled_from([1, 4, 10, 31]), label="seconds"))

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
    settings = hypothesis.settings(max_examples=15, stateful_step_count=16)
    run_state_machine_as_test(lambda: Fleet(database, told), settings=settings)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_no_order_of_events_breaks_a_law_in_many_more_examples(database: Database, told: Told) -> None:
    large = hypothesis.settings.get_profile("large")
    settings = hypothesis.settings(large, max_examples=150, stateful_step_count=50)
    run_state_machine_as_test(lambda: Fleet(database, told), settings=settings)

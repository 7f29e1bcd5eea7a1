"""The machines of checkpoints and tool calls, and the laws that the database itself holds."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from cortex_workers.errors import LeaseLost
from cortex_workers.schemas.ids import CHECKPOINT, RUN, SESSION, TOOL_CALL, new_id
from cortex_workers.schemas.lease import Term
from cortex_workers.schemas.lifecycle import MACHINES, STATES, RunState, Transition, transition
from cortex_workers.store import checkpoints, tables, transcript, transitions, turns
from cortex_workers.store.database import Database
from cortex_workers.store.transitions import Row
from cortex_workers.testing import factory
from cortex_workers.testing.clock import stopped_clock
from tests.contract import snapshot
from tests.contract.conftest import Told

TABLES = {
    "run": tables.runs,
    "checkpoint": tables.checkpoints,
    "tool_call": tables.tool_calls,
    "delivery": tables.a2a_deliveries,
    "ask": tables.a2a_asks,
}
CASES = [
    pytest.param(row, state, id=f"{machine}-{row.name}-{state}")
    for machine in ("checkpoint", "tool_call")
    for row in MACHINES[machine]
    for state in STATES[machine]
]
MACHINE_OF = {id(row): machine for machine, rows in MACHINES.items() for row in rows}


@pytest.mark.parametrize(("row", "state"), CASES)
def test_a_row_moves_from_its_source_states_only(
    common_database: Database, common_told: Told, row: Transition, state: str
) -> None:
    machine = MACHINE_OF[id(row)]
    made = arrange(common_database, machine, state)
    before = snapshot.everything(common_database)[TABLES[machine].name]
    common_told.clear()
    if not row.sources:
        with pytest.raises(IntegrityError):
            common_database.run(lambda unit: transitions.create_in(unit, machine, row.name, [made]))
    else:
        moved = apply(common_database, machine, row.name, made["id"])
        assert [item["state"] for item in moved] == ([row.target] if state in row.sources else [])
    after = snapshot.everything(common_database)[TABLES[machine].name]
    expected = [
        {**item, "state": row.target} if item["id"] == made["id"] and state in row.sources else item
        for item in before
    ]
    assert after == expected
    assert common_told == []


def apply(database: Database, machine: str, name: str, row_id: str) -> list[Row]:
    table = TABLES[machine]
    return database.run(lambda unit: transitions.apply_in(unit, machine, name, [table.c.id == row_id], {}))


def arrange(database: Database, machine: str, state: str) -> dict[str, Any]:
    """A row in a state, by the shortest way of its machine."""
    row = {"checkpoint": a_checkpoint, "tool_call": a_call}[machine]()
    creating = next(
        (item for item in MACHINES[machine] if not item.sources and item.target == state),
        next(item for item in MACHINES[machine] if not item.sources),
    )
    if creating.target != state and machine == "tool_call":
        creating = transition("tool_call", "record")
    database.run(lambda unit: transitions.create_in(unit, machine, creating.name, [row]))
    if creating.target != state:
        step = next(
            item for item in MACHINES[machine] if creating.target in item.sources and item.target == state
        )
        assert apply(database, machine, step.name, row["id"])
    return row


def a_checkpoint() -> dict[str, Any]:
    return {
        "id": new_id(CHECKPOINT),
        "scope": factory.SCOPE,
        "run_id": new_id(RUN),
        "agent": "support",
        "kind": "tool_approval",
        "reason": "asked",
        "step_index": 0,
        "metadata": {},
    }


def a_call() -> dict[str, Any]:
    return {
        "id": new_id(TOOL_CALL),
        "run_id": new_id(RUN),
        "step_index": 0,
        "call_id": "call_0",
        "ordinal": 0,
        "session_id": new_id(SESSION),
        "tool": "refund",
        "class": "mutating",
        "effects": "mutating",
        "seq": 1,
        "term_owner": "worker-a",
        "term_revision": 2,
    }


# --- Calls: what their own fences say -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [{"owner": "worker-z"}, {"revision": 1}, {"revision": 3}, {"run_id": "arun_other"}], ids=str
)
def test_only_its_own_holder_takes_a_start_record_back(
    common_database: Database, change: dict[str, Any]
) -> None:
    row = arrange(common_database, "tool_call", "started")
    term = Term(run_id=row["run_id"], owner="worker-a", revision=2)
    stranger = term.model_copy(update=change)
    assert not common_database.run(lambda unit: transcript.take_back(unit, stranger, "call_0"))
    assert call_state(common_database, row["run_id"]) == "started"
    assert common_database.run(lambda unit: transcript.take_back(unit, term, "call_0"))
    assert call_state(common_database, row["run_id"]) == "pending"


def call_state(database: Database, run_id: str) -> str:
    with database.read() as unit:
        (row,) = transcript.load_calls(unit, run_id)
    return str(row["state"])


@pytest.mark.parametrize("state", list(STATES["tool_call"]))
def test_a_late_result_is_kept_once_under_the_records_own_term_and_moves_nothing(
    common_database: Database, state: str
) -> None:
    row = arrange(common_database, "tool_call", state)
    term = Term(run_id=row["run_id"], owner="worker-a", revision=2)
    other = term.model_copy(update={"revision": 9})
    kept = state in ("started", "unknown")

    def write(by: Term, text_: str) -> bool:
        return common_database.run(lambda unit: transcript.write_late_result(unit, by, "call_0", text_))

    assert [write(other, "a"), write(term, "b"), write(term, "c")] == [False, kept, False]
    with common_database.read() as unit:
        (after,) = transcript.load_calls(unit, row["run_id"])
    assert (after["state"], after["late_result"]) == (state, "b" if kept else None)


def test_a_pause_opens_one_checkpoint_and_tells_of_it_with_the_runs_revision(
    common_database: Database, common_told: Told
) -> None:
    common_told.clear()
    run = factory.a_paused_run(common_database)
    created = [news for news in common_told if news.kind == "CheckpointCreated"]
    assert [(news.run_id, news.revision) for news in created] == [(run["id"], run["revision"])]
    twin = {**a_checkpoint(), "suspension_id": run["suspension_id"]}
    with pytest.raises(IntegrityError):
        common_database.run(lambda unit: checkpoints.open_(unit, twin, 1))
    assert len([news for news in common_told if news.kind == "CheckpointCreated"]) == 1


def test_a_closed_checkpoint_stays_as_it_was_closed(common_database: Database, common_told: Told) -> None:
    run = factory.a_paused_run(common_database)
    where = [tables.checkpoints.c.id == factory.checkpoint_of(common_database, run)]

    def close(name: str, by: str) -> list[Row]:
        decision = {"decision": {"approved": True, "decided_by": by}}
        return common_database.run(lambda unit: checkpoints.close(unit, name, where, decision, 7))

    common_told.clear()
    (first,) = close("decided", "ann")
    assert close("decided", "bob") == close("expired", "cortex") == []
    with common_database.read() as unit:
        kept = checkpoints.get(unit, first["id"])
    assert kept == first
    assert (first["closed_as"], first["decision"]["decided_by"]) == ("decided", "ann")
    assert [(news.kind, news.revision) for news in common_told] == [("CheckpointResolved", 7)]


# --- What Postgres itself refuses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", STATES)
def test_the_states_that_postgres_allows_are_those_of_the_table(
    common_database: Database, machine: str
) -> None:
    with common_database.read() as unit:
        law = unit.scalar(
            text("select pg_get_constraintdef(oid) from pg_constraint where conname = :name").bindparams(
                name=f"{TABLES[machine].name}_state_check"
            )
        )
    assert set(re.findall(r"'(\w+)'", str(law))) == {str(state) for state in STATES[machine]}


def a_leased(database: Database) -> Row:
    return factory.a_running_run(database)


@pytest.mark.invariant("I1")
@pytest.mark.parametrize(
    ("arranged", "change"),
    [
        (factory.a_run, "lease_owner = 'worker-a'"),
        (factory.a_run, "lease_expires_at = now()"),
        (factory.a_run, "lease_owner = 'worker-a', lease_expires_at = now()"),
        (factory.a_run, "state = 'running'"),
        (factory.a_run, "state = 'running', lease_owner = 'worker-a'"),
        (factory.a_run, "state = 'running', lease_expires_at = now()"),
        (factory.a_run, "state = 'paused'"),
        (factory.a_run, "state = 'asleep'"),
        (a_leased, "lease_owner = null"),
        (a_leased, "lease_expires_at = null"),
        (a_leased, "state = 'reclaimable'"),
        (factory.a_paused_run, "suspension_id = null"),
    ],
)
def test_postgres_refuses_a_run_that_breaks_a_law(
    common_database: Database, arranged: Callable[[Database], Row], change: str
) -> None:
    run = arranged(common_database)
    before = snapshot.of_run(common_database, run["id"], run["session_id"])
    with pytest.raises(IntegrityError, match="check constraint"), common_database.transaction() as unit:
        # Past every door of the store: this is what the constraint is for.
        unit.execute(text(f"update runs set {change} where id = :id"), {"id": run["id"]})
    assert snapshot.of_run(common_database, run["id"], run["session_id"]) == before


def test_postgres_refuses_a_second_running_run_of_a_serial_session(common_database: Database) -> None:
    first = factory.a_running_run(common_database, session="one at a time")
    second = factory.a_run(common_database, session="one at a time")
    claim = transitions.Move(owner="worker-b", lease_ttl_s=60.0)
    with pytest.raises(IntegrityError, match="runs_one_turn"):
        common_database.run(
            lambda unit: transitions.apply(unit, "claim", second["id"], transitions.Guard(), claim)
        )
    assert factory.now(common_database, second["id"]) == second
    assert factory.now(common_database, first["id"])["state"] == "running"


def test_postgres_refuses_a_second_live_pause_of_a_run(common_database: Database) -> None:
    run = factory.a_paused_run(common_database)
    with common_database.read() as unit:
        pause = dict(
            unit.execute(tables.suspensions.select().where(tables.suspensions.c.id == run["suspension_id"]))
            .mappings()
            .one()
        )
    with pytest.raises(IntegrityError, match="suspensions_live"), common_database.transaction() as unit:
        unit.execute(tables.suspensions.insert().values({**pause, "id": "sus_other"}))


# --- What a holder writes without moving its run ------------------------------------------------------------------


@pytest.mark.invariant("I2")
@pytest.mark.parametrize(
    "change", [{"owner": "worker-z"}, {"revision": 1}, {"revision": 3}, {"run_id": "arun_x"}], ids=str
)
def test_progress_is_saved_under_the_holders_own_term_only(
    common_database: Database, change: dict[str, Any]
) -> None:
    run = factory.a_running_run(common_database)
    before = snapshot.of_run(common_database, run["id"], run["session_id"])
    stale = factory.term_of(run).model_copy(update=change)
    with pytest.raises(LeaseLost):
        common_database.run(lambda unit: transcript.save(unit, stale, 3, {"step_count": 9}))
    assert snapshot.of_run(common_database, run["id"], run["session_id"]) == before
    saved = common_database.run(
        lambda unit: transcript.save(unit, factory.term_of(run), 3, {"step_count": 9})
    )
    now = factory.now(common_database, run["id"])
    assert now == {**before["runs"][0], "step_count": 9, "next_seq": run["next_seq"] + 3}
    assert saved["next_seq"] == now["next_seq"]


def test_progress_is_not_saved_once_the_lease_is_over(common_database: Database) -> None:
    with stopped_clock() as clock:
        run = factory.a_running_run(common_database, ttl_s=60.0)
        clock.advance(59.999999)
        assert common_database.run(
            lambda unit: transcript.save(unit, factory.term_of(run), 0, {"step_count": 1})
        )
        clock.advance(0.000001)
        with pytest.raises(LeaseLost):
            common_database.run(
                lambda unit: transcript.save(unit, factory.term_of(run), 0, {"step_count": 2})
            )
    assert factory.now(common_database, run["id"])["step_count"] == 1


@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_only_the_holder_that_was_cut_off_lets_a_cancelled_run_go(
    common_database: Database, earlier: int
) -> None:
    """And with it the turn of its session, for which others wait until then."""
    key = new_id(RUN)
    run = factory.a_run(common_database, session=key)
    for _ in range(2):
        run = factory.a_running_run(common_database, run=run)
        held, run = run, factory.a_reclaimable_run(common_database, run=run, handed_off=True)
    held = factory.a_running_run(common_database, run=run)
    following = factory.a_run(common_database, session=key)
    ended = factory.an_ended_run(common_database, RunState.CANCELLED, run=held)
    assert ended["fenced_until"] == held["lease_expires_at"]
    common_database.run(lambda unit: turns.let_go(unit, ended["id"], held["revision"] - earlier))
    free = earlier == 0
    assert (factory.now(common_database, ended["id"])["fenced_until"] is None) is free
    assert factory.now(common_database, following["id"])["wait_reason"] == (None if free else "turn")

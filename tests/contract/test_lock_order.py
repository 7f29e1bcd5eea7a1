"""The lock order of `cortex_workers/store/README.md`: read off every door, and proven by sessions that wait."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from cortex_workers import Client
from cortex_workers.engine import expire, suspend
from cortex_workers.schemas.admission import ResumeAdmission, ResumeExpiry
from cortex_workers.schemas.ids import RUN, new_id
from cortex_workers.schemas.lifecycle import RUN as RUN_MACHINE
from cortex_workers.schemas.run import EnqueueRun
from cortex_workers.store import claims, clock, leases, sessions, tables, transcript, turns
from cortex_workers.store import workers as worker_rows
from cortex_workers.store.claims import Claimer
from cortex_workers.store.database import Database
from cortex_workers.store.transitions import Guard, Row
from cortex_workers.testing import factory
from tests.contract.meeting import Referee, in_background, together
from tests.contract.recorder import Recorder, Statement, recording
from tests.engine import outside
from tests.engine.test_deferred import ANSWER, Deferring, asks, polls
from tests.engine.world import TTL_S, Worker, World, at, call, say, turn

ORDER = ["sessions", "tenants", "runs", "suspensions", "pending_calls", "checkpoints"]


def out_of_order(transaction: list[Statement]) -> list[str]:
    """The tables that a transaction locks, when it may wait for one before which it should have come."""
    held: list[str] = []
    for statement in transaction:
        for table, may_wait in statement.locks:
            if table not in ORDER or table in held:
                continue
            held.append(table)
            if may_wait and any(ORDER.index(table) < ORDER.index(other) for other in held[:-1]):
                return held
    return []


# --- Read off every door ------------------------------------------------------------------------------------------

SCRIPT = {
    "match": [
        {"input_contains": "pay", "turns": [turn(call("find", order="1"), call("pay", amount=1)), say()]},
        {"input_contains": "ship", "turns": [turn(call("ship", order="1"), call("ship", order="2")), say()]},
        {"input_contains": "fail", "turns": [{"fail": "failed"}]},
        {
            "input_contains": "quote",
            "turns": [
                turn(call("quote", item="desk"), call("quote", item="chair")),
                turn(call("ship", order="1")),
                say(),
            ],
        },
        {"default": True, "turns": [turn(call("find", order="1")), turn(call("find", order="2")), say()]},
    ]
}


def test_every_door_takes_its_locks_in_order(world: World) -> None:
    outside.tools(world.host, ttl=timedelta(0))
    world.shop(SCRIPT)
    for name, decide in (("spender", asks), ("poller", polls(2))):
        world.host.agent(name, model=Deferring(ANSWER, decide), instructions="Help.", tools=["find"])
    worker, client = world.worker(), world.client()
    with recording(worker.rt.database, client.runtime.database, world.database) as recorder:
        produce(client)
        decide_every_way(world, worker, client)
        answer_every_way(worker, client)
        close_every_way(world, client)
        settle_every_way(world, worker, client)
        give_up_every_way(world, client)
        cancel_every_way(world, client)
        sweep_every_way(world, worker)
    moved = {row["kind"] for row in world.rows(tables.events)}
    # A host's own runs come with a later room; everything else was done above.
    assert moved == {f"run.{row.name}" for row in RUN_MACHINE} - {"run.cancel_created"}
    check(recorder)


def check(recorder: Recorder) -> None:
    wrong = {str(found): one for one in recorder.transactions if (found := out_of_order(one))}
    assert list(wrong) == [], "\n\n".join(
        f"{found}:\n" + "\n".join(statement.sql[:300] for statement in one) for found, one in wrong.items()
    )
    # Each of these is waited for by somebody here, or the reading of statements is wrong.
    waited_for = {
        name for one in recorder.transactions for item in one for name, waits in item.locks if waits
    }
    assert waited_for >= set(ORDER)


def produce(client: Any) -> None:
    client.enqueue("support", "alone")
    client.enqueue("support", "first", session="talk")
    client.enqueue("support", "second", session="talk")
    many = [
        EnqueueRun(agent="support", input=str(number), scope=f"tenant={tenant}", session=key)
        for number, (tenant, key) in enumerate([("b", "y"), ("a", "x"), ("a", None), ("b", "x")])
    ]
    client.enqueue_many(many)


def paused(world: World, worker: Worker, client: Any, session: str | None = None) -> tuple[Row, str]:
    made = client.enqueue("support", "pay", session=session)
    row = worker.finish(made.id)
    assert row["state"] == "paused"
    return row, client.checkpoints(run_id=made.id)[0].id


def decide_every_way(world: World, worker: Worker, client: Any) -> None:
    for session in (None, new_id(RUN)):
        row, checkpoint = paused(world, worker, client, session)
        client.decide(checkpoint, approved=True)
        assert worker.finish(row["id"])["state"] == "completed"
        _, checkpoint = paused(world, worker, client, session)
        client.decide(checkpoint, approved=False, reason="no")


def quoted(worker: Worker, client: Client, session: str | None) -> str:
    """A run that waits for two results from outside, without a deadline."""
    run_id = client.enqueue("support", "quote", session=session).id
    assert worker.finish(run_id)["state"] == "paused"
    return run_id


def answered(worker: Worker, client: Client, session: str | None) -> str:
    """The same with its results, and nobody has begun with them."""
    run_id = quoted(worker, client, session)
    client.provide_results(run_id, [outside.result(outside.A), outside.result(outside.B)])
    return run_id


def answer_every_way(worker: Worker, client: Client) -> None:
    """Results from outside, one of them given up, and model calls that are made again."""
    for session in (None, new_id(RUN)):
        assert worker.finish(answered(worker, client, session))["state"] == "completed"
        run_id = quoted(worker, client, session)
        client.provide_result(run_id, outside.result(outside.B))
        client.provide_result(run_id, outside.result(outside.A))
        (given,) = client.admissions(run_id).admissions
        client.expire_admission(run_id, given.request.version.suspension_id, given.request_digest)
        run_id = client.enqueue("spender", "find", session=session).id
        worker.work(run_id)
        (asked,) = client.checkpoints(run_id=run_id)
        client.decide(asked.id, approved=True)
        worker.work(run_id)
        run_id = client.enqueue("poller", "find", session=session and new_id(RUN)).id
        assert expire.poll(worker.rt, worker.work(run_id)["suspension_id"])


def close_every_way(world: World, client: Client) -> None:
    """Nobody can say how far a run came with its answer."""
    for session in (None, new_id(RUN)):
        for state in ("reclaimable", "paused", "running"):
            workers = [world.worker() for _ in range(3)]
            run_id = answered(workers[0], client, session)
            if state == "running":
                workers[1].die_at("model.before", run_id)
                world.later(TTL_S + 1)
            else:
                probe = "tool.after_handler" if state == "paused" else "model.before"
                workers[1].lose_at(probe, run_id)
            if state == "paused":
                workers[2].work(run_id)
            assert world.run(run_id)["state"] == state
            for each in workers:
                world.database.run(lambda unit, name=each.name: worker_rows.end(unit, name, "stopped"))
            client.close_uncertain(run_id)


def settle_every_way(world: World, worker: Worker, client: Any) -> None:
    for outcome, more in (
        ("happened", {"result": "shipped"}),
        ("did_not_happen", {"now": True}),
        ("stop", {}),
    ):
        made = client.enqueue("support", "ship")
        worker.lose_at("tool.after_start_record", made.id)
        assert worker.finish(made.id)["state"] == "paused"
        (asked,) = client.checkpoints(run_id=made.id)
        client.settle(asked.id, outcome, **more)


def give_up_every_way(world: World, client: Any) -> None:
    for shared in (False, True):

        def made(text: str, shared: bool = shared) -> str:
            return str(client.enqueue("support", text, session=new_id(RUN) if shared else None).id)

        def ended(run_id: str) -> None:
            client.cancel(run_id)

        run_id = made("slices")
        assert world.worker(slice_steps=1).work(run_id)["state"] == "ready"
        ended(run_id)
        run_id, drained = made("ship"), world.worker()
        with at("turn.after_commit", drained.rt.drain.set):
            assert drained.work(run_id)["state"] == "reclaimable"
        refuse_for_now(world, run_id, "reclaimable")
        ended(run_id)
        run_id = made("refused")
        refuse_for_now(world, run_id, "ready")
        ended(run_id)
        run_id, watched = made("watched"), world.worker()
        term = factory.term_of(watched.claim(run_id).row)
        world.database.run(lambda unit, by=watched.name, term=term: leases.hand_off_all(unit, by, [term], by))
        assert world.run(run_id)["state"] == "reclaimable"
        ended(run_id)
        assert world.worker().work(made("fail"))["state"] == "failed"


def refuse_for_now(world: World, run_id: str, state: str) -> None:
    worker = world.worker()
    row = worker.claim(run_id).row
    suspend.hand_back_claimed(worker.rt.database.run, row, factory.term_of(row), 5.0, 10.0, "not now")
    assert world.run(run_id)["state"] == state
    world.later(6)


def cancel_every_way(world: World, client: Any) -> None:
    for state in ("ready", "running", "reclaimable", "paused"):
        for session in (None, new_id(RUN)):
            run = factory.a_run_in(world.database, state, session=session)  # type: ignore[arg-type]
            client.cancel(run["id"], reason="no longer wanted")


def sweep_every_way(world: World, worker: Worker) -> None:
    for session in (None, new_id(RUN)):
        for policy in ("fail", "return_to_model"):
            run = factory.a_paused_run(
                world.database, ttl_s=0.0, on_expiry=policy, session=session and new_id(RUN)
            )
            assert expire.expire_pause(worker.rt, run["suspension_id"])
        run = factory.a_running_run(world.database, ttl_s=0.0, session=session)
        assert expire.lapse(worker.rt, run["id"])
        late = factory.a_run(world.database, start_by=run["created_at"], session=session and new_id(RUN))
        assert expire.cancel_unstarted(worker.rt, late["id"])


# --- Proven by sessions that wait for one another -----------------------------------------------------------------


@dataclass(frozen=True)
class Door:
    """A way to write to a run: the run it is for, and what is done to it."""

    name: str
    arrange: Callable[[Database, str | None], Row]
    go: Callable[[World, Row], Any]
    to: str


def asked(world: World, run: Row) -> str:
    return factory.checkpoint_of(world.database, run)


def by_holder(name: str) -> Callable[[World, Row], Any]:
    return lambda world, run: factory.move(world.database, name, run, Guard(term=factory.term_of(run)))


def by_client(use: Callable[[Any, World, Row], Any]) -> Callable[[World, Row], Any]:
    return lambda world, run: use(client_of(world), world, run)


@functools.cache
def client_of(world: World) -> Client:
    return world.client()


def running(database: Database, session: str | None) -> Row:
    return factory.a_running_run(database, session=session)


def lapsed(database: Database, session: str | None) -> Row:
    return factory.a_running_run(database, session=session, ttl_s=0.0)


def paused_run(database: Database, session: str | None) -> Row:
    factory.an_agent(database)
    return factory.a_paused_run(database, session=session)


def overdue(database: Database, session: str | None) -> Row:
    return factory.a_paused_run(database, session=session, ttl_s=0.0)


def uncertain(database: Database, session: str | None) -> Row:
    return factory.an_uncertain_run(database, session=session)


def waiting(database: Database, session: str | None) -> Row:
    return factory.a_run(database, session=session)


def late(database: Database, session: str | None) -> Row:
    return factory.a_run(database, session=session, start_by=clock.wall())


def asks_about_a_model_call(database: Database, session: str | None) -> Row:
    run = paused_run(database, session)
    return _as(database, run, "update checkpoints set kind = 'deferred_model_call' where run_id = :id")


def asked_again(database: Database, session: str | None) -> Row:
    run = wants_results(database, session)
    poll = (
        "update suspensions set deferral_kind = 'batch', next_poll_at = clock_timestamp() where run_id = :id"
    )
    return _as(database, run, poll)


def _as(database: Database, run: Row, statement: str) -> Row:
    with database.transaction() as unit:
        unit.execute(text(statement), {"id": run["id"]})
    return run


def wants_results(database: Database, session: str | None) -> Row:
    return factory.a_run_waiting_outside(database, session=session, ttl_s=None)


def admitted(database: Database, session: str | None) -> Row:
    return factory.an_admitted_run(database, run=wants_results(database, session))


def began(database: Database, session: str | None) -> Row:
    """Somebody began with its answer, and the lease is over."""
    return factory.a_running_run(database, run=admitted(database, session), ttl_s=0.0)


def cut_off(database: Database, session: str | None) -> Row:
    return factory.a_reclaimable_run(database, run=began(database, session))


def asks_after_its_answer(database: Database, session: str | None) -> Row:
    return factory.an_uncertain_run(database, run=began(database, session))


def give(client: Client, run: Row) -> ResumeAdmission:
    return client.provide_results(run["id"], [outside.result("call_0_0")])


def give_up(client: Client, run: Row) -> ResumeExpiry:
    (given,) = client.admissions(run["id"]).admissions
    return client.expire_admission(run["id"], run["suspension_id"], given.request_digest)


ENDING = [
    Door("complete", running, by_holder("complete"), "completed"),
    Door("fail", running, by_holder("fail"), "failed"),
    Door("cancel waiting", waiting, by_client(lambda client, _, run: client.cancel(run["id"])), "cancelled"),
    Door("cancel running", running, by_client(lambda client, _, run: client.cancel(run["id"])), "cancelled"),
    Door(
        "cancel paused", paused_run, by_client(lambda client, _, run: client.cancel(run["id"])), "cancelled"
    ),
    Door(
        "reject",
        paused_run,
        by_client(lambda client, world, run: client.decide(asked(world, run), approved=False)),
        "failed",
    ),
    Door(
        "stop",
        uncertain,
        by_client(lambda client, world, run: client.settle(asked(world, run), "stop")),
        "failed",
    ),
    Door(
        "expire",
        overdue,
        by_client(lambda client, _, run: expire.expire_pause(client.runtime, run["suspension_id"])),
        "failed",
    ),
    Door("give up", admitted, by_client(lambda client, _, run: give_up(client, run)), "failed"),
    *(
        Door(
            name,
            arrange,
            by_client(
                lambda client, _, run, held=held: client.close_uncertain(run["id"], held)  # type: ignore[misc]
            ),
            "incomplete",
        )
        for name, arrange, held in (
            ("close reclaimable", cut_off, [factory.OWNER]),
            ("close running", began, [factory.OWNER]),
            ("close paused", asks_after_its_answer, [factory.OWNER, "worker-b"]),
        )
    ),
    Door(
        "start_by",
        late,
        by_client(lambda client, _, run: expire.cancel_unstarted(client.runtime, run["id"])),
        "cancelled",
    ),
]
TOUCHING = [
    Door(
        "approve",
        paused_run,
        by_client(lambda client, world, run: client.decide(asked(world, run), approved=True)),
        "ready",
    ),
    Door(
        "repeat",
        asks_about_a_model_call,
        by_client(lambda client, world, run: client.decide(asked(world, run), approved=True)),
        "ready",
    ),
    Door(
        "poll",
        asked_again,
        by_client(lambda client, _, run: expire.poll(client.runtime, run["suspension_id"])),
        "ready",
    ),
    Door("admit", wants_results, by_client(lambda client, _, run: give(client, run)), "ready"),
    Door(
        "admit the last",
        wants_results,
        by_client(lambda client, _, run: client.provide_result(run["id"], outside.result("call_0_0"))),
        "ready",
    ),
    Door(
        "settle",
        uncertain,
        by_client(lambda client, world, run: client.settle(asked(world, run), "happened", result="done")),
        "ready",
    ),
]
LETTING_GO = [
    Door("slice_end", running, by_holder("slice_end"), "ready"),
    Door("hand_off", running, by_holder("hand_off"), "reclaimable"),
    Door("hand_back", running, by_holder("hand_back"), "ready"),
    Door(
        "lapse", lapsed, lambda world, run: factory.move(world.database, "lapse", run, Guard()), "reclaimable"
    ),
]


def name_of(value: Any) -> str | None:
    return value.name if isinstance(value, Door) else None


@pytest.mark.parametrize(
    ("door", "shared"),
    [
        *((door, shared) for door in (*ENDING, *TOUCHING) for shared in (False, True)),
        *((door, True) for door in LETTING_GO),
    ],
    ids=name_of,
)
def test_a_door_waits_for_the_session_before_it_holds_the_run(
    common_world: World, common_referee: Referee, door: Door, shared: bool
) -> None:
    world, referee = common_world, common_referee
    run = door.arrange(world.database, new_id(RUN) if shared else None)
    with (
        referee.holding("sessions", run["session_id"]) as holder,
        in_background(lambda: door.go(world, run)) as (done,),
    ):
        referee.wait_for_waiters()
        assert referee.is_free("runs", run["id"])
        holder.rollback()
        done.result()
    assert world.run(run["id"])["state"] == door.to


@pytest.mark.parametrize(
    ("door", "shared"),
    [
        *((door, shared) for door in (*ENDING, *TOUCHING) for shared in (False, True)),
        *((door, True) for door in LETTING_GO),
    ],
    ids=name_of,
)
def test_a_door_that_waits_for_the_run_holds_the_session(
    common_world: World, common_referee: Referee, door: Door, shared: bool
) -> None:
    world, referee = common_world, common_referee
    run = door.arrange(world.database, new_id(RUN) if shared else None)
    with referee.holding("runs", run["id"]) as holder, in_background(lambda: door.go(world, run)) as (done,):
        referee.wait_for_waiters()
        assert not referee.is_free("sessions", run["session_id"])
        holder.rollback()
        done.result()
    assert world.run(run["id"])["state"] == door.to


@pytest.mark.parametrize("door", LETTING_GO, ids=name_of)
def test_the_short_way_of_an_unshared_run_does_not_wait_for_its_session(
    common_world: World, common_referee: Referee, door: Door
) -> None:
    world, referee = common_world, common_referee
    run = door.arrange(world.database, None)
    with referee.holding("sessions", run["session_id"]):
        door.go(world, run)
    assert world.run(run["id"])["state"] == door.to


def test_a_holders_progress_waits_for_nobody_but_its_run(world: World, referee: Referee) -> None:
    run = factory.a_running_run(world.database, session="talk")
    with referee.holding("sessions", run["session_id"]):
        world.database.run(lambda unit: transcript.save(unit, factory.term_of(run), 1, {"step_count": 1}))
    assert world.run(run["id"])["step_count"] == 1


@pytest.mark.parametrize("table", ["sessions", "runs"])
def test_a_claim_passes_over_what_is_locked_and_waits_for_nothing(
    world: World, referee: Referee, table: str
) -> None:
    locked = factory.a_run(world.database, session="talk")
    free = factory.a_run(world.database, session="other")
    claimer = Claimer("worker-a", 60.0, "main", [factory.AGENT.digest()])

    def claim(work: Callable[[Any], list[Row]]) -> list[str]:
        return [row["id"] for row in world.database.run(work)]

    with referee.holding(table, locked["session_id" if table == "sessions" else "id"]):
        assert claim(lambda unit: claims.claim_named(unit, claimer, locked["id"])) == []
        assert claim(lambda unit: claims.claim_next(unit, claimer, starts=True)) == [free["id"]]
    assert claim(lambda unit: claims.claim_named(unit, claimer, locked["id"])) == [locked["id"]]


def test_a_run_that_becomes_shared_while_it_is_let_go_is_let_go_the_long_way(
    world: World, referee: Referee
) -> None:
    """Its session is joined, and paused by an operator, in a transaction that has marked it and is not committed yet.

    The short way would not see that the session is paused.
    """
    run = factory.a_running_run(world.database)
    with world.database.transaction() as joining:
        sessions.lock(joining, run["session_id"])
        sessions.share(joining, run["session_id"], True)
        gate = {"id": run["session_id"]}
        joining.execute(text("update sessions set gated_at = clock_timestamp() where id = :id"), gate)
        with in_background(lambda: by_holder("slice_end")(world, run)) as (done,):
            referee.wait_for_waiters()
            joining.connection.commit()
            done.result()
    now = world.run(run["id"])
    assert (now["state"], now["shared"], now["serial"], now["wait_reason"]) == ("ready", True, True, "gate")


# --- Operations that cross ----------------------------------------------------------------------------------------


def requests(
    keys: Sequence[str], ids: Sequence[str | None] = (), tenants: Sequence[str] = ()
) -> list[EnqueueRun]:
    return [
        EnqueueRun(
            agent=factory.AGENT.name,
            input="hello",
            session=key or None,
            run_id=ids[index] if ids else None,
            scope=f"tenant={tenants[index] if tenants else 'acme'}",
        )
        for index, key in enumerate(keys)
    ]


def cross(referee: Referee, *works: Callable[[], Any], rounds: int = 1) -> list[Any]:
    """Let them run into each other; nobody may fail, and Postgres may have had nothing to resolve."""
    results: list[Any] = []
    for _ in range(rounds):
        results = together(*works)
        assert [item for item in results if isinstance(item, Exception)] == []
    assert referee.deadlocks() == 0
    return results


def test_sessions_created_in_opposite_order_meet_without_a_deadlock(world: World, referee: Referee) -> None:
    factory.an_agent(world.database)
    client = world.client()
    keys = [f"talk {number}" for number in range(30)]
    mine, theirs = requests(keys), requests(keys[::-1])
    cross(referee, lambda: client.enqueue_many(mine), lambda: client.enqueue_many(theirs))
    assert len(world.rows(tables.sessions)) == len(keys)
    cross(referee, lambda: client.enqueue_many(mine), lambda: client.enqueue_many(theirs))
    by_session: dict[str, list[int]] = {}
    for run in world.rows(tables.runs):
        by_session.setdefault(run["session_id"], []).append(run["session_seq"])
    assert all(sorted(seqs) == [1, 2, 3, 4] for seqs in by_session.values())


def test_the_same_ids_in_opposite_order_meet_without_a_deadlock(world: World, referee: Referee) -> None:
    factory.an_agent(world.database)
    client = world.client()
    ids = [new_id(RUN) for _ in range(40)]
    tenants = [f"t{number}" for number in range(40)]
    mine = requests([""] * 40, ids, tenants)
    first, second = cross(referee, lambda: client.enqueue_many(mine), lambda: client.enqueue_many(mine[::-1]))
    assert [item.id for item in first] == ids
    assert {item.id: item.fresh for item in first} == {item.id: not item.fresh for item in second}


def test_a_conversation_full_of_work_is_no_knot(world: World, referee: Referee) -> None:
    """Joins, ends, cancels, decisions and lapses of one session at once."""
    factory.an_agent(world.database)
    client, database = world.client(), world.database
    for round_ in range(4):
        key = f"talk {round_}"
        waits = factory.a_paused_run(database, session=key)
        held = factory.a_running_run(database, session=key)
        ready = factory.a_run(database, session=key)
        cross(
            referee,
            lambda key=key: client.enqueue_many(requests([key, f"{key} aside"])),
            lambda key=key: client.enqueue_many(requests([f"{key} aside", key])),
            lambda waits=waits: client.decide(asked(world, waits), approved=True),
            lambda held=held: by_holder("complete")(world, held),
            lambda ready=ready: client.cancel(ready["id"]),
            lambda held=held: database.run(lambda unit: turns.recompute(unit, held["session_id"])),
        )
        rows = world.rows(tables.runs, tables.runs.c.session_id == held["session_id"])
        turn_ = [row for row in rows if row["state"] == "ready" and row["wait_reason"] is None]
        assert [row["id"] for row in turn_] == [waits["id"]], "the answered run goes first"


def test_a_watchdog_and_those_who_join_do_not_wait_for_each_other(world: World, referee: Referee) -> None:
    factory.an_agent(world.database)
    client, database = world.client(), world.database
    held = [factory.a_running_run(database, session=f"talk {number}") for number in range(20)]
    terms = [factory.term_of(run) for run in held]
    keys = [f"talk {number}" for number in range(20)]

    def hand_off() -> set[str]:
        moved: set[str] = set()
        for _ in range(1000):
            if len(moved) == len(held):
                break
            rows = database.run(lambda unit: leases.hand_off_all(unit, factory.OWNER, terms, factory.OWNER))
            moved |= {row["id"] for row in rows}
        return moved

    moved, *_ = cross(
        referee,
        hand_off,
        lambda: client.enqueue_many(requests(keys)),
        lambda: client.enqueue_many(requests(keys[::-1])),
    )
    assert moved == {run["id"] for run in held}

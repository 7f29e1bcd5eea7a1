"""What a run costs: its transactions by the formula, its bytes, and no connection while it thinks or acts."""

import statistics
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from cortex_workers import ToolContext
from cortex_workers.embedded import PostgresNode
from cortex_workers.host import Happened
from cortex_workers.llm.scripted import turn_index
from cortex_workers.schemas.ids import RUN, new_id
from cortex_workers.schemas.llm import ModelRequest
from tests.contract.recorder import Recorder, recording
from tests.engine.world import Worker, World, at, call, say, turn

# One letter a call: s may run again, u may not, a needs an approval (and may not).
TOOLS = {"s": ("find", {"order": "1"}), "u": ("ship", {"order": "1"}), "a": ("pay", {"amount": 1})}

ENQUEUE = CLAIM = FINISH = TURN_COMMIT = PAUSE = ANSWER = LAPSE = 1


def script(turns: Sequence[str]) -> list[dict[str, Any]]:
    """A model that asks for these turns and then answers."""
    asked = [turn(*(call(TOOLS[kind][0], **TOOLS[kind][1]) for kind in calls)) for calls in turns]
    return [*asked, say()]


def dispatched(calls: str, recorded: bool) -> int:
    """Transactions of calls that run one after the other; ``recorded``: the first start record is stored already."""
    count = 0
    for index, kind in enumerate(calls):
        if kind == "s":
            continue
        carried = recorded if index == 0 else calls[index - 1] != "s"
        count += (0 if carried else 1) + 1
    return count


def of_turn(calls: str) -> int:
    """Transactions of one turn, its pause and what follows it included."""
    before = "".join(kind for kind in calls if kind != "a")
    waiting = "u" * calls.count("a")
    if not waiting:
        return TURN_COMMIT + dispatched(before, recorded=True)
    pause = PAUSE + (TURN_COMMIT + dispatched(before, recorded=True) if before else 0)
    return pause + ANSWER + CLAIM + dispatched(waiting, recorded=False)


def formula(turns: Sequence[str]) -> int:
    """Ruling 2."""
    return ENQUEUE + CLAIM + FINISH + sum(of_turn(calls) for calls in turns)


class Counted:
    """A worker and a client whose transactions are counted, two ways."""

    def __init__(self, world: World, recorder: Recorder, worker: Worker, client: Any) -> None:
        self.world, self.recorder, self.worker, self.client = world, recorder, worker, client
        self._databases = [worker.rt.database, client.runtime.database]
        self._began = self._commits()

    def _commits(self) -> int:
        return sum(database.transactions for database in self._databases)

    @property
    def transactions(self) -> int:
        """What was written, in how many transactions; those that only read are not meant."""
        return self.recorder.writing

    def check_counter(self) -> None:
        """The database's own counter agrees: every transaction that was opened wrote something."""
        assert self._commits() - self._began == self.recorder.writing

    def run(self, session: str | None = None, approved: bool = True) -> Any:
        """A run to its end; whatever is asked on the way is approved, or not."""
        made = self.client.enqueue("support", "hello", session=session)
        row = self.worker.finish(made.id)
        while row["state"] == "paused":
            (asked,) = self.client.checkpoints(run_id=made.id)
            self.client.decide(asked.id, approved=approved)
            row = self.world.run(made.id)
            if row["state"] == "ready":
                row = self.worker.finish(made.id)
        return row


@pytest.fixture
def counted(fresh_world: World, request: pytest.FixtureRequest) -> Iterator[Counted]:
    """What ``turns``, ``options`` and ``settings`` of the test say, with its transactions counted."""
    given = {"turns": [], "options": {}, "settings": {}, **getattr(request, "param", {})}
    world = fresh_world
    world.shop(script(given["turns"]), **given["options"])
    worker, client = world.worker(**given["settings"]), world.client()
    client.enqueue("support", "warm up")
    with recording(worker.rt.database, client.runtime.database) as recorder:
        yield Counted(world, recorder, worker, client)


def with_turns(*turns: str, **more: Any) -> dict[str, Any]:
    return {"turns": turns, **more}


SCRIPTS = [
    [], ["s"], ["u"], ["ss"], ["uu"], ["su"], ["us"], ["susu"], ["usuus"], ["s", "u", "su"], ["uuu", "s"],
    ["a"], ["aa"], ["sa"], ["ua"], ["as"], ["usaua"], ["a", "s", "a"],
]  # fmt: skip


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "in a conversation"])
@pytest.mark.parametrize(
    ("counted", "turns"),
    [pytest.param(with_turns(*turns), turns, id="-".join(turns) or "answer") for turns in SCRIPTS],
    indirect=["counted"],
)
def test_a_run_costs_what_the_formula_says(counted: Counted, turns: list[str], shared: bool) -> None:
    row = counted.run(session=new_id(RUN) if shared else None)
    assert row["state"] == "completed"
    assert counted.transactions == formula(turns)
    counted.check_counter()


def test_the_formula_is_the_one_of_the_book() -> None:
    assert formula([]) == 3
    assert [formula([calls]) - 3 for calls in ("s", "u", "uu", "su", "susu")] == [1, 2, 3, 3, 5]
    # The pause is the turn commit when nothing of the turn can be dispatched.
    assert of_turn("sa") - of_turn("a") == 1


@pytest.mark.parametrize("counted", [with_turns("a")], indirect=True)
def test_a_rejection_that_ends_the_run_is_one_transaction(counted: Counted) -> None:
    assert counted.run(approved=False)["state"] == "failed"
    assert counted.transactions == ENQUEUE + CLAIM + PAUSE + ANSWER


@pytest.mark.parametrize(
    "counted", [with_turns("a", options={"on_rejection": "return_to_model"})], indirect=True
)
def test_a_rejection_that_the_model_reads_travels_with_what_follows(counted: Counted) -> None:
    assert counted.run(approved=False)["state"] == "completed"
    assert counted.transactions == ENQUEUE + CLAIM + PAUSE + ANSWER + CLAIM + FINISH


@pytest.mark.parametrize("counted", [with_turns("s", "s", "s", settings={"slice_steps": 1})], indirect=True)
def test_a_slice_costs_its_end_and_a_claim(counted: Counted) -> None:
    assert counted.run()["state"] == "completed"
    slices = 3
    assert counted.transactions == formula(["s", "s", "s"]) + 2 * slices


@pytest.mark.parametrize("counted", [with_turns("s", "s", settings={"phase_commit_s": 0.0})], indirect=True)
def test_a_long_tool_phase_stores_its_results_at_once(counted: Counted) -> None:
    assert counted.run()["state"] == "completed"
    assert counted.transactions == formula(["s", "s"]) + 2


@pytest.mark.parametrize("counted", [with_turns("u")], indirect=True)
def test_a_hand_off_is_one_transaction_and_takes_the_record_back_in_it(counted: Counted) -> None:
    made = counted.client.enqueue("support", "hello")
    with at("tool.after_start_record", counted.worker.rt.drain.set):
        assert counted.worker.work(made.id)["state"] == "reclaimable"
    assert counted.transactions == ENQUEUE + CLAIM + TURN_COMMIT + 1
    assert counted.world.call(made.id)["state"] == "pending"


@pytest.mark.parametrize("counted", [with_turns("u")], indirect=True)
def test_an_uncertain_effect_costs_its_question_and_its_answer(counted: Counted) -> None:
    made = counted.client.enqueue("support", "hello")
    counted.worker.lose_at("tool.after_handler", made.id)
    assert counted.transactions == ENQUEUE + CLAIM + TURN_COMMIT + LAPSE
    assert counted.worker.finish(made.id)["state"] == "paused"
    (asked,) = counted.client.checkpoints(run_id=made.id)
    counted.client.settle(asked.id, "happened", result="shipped")
    assert counted.worker.finish(made.id)["state"] == "completed"
    more = CLAIM + PAUSE + ANSWER + CLAIM + FINISH
    assert counted.transactions == ENQUEUE + CLAIM + TURN_COMMIT + LAPSE + more


@pytest.mark.parametrize("counted", [with_turns("s")], indirect=True)
def test_a_thousand_runs_are_stored_in_one_transaction(counted: Counted) -> None:
    from cortex_workers.schemas.run import EnqueueRun

    requests = [EnqueueRun(agent="support", input=str(number), scope="tenant=acme") for number in range(1001)]
    assert len(counted.client.enqueue_many(requests)) == 1001
    assert counted.transactions == 2


# --- Bytes --------------------------------------------------------------------------------------------------------


def test_a_late_step_writes_as_much_as_an_early_one(own_postgres: PostgresNode) -> None:
    """On a server of its own, where nobody else writes: the log's growth from one model call to the next."""
    steps, world = 205, World(own_postgres.url)
    positions: dict[int, int] = {}

    def answer(request: ModelRequest) -> dict[str, Any]:
        step = turn_index(request.messages)
        with world.database.read() as unit:
            positions[step] = int(unit.scalar(text("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn")))
        return turn(call("find", order="1" * 500), call("ship", order="2" * 500)) if step < steps else say()

    try:
        world.shop(answer, max_steps=steps + 1)
        worker = world.worker(slice_steps=10_000)
        with world.database.read() as unit:
            unit.execute(text("checkpoint"))
        assert worker.work(world.client().enqueue("support", "hello").id)["state"] == "completed"
    finally:
        world.close()
    written = {step: positions[step + 1] - positions[step] for step in range(steps)}
    early = statistics.median(written[step] for step in range(2, 11))
    late = statistics.median(written[step] for step in range(195, 204))
    assert early > 2_000, "the payloads of a step are not in it"
    assert late == pytest.approx(early, rel=0.1)


# --- Connections --------------------------------------------------------------------------------------------------


def test_no_connection_is_held_while_a_model_or_a_tool_works(fresh_world: World) -> None:
    world, held = fresh_world, dict[str, int]()
    workers: list[Worker] = []

    def look(who: str) -> None:
        held[who] = max(held.get(who, 0), workers[0].rt.database.engine.pool.checkedout())  # type: ignore[attr-defined]

    def answer(request: ModelRequest) -> dict[str, Any]:
        look("model, streamed")
        turns = [turn(call("slow"), call("wait")), turn(call("send")), say()]
        return turns[turn_index(request.messages)]

    @world.host.tool(retry_safe=True)
    def slow(ctx: ToolContext) -> str:
        look("tool that may run again")
        return "done"

    @world.host.tool(timeout=timedelta(seconds=30))
    async def wait(ctx: ToolContext) -> str:
        look("async tool with a timeout")
        return "done"

    @world.host.tool(needs_approval=True)
    def send(ctx: ToolContext) -> str:
        look("approved tool")
        return "done"

    @send.lookup
    def sent(ctx: ToolContext) -> Happened:
        look("lookup")
        return Happened("done")

    world.shop(answer, tools=["slow", "wait", "send"], stream=True)
    workers.append(world.worker())
    client = world.client()
    made = client.enqueue("support", "hello")
    assert workers[0].finish(made.id)["state"] == "paused"
    client.decide(client.checkpoints(run_id=made.id)[0].id, approved=True)
    workers[0].lose_at("tool.after_handler", made.id)
    assert workers[0].finish(made.id)["state"] == "completed"
    assert held == dict.fromkeys(
        [
            "model, streamed",
            "tool that may run again",
            "async tool with a timeout",
            "approved tool",
            "lookup",
        ],
        0,
    )

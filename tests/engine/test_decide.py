"""Deciding a pause: once, by whoever comes first, and nothing else can make a call run."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import event

from cortex_workers import Client
from cortex_workers.engine import expire, slot
from cortex_workers.errors import (
    CheckpointNotFound,
    CortexError,
    InvalidArgument,
    InvalidDecision,
    InvalidId,
    InvalidState,
    NotContinuable,
    Stopping,
    StoreUnavailable,
    SuspensionExpired,
    UnstorableText,
)
from cortex_workers.schemas.checkpoint import Checkpoint
from cortex_workers.schemas.ids import CHECKPOINT, RUN, new_id
from cortex_workers.store import tables
from tests.engine.world import World, call, error_of, only, say, turn

PAY = [turn(call("pay", amount=5)), say("Done.")]


def paused(world: World, script: Any = None, **options: Any) -> tuple[Client, str, str]:
    """A run that waits for approval: a client, the run, the checkpoint."""
    world.shop(script or PAY, **options)
    worker, client = world.worker(), world.client()
    run_id = client.enqueue("support", "Pay 5").id
    assert worker.work(run_id)["state"] == "paused"
    return client, run_id, only(client.checkpoints()).id


def test_an_approval_makes_the_run_ready_and_runs_nothing(world: World) -> None:
    client, run_id, checkpoint_id = paused(world)
    world.told.clear()
    decided = client.decide(checkpoint_id, approved=True, reason="fine", decided_by="The boss")
    run = world.run(run_id)
    assert (run["state"], run["instruction"], run["queue_class"]) == ("ready", "answer", "begun")
    assert (decided.state, decided.closed_as) == ("resolved", "decided")
    assert decided.decision is not None
    assert (decided.decision.approved, decided.decision.reason) == (True, "fine")
    assert decided.decided_at is not None
    assert world.notified(run_id) == ["RunReady", "CheckpointResolved"] or world.notified(run_id) == [
        "CheckpointResolved",
        "RunReady",
    ]
    assert (len(world.model.requests), world.effects) == (1, [])
    assert world.pauses(run_id)[0]["ended_as"] == "answered"
    assert client.checkpoints() == []


def test_the_approved_call_runs_once_and_the_run_ends(world: World) -> None:
    client, run_id, checkpoint_id = paused(world)
    client.decide(checkpoint_id, approved=True)
    run = world.worker().work(run_id)
    assert (run["state"], run["output"], len(world.effects)) == ("completed", "Done.", 1)
    (verdict,) = world.rows(tables.adjudications)
    assert (verdict["outcome"], verdict["disposition"], verdict["authority"]) == (
        "granted",
        "authorized",
        "person",
    )


def test_a_rejection_fails_the_run_with_the_deciders_words(world: World) -> None:
    client, run_id, checkpoint_id = paused(world)
    client.decide(checkpoint_id, approved=False, reason="too much")
    run = world.run(run_id)
    assert (run["state"], run["error_code"]) == ("failed", "checkpoint_rejected")
    assert run["error_text"] == "checkpoint rejected: too much"
    assert world.call(run_id)["state"] == "denied"
    assert world.pauses(run_id)[0]["ended_as"] == "rejected"
    assert sorted(world.notified(run_id)[-2:]) == ["CheckpointResolved", "RunFailed"]
    assert world.effects == []
    (verdict,) = world.rows(tables.adjudications)
    assert (verdict["outcome"], verdict["disposition"]) == ("denied", "refused_by_operator")


def test_a_rejection_without_words_says_that_there_are_none(world: World) -> None:
    client, run_id, checkpoint_id = paused(world)
    client.decide(checkpoint_id, approved=False)
    assert world.run(run_id)["error_text"] == "checkpoint rejected: no reason given"


def test_a_rejection_may_go_back_to_the_model(world: World) -> None:
    client, run_id, checkpoint_id = paused(world, on_rejection="return_to_model")
    client.decide(checkpoint_id, approved=False, reason="too much", decided_by="The boss")
    assert world.run(run_id)["state"] == "ready"
    run = world.worker().work(run_id)
    assert (run["state"], world.effects) == ("completed", [])
    assert error_of(world.messages(run_id)[1]) == "rejected by The boss: too much"
    assert world.call(run_id)["state"] == "denied"


def test_a_rejection_of_many_calls_answers_each_of_them(world: World) -> None:
    client, run_id, checkpoint_id = paused(
        world,
        [turn(call("pay", amount=1), call("pay", amount=2)), say("Done.")],
        on_rejection="return_to_model",
    )
    client.decide(checkpoint_id, approved=False, reason="no")
    assert world.worker().work(run_id)["state"] == "completed"
    assert [row["state"] for row in world.calls(run_id)] == ["denied", "denied"]


# --- Changed arguments -----------------------------------------------------------------------------------------------


def test_changed_arguments_are_what_runs_and_the_record_has_both(world: World) -> None:
    client, run_id, checkpoint_id = paused(world)
    client.decide(checkpoint_id, approved=True, amended_arguments={"amount": 3}, decided_by="The boss")
    world.worker().work(run_id)
    assert [effect.arguments for effect in world.effects] == [{"amount": 3, "currency": "EUR"}]
    row = world.call(run_id)
    assert (row["executed_args"], row["amended_by"]) == ('{"amount": 3}', "The boss")
    assert world.messages(run_id)[0].tool_calls[0].arguments == '{"amount": 5}'


def test_changed_arguments_of_a_safe_tool_are_recorded_too(world: World) -> None:
    @world.host.tool(retry_safe=True, needs_approval=True)
    def peek(order: str) -> str:
        """Look at an order."""
        return f"order {order}"

    client, run_id, checkpoint_id = paused(world, [turn(call("peek", order="1")), say()])
    client.decide(checkpoint_id, approved=True, amended_arguments={"order": "2"})
    run = world.worker().work(run_id)
    assert world.call(run_id)["executed_args"] == '{"order": "2"}'
    assert "order 2" in run["output"]


@pytest.mark.parametrize("outcome", ["it returns", "it fails"])
def test_the_model_is_told_what_ran_and_by_whom_it_was_changed(world: World, outcome: str) -> None:
    """Bug case C24: a model that does not see the change asks for the first call again."""
    mails: list[str] = []

    @world.host.tool(needs_approval=True)
    def send_mail(to: str) -> str:
        """Send a mail."""
        mails.append(to)
        if outcome == "it fails":
            raise ConnectionError("no answer")
        return "sent"

    def script(request: Any) -> dict[str, Any]:
        told = [message.content for message in request.messages if message.role == "tool"]
        return say("Done.") if any("team" in text for text in told) else turn(call("send_mail", to="all"))

    client, run_id, checkpoint_id = paused(world, script)
    client.decide(checkpoint_id, approved=True, amended_arguments={"to": "team"}, decided_by="The boss")
    assert world.worker().work(run_id)["state"] == "completed"
    assert mails == ["team"]
    told = world.messages(run_id)[1].content
    assert "team" in told
    assert "The boss" in told


def test_changed_arguments_of_a_rejection_are_dropped(world: World) -> None:
    client, _run_id, checkpoint_id = paused(world)
    decided = client.decide(checkpoint_id, approved=False, amended_arguments={"amount": 3})
    assert decided.decision is not None
    assert decided.decision.amended_arguments is None
    # So the same words again are the same decision.
    assert client.decide(checkpoint_id, approved=False, amended_arguments={"amount": 3}) == decided


WRONG: list[tuple[str, dict[str, Any], type[CortexError]]] = [
    ("a list", {"amended_arguments": [1]}, InvalidDecision),
    ("a text", {"amended_arguments": '{"amount": 1}'}, InvalidDecision),
    ("a missing parameter", {"amended_arguments": {"currency": "EUR"}}, InvalidDecision),
    ("a wrong type", {"amended_arguments": {"amount": "much"}}, InvalidDecision),
    ("an unknown parameter", {"amended_arguments": {"amount": 1, "colour": "red"}}, InvalidDecision),
    ("NaN", {"amended_arguments": {"amount": float("nan")}}, InvalidDecision),
    ("number keys", {"amended_arguments": {"amount": 1, 2: 3}}, InvalidDecision),
    ("no JSON", {"amended_arguments": {"amount": object()}}, InvalidDecision),
    ("NUL in arguments", {"amended_arguments": {"amount": 1, "currency": "\x00"}}, UnstorableText),
    ("NUL in the reason", {"reason": "a\x00"}, UnstorableText),
    ("half a character in a name", {"decided_by": "\ud800"}, UnstorableText),
    ("a long reason", {"reason": "x" * 10_001}, InvalidDecision),
    ("a reason that is no text", {"reason": 5}, InvalidArgument),
    ("a mechanism", {"decided_by": "cortex:sweeper"}, InvalidDecision),
    ("no verdict", {"approved": None}, InvalidDecision),
    ("a word for a verdict", {"approved": "false"}, InvalidDecision),
    ("a principal without a codec", {"principal": {"user": "ada"}}, InvalidArgument),
]


def test_a_decision_that_is_wrong_in_itself_moves_nothing(world: World, subtests: pytest.Subtests) -> None:
    client, _run_id, checkpoint_id = paused(world)
    before = world.snapshot()
    for name, wrong, error in WRONG:
        with subtests.test(name):
            with pytest.raises(error):
                client.decide(checkpoint_id, **{"approved": True, **wrong})
            assert world.snapshot() == before
    assert client.decide(checkpoint_id, approved=True).closed_as == "decided"


def test_one_set_of_arguments_does_not_fit_two_calls(world: World) -> None:
    client, _run_id, checkpoint_id = paused(
        world, [turn(call("pay", amount=1), call("pay", amount=2)), say("Done.")]
    )
    before = world.snapshot()
    with pytest.raises(InvalidDecision, match="exactly one call"):
        client.decide(checkpoint_id, approved=True, amended_arguments={"amount": 3})
    assert world.snapshot() == before


def test_a_client_whose_actor_is_a_mechanism_cannot_decide(world: World) -> None:
    _client, _run_id, checkpoint_id = paused(world)
    with pytest.raises(InvalidDecision):
        world.client(actor="cortex:timer").decide(checkpoint_id, approved=True)


def test_a_checkpoint_that_is_not_there_is_not_decided(world: World, subtests: pytest.Subtests) -> None:
    client, _run_id, _ = paused(world)
    before = world.snapshot()
    for checkpoint_id in ("17", "", new_id(RUN), new_id(CHECKPOINT)):
        error = CheckpointNotFound if checkpoint_id.startswith(f"{CHECKPOINT}_") else InvalidId
        with subtests.test(checkpoint_id):
            with pytest.raises(error):
                client.decide(checkpoint_id, approved=True)
            with pytest.raises(error):
                client.checkpoint(checkpoint_id)
    assert world.snapshot() == before


# --- Repeats and races -----------------------------------------------------------------------------------------------


def test_the_same_decision_again_returns_what_was_recorded(world: World) -> None:
    client, run_id, checkpoint_id = paused(world)
    first = client.decide(checkpoint_id, approved=True, reason="fine", amended_arguments={"amount": 3})
    before = world.snapshot()
    again = world.client(actor="somebody else")
    assert again.decide(checkpoint_id, approved=True, reason="fine", amended_arguments={"amount": 3}) == first
    assert world.snapshot() == before
    world.worker().work(run_id)
    assert (
        client.decide(checkpoint_id, approved=True, reason="fine", amended_arguments={"amount": 3}) == first
    )
    assert len(world.effects) == 1


@pytest.mark.parametrize(
    "other",
    [{"approved": False}, {"reason": "other"}, {"amended_arguments": {"amount": 4}}],
    ids=["verdict", "reason", "arguments"],
)
def test_another_decision_is_refused_and_told_the_first(world: World, other: dict[str, Any]) -> None:
    client, _run_id, checkpoint_id = paused(world)
    client.decide(checkpoint_id, approved=True, reason="fine")
    before = world.snapshot()
    with pytest.raises(InvalidState, match="approved") as refused:
        client.decide(checkpoint_id, **{"approved": True, "reason": "fine", **other})
    assert refused.value.data["recorded"].reason == "fine"
    assert world.snapshot() == before


def race(*attempts: Callable[[], Any]) -> list[Any]:
    """All at one instant; what each came to, an error included."""
    start = threading.Barrier(len(attempts))

    def run(attempt: Callable[[], Any]) -> Any:
        start.wait()
        try:
            return attempt()
        except CortexError as error:
            return error

    with ThreadPoolExecutor(len(attempts)) as pool:
        return list(pool.map(run, attempts))


def test_twenty_equal_decisions_at_one_instant_are_one(world: World) -> None:
    """Bug case C01."""
    client, run_id, checkpoint_id = paused(world)
    clients = [client, world.client()]
    world.told.clear()
    found = race(*(lambda n=n: clients[n % 2].decide(checkpoint_id, approved=True) for n in range(16)))
    assert len({item.model_dump_json() for item in found if isinstance(item, Checkpoint)}) == 1
    assert all(isinstance(item, Checkpoint) for item in found)
    assert Counter(world.notified(run_id)) == {"RunReady": 1, "CheckpointResolved": 1}
    assert len(world.rows(tables.adjudications)) == 1
    worker = world.worker()
    assert worker.work(run_id)["state"] == "completed"
    assert len(world.effects) == 1
    assert [client.decide(checkpoint_id, approved=True) for _ in range(5)] == [found[0]] * 5


def test_of_an_approval_and_a_rejection_at_one_instant_one_wins(world: World) -> None:
    client, run_id, checkpoint_id = paused(world)
    for _ in range(4):
        world.told.clear()
        clients = [client, world.client()]
        found = race(
            lambda c=clients, i=checkpoint_id: c[0].decide(i, approved=True),
            lambda c=clients, i=checkpoint_id: c[1].decide(i, approved=False),
        )
        (won,) = [item for item in found if isinstance(item, Checkpoint)]
        (lost,) = [item for item in found if isinstance(item, CortexError)]
        assert isinstance(lost, InvalidState)
        assert won.decision is not None
        assert lost.data["recorded"] == won.decision
        assert world.notified(run_id).count("CheckpointResolved") == 1
        paid = len(world.effects)
        if won.decision.approved:
            assert world.worker().work(run_id)["state"] == "completed"
        assert world.run(run_id)["state"] == ("completed" if won.decision.approved else "failed")
        assert len(world.effects) - paid == int(won.decision.approved)
        run_id = client.enqueue("support", "Again").id
        world.worker().work(run_id)
        checkpoint_id = only(client.checkpoints()).id


def test_of_a_decision_and_a_cancel_at_one_instant_the_run_agrees_with_both_answers(world: World) -> None:
    client, run_id, checkpoint_id = paused(world)
    other = world.client()
    for _ in range(4):
        decided, cancelled = race(
            lambda i=checkpoint_id: client.decide(i, approved=True), lambda r=run_id: other.cancel(r)
        )
        run = world.run(run_id)
        # A cancel that came second ends what the decision had made ready.
        assert run["state"] == "cancelled", (decided, cancelled)
        assert (
            world.rows(tables.checkpoints, tables.checkpoints.c.id == checkpoint_id)[0]["state"] == "resolved"
        )
        if isinstance(decided, CortexError):
            assert isinstance(decided, InvalidState)
        run_id = client.enqueue("support", "Again").id
        world.worker().work(run_id)
        checkpoint_id = only(client.checkpoints()).id
    assert world.effects == []


def test_of_a_decision_and_the_expiry_one_wins(world: World) -> None:
    client, run_id, checkpoint_id = paused(world)
    worker = world.worker()
    for overdue in (False, True, False, True):
        suspension_id = world.run(run_id)["suspension_id"]
        if overdue:
            world.sql(
                "update suspensions set expires_at = clock_timestamp() where id = :id", id=suspension_id
            )
        found = race(
            lambda i=checkpoint_id: client.decide(i, approved=True),
            lambda s=suspension_id: expire.expire_pause(worker.rt, s),
        )
        if overdue:
            assert isinstance(found[0], SuspensionExpired | InvalidState)
            assert (found[1], world.run(run_id)["state"]) == (True, "failed")
        else:
            assert (found[1], world.run(run_id)["state"]) == (False, "ready")
        run_id = client.enqueue("support", "Again").id
        worker.work(run_id)
        checkpoint_id = next(item.id for item in client.checkpoints() if item.run_id == run_id)


@pytest.mark.invariant("I3")
def test_a_decision_that_comes_while_the_approved_call_runs_is_refused(world: World) -> None:
    answers: list[Any] = []

    @world.host.tool(needs_approval=True)
    def slow(amount: int) -> str:
        """Take your time."""
        for approved in (True, False):
            try:
                answers.append(client.decide(checkpoint_id, approved=approved).closed_as)
            except InvalidState as error:
                answers.append(error.code)
        return "paid"

    client, run_id, checkpoint_id = paused(world, [turn(call("slow", amount=1)), say("Done.")])
    client.decide(checkpoint_id, approved=True)
    assert world.worker().work(run_id)["state"] == "completed"
    assert answers == ["decided", "invalid_state"]


def test_after_the_deadline_nothing_is_decided_and_the_sweep_comes(world: World) -> None:
    client, run_id, checkpoint_id = paused(world)
    world.later(7 * 86_400 + 1)
    before = world.snapshot()
    for approved in (True, False):
        with pytest.raises(SuspensionExpired, match="deadline"):
            client.decide(checkpoint_id, approved=approved)
    assert world.snapshot() == before
    assert world.run(run_id)["state"] == "paused"


def test_what_is_not_paused_any_more_is_not_decided(world: World) -> None:
    """Bug case C46."""
    client, run_id, checkpoint_id = paused(world)
    client.cancel(run_id)
    with pytest.raises(InvalidState, match="cancelled"):
        client.decide(checkpoint_id, approved=True)
    assert slot.claim_named(world.worker().rt, run_id) is None
    assert world.effects == []


# --- A half of a decision --------------------------------------------------------------------------------------------


def forget_the_record(world: World, checkpoint_id: str, adjudications: bool = False) -> None:
    """What a store with two writes would leave between them."""
    world.sql(
        "update checkpoints set state = 'pending', closed_as = null, decision = null, decided_at = null"
        " where id = :id",
        id=checkpoint_id,
    )
    if adjudications:
        world.sql("delete from adjudications where checkpoint_id = :id", id=checkpoint_id)


@pytest.mark.parametrize("adjudications", [False, True])
def test_a_decision_whose_recording_was_lost_is_completed_by_the_same_one(
    world: World, adjudications: bool
) -> None:
    client, run_id, checkpoint_id = paused(world)
    client.decide(checkpoint_id, approved=True, reason="fine")
    forget_the_record(world, checkpoint_id, adjudications)
    again = client.decide(checkpoint_id, approved=True, reason="fine")
    assert again.closed_as == "decided"
    assert len(world.rows(tables.adjudications)) == 1
    assert world.worker().work(run_id)["state"] == "completed"
    assert len(world.effects) == 1


@pytest.mark.parametrize("adjudications", [False, True])
def test_another_decision_does_not_complete_it(world: World, adjudications: bool) -> None:
    client, run_id, checkpoint_id = paused(world)
    client.decide(checkpoint_id, approved=True, reason="fine")
    forget_the_record(world, checkpoint_id, adjudications)
    before = world.snapshot()
    with pytest.raises(InvalidState):
        client.decide(checkpoint_id, approved=False)
    assert world.snapshot() == before
    assert world.run(run_id)["state"] == "ready"


def test_a_decision_whose_run_was_claimed_meanwhile_is_recorded_and_refused(world: World) -> None:
    client, run_id, checkpoint_id = paused(world)
    client.decide(checkpoint_id, approved=True)
    forget_the_record(world, checkpoint_id)
    claimed = world.worker().claim(run_id)
    with pytest.raises(InvalidState, match="claimed"):
        client.decide(checkpoint_id, approved=True)
    decided = client.checkpoint(checkpoint_id)
    assert decided.decision is not None
    assert decided.decision.approved
    world.worker().go_on(claimed)
    assert len(world.effects) == 1


@pytest.mark.invariant("I3")
@pytest.mark.parametrize("approved", [True, False])
def test_a_checkpoint_whose_run_waits_on_another_pause_is_closed_and_that_pause_is_left_alone(
    world: World, approved: bool
) -> None:
    client, run_id, checkpoint_id = paused(
        world, [turn(call("pay", amount=1)), turn(call("pay", amount=2)), say("Done.")]
    )
    client.decide(checkpoint_id, approved=True)
    world.worker().work(run_id)
    newer = only(client.checkpoints())
    forget_the_record(world, checkpoint_id)
    before = (world.run(run_id), world.pauses(run_id))
    with pytest.raises(InvalidState):
        client.decide(checkpoint_id, approved=approved)
    assert client.checkpoint(checkpoint_id).closed_as == "superseded"
    assert only(client.checkpoints()) == newer
    assert (world.run(run_id), world.pauses(run_id)) == before


def test_an_answer_outlives_the_worker_that_was_to_carry_it_out(world: World) -> None:
    client, run_id, checkpoint_id = paused(world)
    client.decide(checkpoint_id, approved=True)
    worker = world.worker()
    worker.lose_at("claim.after_commit", run_id)
    run = world.run(run_id)
    assert (run["state"], run["instruction"], run["reclaim_count"]) == ("reclaimable", "answer", 1)
    assert worker.work(run_id)["state"] == "completed"
    assert len(world.effects) == 1


# --- A connection that is cut ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("committed", [True, False])
def test_a_decision_whose_commit_is_not_known_is_decided_once_or_not_at_all(
    world: World, committed: bool
) -> None:
    """Bug case C14: the connection is lost while the client waits for the commit."""
    client, run_id, checkpoint_id = paused(world)
    engine = client.runtime.database.engine

    def lose(connection: Any) -> None:
        real = connection.connection.driver_connection
        if committed:
            real.commit()
            real.execute("select 1")
        world.sql("select pg_terminate_backend(:pid, 5000)", pid=real.info.backend_pid)

    event.listen(engine, "commit", lose)
    try:
        with pytest.raises(StoreUnavailable):
            client.decide(checkpoint_id, approved=True)
    finally:
        event.remove(engine, "commit", lose)
    run = world.run(run_id)
    assert run["state"] == ("ready" if committed else "paused")
    assert client.checkpoint(checkpoint_id).state == ("resolved" if committed else "pending")
    again = client.decide(checkpoint_id, approved=True)
    assert again.closed_as == "decided"
    assert world.worker().work(run_id)["state"] == "completed"
    assert len(world.effects) == len(world.rows(tables.adjudications)) == 1


# --- Resolve ---------------------------------------------------------------------------------------------------------


def test_resolve_decides_and_goes_on_here(world: World) -> None:
    _client, run_id, checkpoint_id = paused(world)
    host = world.client(host=world.host)
    run = host.resolve(checkpoint_id, approved=True, amended_arguments={"amount": 2})
    assert (run.id, run.state, run.output) == (run_id, "completed", "Done.")
    assert world.effects[0].arguments["amount"] == 2


def test_resolve_of_a_rejection_returns_the_failed_run(world: World) -> None:
    _client, _run_id, checkpoint_id = paused(world)
    run = world.client(host=world.host).resolve(checkpoint_id, approved=False, reason="no")
    assert (run.state, run.error_text) == ("failed", "checkpoint rejected: no")


def test_resolve_records_nothing_while_its_process_drains(world: World) -> None:
    _client, run_id, checkpoint_id = paused(world)
    host = world.client(host=world.host)
    host.runtime.drain.set()
    before = world.snapshot()
    for verb in (
        lambda: host.resolve(checkpoint_id, approved=True),
        lambda: host.run("support", "Go"),
        lambda: host.continue_run(run_id),
    ):
        with pytest.raises(Stopping):
            verb()
    assert {**world.snapshot(), "agent_versions": 0} == {**before, "agent_versions": 0}


def test_resolve_whose_run_was_taken_by_somebody_quicker_says_so(world: World) -> None:
    _client, run_id, checkpoint_id = paused(world)
    host, worker = world.client(host=world.host), world.worker()
    taken: list[Any] = []
    host.runtime.hooks.subscribe(lambda told: taken.append(worker.claim(told.run_id)), "RunReady")
    with pytest.raises(NotContinuable):
        host.resolve(checkpoint_id, approved=True)
    worker.go_on(taken[0])
    assert (world.run(run_id)["state"], len(world.effects)) == ("completed", 1)

"""Peers elsewhere and hand-offs: foreign code is called between two transactions, by one worker at a time."""

from collections.abc import Iterator
from typing import Any

import pytest

from cortex_workers.ports import Admitted, Assignment, Deferred, Rejected
from cortex_workers.store import tables
from cortex_workers.sweep import frame
from tests.engine.peer import HttpTransport, Peer, a_peer
from tests.engine.talking import ANSWERS, Talk, ask, deliveries, send
from tests.engine.world import World, dying_at, say, turn

ASKS = [turn(ask("pricing@paris")), say("It is {last_result}")]


@pytest.fixture
def peer() -> Iterator[Peer]:
    with a_peer() as peer:
        yield peer


def talking(world: World, peer: Peer, script: Any = None, **more: Any) -> Talk:
    return Talk(
        world, {"sales": script or ASKS, "pricing": ANSWERS}, transports=[HttpTransport(peer)], **more
    )


def only(talk: Talk) -> dict[str, Any]:
    (row,) = talk.world.rows(deliveries, deliveries.c.kind == "remote")
    return dict(row)


def test_a_peer_elsewhere_is_asked_polled_and_answers(world: World, peer: Peer) -> None:
    """Issue: states and polling through `deliver_a2a`; no worker waits. g34, g88, g89"""
    talk = talking(world, peer)
    run_id = talk.begin("sales")
    assert talk.deliver(only(talk)["id"]) == "await_remote"
    waiting = only(talk)
    assert (waiting["state"], waiting["remote_task_id"]) == ("awaiting_remote", "task-1")
    assert talk.deliver(waiting["id"]) == "nothing", "not before its time"
    world.later(2)
    assert talk.deliver(waiting["id"]) == "await_remote"
    peer.done = True
    world.later(2)
    assert talk.deliver(waiting["id"]) == "answered"
    assert only(talk)["state"] == "delivered"
    assert talk.worker.finish(run_id)["state"] == "completed"
    (item,) = talk.result(run_id)["replies"]
    assert (item["sender"], item["content"]) == ("pricing@paris", "9 EUR")
    assert (len(peer.seen), peer.polls) == (1, 2)
    assert peer.seen[0]["reply_with"] == talk.asked(run_id)[0]["reply_with"]
    assert world.rows(tables.runs, tables.runs.c.agent == "pricing") == [], "never the namesake here"


def test_a_peer_may_answer_at_once(world: World) -> None:
    with a_peer(answers="message") as peer:
        talk = talking(world, peer)
        run_id = talk.begin("sales")
        assert talk.deliver(only(talk)["id"]) == "answered"
        assert talk.worker.finish(run_id)["state"] == "completed"


def test_what_is_only_told_a_peer_is_handed_over(world: World, peer: Peer) -> None:
    peer.answers = "message"
    talk = talking(world, peer, [turn(send("pricing@paris")), say("Sent.")])
    talk.begin("sales")
    assert talk.deliver(only(talk)["id"]) == "answered"
    assert len(talk.said()) == 1, "what a peer says to that is not asked for"


def test_a_busy_peer_is_tried_again_so_many_times(world: World, peer: Peer) -> None:
    """g30, g32: only what has surely begun nothing; then it has failed, visibly, and whoever asked is told."""
    peer.refusals = 99
    talk = talking(world, peer)
    run_id = talk.begin("sales")
    done = []
    for _ in range(7):
        done.append(talk.deliver(only(talk)["id"]))
        world.later(73)
    assert done == ["retry"] * 4 + ["failed", "nothing", "nothing"]
    row = only(talk)
    assert (row["state"], row["fail_code"], row["attempts"]) == ("failed", "exhausted", 5)
    assert peer.seen == []
    assert talk.worker.finish(run_id)["state"] == "completed"
    result = talk.result(run_id)
    assert (result["complete"], result["replies"][0]["performative"]) == (False, "failure")


def test_a_peer_that_fails_is_told_at_once_and_not_tried_again(world: World, peer: Peer) -> None:
    """g34"""
    peer.broken = True
    talk = talking(world, peer)
    run_id = talk.begin("sales")
    assert talk.deliver(only(talk)["id"]) == "failed"
    assert len(peer.seen) == 1
    assert only(talk)["fail_code"] == "transport"
    assert [item.delivery_id for item in talk.heard("MessageRefused")] == [only(talk)["id"]]
    talk.worker.finish(run_id)
    assert "the peer said 500" in talk.result(run_id)["replies"][0]["content"]


def test_a_worker_that_dies_over_a_call_holds_it_up_for_its_lease_only(world: World, peer: Peer) -> None:
    """g25, g26: not touched before; the same delivery id, so the peer knows it again."""
    talk = talking(world, peer)
    talk.begin("sales")
    row = only(talk)
    with dying_at("delivery.after_call"):
        talk.deliver(row["id"])
    assert only(talk)["state"] == "delivering"
    other = world.worker()
    assert talk.deliver(row["id"], other) == "nothing"
    world.later(61)
    assert talk.deliver(row["id"], other) == "await_remote"
    assert [item["delivery"] for item in peer.seen] == [row["id"]] * 2
    assert only(talk)["remote_task_id"] == "task-1"


def test_a_worker_that_was_taken_over_writes_nothing(world: World, peer: Peer) -> None:
    """g26: it wakes up later and its word does not count."""
    talk = talking(world, peer)
    run_id = talk.begin("sales")
    row = only(talk)
    peer.answers = "message"
    transport = world.host.transports[0]
    deliver = transport.deliver

    def slow(*given: Any) -> Any:
        world.later(61)
        transport.deliver = deliver  # type: ignore[method-assign]
        assert talk.deliver(row["id"], world.worker()) == "answered"
        peer.content = "99 EUR"
        return deliver(*given)

    transport.deliver = slow  # type: ignore[method-assign]
    assert talk.deliver(row["id"]) == "nothing"
    talk.worker.finish(run_id)
    assert talk.result(run_id)["replies"][0]["content"] == "9 EUR"
    assert len(talk.said()) == 2


def test_a_message_that_kills_its_workers_is_given_up(world: World, peer: Peer) -> None:
    """b.3: the poison rule."""
    talk = talking(world, peer)
    run_id = talk.begin("sales")
    row = only(talk)
    for _ in range(5):
        with dying_at("delivery.after_call"):
            talk.deliver(row["id"])
        world.sql("update a2a_deliveries set lease_expires_at = now() - interval '1 minute'")
    assert talk.deliver(row["id"]) == "failed"
    assert only(talk)["fail_code"] == "poison"
    assert world.run(run_id)["state"] == "ready"


def test_nobody_asks_a_peer_for_what_nobody_waits_for(world: World, peer: Peer) -> None:
    talk = talking(world, peer)
    run_id = talk.begin("sales")
    talk.deliver(only(talk)["id"])
    world.later(301)
    frame.sweep(talk.worker.rt, ["asks"], by="test", force=True)
    assert talk.deliver(only(talk)["id"]) == "retired"
    assert (only(talk)["state"], peer.polls) == ("retired", 0)
    talk.worker.finish(run_id)
    assert talk.result(run_id)["complete"] is False


def test_a_sweep_calls_nobody_it_announces(world: World, peer: Peer) -> None:
    """ruling 64"""
    talk = talking(world, peer)
    talk.begin("sales")
    nudged: list[Any] = []
    talk.worker.rt.nudge = nudged.append
    frame.sweep(talk.worker.rt, ["deliveries"], by="test", force=True)
    assert nudged == [], "it was announced a moment ago"
    world.later(16)
    for _ in range(2):
        frame.sweep(talk.worker.rt, ["deliveries"], by="test", force=True)
    assert [(item.delivery_id, item.why) for item in nudged] == [(only(talk)["id"], "again")]
    assert peer.seen == []


def test_a_question_to_somebody_here_and_somebody_there_is_one_question(world: World, peer: Peer) -> None:
    """j34"""
    peer.answers = "message"
    talk = talking(world, peer, [turn(ask(["pricing", "pricing@paris"])), say("{last_result}")])
    run_id = talk.begin("sales")
    for row in talk.queued():
        talk.deliver(row["id"])
    (expert,) = [row["id"] for row in talk.ready()]
    talk.worker.finish(expert)
    talk.settle()
    talk.worker.finish(run_id)
    assert sorted(item["content"] for item in talk.result(run_id)["replies"]) == ["12 EUR", "9 EUR"]


# --- Hand-offs --------------------------------------------------------------------------------------------


class Handler:
    """Answers as it is told, and keeps what it was asked."""

    def __init__(self, *verdicts: Any) -> None:
        self.verdicts = list(verdicts)
        self.asked: list[Assignment] = []

    def assign(self, assignment: Assignment) -> Any:
        self.asked.append(assignment)
        return self.verdicts.pop(0) if len(self.verdicts) > 1 else self.verdicts[0]


def assigned(world: World, handler: Handler | None) -> tuple[Talk, dict[str, Any]]:
    talk = Talk(world, {"pricing": ANSWERS}, handoff=handler)
    talk.client.send("pricing", "Do this.", sender="boss", performative="request", assignment={"order": 17})
    (row,) = talk.queued()
    return talk, dict(row)


def test_without_a_handler_every_assignment_is_refused(world: World) -> None:
    talk, row = assigned(world, None)
    assert talk.deliver(row["id"]) == "answered"
    assert world.rows(tables.runs) == []
    (item,) = talk.client.inbox("boss")
    assert (item.performative, item.content) == ("refuse", "pricing takes no assignments here")


def test_a_handler_takes_refuses_or_puts_off_an_assignment(world: World) -> None:
    """d.6: it gets the same assignment each time, with the run that would carry it out."""
    handler = Handler(Deferred(30), Admitted())
    talk, row = assigned(world, handler)
    assert talk.deliver(row["id"]) == "retry"
    assert talk.deliver(row["id"]) == "nothing"
    world.later(30)
    assert talk.deliver(row["id"]) == "begun"
    first, second = handler.asked
    assert first == second
    assert (first.body, first.sender, first.receiver) == ({"order": 17}, "boss", "pricing")
    assert world.run(first.run_id)["state"] == "ready"
    talk.all_quiet()
    assert talk.delivery(row["id"])["state"] == "delivered"
    assert [item.content for item in talk.client.inbox("boss")] == ["12 EUR"]


def test_a_handler_that_refuses_is_heard(world: World) -> None:
    talk, row = assigned(world, Handler(Rejected("We are closed.")))
    assert talk.deliver(row["id"]) == "answered"
    assert [item.content for item in talk.client.inbox("boss")] == ["We are closed."]


def test_a_handler_that_breaks_is_a_failed_delivery(world: World) -> None:
    talk, row = assigned(world, Handler("yes"))
    assert talk.deliver(row["id"]) == "failed"
    assert talk.delivery(row["id"])["fail_code"] == "transport"
    (item,) = talk.client.inbox("boss")
    assert item.performative == "failure"

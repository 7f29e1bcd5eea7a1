"""Deliveries: from the row to the receiver's run and back to a reply, once, whoever dies on the way."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from cortex_workers.errors import DeliveryNotFound, InvalidState, Stopping
from cortex_workers.host import JsonPrincipalCodec
from cortex_workers.schemas.ids import same_suffix
from cortex_workers.store import tables
from cortex_workers.sweep import frame
from tests.engine.talking import ANSWERS, ASKS, Talk, ask, deliveries, send
from tests.engine.world import World, call, dying_at, say, turn

RUNS = tables.runs
REQUESTS = [turn(send("pricing", "Look.", performative="request")), say("Sent.")]


@pytest.fixture
def talk(world: World) -> Talk:
    return Talk(world, {"sales": ASKS, "pricing": ANSWERS})


def sweep(talk: Talk, *names: str) -> dict[str, int]:
    return dict(frame.sweep(talk.worker.rt, names or None, by="test", force=True).done)


def test_the_receivers_run_has_the_deliverys_id_and_the_messages_scope_rights_and_depth(world: World) -> None:
    """g33, g49; e.2, e.3"""
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS}, codec=JsonPrincipalCodec())
    client = world.client(codec=JsonPrincipalCodec(), scope="tenant=acme/user=7")
    run_id = str(client.enqueue("sales", "Go", principal={"name": "ann"}).id)
    talk.worker.finish(run_id)
    (row,) = talk.queued()
    (expert,) = talk.carry()
    run = world.run(expert)
    assert expert == same_suffix("arun", row["id"])
    assert (run["agent"], run["scope"]) == ("pricing", "tenant=acme/user=7")
    assert (run["origin"], run["origin_delivery_id"], run["chain_depth"]) == ("delivery", row["id"], 1)
    specs = {item["run_id"]: item["principal"] for item in world.rows(tables.run_specs)}
    assert specs[expert] == specs[run_id] is not None


class Watcher:
    """An authorizer that allows everything and keeps who asked for it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, tuple[str, ...], Any]] = []

    def visible(self, ctx: Any, tools: Any) -> Any:
        return tools

    def authorize(self, ctx: Any, tool: str, arguments: Any, approved: bool) -> None:
        self.seen.append((ctx.agent, tool, ctx.chain, ctx.principal))


def test_an_authorizer_sees_who_sent_an_agent_to_work_and_with_whose_rights(world: World) -> None:
    """e.3: delegated work has the rights of whoever began, and no others."""
    watcher = Watcher()
    talk = Talk(
        world,
        {
            "a": [turn(ask("b")), say("{last_result}")],
            "b": [turn(ask("c")), say("{last_result}")],
            "c": [turn(call("ship", order="1")), say("Shipped.")],
        },
        authorizer=watcher,
        codec=JsonPrincipalCodec(),
    )
    client = world.client(codec=JsonPrincipalCodec())
    run_id = str(client.enqueue("a", "Go", principal={"name": "ann"}).id)
    talk.all_quiet()
    assert world.run(run_id)["state"] == "completed"
    assert watcher.seen == [
        ("a", "agent_ask", (), {"name": "ann"}),
        ("b", "agent_ask", ("a",), {"name": "ann"}),
        ("c", "ship", ("b", "a"), {"name": "ann"}),
    ]


def test_eight_workers_start_one_run(talk: Talk) -> None:
    """g18"""
    talk.begin("sales")
    (row,) = talk.queued()
    workers = [talk.world.worker() for _ in range(8)]
    start = threading.Barrier(8)

    def one(worker: Any) -> str:
        start.wait()
        return talk.deliver(row["id"], worker)

    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(one, workers))
    assert sorted(done) == ["begun"] + ["nothing"] * 7
    assert len(talk.world.rows(RUNS, RUNS.c.agent == "pricing")) == 1


def test_eight_workers_store_one_reply(talk: Talk) -> None:
    """g28"""
    run_id = talk.begin("sales")
    (expert,) = talk.carry()
    talk.worker.finish(expert)
    (row,) = talk.due()
    workers = [talk.world.worker() for _ in range(8)]
    start = threading.Barrier(8)

    def one(worker: Any) -> str:
        start.wait()
        return talk.deliver(row["id"], worker)

    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(one, workers))
    assert sorted(done) == ["nothing"] * 7 + ["settled"]
    assert len(talk.said()) == 2
    assert talk.world.run(run_id)["state"] == "ready"


def test_a_hint_that_comes_again_at_any_time_changes_nothing(talk: Talk) -> None:
    """g19: after the start, while the run works, after the reply."""
    run_id = talk.begin("sales")
    (row,) = talk.queued()
    assert talk.deliver(row["id"]) == "begun"
    before = talk.world.snapshot()
    assert talk.deliver(row["id"]) == "nothing"
    assert talk.world.snapshot() == before
    talk.worker.finish(talk.delivery(row["id"])["run_id"])
    assert talk.deliver(row["id"]) == "settled"
    before = talk.world.snapshot()
    assert talk.deliver(row["id"]) == "nothing"
    assert talk.world.snapshot() == before
    assert talk.worker.finish(run_id)["state"] == "completed"
    assert [item.message_id for item in talk.heard("MessageSent")] == [item["id"] for item in talk.said()]
    assert [item.delivery_id for item in talk.heard("MessageDelivered")] == [row["id"]]


@pytest.mark.parametrize("probe", ["delivery.before_commit", "delivery.after_commit"])
def test_a_worker_that_dies_over_a_start_leaves_one_run(talk: Talk, probe: str) -> None:
    """g25, g27"""
    talk.begin("sales")
    (row,) = talk.queued()
    with dying_at(probe):
        talk.deliver(row["id"])
    begun = talk.deliver(row["id"], talk.world.worker())
    assert begun == ("begun" if probe == "delivery.before_commit" else "nothing")
    assert [item["id"] for item in talk.world.rows(RUNS, RUNS.c.agent == "pricing")] == [
        same_suffix("arun", row["id"])
    ]


@pytest.mark.parametrize("probe", ["reply.before_commit", "reply.after_commit"])
def test_a_worker_that_dies_over_a_reply_leaves_one_reply(talk: Talk, probe: str) -> None:
    """g28, g72: the seal, the admission and the reply are one transaction."""
    run_id = talk.begin("sales")
    (expert,) = talk.carry()
    talk.worker.finish(expert)
    (row,) = talk.due()
    with dying_at(probe):
        talk.deliver(row["id"])
    assert len(talk.said()) == (1 if probe == "reply.before_commit" else 2)
    talk.deliver(row["id"], talk.world.worker())
    assert len(talk.said()) == 2
    assert talk.worker.finish(run_id)["state"] == "completed"


@pytest.mark.parametrize("probe", ["model.after", "finish.before_commit", "finish.after_commit"])
def test_a_receiver_that_loses_its_worker_answers_once(talk: Talk, probe: str) -> None:
    """g27, g61: no reply before the run has ended."""
    run_id = talk.begin("sales")
    (expert,) = talk.carry()
    if probe == "finish.after_commit":
        talk.worker.die_at(probe, expert)
    else:
        talk.worker.lose_at(probe, expert)
        assert sweep(talk, "deliveries") == {"deliveries": 0}
        assert talk.world.run(run_id)["state"] == "paused"
        talk.worker.finish(expert)
    assert sweep(talk, "deliveries") == {"deliveries": 1}
    assert talk.worker.finish(run_id)["state"] == "completed"
    assert len(talk.said()) == 2


def test_a_receiver_that_waits_for_a_person_answers_when_it_has_ended(world: World) -> None:
    """g61: also when that takes two hours, because its ``reply_by`` says so (ruling 65)."""
    pays = [turn(call("pay", amount=1)), say("Paid.")]
    talk = Talk(world, {"sales": ASKS, "pricing": {"script": pays, "reply_by": timedelta(hours=3)}})
    run_id = talk.begin("sales")
    (expert,) = talk.carry()
    assert talk.worker.finish(expert)["state"] == "paused"
    world.later(2 * 3600)
    sweep(talk)
    assert (world.run(run_id)["state"], len(talk.said())) == ("paused", 1)
    talk.client.decide(talk.client.checkpoints(run_id=expert)[0].id, approved=True)
    assert talk.worker.finish(expert)["state"] == "completed"
    talk.settle()
    assert talk.worker.finish(run_id)["state"] == "completed"
    assert talk.result(run_id)["replies"][0]["content"] == "Paid."


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ([{"fail": "failed"}], "pricing could not answer"),
        ([turn(call("find", order="1"))] * 30, "steps"),
    ],
)
def test_a_receiver_that_fails_answers_with_a_failure(world: World, script: Any, says: str) -> None:
    """g22: and its delivery is delivered."""
    talk = Talk(world, {"sales": ASKS, "pricing": script})
    run_id = talk.begin("sales")
    talk.all_quiet()
    assert world.run(run_id)["state"] == "completed"
    (item,) = talk.result(run_id)["replies"]
    assert item["performative"] == "failure"
    assert says in item["content"]
    assert talk.only_delivery()["state"] == "delivered"


def test_a_receiver_that_is_cancelled_answers_with_a_failure_once(talk: Talk) -> None:
    """g71"""
    run_id = talk.begin("sales")
    (expert,) = talk.carry()
    talk.client.cancel(expert)
    talk.all_quiet()
    assert talk.world.run(run_id)["state"] == "completed"
    (item,) = talk.result(run_id)["replies"]
    assert (item["performative"], item["content"]) == (
        "failure",
        "pricing could not answer: the work was cancelled",
    )
    assert len(talk.said()) == 2


def test_an_empty_answer_is_an_answer(world: World) -> None:
    """j38"""
    talk = Talk(world, {"sales": ASKS, "pricing": [say("")]})
    run_id = talk.begin("sales")
    talk.all_quiet()
    assert talk.result(run_id)["replies"][0]["content"] == ""
    assert talk.result(run_id)["complete"] is True


def test_what_broker_and_workers_forgot_the_sweep_carries(world: World) -> None:
    """g29, g35: starts, replies, and what they set free."""
    talk = Talk(
        world,
        {
            "sales": [turn(ask(["p1", "p2", "p3"])), say("{last_result}")],
            "p1": ANSWERS,
            "p2": ANSWERS,
            "p3": ANSWERS,
        },
    )
    run_id = talk.begin("sales")
    assert sweep(talk, "deliveries") == {"deliveries": 3}
    for row in talk.ready():
        talk.worker.finish(row["id"])
    assert sweep(talk, "deliveries") == {"deliveries": 3}
    assert talk.worker.finish(run_id)["state"] == "completed"
    assert sweep(talk, "deliveries") == {"deliveries": 0}


def test_one_delivery_that_cannot_be_carried_holds_up_no_other(world: World) -> None:
    """g31: nor a row of another scope; and its sender is told."""
    talk = Talk(world, {"sales": REQUESTS, "pricing": ANSWERS})
    talk.begin("sales")
    other = str(talk.client.enqueue("sales", "Go", scope="tenant=other").id)
    talk.worker.finish(other)
    first, _ = talk.queued()
    world.sql("update a2a_deliveries set receiver_agent = 'gone' where id = :id", id=first["id"])
    assert sweep(talk, "deliveries") == {"deliveries": 2}
    failed, begun = world.rows(deliveries, deliveries.c.kind == "directive", order=deliveries.c.id)
    assert (failed["state"], failed["fail_code"]) == ("failed", "receiver_gone")
    assert (begun["state"], world.run(begun["run_id"])["scope"]) == ("running", "tenant=other")
    (item,) = talk.client.inbox("sales")
    assert (item.performative, item.sender) == ("failure", "gone")
    assert [row.id for row in talk.client.deliveries(state="failed")] == [first["id"]]


def test_an_operator_sends_a_failed_delivery_on_its_way_again(world: World) -> None:
    """g32 in part; b.3 16"""
    talk = Talk(world, {"sales": REQUESTS, "pricing": ANSWERS})
    talk.begin("sales")
    (row,) = talk.queued()
    with pytest.raises(InvalidState):
        talk.client.redrive(row["id"])
    with pytest.raises(DeliveryNotFound):
        talk.client.redrive(row["id"], scope="tenant=other")
    world.sql("update a2a_deliveries set receiver_agent = 'gone'")
    assert talk.deliver(row["id"]) == "refused"
    world.sql("update a2a_deliveries set receiver_agent = 'pricing'  where id = :id", id=row["id"])
    assert talk.client.redrive(row["id"]).state == "queued"
    talk.all_quiet()
    assert talk.delivery(row["id"])["state"] == "delivered"
    assert [item.content for item in talk.client.inbox("sales")][-1] == "12 EUR"
    (note,) = world.rows(tables.events, tables.events.c.kind == "delivery.redrive")
    assert (note["actor"], note["data"]) == ("ops", {"delivery_id": row["id"]})


def test_a_receiver_whose_session_was_aborted_is_a_failure_and_one_that_is_gated_waits(world: World) -> None:
    """ruling 39"""
    script = [turn(ask("pricing", "1")), say("{last_result}")]
    talk = Talk(world, {"sales": script, "pricing": ANSWERS})
    first, second = talk.begin("sales"), talk.begin("sales")
    for run_id, column in ((first, "aborted_at"), (second, "gated_at")):
        (asked,) = talk.asked(run_id)
        world.sql(
            "insert into sessions (id, scope, agent, key) values (:id, 'tenant=acme', 'pricing', :key)",
            id=f"ses_{column}",
            key=asked["conversation_id"],
        )
        world.sql(f"update sessions set {column} = now() where id = :id", id=f"ses_{column}")
    runs = talk.carry()
    assert world.run(first)["state"] == "ready"
    assert [world.run(run_id)["wait_reason"] for run_id in runs] == ["gate"]
    assert world.run(second)["state"] == "paused"


def test_who_talks_remembers_and_strangers_share_nothing(world: World) -> None:
    """e.4: a session for each conversation and receiver; its runs go one after the other."""
    conversation: dict[str, str] = {}

    def twice(request: Any) -> dict[str, Any]:
        if sum(item.role == "tool" for item in request.messages) == 2:
            return say("Done.")
        return turn(ask("pricing", **conversation))

    talk = Talk(world, {"sales": twice, "other": ASKS, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    conversation["conversation_id"] = talk.asked(run_id)[0]["conversation_id"]
    talk.begin("other")
    talk.all_quiet()
    assert world.run(run_id)["state"] == "completed"
    rows = world.rows(RUNS, RUNS.c.agent == "pricing", order=RUNS.c.id)
    sessions = [row["session_id"] for row in rows]
    assert len(sessions) == 3
    assert len(set(sessions)) == 2
    requests = talk.models["pricing"].requests
    assert sorted(len(request.messages) for request in requests) == [1, 1, 3]


def test_a_worker_that_drains_takes_no_delivery(talk: Talk) -> None:
    """g79: another one does."""
    talk.begin("sales")
    (row,) = talk.queued()
    draining = talk.world.worker()
    draining.rt.drain.set()
    with pytest.raises(Stopping):
        talk.deliver(row["id"], draining)
    assert talk.deliver(row["id"]) == "begun"


def test_a_reply_longer_than_a_message_is_cut(world: World) -> None:
    """ruling 61"""
    talk = Talk(world, {"sales": ASKS, "pricing": [say("x" * 5000)]})
    worker = world.worker(message_bytes=1024)
    run_id = talk.begin("sales")
    (expert,) = talk.carry()
    worker.finish(expert)
    (row,) = talk.due()
    talk.deliver(row["id"], worker)
    talk.worker.finish(run_id)
    content = talk.result(run_id)["replies"][0]["content"]
    assert len(content) == 1024
    assert "[cut: this result has 5000 bytes" in content


def test_private_messages_are_nobodys_here(talk: Talk) -> None:
    """g90 in part: the public dispatcher passes them over."""
    talk.begin("sales")
    (row,) = talk.queued()
    talk.world.sql("update a2a_deliveries set partition = 'orch_1'")
    assert talk.deliver(row["id"]) == "nothing"
    assert sweep(talk, "deliveries") == {"deliveries": 0}

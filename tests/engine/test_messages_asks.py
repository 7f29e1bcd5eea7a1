"""Questions between agents: the pause, the answers, and what neither may do."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from cortex_workers.errors import (
    AskNotFound,
    InvalidArgument,
    NotAgentReplyResumable,
    RequiresApproval,
)
from cortex_workers.host import JsonPrincipalCodec
from cortex_workers.schemas.admission import ToolResult
from cortex_workers.store import tables
from cortex_workers.testing.clock import stopped_clock
from tests.engine.talking import ANSWERS, ASKS, Talk, answers, ask, asks, deliveries, messages, send
from tests.engine.world import World, call, dying_at, error_of, say, turn

A, B = "call_0_0", "call_0_1"
TWO = [turn(ask("pricing"), ask("stock", "How many?")), say("Done.")]
BROADCAST = [turn(ask(["pricing", "stock"])), say("{last_result}")]


def answered(talk: Talk) -> None:
    """Everybody who was asked works and its reply is stored."""
    for run_id in talk.carry():
        talk.worker.finish(run_id)
    talk.settle()


def test_an_agent_asks_another_and_goes_on_with_its_answer(world: World) -> None:
    """g21, g85"""
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    assert world.run(run_id)["state"] == "paused"
    (expert,) = talk.carry()
    assert talk.worker.finish(expert)["agent"] == "pricing"
    talk.settle()
    assert talk.worker.finish(run_id)["state"] == "completed"
    question, reply = talk.said()
    assert talk.result(run_id) == {
        "complete": True,
        "replies": [
            {
                "performative": "inform",
                "sender": "pricing",
                "content": "12 EUR",
                "conversation_id": question["conversation_id"],
            }
        ],
    }
    assert (reply["in_reply_to"], reply["conversation_id"]) == (
        question["reply_with"],
        question["conversation_id"],
    )
    assert [row["state"] for row in world.rows(deliveries)] == ["delivered"]


def test_the_pause_names_call_and_token_and_the_row_names_everything_else(world: World) -> None:
    """g36"""
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    (pause,) = world.pauses(run_id)
    (pending,) = world.pending(pause["id"])
    (asked,) = talk.asked(run_id)
    (question,) = talk.said()
    assert (pause["reason"], pending["kind"], pending["answerable_by"]) == ("agent_reply", "ask", "bus")
    assert pending["reply_with"] == asked["reply_with"] == question["reply_with"]
    assert (asked["call_id"], asked["suspension_id"], asked["message_id"]) == (A, pause["id"], question["id"])
    assert (asked["expected"], asked["state"], asked["conversation_id"]) == (
        1,
        "open",
        question["conversation_id"],
    )
    assert len(asked["reply_with"]) >= 22, "at least 128 random bits"


@pytest.mark.parametrize("probe", ["model.after", "pause.before_commit"])
def test_nothing_of_a_question_exists_before_the_pause_commits(world: World, probe: str) -> None:
    """g37 to g40, as ruling 62 has it: no held questions, so nothing can be orphaned or released twice."""
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS})
    run_id = str(talk.client.enqueue("sales", "Go").id)
    talk.worker.die_at(probe, run_id)
    for table in (messages, deliveries, asks, tables.a2a_conversations):
        assert world.rows(table) == []
    talk.worker.lapse(run_id)
    assert talk.worker.finish(run_id)["state"] == "paused"
    assert (len(talk.said()), len(talk.queued()), len(talk.asked(run_id))) == (1, 1, 1)


def test_a_peer_that_answers_at_once_still_resumes_the_run(world: World) -> None:
    """g38: the very first moment at which anybody can see the question."""
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS})
    run_id = str(talk.client.enqueue("sales", "Go").id)
    with dying_at("pause.after_commit"):
        talk.worker.work(run_id)
    answered(talk)
    assert world.run(run_id)["state"] == "ready"
    assert talk.worker.finish(run_id)["state"] == "completed"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"to": "nobody"}, "no agent named 'nobody'"),
        ({"to": "pricing@paris"}, "no transport"),
        ({"to": "sales"}, "nobody writes to himself"),
        ({"to": ["pricing", "sales"]}, "nobody writes to himself"),
        ({"to": []}, "both to and content are required"),
        ({"to": "pricing", "content": ""}, "both to and content are required"),
        ({"to": "pricing", "performative": "inform"}, "cannot be asked"),
        ({"to": "pricing", "performative": "shout"}, "no performative 'shout'"),
        ({"to": "pricing", "conversation_id": "conv_1"}, "conversation id looks like"),
        ({"to": "pricing", "conversation_id": "conv_01h2xcejqtf2nbrexx3vqjhp41"}, "no conversation"),
        ({"to": "pricing", "reply_by_s": 5}, "reply_by_s is 30 to 604800"),
        ({"to": 7}, "to"),
        ({"to": {"name": "pricing"}}, "to"),
        ({"to": [f"agent-{number}" for number in range(33)]}, "at most 32 receivers"),
    ],
)
def test_a_question_that_cannot_be_put_is_a_text_for_the_model(
    world: World, arguments: dict[str, Any], says: str
) -> None:
    """g10, g41, g84"""
    script = [turn(call("agent_ask", **{"content": "How much?", **arguments})), say("Never mind.")]
    talk = Talk(world, {"sales": script, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    assert world.run(run_id)["state"] == "completed"
    (result,) = [item for item in world.messages(run_id) if item.role == "tool"]
    assert says in error_of(result)
    assert world.call(run_id)["state"] == "failed"
    assert world.pauses(run_id) == world.rows(asks) == world.rows(messages) == world.rows(deliveries) == []


class Closer:
    """An authorizer of the host that ends a conversation when it is asked about the second call of a turn."""

    def __init__(self) -> None:
        self.end: Callable[[], object] = lambda: None
        self.asked = 0

    def visible(self, ctx: Any, tools: Any) -> Any:
        return tools

    def authorize(self, ctx: Any, tool: str, arguments: Any, approved: bool) -> None:
        self.asked += 1
        if self.asked == 2:
            self.end()


def closing_between(world: World, second: dict[str, Any]) -> tuple[Talk, str]:
    """A run that asks in a conversation that is closed after the look at its question and before its pause."""
    closer, first = Closer(), {"to": "pricing", "content": "How much?"}
    given: dict[str, Any] = {}

    def model(request: Any) -> dict[str, Any]:
        if any(item.role == "tool" for item in request.messages):
            return say("Done.")
        both = {"same": given, "new": {}}[second["in"]]
        return turn(call("agent_ask", **first, **given), call("agent_ask", to="stock", content="?", **both))

    talk = Talk(
        world,
        {"sales": model, "pricing": ANSWERS, "stock": ANSWERS},
        authorizer=closer,
        codec=JsonPrincipalCodec(),
    )
    given["conversation_id"] = talk.client.send("pricing", "Hello", sender="sales").conversation_id
    closer.end = lambda: talk.client.send("pricing", "", performative="cancel", **given)
    return talk, talk.begin("sales")


def test_a_check_that_fails_in_the_pause_itself_is_an_ordinary_tool_error(world: World) -> None:
    """g41; ruling 62: the other question is put all the same."""
    talk, run_id = closing_between(world, {"in": "new"})
    assert (world.run(run_id)["state"], [row["call_id"] for row in talk.asked(run_id)]) == ("paused", [B])
    answered(talk)
    assert talk.worker.finish(run_id)["state"] == "completed"
    first, second = [item for item in world.messages(run_id) if item.role == "tool"]
    assert "was closed" in error_of(first)
    assert json.loads(second.content)["complete"] is True
    assert {row["call_id"]: row["state"] for row in world.calls(run_id)} == {A: "failed", B: "completed"}


def test_a_pause_of_which_every_question_is_refused_is_no_pause(world: World) -> None:
    _, run_id = closing_between(world, {"in": "same"})
    assert world.run(run_id)["state"] == "completed"
    assert world.pauses(run_id) == [] == world.rows(asks)
    assert ["was closed" in error_of(item) for item in world.messages(run_id) if item.role == "tool"] == [
        True,
        True,
    ]


def test_each_deadline_is_the_questions_own_or_the_receivers_or_the_usual(world: World) -> None:
    """g42; ruling 65"""
    talk = Talk(
        world,
        {
            "sales": [turn(ask("pricing")), say()],
            "quick": [turn(ask("slow")), say()],
            "own": [turn(ask("slow", reply_by_s=45)), say()],
            "pricing": ANSWERS,
            "slow": {"script": ANSWERS, "reply_by": timedelta(hours=2)},
        },
    )
    waits = {}
    with stopped_clock() as clock:
        for name in ("sales", "quick", "own"):
            (asked,) = talk.asked(talk.begin(name))
            (pause,) = world.pauses(asked["asker_run_id"])
            waits[name] = (asked["deadline"] - clock.at).total_seconds()
            assert (pause["expires_at"] - asked["deadline"]).total_seconds() == 300, "the grace"
    assert waits == {"sales": 300, "quick": 7200, "own": 45}


def test_all_questions_of_a_turn_have_the_earliest_deadline(world: World) -> None:
    script = [turn(ask("pricing", reply_by_s=900), ask("stock", reply_by_s=60)), say()]
    talk = Talk(world, {"sales": script, "pricing": ANSWERS, "stock": ANSWERS})
    with stopped_clock() as clock:
        first, second = talk.asked(talk.begin("sales"))
    assert first["deadline"] == second["deadline"] == clock.at + timedelta(seconds=60)


def test_two_questions_of_a_turn_resume_the_run_once_each_with_its_own_answer(world: World) -> None:
    """g45: whoever answers first."""
    talk = Talk(world, {"sales": TWO, "pricing": [say("12 EUR")], "stock": [say("7 left")]})
    run_id = talk.begin("sales")
    pricing, stock = talk.carry()
    talk.worker.finish(stock)
    talk.settle()
    assert world.run(run_id)["state"] == "paused"
    talk.worker.finish(pricing)
    talk.settle()
    assert world.run(run_id)["state"] == "ready"
    assert [item.kind for item in world.told if item.kind == "ResumeAdmitted"] == ["ResumeAdmitted"]
    assert talk.worker.finish(run_id)["state"] == "completed"
    assert [talk.result(run_id, index)["replies"][0]["content"] for index in (0, 1)] == ["12 EUR", "7 left"]
    (pause,) = world.pauses(run_id)
    assert [row["answer"] for row in world.pending(pause["id"])] == [None, None], "bytes have one home"


def test_a_question_beside_an_approval_waits_for_its_turn(world: World) -> None:
    """g43, as decision R12 has it: one kind at a time, nothing fails."""
    script = [turn(call("pay", amount=1), ask("pricing")), say("Done.")]
    talk = Talk(world, {"sales": script, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    assert (world.pauses(run_id)[0]["reason"], world.rows(asks)) == ("approval", [])
    talk.client.decide(talk.client.checkpoints(run_id=run_id)[0].id, approved=True)
    assert talk.worker.finish(run_id)["state"] == "paused"
    assert [row["reason"] for row in world.pauses(run_id)] == ["approval", "agent_reply"]
    assert [effect.tool for effect in world.effects] == ["pay"]
    answered(talk)
    assert talk.worker.finish(run_id)["state"] == "completed"
    assert [effect.tool for effect in world.effects] == ["pay"]


def test_what_ran_beside_a_question_does_not_run_again(world: World) -> None:
    """g44"""
    script = [turn(call("ship", order="1"), ask("pricing"), call("find", order="2")), say("Done.")]
    talk = Talk(world, {"sales": script, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    assert [effect.tool for effect in world.effects] == ["ship", "find"]
    answered(talk)
    assert talk.worker.finish(run_id)["state"] == "completed"
    assert [effect.tool for effect in world.effects] == ["ship", "find"]
    assert len([item for item in world.messages(run_id) if item.role == "tool"]) == 3


def test_a_call_id_that_comes_again_gets_its_own_answer(world: World) -> None:
    """g46: and the late answer to the first question is mail."""
    again = {"tool": "agent_ask", "args": {"to": "pricing", "content": "How much?"}, "id": "the-same"}
    talk = Talk(world, {"sales": [turn(again), turn(again), say("Done.")], "pricing": ANSWERS})
    run_id = talk.begin("sales")
    (first,) = talk.asked(run_id)
    answered(talk)
    talk.worker.finish(run_id)
    assert world.run(run_id)["state"] == "paused"
    late = talk.client.send("sales", "99 EUR", sender="pricing", in_reply_to=first["reply_with"])
    assert len(late.deliveries) == 1
    assert world.run(run_id)["state"] == "paused"
    answered(talk)
    assert talk.worker.finish(run_id)["state"] == "completed"
    assert [talk.result(run_id, index)["replies"][0]["content"] for index in (0, 1)] == ["12 EUR", "12 EUR"]
    assert len({row["call_id"] for row in world.rows(asks)}) == 2


def test_a_turn_that_is_done_again_asks_once(world: World) -> None:
    """g47: the worker dies right after the pause; nobody asks a second time."""
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS})
    run_id = str(talk.client.enqueue("sales", "Go").id)
    talk.worker.die_at("pause.after_commit", run_id)
    world.later(120)
    assert (len(talk.said()), len(talk.asked(run_id))) == (1, 1)
    answered(talk)
    assert talk.worker.finish(run_id)["state"] == "completed"


def test_no_other_door_answers_for_a_peer_and_a_peer_answers_no_other_pause(world: World) -> None:
    """g48"""
    talk = Talk(world, {"sales": ASKS, "pays": [turn(call("pay", amount=1)), say()], "pricing": ANSWERS})
    run_id, other = talk.begin("sales"), talk.begin("pays")
    before = world.snapshot()
    result = ToolResult(tool_call_id=A, content="1 EUR")
    with pytest.raises(NotAgentReplyResumable):
        talk.client.provide_results(run_id, [result])
    with pytest.raises(NotAgentReplyResumable):
        talk.client.provide_result(run_id, result)
    with pytest.raises(RequiresApproval):
        talk.client.provide_result(other, result)
    with pytest.raises(AskNotFound):
        talk.client.answer(other, "Do it.")
    assert world.snapshot() == before


def test_nothing_reaches_the_conversation_at_the_pause_and_each_message_once_at_the_end(world: World) -> None:
    """g50"""
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    assert [item.role for item in world.messages(run_id)] == ["assistant"]
    answered(talk)
    talk.worker.finish(run_id)
    assert [item.role for item in world.messages(run_id)] == ["assistant", "tool", "assistant"]


# --- Answers ---------------------------------------------------------------------------------------------------------


def reply(talk: Talk, asked: Any, content: str = "5 EUR", **more: Any) -> Any:
    """What a host says in the name of a peer."""
    return talk.client.send(
        "sales", content, in_reply_to=asked["reply_with"], **{"sender": "pricing", **more}
    )


def test_a_promise_is_no_answer_and_what_follows_is(world: World) -> None:
    """g51"""
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    (asked,) = talk.asked(run_id)
    assert len(reply(talk, asked, "I will look.", performative="agree").deliveries) == 1
    assert world.run(run_id)["state"] == "paused"
    assert reply(talk, asked).deliveries == ()
    assert talk.worker.finish(run_id)["state"] == "completed"


@pytest.mark.parametrize("performative", ["refuse", "propose", "confirm", "failure", "not-understood"])
def test_any_answer_resumes_whoever_asked_one(world: World, performative: str) -> None:
    """g52, g55: also one that could be asked starts no run."""
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    (asked,) = talk.asked(run_id)
    before = len(world.rows(deliveries))
    reply(talk, asked, performative=performative)
    assert talk.worker.finish(run_id)["state"] == "completed"
    assert talk.result(run_id)["replies"][0]["performative"] == performative
    assert len(world.rows(deliveries)) == before


def test_a_question_to_many_waits_for_each_of_them_once(world: World) -> None:
    """g52, g53, g86: the first answer of each counts; in the order in which they come."""
    talk = Talk(world, {"sales": BROADCAST, "pricing": ANSWERS, "stock": ANSWERS})
    run_id = talk.begin("sales")
    (asked,) = talk.asked(run_id)
    assert asked["expected"] == 2
    reply(talk, asked, "none", sender="stock", performative="refuse")
    assert len(reply(talk, asked, "some", sender="stock").deliveries) == 1
    assert world.run(run_id)["state"] == "paused"
    assert talk.client.tender(asked["message_id"]).complete is False
    reply(talk, asked, "5 EUR", performative="propose")
    assert talk.worker.finish(run_id)["state"] == "completed"
    result = talk.result(run_id)
    assert [(item["sender"], item["content"]) for item in result["replies"]] == [
        ("stock", "none"),
        ("pricing", "5 EUR"),
    ]
    assert result["complete"] is True
    tender = talk.client.tender(asked["message_id"])
    assert ([item.content for item in tender.proposals], [item.content for item in tender.refusals]) == (
        ["5 EUR"],
        ["none"],
    )
    assert tender.complete


def test_a_late_or_second_answer_is_mail_and_resumes_nobody(world: World) -> None:
    """g56: also a late proposal starts no run of whoever asked."""
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    (asked,) = talk.asked(run_id)
    reply(talk, asked)
    revision = world.run(run_id)["revision"]
    for performative in ("inform", "propose"):
        (sent,) = reply(talk, asked, "6 EUR", performative=performative).deliveries
        assert sent.delivery_id is not None
        row = talk.delivery(sent.delivery_id)
        assert (row["state"], row["kind"], row["run_id"]) == ("delivered", "informative", None)
    assert world.run(run_id)["revision"] == revision
    assert talk.worker.finish(run_id)["state"] == "completed"
    assert talk.result(run_id)["replies"][0]["content"] == "5 EUR"


def test_a_token_that_nobody_here_knows_makes_ordinary_mail(world: World) -> None:
    """g57: an unknown one, and one of another scope, are told apart by nobody."""
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    (asked,) = talk.asked(run_id)
    elsewhere = talk.client.send(
        "sales", "1 EUR", sender="pricing", in_reply_to=asked["reply_with"], scope="tenant=other"
    )
    unknown = talk.client.send("sales", "1 EUR", sender="pricing", in_reply_to="no-such-token")
    assert len(elsewhere.deliveries) == len(unknown.deliveries) == 1
    assert world.run(run_id)["state"] == "paused"
    assert world.rows(answers) == []


def test_an_answer_of_an_agent_that_was_not_asked_is_mail(world: World) -> None:
    """g58: marked, and it counts for nobody."""
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS, "liar": ANSWERS})
    run_id = talk.begin("sales")
    (asked,) = talk.asked(run_id)
    sent = reply(talk, asked, "0 EUR", sender="liar")
    assert len(sent.deliveries) == 1
    assert (world.run(run_id)["state"], world.rows(answers)) == ("paused", [])
    (forged,) = [row for row in talk.said() if row["id"] == sent.message_id]
    assert forged["metadata"] == {"unmatched_reply": True}


def test_an_answer_to_somebody_else_than_the_asker_counts_for_nobody(world: World) -> None:
    """g58"""
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS, "stock": ANSWERS})
    run_id = talk.begin("sales")
    (asked,) = talk.asked(run_id)
    talk.client.send("stock", "0 EUR", sender="pricing", in_reply_to=asked["reply_with"])
    assert (world.run(run_id)["state"], world.rows(answers)) == ("paused", [])


def test_an_answer_joins_the_conversation_of_its_question_and_no_other_counts(world: World) -> None:
    """g59"""
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    (asked,) = talk.asked(run_id)
    other = talk.client.send("pricing", "Something else.", sender="ann")
    reply(talk, asked, conversation_id=other.conversation_id)
    assert world.run(run_id)["state"] == "paused"
    assert reply(talk, asked).conversation_id == asked["conversation_id"]
    assert world.run(run_id)["state"] == "ready"


def test_a_person_answers_in_place_of_who_was_asked(world: World) -> None:
    """g60: the published example: a human address, the token, no conversation."""
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    (asked,) = talk.asked(run_id)
    sent = talk.client.send("sales", "4 EUR", sender="ann@example.com@", in_reply_to=asked["reply_with"])
    assert sent.deliveries == ()
    assert talk.worker.finish(run_id)["state"] == "completed"
    (item,) = talk.result(run_id)["replies"]
    assert (item["sender"], item["content"]) == ("ann@example.com@", "4 EUR")
    (row,) = world.rows(answers)
    assert (row["responder_agent"], row["on_behalf_by"]) == ("pricing", "ops")


def test_a_person_says_for_whom_when_several_were_asked(world: World) -> None:
    talk = Talk(world, {"sales": BROADCAST, "pricing": ANSWERS, "stock": ANSWERS})
    run_id = talk.begin("sales")
    with pytest.raises(InvalidArgument, match="on whose behalf"):
        talk.client.answer(run_id, "4 EUR")
    with pytest.raises(InvalidArgument, match="was not asked"):
        talk.client.answer(run_id, "4 EUR", on_behalf_of="liar")
    talk.client.answer(run_id, "4 EUR", on_behalf_of="pricing")
    talk.client.answer(run_id, "none", on_behalf_of="stock", performative="refuse")
    assert talk.worker.finish(run_id)["state"] == "completed"


def test_a_run_is_answered_by_its_id_and_the_token_stays_where_it_is(world: World) -> None:
    talk = Talk(world, {"sales": TWO, "pricing": ANSWERS, "stock": ANSWERS})
    run_id = talk.begin("sales")
    with pytest.raises(InvalidArgument, match="name the call"):
        talk.client.answer(run_id, "4 EUR")
    talk.client.answer(run_id, "4 EUR", call_id=A)
    talk.client.answer(run_id, "7 left")
    assert talk.worker.finish(run_id)["state"] == "completed"
    with pytest.raises(AskNotFound):
        talk.client.answer(run_id, "Too late.")
    tokens = [row["reply_with"] for row in world.rows(asks)]
    shown = json.dumps([item.content for item in world.messages(run_id)])
    assert not [token for token in tokens if token in shown], "no token is ever shown to a model"


def test_an_awaited_answer_is_never_refused_by_the_ceiling(world: World) -> None:
    """g62, as ruling 65 has it."""
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    world.sql("update a2a_conversations set hop_ceiling = 1")
    answered(talk)
    assert talk.worker.finish(run_id)["state"] == "completed"
    assert talk.result(run_id)["replies"][0]["content"] == "12 EUR"
    assert [row["hop"] for row in talk.said()] == [1, 2]


def test_the_answer_of_a_run_that_was_sent_something_and_not_asked_is_mail(world: World) -> None:
    """g23, g35 in part: a directive by `agent_send` runs the receiver and its reply goes to the inbox."""
    script = [turn(send("pricing", "Look.", performative="request")), say("Sent.")]
    talk = Talk(world, {"sales": script, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    assert world.run(run_id)["state"] == "completed"
    assert talk.client.inbox("sales") == []
    answered(talk)
    (item,) = talk.client.inbox("sales")
    assert (item.sender, item.content) == ("pricing", "12 EUR")

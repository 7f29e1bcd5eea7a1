"""Messages: what is accepted, what is refused without a trace, conversations, inboxes, the tools of a model."""

import json
from typing import Any

import pytest

from cortex_workers import Host
from cortex_workers.errors import (
    ConversationClosed,
    ConversationNotFound,
    HopCeiling,
    InvalidArgument,
    InvalidPerformative,
    MessagingOff,
    Misconfiguration,
    NoScope,
    SelfAddressed,
    UnknownReceiver,
    Unroutable,
)
from cortex_workers.host import JsonPrincipalCodec
from cortex_workers.store import tables
from tests.engine.talking import ANSWERS, ASKS, Talk, ask, asks, deliveries, inbox, messages, send
from tests.engine.world import SCOPE, World, call, say, turn

CONVERSATIONS = tables.a2a_conversations
TABLES = (messages, deliveries, asks, CONVERSATIONS, tables.a2a_answers)
UNKNOWN = "conv_01h2xcejqtf2nbrexx3vqjhp41"


@pytest.fixture
def talk(world: World) -> Talk:
    return Talk(world, {"sales": ASKS, "pricing": ANSWERS, "stock": ANSWERS})


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"performative": "shout"}, InvalidPerformative, "shout"),
        ({"to": "ann", "sender": "ann"}, SelfAddressed, "ann"),
        ({"to": "nobody"}, UnknownReceiver, "nobody"),
        ({"to": ["pricing", "nobody"]}, UnknownReceiver, "nobody"),
        ({"to": "pricing@paris"}, Unroutable, "pricing@paris"),
        ({"conversation_id": UNKNOWN}, ConversationNotFound, UNKNOWN),
        ({"performative": "cancel"}, InvalidArgument, "conversation_id"),
        ({"subject": "Hello"}, InvalidArgument, "subject"),
    ],
)
def test_a_refused_message_leaves_no_trace(
    talk: Talk, wrong: dict[str, Any], error: type[Exception], says: str
) -> None:
    """g3, g9, g10: each with an error that names what is wrong."""
    given = {"to": "pricing", "content": "Hello", "sender": "ann", **wrong}
    with pytest.raises(error, match=says):
        talk.client.send(given.pop("to"), given.pop("content"), **given)
    assert [talk.world.rows(table) for table in TABLES] == [[]] * len(TABLES)
    assert talk.world.told == []


def test_every_verb_needs_a_scope(talk: Talk) -> None:
    """g8"""
    client = talk.world.client(scope=None)
    for verb in (
        lambda: client.send("pricing", "Hello"),
        lambda: client.inbox("pricing"),
        client.conversations,
        client.deliveries,
        lambda: client.messages(UNKNOWN),
    ):
        with pytest.raises(NoScope):
            verb()


def test_a_conversation_of_another_scope_is_not_there(talk: Talk) -> None:
    """g11: and cannot be told from one that never was; a broader scope sees it."""
    sent = talk.client.send("pricing", "Hello", scope="tenant=acme/user=1")
    for scope in ("tenant=other", "tenant=acme/user=2"):
        for conversation_id in (sent.conversation_id, UNKNOWN):
            with pytest.raises(ConversationNotFound, match="there is no conversation"):
                talk.client.send("pricing", "Hi", conversation_id=conversation_id, scope=scope)
    more = talk.client.send("pricing", "Hi", conversation_id=sent.conversation_id)
    assert {row["scope"] for row in talk.said()} == {"tenant=acme/user=1"}, "the conversation's own"
    assert more.conversation_id == sent.conversation_id
    assert [item.id for item in talk.client.conversations()] == [sent.conversation_id]
    assert talk.client.conversations(scope="tenant=other") == []


def test_a_conversation_takes_as_many_messages_as_its_ceiling(talk: Talk) -> None:
    """g12"""
    first = talk.client.send("pricing", "1")
    for number in range(2, 9):
        talk.client.send("pricing", str(number), conversation_id=first.conversation_id)
    with pytest.raises(HopCeiling, match="used 8 of its 8"):
        talk.client.send("pricing", "9", conversation_id=first.conversation_id)
    assert [item.hop for item in talk.client.messages(first.conversation_id)] == list(range(1, 9))


def test_the_ceiling_is_fixed_when_a_conversation_begins(talk: Talk) -> None:
    """g14"""
    first = talk.client.send("pricing", "1")
    narrow = talk.world.client(settings={"hop_ceiling": 1})
    narrow.send("pricing", "2", conversation_id=first.conversation_id)
    assert talk.client.conversation(first.conversation_id).hop_ceiling == 8
    own = narrow.send("pricing", "1")
    with pytest.raises(HopCeiling):
        talk.client.send("pricing", "2", conversation_id=own.conversation_id)


def test_everybody_who_speaks_or_is_spoken_to_takes_part_once(talk: Talk) -> None:
    """g13"""
    first = talk.client.send(["pricing", "stock"], "1", sender="ann")
    talk.client.send("pricing", "2", sender="bob", conversation_id=first.conversation_id)
    talk.client.send("stock", "3", sender="ann", conversation_id=first.conversation_id)
    assert talk.client.conversation(first.conversation_id).participants == ("ann", "pricing", "stock", "bob")


def test_a_peers_thread_is_one_conversation(talk: Talk) -> None:
    """g15: of one node; the same thread of another node is another one."""

    def of(node: str, context: str) -> str:
        return talk.client.send(
            "pricing", "Hi", sender=f"x@{node}", peer_node=node, peer_context=context
        ).conversation_id

    assert of("paris", "thread-1") == of("paris", "thread-1")
    assert len({of("paris", "thread-1"), of("rome", "thread-1"), of("paris", "thread-2")}) == 3


def test_one_delivery_for_each_receiver_and_each_is_announced_if_somebody_has_to_carry_it(talk: Talk) -> None:
    """g7, g16, g17"""
    sent = talk.client.send(["pricing", "stock", "pricing"], "Look.", performative="request")
    assert [item.receiver.agent for item in sent.deliveries] == ["pricing", "stock"]
    assert sorted(item.delivery_id for item in talk.told()) == sorted(row["id"] for row in talk.queued())
    talk.client.send(["pricing", "stock"], "A fact.")
    assert len(talk.told()) == 2, "mail is there at once"


def test_mail_is_in_the_inbox_at_once_and_read_once(talk: Talk) -> None:
    """g20, g23, g24"""
    talk.client.send("pricing", "A fact.", sender="ann")
    talk.client.send("pricing", "Work.", sender="ann", performative="request")
    (item,) = talk.client.inbox("pricing")
    assert (item.sender, item.performative, item.content) == ("ann", "inform", "A fact.")
    assert item.received_at is not None
    assert talk.client.inbox("pricing") == []
    assert [again.message_id for again in talk.client.inbox("pricing", unread_only=False)] == [
        item.message_id
    ]
    assert talk.client.inbox("pricing", scope="tenant=other", unread_only=False) == []
    assert talk.client.inbox("stock", unread_only=False) == []


def test_an_inbox_is_read_in_pages(talk: Talk) -> None:
    for number in range(5):
        talk.client.send("pricing", str(number))
    first = talk.client.inbox("pricing", limit=2)
    rest = talk.client.inbox("pricing", limit=10, after=first[-1].delivery_id)
    assert [item.content for item in (*first, *rest)] == ["0", "1", "2", "3", "4"]


def test_a_person_who_has_spoken_is_written_to_in_that_conversation_only(world: World) -> None:
    """ruling 66"""
    script = [turn(send("ann", "Noted.")), say("Done.")]
    talk = Talk(world, {"sales": script, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    assert "has it spoken here" in talk.result(run_id)["error"]
    sent = talk.client.send("pricing", "Hello", sender="ann")
    talk.client.send("ann", "Hello, Ann.", sender="pricing", conversation_id=sent.conversation_id)
    assert [item.content for item in talk.client.inbox("ann")] == ["Hello, Ann."]


def test_the_same_key_sends_once(talk: Talk) -> None:
    first = talk.client.send("pricing", "Hello", key="mail-17")
    assert talk.client.send("pricing", "Hello", key="mail-17") == first
    assert len(talk.said()) == 1
    assert talk.client.send("pricing", "Hello", key="mail-17", scope="tenant=other") != first


def test_a_message_never_changes_and_no_row_changes_its_scope(world: World) -> None:
    """g6, g92: whatever happens to it afterwards."""
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    (question,) = talk.said()
    talk.all_quiet()
    assert world.run(run_id)["state"] == "completed"
    talk.client.send("pricing", "", performative="cancel", conversation_id=question["conversation_id"])
    assert [row for row in talk.said() if row["id"] == question["id"]] == [question]
    for table in TABLES:
        assert {row["scope"] for row in world.rows(table)} == {SCOPE}, table.name


# --- Tools -----------------------------------------------------------------------------------------------------------


def test_an_agent_has_the_tools_only_where_messages_are_on(world: World) -> None:
    """g83"""
    talk = Talk(world, {"sales": [say("Hello.")], "pricing": ANSWERS})
    names = {"agent_send", "agent_ask", "agent_inbox"}
    assert names <= {spec.name for spec in world.host.definitions()["sales"].tools}
    talk.begin("sales")
    assert names <= {tool.name for tool in talk.models["sales"].requests[-1].tools}
    off = Host()
    off.agent("sales", model=talk.models["sales"])
    assert off.definitions()["sales"].tools == ()
    with pytest.raises(MessagingOff):
        world.client(host=off).send("pricing", "Hello")
    with pytest.raises(Misconfiguration, match="messaging=True"):
        Host(transports=[object()]).check()  # type: ignore[list-item]


def test_a_list_of_tools_does_not_hide_them_and_their_names_are_taken(world: World) -> None:
    host = Host(messaging=True)
    host.agent("sales", model="scripted:none", tools=["agent_ask"])
    assert [spec.name for spec in host.definitions()["sales"].tools] == [
        "agent_ask",
        "agent_send",
        "agent_inbox",
    ]
    with pytest.raises(Misconfiguration, match="registered already"):

        @host.tool
        def agent_send(to: str) -> str:
            return to


class Only:
    """Lets an agent see and call what it names."""

    def __init__(self, *denied: str) -> None:
        self.denied = denied

    def visible(self, ctx: Any, tools: Any) -> Any:
        return tools

    def authorize(self, ctx: Any, tool: str, arguments: Any, approved: bool) -> None:
        if tool in self.denied:
            raise PermissionError(f"{tool} is not for you")


def test_what_the_authorizer_denies_never_reaches_the_bus(world: World) -> None:
    """g83"""
    script = [turn(ask("pricing"), send("pricing")), say("Done.")]
    talk = Talk(
        world,
        {"sales": script, "pricing": ANSWERS},
        authorizer=Only("agent_ask", "agent_send"),
        codec=JsonPrincipalCodec(),
    )
    run_id = talk.begin("sales")
    assert world.run(run_id)["state"] == "completed"
    assert {row["state"] for row in world.calls(run_id)} == {"denied"}
    assert [world.rows(table) for table in TABLES] == [[]] * len(TABLES)


def test_an_agent_speaks_as_itself_whatever_it_says(world: World) -> None:
    """g83"""
    script = [turn(send("pricing", "Hello", sender="boss")), turn(send("pricing")), say("Done.")]
    talk = Talk(world, {"sales": script, "pricing": ANSWERS})
    talk.begin("sales")
    assert [row["sender"] for row in talk.said()] == ["sales"]


def test_a_sent_message_is_a_result_with_these_keys(world: World) -> None:
    """g85; and the message and the outcome of its call are one transaction."""
    script = [turn(send(["pricing", "stock"], performative="request", ontology="prices")), say("Done.")]
    talk = Talk(world, {"sales": script, "pricing": ANSWERS, "stock": ANSWERS})
    run_id = talk.begin("sales")
    (message,) = talk.said()
    assert talk.result(run_id) == {
        "message_id": message["id"],
        "conversation_id": message["conversation_id"],
        "deliveries": [
            {"receiver": {"agent": row["receiver_agent"]}, "status": "queued", "delivery_id": row["id"]}
            for row in talk.queued()
        ],
    }
    assert (message["origin_run_id"], message["labels"]) == (run_id, {"ontology": "prices"})
    assert world.call(run_id)["state"] == "completed"


def test_a_refused_message_is_a_completed_call_with_an_error(world: World) -> None:
    """g9, g85"""
    script = [turn(send("nobody"), send("pricing", conversation_id=UNKNOWN)), say("Done.")]
    talk = Talk(world, {"sales": script, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    assert [row["state"] for row in world.calls(run_id)] == ["completed", "completed"]
    assert [set(talk.result(run_id, index)) for index in (0, 1)] == [{"error"}, {"error"}]
    assert [world.rows(table) for table in TABLES] == [[]] * len(TABLES)


@pytest.mark.parametrize("probe", ["message.after_commit", "model.before"])
def test_a_message_is_sent_once_however_often_its_run_loses_its_worker(world: World, probe: str) -> None:
    """g47: right after the message was stored with its outcome."""
    script = [turn(call("ship", order="1"), send("pricing"), send("pricing")), say("Done.")]
    talk = Talk(world, {"sales": script, "pricing": ANSWERS})
    run_id = str(talk.client.enqueue("sales", "Go").id)
    talk.worker.lose_at(probe, run_id, nth=1 if probe == "message.after_commit" else 2)
    assert talk.worker.finish(run_id)["state"] == "completed"
    assert len(talk.said()) == 2
    assert [effect.tool for effect in world.effects] == ["ship"]


def test_an_agent_reads_what_was_said_in_the_conversations_of_its_session(world: World) -> None:
    """g24; ruling 66: what was said to another run of the agent is none of its business."""
    talk = Talk(
        world,
        {
            "sales": [
                turn(send("pricing", "Look.", performative="request")),
                turn(inbox()),
                turn(inbox()),
                say("Done."),
            ],
            "pricing": ANSWERS,
        },
    )
    talk.client.send("sales", "For another run.", sender="pricing")
    run_id = str(talk.client.enqueue("sales", "Go", session="mine").id)
    talk.worker.lose_at("message.after_commit", run_id)
    (expert,) = talk.carry()
    talk.worker.finish(expert)
    talk.settle()
    assert talk.worker.finish(run_id)["state"] == "completed"
    items = talk.result(run_id, 1)["messages"]
    assert [set(item) for item in items] == [
        {
            "delivery_id",
            "message_id",
            "conversation_id",
            "sender",
            "performative",
            "content",
            "received_at",
        }
    ]
    assert items[0]["content"] == "12 EUR"
    assert talk.result(run_id, 2) == {"status": "nothing new"}
    assert [item.content for item in talk.client.inbox("sales")] == ["For another run."]


def test_a_read_that_was_lost_with_its_worker_is_read_again(world: World) -> None:
    """h18 avoided: marking read and the outcome of the call are one transaction."""
    script = [turn(send("pricing", "x", performative="request")), turn(inbox(limit=1)), say("Done.")]
    talk = Talk(world, {"sales": script, "pricing": ANSWERS})
    run_id = str(talk.client.enqueue("sales", "Go").id)
    talk.worker.lose_at("message.after_commit", run_id)
    (expert,) = talk.carry()
    talk.worker.finish(expert)
    talk.settle()
    talk.worker.lose_at("turn.after_commit", run_id)
    world.later(31)
    world.wake()
    assert talk.worker.finish(run_id)["state"] == "completed"
    assert [item["content"] for item in talk.result(run_id)["messages"]] == ["12 EUR"]


@pytest.mark.parametrize("arguments", [{"limit": 0}, {"limit": 101}, {"conversation_id": "conv_1"}])
def test_a_wrong_look_into_the_inbox_is_a_text(world: World, arguments: dict[str, Any]) -> None:
    talk = Talk(world, {"sales": [turn(inbox(**arguments)), say("Done.")], "pricing": ANSWERS})
    run_id = talk.begin("sales")
    assert set(talk.result(run_id)) == {"error"}


def test_the_input_of_a_receiver_names_speaker_and_act_and_no_ids(world: World) -> None:
    script = [turn(ask("pricing", "How much?", ontology="prices", protocol="fipa-query")), say("Done.")]
    talk = Talk(world, {"sales": script, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    (expert,) = talk.carry()
    talk.worker.finish(expert)
    text = talk.models["pricing"].requests[-1].messages[-1].content
    first, blank, words, _, deadline = text.split("\n")
    assert first == "sales (request) [ontology: prices] [protocol: fipa-query]:"
    assert (blank, words) == ("", "How much?")
    assert deadline.startswith("An answer is wanted by 20")
    (asked,) = talk.asked(run_id)
    assert asked["reply_with"] not in text
    assert asked["conversation_id"] not in text


# --- Containment -----------------------------------------------------------------------------------------------------


def test_one_run_may_send_so_many_messages(world: World) -> None:
    script = [turn(*[send("pricing", str(number)) for number in range(4)]), say("Done.")]
    talk = Talk(world, {"sales": script, "pricing": ANSWERS})
    worker = world.worker(messages_per_run=3)
    run_id = str(talk.client.enqueue("sales", "Go").id)
    worker.finish(run_id)
    assert len(talk.said()) == 3
    assert "one run may send 3" in talk.result(run_id)["error"]


def test_agents_that_ask_one_another_in_circles_are_stopped(world: World) -> None:
    """g81: A asks B asks A, each in a conversation of its own."""
    talk = Talk(
        world,
        {"a": [turn(ask("b")), say("a: {last_result}")], "b": [turn(ask("a")), say("b: {last_result}")]},
    )
    run_id = talk.begin("a")
    talk.all_quiet()
    assert world.run(run_id)["state"] == "completed"
    refused = [
        json.loads(item.content)["error"]
        for row in world.rows(tables.runs)
        for item in world.messages(row["id"])
        if item.role == "tool" and item.is_error
    ]
    assert len(refused) == 1
    assert "goes round in circles" in refused[0]
    assert len(world.rows(tables.runs)) == 5


def test_a_chain_of_agents_ends_at_its_depth(world: World) -> None:
    """g81: sending, not asking; nobody goes in circles with the same words for ever."""
    talk = Talk(
        world,
        {
            "a": [turn(send("b", "x", performative="request")), say("Done.")],
            "b": [turn(send("a", "x", performative="request")), say("Done.")],
        },
    )
    talk.begin("a")
    talk.all_quiet()
    assert max(row["chain_depth"] for row in world.rows(tables.runs)) == 8
    assert len([row for row in talk.said() if row["performative"] == "request"]) == 8


def test_a_storm_of_broadcasts_ends(world: World) -> None:
    """Issue 4: everybody who is told anything tells everybody, in the same conversation, and it ends at the ceiling."""

    def shout(request: Any) -> dict[str, Any]:
        if sum(item.role == "assistant" for item in request.messages) % 2:
            return say("Done.")
        return turn(send(["b", "c"], "All!", performative="request"))

    def echo(request: Any) -> dict[str, Any]:
        if sum(item.role == "assistant" for item in request.messages) % 2:
            return say("Done.")
        return turn(send("a", "All!", performative="request"))

    talk = Talk(world, {"a": shout, "b": echo, "c": echo})
    world.worker(messages_per_run=4)
    talk.begin("a")
    talk.all_quiet(most=200)
    depths = [row["chain_depth"] for row in world.rows(tables.runs)]
    assert max(depths) == 8
    assert all(row["hops_used"] <= 8 for row in world.rows(CONVERSATIONS))


def test_a_nested_question_is_due_before_the_one_it_serves(world: World) -> None:
    """g82"""
    talk = Talk(
        world,
        {
            "a": [turn(ask("b", reply_by_s=60)), say("{last_result}")],
            "b": [turn(ask("c", reply_by_s=3600)), say("{last_result}")],
            "c": ANSWERS,
        },
    )
    run_id = talk.begin("a")
    (nested,) = talk.carry()
    talk.worker.finish(nested)
    (outer,), (inner,) = talk.asked(run_id), talk.asked(nested)
    assert inner["deadline"] < outer["deadline"]
    assert world.run(nested)["ask_deadline"] == outer["deadline"]
    assert world.run(nested)["chain_depth"] == 1


def test_who_has_no_time_left_asks_nobody(world: World) -> None:
    """g82"""
    talk = Talk(
        world,
        {
            "a": [turn(ask("b", reply_by_s=30)), say("{last_result}")],
            "b": [turn(ask("c")), say("{last_result}")],
            "c": ANSWERS,
        },
    )
    talk.begin("a")
    (nested,) = talk.carry()
    world.later(26)
    talk.worker.finish(nested)
    assert talk.asked(nested) == []
    assert "no time left" in talk.result(nested)["error"]


# --- Cancel ----------------------------------------------------------------------------------------------------------


def test_cancel_answers_what_was_asked_and_closes_the_conversation(world: World) -> None:
    """g68: none of another conversation; what was on its way stays; twice is harmless."""
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS})
    run_id, other = talk.begin("sales"), talk.begin("sales")
    (asked,) = talk.asked(run_id)
    conversation_id = asked["conversation_id"]
    first = talk.client.send(
        "pricing", "changed my mind", performative="cancel", conversation_id=conversation_id
    )
    assert world.run(other)["state"] == "paused"
    assert talk.worker.finish(run_id)["state"] == "completed"
    result = talk.result(run_id)
    assert (result["complete"], result["replies"][0]["performative"]) == (False, "failure")
    assert "changed my mind" in result["replies"][0]["content"]
    assert talk.client.conversation(conversation_id).status == "closed"
    retired = world.rows(deliveries, deliveries.c.conversation_id == conversation_id)
    assert sorted(row["state"] for row in retired) == ["delivered", "retired"]
    again = talk.client.send("pricing", "", performative="cancel", conversation_id=conversation_id)
    assert again.message_id == first.message_id
    with pytest.raises(ConversationClosed):
        talk.client.send("pricing", "Hello?", conversation_id=conversation_id)
    assert [row["state"] for row in talk.asked(other)] == ["open"]


def test_cancel_works_when_the_messages_are_used_up(world: World) -> None:
    """g69"""
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    (asked,) = talk.asked(run_id)
    world.sql("update a2a_conversations set hop_ceiling = 1")
    talk.client.send("pricing", "", performative="cancel", conversation_id=asked["conversation_id"])
    assert world.run(run_id)["state"] == "ready"


def test_an_agent_ends_only_conversations_in_which_it_takes_part(world: World) -> None:
    """j13, j14"""
    conversation: dict[str, str] = {}

    def cancels(request: Any) -> dict[str, Any]:
        if any(item.role == "tool" for item in request.messages):
            return say("Done.")
        return turn(
            send("pricing", "", performative="cancel"),
            send("pricing", "stop", performative="cancel", **conversation),
        )

    talk = Talk(world, {"sales": ASKS, "stranger": cancels, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    conversation["conversation_id"] = talk.asked(run_id)[0]["conversation_id"]
    stranger = talk.begin("stranger")
    assert "both to and content" in talk.result(stranger, 0)["error"]
    assert "takes no part" in talk.result(stranger, 1)["error"]
    assert world.run(run_id)["state"] == "paused"


def test_an_agent_that_was_asked_ends_the_conversation(world: World) -> None:
    """g68: by its own tool, in the transaction of its call."""
    conversation: dict[str, str] = {}

    def cancels(request: Any) -> dict[str, Any]:
        if any(item.role == "tool" for item in request.messages):
            return say("Too late.")
        return turn(send("sales", "not my business", performative="cancel", **conversation))

    talk = Talk(world, {"sales": ASKS, "pricing": cancels})
    run_id = talk.begin("sales")
    conversation["conversation_id"] = talk.asked(run_id)[0]["conversation_id"]
    (expert,) = talk.carry()
    talk.worker.finish(expert)
    talk.settle()
    assert talk.worker.finish(run_id)["state"] == "completed"
    (item,) = talk.result(run_id)["replies"]
    assert "pricing ended the conversation: not my business" in item["content"]
    assert len(talk.said()) == 2, "what came after the end is no message of the conversation"
    assert [row["state"] for row in world.rows(deliveries)] == ["delivered", "delivered"]

"""Who may do what: the authorizer is asked about each call, under the starter's own scope and principal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from cortex_workers import (
    Client,
    Host,
    JsonPrincipalCodec,
    PrincipalRevoked,
    PrincipalUndecodable,
    RequiresApproval,
    ToolContext,
)
from cortex_workers.errors import PrincipalCodecRequired
from cortex_workers.schemas.llm import ModelRequest
from cortex_workers.store import tables
from tests.engine.world import SCOPE, World, call, error_of, only, say, turn


class Guard:
    """An authorizer that says what the test wants, and remembers what it was asked."""

    def __init__(self) -> None:
        self.hidden: set[str] = set()
        self.answers: dict[str, Exception] = {}
        self.asked: list[tuple[str, dict[str, Any], bool]] = []
        self.shown: list[Sequence[str]] = []
        self.contexts: list[ToolContext] = []

    def visible(self, ctx: ToolContext, tools: Sequence[str]) -> Sequence[str]:
        self.contexts.append(ctx)
        self.shown.append(tools)
        return [name for name in tools if name not in self.hidden]

    def authorize(self, ctx: ToolContext, tool: str, arguments: dict[str, Any], approved: bool) -> None:
        self.contexts.append(ctx)
        self.asked.append((tool, arguments, approved))
        if tool in self.answers:
            raise self.answers[tool]


class Codec(JsonPrincipalCodec):
    """A codec that can be told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: Exception | None = None

    def decode(self, data: bytes) -> Any:
        if self.fails is not None:
            raise self.fails
        return super().decode(data)


@pytest.fixture
def guard(world: World) -> Guard:
    made = Guard()
    world.host = Host(authorizer=made, codec=Codec())
    return made


def codec(world: World) -> Codec:
    found = world.host.codec
    assert isinstance(found, Codec)
    return found


@pytest.fixture
def client(world: World, guard: Guard) -> Client:
    world.shop([turn(call("ship", order="17")), say("Done.")])
    world.worker()
    return world.client(codec=JsonPrincipalCodec())


def test_what_is_not_visible_is_not_shown(world: World, guard: Guard, client: Client) -> None:
    guard.hidden = {"pay", "ship"}
    world.worker().work(client.enqueue("support", "Go").id)
    assert [[tool.name for tool in request.tools] for request in world.model.requests] == [["find"], ["find"]]
    # It is asked once a step.
    assert len(guard.shown) == 2


def test_what_is_visible_is_computed_anew_in_each_step(world: World, guard: Guard, client: Client) -> None:
    def script(request: ModelRequest) -> dict[str, Any]:
        guard.hidden.add("find")
        return turn(call("ship", order="1")) if request.step == 0 else say("Done.")

    world.model._decide = script
    world.worker().work(client.enqueue("support", "Go").id)
    assert [len(request.tools) for request in world.model.requests] == [3, 2]


def test_the_authorizer_cannot_show_a_tool_that_the_agent_does_not_have(world: World, guard: Guard) -> None:
    world.shop([say("Hi.")], tools=["find"])
    guard.visible = lambda ctx, tools: ["find", "ship", "fly"]  # type: ignore[method-assign]
    worker = world.worker()
    worker.work(world.client().enqueue("support", "Go").id)
    assert [tool.name for tool in world.model.requests[0].tools] == ["find"]


def test_a_hidden_tool_that_the_model_names_all_the_same_is_asked_about(
    world: World, guard: Guard, client: Client
) -> None:
    guard.hidden = {"ship"}
    guard.answers = {"ship": PermissionError("not for you")}
    run = world.worker().work(client.enqueue("support", "Go").id)
    assert guard.asked == [("ship", {"order": "17"}, False)]
    assert (run["state"], world.call(run["id"])["state"]) == ("completed", "denied")
    assert error_of(world.messages(run["id"])[1]) == "not for you"
    assert world.effects == []


def test_a_denial_without_words_is_told_by_its_kind(world: World, guard: Guard, client: Client) -> None:
    guard.answers = {"ship": PermissionError()}
    run = world.worker().work(client.enqueue("support", "Go").id)
    assert error_of(world.messages(run["id"])[1]) == "PermissionError"


def test_the_authorizer_is_not_asked_about_what_cannot_run(world: World, guard: Guard) -> None:
    world.shop([turn(call("fly"), call("ship", colour="red")), say("Done.")])
    worker = world.worker()
    run = worker.work(world.client().enqueue("support", "Go").id)
    assert guard.asked == []
    assert [row["state"] for row in world.calls(run["id"])] == ["failed", "failed"]


def test_an_escalated_call_asks_a_person_within_its_own_time(
    world: World, guard: Guard, client: Client
) -> None:
    guard.answers = {"ship": RequiresApproval(ttl=timedelta(hours=4))}
    run = world.worker().work(client.enqueue("support", "Go").id)
    assert run["state"] == "paused"
    assert world.effects == []
    checkpoint = only(client.checkpoints())
    (pause,) = world.pauses(run["id"])
    assert checkpoint.metadata["tools"] == ["ship"]
    assert checkpoint.metadata["suspension_id"] == pause["id"] == checkpoint.suspension_id
    assert (pause["expires_at"] - pause["created_at"]).total_seconds() == pytest.approx(4 * 3600, abs=2)
    assert world.call(run["id"])["state"] == "pending"


def test_an_approved_call_that_is_escalated_again_is_granted(
    world: World, guard: Guard, client: Client
) -> None:
    guard.answers = {"ship": RequiresApproval()}
    worker = world.worker()
    run_id = client.enqueue("support", "Go").id
    worker.work(run_id)
    client.decide(only(client.checkpoints()).id, approved=True)
    run = worker.work(run_id)
    assert (run["state"], [effect.tool for effect in world.effects]) == ("completed", ["ship"])
    # It is told that a person approved this very call.
    assert [asked[2] for asked in guard.asked] == [False, True]
    assert client.checkpoints() == []


def test_a_fresh_denial_beats_an_approval(world: World, guard: Guard, client: Client) -> None:
    guard.answers = {"ship": RequiresApproval()}
    worker = world.worker()
    run_id = client.enqueue("support", "Go").id
    worker.work(run_id)
    client.decide(only(client.checkpoints()).id, approved=True)
    guard.answers = {"ship": PermissionError("the shop has closed")}
    run = worker.work(run_id)
    assert (run["state"], world.effects) == ("completed", [])
    assert error_of(world.messages(run_id)[1]) == "the shop has closed"
    assert world.call(run_id)["state"] == "denied"
    (verdict,) = world.rows(tables.adjudications)
    assert (verdict["outcome"], verdict["disposition"]) == ("granted", "refused_by_engine")


def test_the_authorizer_sees_the_arguments_that_will_run(world: World, guard: Guard) -> None:
    world.shop([turn(call("pay", amount=5)), say("Done.")])
    worker = world.worker()
    client = world.client(codec=JsonPrincipalCodec())
    run_id = client.enqueue("support", "Go").id
    worker.work(run_id)
    client.decide(only(client.checkpoints()).id, approved=True, amended_arguments={"amount": 3})
    worker.work(run_id)
    assert guard.asked == [
        ("pay", {"amount": 5, "currency": "EUR"}, False),
        ("pay", {"amount": 3, "currency": "EUR"}, True),
    ]


def test_what_an_authorizer_does_to_the_arguments_does_not_reach_the_tool(world: World, guard: Guard) -> None:
    @world.host.tool
    def post(lines: list[str], ctx: ToolContext) -> str:
        """Post something."""
        return world.act("post", ctx, lines=lines)

    def meddle(ctx: ToolContext, tool: str, arguments: dict[str, Any], approved: bool) -> None:
        arguments["lines"].append("and more")

    guard.authorize = meddle  # type: ignore[method-assign]
    world.shop([turn(call("post", lines=["a"])), say("Done.")])
    worker = world.worker()
    worker.work(world.client().enqueue("support", "Go").id)
    assert world.effects[0].arguments == {"lines": ["a"]}


# --- Principals ------------------------------------------------------------------------------------------------------


@pytest.mark.invariant("I9")
def test_authorizer_and_tools_see_the_starter_and_not_the_decider(world: World, guard: Guard) -> None:
    seen: list[Any] = []

    @world.host.tool(needs_approval=True)
    def sign(ctx: ToolContext) -> str:
        """Sign."""
        seen.append((ctx.principal, ctx.scope))
        return "signed"

    world.shop([turn(call("sign")), say("Done.")])
    worker = world.worker()
    client = world.client(codec=JsonPrincipalCodec())
    starter, decider = {"user": "ada"}, {"user": "boss"}
    run_id = client.enqueue("support", "Go", scope=f"{SCOPE}/app=b", principal=starter).id
    worker.work(run_id)
    client.decide(only(client.checkpoints()).id, approved=True, principal=decider)
    worker.work(run_id)
    assert seen == [(starter, f"{SCOPE}/app=b")]
    assert all((ctx.principal, ctx.scope) == (starter, f"{SCOPE}/app=b") for ctx in guard.contexts)


@pytest.mark.invariant("I9")
def test_the_deciders_principal_is_kept_and_shown_to_nobody(world: World, guard: Guard) -> None:
    world.shop([turn(call("pay", amount=5)), say("Done.")])
    worker = world.worker()
    client = world.client(codec=JsonPrincipalCodec())
    worker.work(client.enqueue("support", "Go").id)
    checkpoint_id = only(client.checkpoints()).id
    decided = client.decide(
        checkpoint_id, approved=True, decided_by="The boss", principal={"secret": "boss-1"}
    )
    (row,) = world.rows(tables.checkpoints)
    assert b"boss-1" in bytes(row["decider_principal"])
    for shown in (decided, client.checkpoint(checkpoint_id)):
        assert "boss-1" not in shown.model_dump_json()
    assert decided.decision is not None
    assert (decided.decision.actor, decided.decision.decided_by) == ("ops", "The boss")


@pytest.mark.invariant("I9")
def test_without_a_codec_there_is_no_principal(world: World) -> None:
    seen: list[Any] = []

    @world.host.tool(retry_safe=True)
    def look(ctx: ToolContext) -> str:
        """Look."""
        seen.append(ctx.principal)
        return "seen"

    world.shop([turn(call("look")), say("Done.")])
    worker = world.worker()
    world.worker().work(world.client().enqueue("support", "Go").id)
    worker.work(
        world.client(codec=JsonPrincipalCodec()).enqueue("support", "Go", principal={"user": "ada"}).id
    )
    assert seen == [None, None]


@pytest.mark.invariant("I9")
def test_an_authorizer_without_a_codec_is_refused(world: World) -> None:
    world.host = Host(authorizer=Guard())
    world.shop([say("Hi.")])
    with pytest.raises(PrincipalCodecRequired):
        world.worker()


@pytest.mark.invariant("I9")
@pytest.mark.parametrize(
    "error", [PrincipalUndecodable("the key service is away"), ConnectionError("no answer")]
)
def test_a_principal_that_cannot_be_decoded_now_leaves_the_run_waiting(
    world: World, client: Client, error: Exception
) -> None:
    worker = world.worker()
    made = client.enqueue("support", "Go", principal={"user": "ada"})
    before = world.run(made.id)
    codec(world).fails = error
    waits = []
    for _ in range(4):
        run = worker.work(made.id)
        waits.append((run["not_before"] - run["state_since"]).total_seconds())
        world.later(waits[-1] + 0.01)
    assert waits == pytest.approx([1, 2, 4, 8], abs=0.1)
    assert (run["state"], run["instruction"], run["queue_class"]) == ("ready", "start", "start")
    assert (run["hand_backs"], run["reclaim_total"], run["started_at"]) == (4, 0, None)
    assert run["rank"] == before["rank"]
    assert world.model.requests == []
    reasons = [event["data"]["reason"] for event in world.events(made.id) if event["kind"] == "run.hand_back"]
    assert reasons == ["principal"] * 4
    codec(world).fails = None
    assert worker.work(made.id)["state"] == "completed"


def test_the_wait_for_a_principal_grows_to_five_minutes_and_stays_there(world: World, client: Client) -> None:
    worker = world.worker()
    run_id = client.enqueue("support", "Go", principal={"user": "ada"}).id
    codec(world).fails = PrincipalUndecodable()
    for _ in range(12):
        run = worker.work(run_id)
        wait = (run["not_before"] - run["state_since"]).total_seconds()
        world.later(wait + 0.01)
        world.wake()
    assert wait == pytest.approx(300, abs=0.1)


def test_a_long_wait_is_marked_so_that_claims_do_not_look_at_it(world: World, client: Client) -> None:
    worker = world.worker()
    run_id = client.enqueue("support", "Go", principal={"user": "ada"}).id
    world.sql("update runs set hand_backs = 5")
    codec(world).fails = PrincipalUndecodable()
    run = worker.work(run_id)
    assert run["wait_reason"] == "later"
    world.later(33)
    world.wake()
    assert world.run(run_id)["wait_reason"] is None


def test_an_answer_waits_with_the_principal_and_is_carried_out_once(world: World, guard: Guard) -> None:
    world.shop([turn(call("pay", amount=5)), say("Done.")])
    worker = world.worker()
    client = world.client(codec=JsonPrincipalCodec())
    run_id = client.enqueue("support", "Go", principal={"user": "ada"}).id
    worker.work(run_id)
    client.decide(only(client.checkpoints()).id, approved=True)
    codec(world).fails = PrincipalUndecodable()
    run = worker.work(run_id)
    assert (run["state"], run["instruction"], world.effects) == ("ready", "answer", [])
    world.later(2)
    codec(world).fails = None
    assert worker.work(run_id)["state"] == "completed"
    assert len(world.effects) == 1


@pytest.mark.invariant("I9")
def test_a_revoked_principal_fails_the_run(world: World, guard: Guard) -> None:
    world.shop([turn(call("pay", amount=5)), say("Done.")])
    worker = world.worker()
    client = world.client(codec=JsonPrincipalCodec())
    run_id = client.enqueue("support", "Go", principal={"user": "ada"}).id
    worker.work(run_id)
    client.decide(only(client.checkpoints()).id, approved=True)
    codec(world).fails = PrincipalRevoked("ada has left")
    run = worker.work(run_id)
    assert (run["state"], run["error_code"], run["error_text"]) == (
        "failed",
        "principal_revoked",
        "ada has left",
    )
    assert world.effects == []
    assert client.checkpoints() == []
    assert world.call(run_id)["state"] == "denied"


@pytest.mark.invariant("I9")
def test_a_decider_of_a_broader_scope_decides_within_the_runs_own(world: World, guard: Guard) -> None:
    world.shop([turn(call("pay", amount=5)), say("Done.")])
    worker = world.worker()
    client = world.client(codec=JsonPrincipalCodec())
    narrow = f"{SCOPE}/app=b/user=ada"
    run_id = client.enqueue("support", "Go", scope=narrow).id
    worker.work(run_id)
    client.decide(only(client.checkpoints()).id, approved=True)
    worker.work(run_id)
    for table in (tables.runs, tables.sessions, tables.suspensions, tables.checkpoints, tables.events):
        assert {row["scope"] for row in world.rows(table)} == {narrow}


@pytest.mark.invariant("I9")
def test_a_sibling_scope_finds_nothing_and_moves_nothing(world: World, guard: Guard) -> None:
    from cortex_workers.errors import CheckpointNotFound, RunNotFound

    world.shop([turn(call("pay", amount=5)), say("Done.")])
    worker = world.worker()
    client = world.client()
    run_id = client.enqueue("support", "Go", scope=f"{SCOPE}/app=b").id
    worker.work(run_id)
    checkpoint_id = only(client.checkpoints()).id
    before = world.snapshot()
    for scope in (f"{SCOPE}/app=c", f"{SCOPE}/app=b/user=ada", "tenant=ac", "tenant=acme2", "tenant=other"):
        stranger = world.client(scope=scope, host=world.host, codec=JsonPrincipalCodec())
        for run_verb in (stranger.get, stranger.cancel, stranger.continue_run):
            with pytest.raises(RunNotFound):
                run_verb(run_id)
        with pytest.raises(CheckpointNotFound):
            stranger.checkpoint(checkpoint_id)
        with pytest.raises(CheckpointNotFound):
            stranger.decide(checkpoint_id, approved=True)
        assert stranger.checkpoints() == []
        assert stranger.runs() == []
    assert world.snapshot() == before

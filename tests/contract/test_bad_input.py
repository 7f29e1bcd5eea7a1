"""Bad input gets a clear error and writes nothing, at every door of the main job."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from annotated_types import Ge, Gt, Le

from cortex_workers import Client, Host, errors, wiring
from cortex_workers.engine import expire
from cortex_workers.host import load_host
from cortex_workers.schemas.ids import CHECKPOINT, RUN, SESSION, new_id
from cortex_workers.schemas.lifecycle import RunState
from cortex_workers.schemas.run import EnqueueRun, RunOverrides
from cortex_workers.settings import PREFIX, Settings, load_settings
from cortex_workers.store.transitions import Row
from cortex_workers.testing import factory
from tests.contract import snapshot
from tests.engine.world import World

FOREIGN = "tenant=other"
NUL, SURROGATE = "a\x00b", "a\ud800b"
MIB = 1024 * 1024


@dataclass(frozen=True)
class Fleet:
    """What is there before the bad input comes."""

    world: World
    client: Client
    ready: Row
    running: Row
    ended: Row
    paused: Row
    pair: Row
    decided: Row
    overdue: Row
    uncertain: Row

    def asked(self, run: Row) -> str:
        return factory.checkpoint_of(self.world.database, run)


@pytest.fixture(scope="module")
def fleet(common_world: World) -> Iterator[Fleet]:
    database = common_world.database
    factory.an_agent(database)
    client = common_world.client(scope=factory.SCOPE)
    decided = factory.a_paused_run(database)
    client.decide(factory.checkpoint_of(database, decided), approved=True, reason="fine")
    yield Fleet(
        world=common_world,
        client=client,
        ready=common_world.run(client.enqueue("support", "Refund order 17", session="talk").id),
        running=factory.a_running_run(database),
        ended=factory.a_run_in(database, RunState.COMPLETED),
        paused=factory.a_paused_run(database),
        pair=factory.a_paused_run(database, calls=2),
        decided=decided,
        overdue=factory.a_paused_run(database, ttl_s=0.0),
        uncertain=factory.an_uncertain_run(database),
    )


Act = Callable[[Fleet], Any]


def refused(name: str, error: type[Exception], match: str, act: Act) -> Any:
    return pytest.param(error, match, act, id=name)


def send(**what: Any) -> Act:
    given = {"agent": "support", "input": "hello", **what}
    return lambda fleet: fleet.client.enqueue(**given)


def decide(which: str, **what: Any) -> Act:
    return lambda fleet: fleet.client.decide(fleet.asked(getattr(fleet, which)), **what)


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def settle(which: str, outcome: Any, **what: Any) -> Act:
    return lambda fleet: fleet.client.settle(fleet.asked(getattr(fleet, which)), outcome, **what)


RUNS = [
    refused(
        "unknown agent",
        errors.AgentNotFound,
        "no worker has registered an agent named 'nobody'",
        send(agent="nobody"),
    ),
    refused("no agent", errors.InvalidArgument, "the agent's name has 1 to 200 characters", send(agent="")),
    refused(
        "empty scope",
        errors.NoScope,
        "A scope is required",
        lambda fleet: scopeless(fleet).enqueue("support", "hi", scope=""),
    ),
    refused(
        "no scope",
        errors.NoScope,
        "A scope is required",
        lambda fleet: scopeless(fleet).enqueue("support", "hi"),
    ),
    refused(
        "four levels", errors.InvalidScope, "at most 3 levels, this one has 4", send(scope="a=1/b=2/c=3/d=4")
    ),
    refused("a level without a value", errors.InvalidScope, "key=value", send(scope="tenant=")),
    refused("a level without a key", errors.InvalidScope, "key=value", send(scope="=acme")),
    refused("a separator in a value", errors.InvalidScope, "key=value", send(scope="tenant=a=b")),
    refused("an empty level", errors.InvalidScope, "key=value", send(scope="tenant=acme/")),
    refused("NUL in the scope", errors.InvalidScope, "control characters", send(scope=f"tenant={NUL}")),
    refused(
        "an id of another kind",
        errors.InvalidId,
        "a run id looks like arun_",
        send(run_id=new_id(CHECKPOINT)),
    ),
    refused("an id of no kind", errors.InvalidId, "a run id looks like arun_", send(run_id="17")),
    refused(
        "an id that only begins well", errors.InvalidId, "a run id looks like arun_", send(run_id="arun_17")
    ),
    refused(
        "an id and a key",
        errors.InvalidArgument,
        "run_id or key, not both",
        send(run_id=new_id(RUN), key="order-17"),
    ),
    refused("an empty key", errors.InvalidArgument, "1 to 200 characters", send(key="")),
    refused("a key too long", errors.InvalidArgument, "1 to 200 characters", send(key="k" * 201)),
    refused("NUL in the input", errors.UnstorableText, "the input holds a NUL", send(input=NUL)),
    refused("half a character in the input", errors.UnstorableText, "lone surrogate", send(input=SURROGATE)),
    refused(
        "an input of 9 MiB",
        errors.InputTooLarge,
        "9437184 bytes, the limit is 8388608",
        send(input="x" * 9 * MIB),
    ),
    refused(
        "9 MiB of few characters",
        errors.InputTooLarge,
        "the limit is 8388608",
        send(input="ü" * (9 * MIB // 2)),
    ),
    refused("an input that is no text", errors.InvalidArgument, "the input must be text", send(input=17)),
    refused(
        "metadata that is no JSON",
        errors.InvalidArgument,
        "metadata must be a JSON object",
        send(metadata={"a": object()}),
    ),
    refused("NUL in metadata", errors.UnstorableText, "metadata", send(metadata={"a": [{"b": NUL}]})),
    refused("NUL in a key of metadata", errors.UnstorableText, "a key of metadata", send(metadata={NUL: 1})),
    refused("much metadata", errors.InputTooLarge, "metadata is larger", send(metadata={"a": "x" * 70_000})),
    refused(
        "a session that is not there", errors.SessionNotFound, "has no session", send(session=new_id(SESSION))
    ),
    refused(
        "a session id that is none", errors.InvalidId, "a session id looks like ses_", send(session="ses_17")
    ),
    refused("an empty session", errors.InvalidArgument, "1 to 200 characters", send(session="")),
    refused("a session key too long", errors.InvalidArgument, "1 to 200 characters", send(session="s" * 201)),
    refused("NUL in the session", errors.UnstorableText, "the session", send(session=NUL)),
    refused(
        "a tool that the agent has not",
        errors.InvalidArgument,
        "no tool named 'fly'",
        send(overrides=RunOverrides(tools=("fly",))),
    ),
    refused(
        "start by a time that is over",
        errors.InvalidArgument,
        "start_by",
        send(start_by=timedelta(seconds=-1)),
    ),
    refused(
        "start by more than the calendar has",
        errors.InvalidArgument,
        "start_by must be more than zero and at most 3650 days",
        send(start_by=timedelta.max),
    ),
    refused(
        "start by a number",
        errors.InvalidArgument,
        "start_by is a timedelta from now, not int",
        send(start_by=5),
    ),
    refused(
        "start by a date",
        errors.InvalidArgument,
        "start_by is a timedelta from now, not datetime",
        send(start_by=datetime(2030, 1, 1)),  # noqa: DTZ001  a naive one is what somebody may send
    ),
    refused(
        "a request that is none",
        errors.InvalidArgument,
        "a request is EnqueueRun",
        lambda fleet: fleet.client.enqueue_many([request("one"), {"agent": "support"}]),  # type: ignore[list-item]
    ),
    refused(
        "metadata in many levels",
        errors.InvalidArgument,
        "metadata is nested deeper",
        send(metadata=nested(400)),
    ),
    refused(
        "an actor that cannot be stored",
        errors.UnstorableText,
        "the actor",
        lambda fleet: fleet.world.client(scope=factory.SCOPE, actor=NUL),
    ),
    refused(
        "a principal without a codec",
        errors.InvalidArgument,
        "a principal needs a codec",
        send(principal={"user": 1}),
    ),
    refused(
        "somebody else's session",
        errors.SessionNotFound,
        "has no session",
        lambda fleet: fleet.client.enqueue("support", "hi", scope=FOREIGN, session=fleet.ready["session_id"]),
    ),
    refused(
        "an id used for something else",
        errors.RunIdReused,
        "used before with different content",
        lambda fleet: fleet.client.enqueue("support", "other", run_id=fleet.ready["id"]),
    ),
    refused(
        "an id used in another scope",
        errors.RunIdTaken,
        "is taken$",
        lambda fleet: fleet.client.enqueue(
            "support", "Refund order 17", session="talk", run_id=fleet.ready["id"], scope=FOREIGN
        ),
    ),
    refused(
        "one bad request among good ones",
        errors.UnstorableText,
        "NUL",
        lambda fleet: fleet.client.enqueue_many([request("one"), request(NUL), request("three")]),
    ),
    refused(
        "one conflict among many",
        errors.RunIdReused,
        "different content",
        lambda fleet: fleet.client.enqueue_many([request("one"), request("two", run_id=fleet.ready["id"])]),
    ),
    refused(
        "one id for two requests",
        errors.RunIdReused,
        "stands twice",
        lambda fleet: fleet.client.enqueue_many(
            [request("one", run_id=fleet.ended["id"]), request("two", run_id=fleet.ended["id"])]
        ),
    ),
    refused(
        "get an unknown run",
        errors.RunNotFound,
        "there is no run",
        lambda fleet: fleet.client.get(new_id(RUN)),
    ),
    refused(
        "get a run of another scope",
        errors.RunNotFound,
        "in this scope",
        lambda fleet: fleet.client.get(fleet.ready["id"], scope=FOREIGN),
    ),
    refused(
        "get by another kind of id",
        errors.InvalidId,
        "a run id looks like arun_.*this looks like a checkpoint id",
        lambda fleet: fleet.client.get(new_id(CHECKPOINT)),
    ),
    refused(
        "cancel an unknown run",
        errors.RunNotFound,
        "there is no run",
        lambda fleet: fleet.client.cancel(new_id(RUN)),
    ),
    refused(
        "cancel a run of another scope",
        errors.RunNotFound,
        "in this scope",
        lambda fleet: fleet.client.cancel(fleet.running["id"], scope=FOREIGN),
    ),
    refused(
        "cancel a run that has ended",
        errors.InvalidState,
        "has ended already: completed",
        lambda fleet: fleet.client.cancel(fleet.ended["id"]),
    ),
    refused(
        "NUL in the reason of a cancel",
        errors.UnstorableText,
        "the reason",
        lambda fleet: fleet.client.cancel(fleet.running["id"], reason=NUL),
    ),
    refused(
        "wait for an unknown run",
        errors.RunNotFound,
        "there is no run",
        lambda fleet: fleet.client.wait(new_id(RUN)),
    ),
    refused(
        "continue without a host",
        errors.NoHost,
        "needs Client\\(host=",
        lambda fleet: fleet.client.continue_run(fleet.ready["id"]),
    ),
    refused(
        "list a state that is none",
        errors.InvalidArgument,
        "no such state",
        lambda fleet: fleet.client.runs(state="asleep"),
    ),
    refused("list none", errors.InvalidArgument, "limit", lambda fleet: fleet.client.runs(limit=0)),
    refused("list some", errors.InvalidArgument, "limit", lambda fleet: fleet.client.runs(limit="5")),  # type: ignore[arg-type]
    refused(
        "list an agent that cannot be stored",
        errors.UnstorableText,
        "the agent's name",
        lambda fleet: fleet.client.runs(agent=NUL),
    ),
    refused(
        "list a session by its key",
        errors.InvalidId,
        "a session id looks like ses_",
        lambda fleet: fleet.client.runs(session="talk"),
    ),
    refused(
        "list from a text that cannot be stored",
        errors.InvalidId,
        "a run id looks like arun_",
        lambda fleet: fleet.client.runs(before=NUL),
    ),
    refused(
        "look for the questions of half a character",
        errors.InvalidId,
        "a run id looks like arun_",
        lambda fleet: fleet.client.checkpoints(run_id=SURROGATE),
    ),
]

DECISIONS = [
    refused(
        "unknown checkpoint",
        errors.CheckpointNotFound,
        "checkpoint",
        lambda fleet: fleet.client.decide(new_id(CHECKPOINT), approved=True),
    ),
    refused(
        "a run's id",
        errors.InvalidId,
        "a checkpoint id looks like acp_.*this looks like a run id",
        lambda fleet: fleet.client.decide(fleet.paused["id"], approved=True),
    ),
    refused(
        "a checkpoint of another scope",
        errors.CheckpointNotFound,
        "in this scope",
        decide("paused", approved=True, scope=FOREIGN),
    ),
    refused(
        "a decided one, otherwise",
        errors.InvalidState,
        "was decided already: approved",
        decide("decided", approved=False),
    ),
    refused(
        "a decided one, with another reason",
        errors.InvalidState,
        "was decided already",
        decide("decided", approved=True, reason="no"),
    ),
    refused(
        "arguments that are no object",
        errors.InvalidDecision,
        "amended",
        decide("paused", approved=True, amended_arguments=[1]),
    ),
    refused(
        "arguments that lack something",
        errors.InvalidDecision,
        "amended arguments do not fit tool refund: .*'amount_cents' is a required",
        decide("paused", approved=True, amended_arguments={"order_id": "1"}),
    ),
    refused(
        "arguments of another type",
        errors.InvalidDecision,
        "amount_cents: 'much' is not of type",
        decide("paused", approved=True, amended_arguments={"order_id": "1", "amount_cents": "much"}),
    ),
    refused(
        "arguments too many",
        errors.InvalidDecision,
        "Additional properties",
        decide("paused", approved=True, amended_arguments={"order_id": "1", "amount_cents": 1, "to": "me"}),
    ),
    refused(
        "NUL in arguments",
        errors.CortexError,
        "NUL|stored",
        decide("paused", approved=True, amended_arguments={"order_id": NUL, "amount_cents": 1}),
    ),
    refused(
        "one set of arguments for two calls",
        errors.InvalidDecision,
        "exactly one call; this one has 2",
        decide("pair", approved=True, amended_arguments={"order_id": "1", "amount_cents": 1}),
    ),
    refused(
        "after the deadline",
        errors.SuspensionExpired,
        "the deadline of this pause was 20",
        decide("overdue", approved=True),
    ),
    refused(
        "a rejection after the deadline",
        errors.SuspensionExpired,
        "the deadline of this pause was 20",
        decide("overdue", approved=False),
    ),
    refused(
        "a word instead of yes or no",
        errors.InvalidDecision,
        "True or False",
        decide("paused", approved="yes"),
    ),
    refused(
        "NUL in the reason", errors.UnstorableText, "the reason", decide("paused", approved=True, reason=NUL)
    ),
    refused(
        "half a character in decided_by",
        errors.UnstorableText,
        "decided_by",
        decide("paused", approved=True, decided_by=SURROGATE),
    ),
    refused(
        "the name of a mechanism",
        errors.InvalidDecision,
        "cortex:",
        decide("paused", approved=True, decided_by="cortex:sweeper"),
    ),
    refused(
        "approve an uncertain effect",
        errors.InvalidDecision,
        "happened, did_not_happen or stop",
        decide("uncertain", approved=True),
    ),
    refused(
        "reject an uncertain effect",
        errors.InvalidDecision,
        "happened, did_not_happen or stop",
        decide("uncertain", approved=False),
    ),
    refused(
        "settle an approval",
        errors.InvalidDecision,
        "approve or reject",
        settle("paused", "happened", result="done"),
    ),
    refused(
        "settle with another word",
        errors.InvalidDecision,
        "happened, did_not_happen, stop",
        settle("uncertain", "maybe"),
    ),
    refused(
        "a result of what did not happen",
        errors.InvalidDecision,
        "belongs to the outcome happened",
        settle("uncertain", "did_not_happen", result="done"),
    ),
    refused(
        "a result that is no JSON",
        errors.InvalidDecision,
        "cannot be stored",
        settle("uncertain", "happened", result=object()),
    ),
]


def request(text: str, **more: Any) -> EnqueueRun:
    return EnqueueRun.model_construct(agent="support", input=text, scope=factory.SCOPE, **more)


def scopeless(fleet: Fleet) -> Client:
    return fleet.world.client(scope=None)


@pytest.mark.parametrize(("error", "match", "act"), [*RUNS, *DECISIONS])
def test_bad_input_is_refused_and_nothing_is_written(
    fleet: Fleet, error: type[Exception], match: str, act: Act
) -> None:
    before = snapshot.everything(fleet.world.database)
    fleet.world.told.clear()
    with pytest.raises(error, match=match) as caught:
        act(fleet)
    assert snapshot.everything(fleet.world.database) == before
    assert fleet.world.told == []
    assert NUL not in str(caught.value) and "Refund order 17" not in str(caught.value)


def test_the_fleet_of_these_tests_takes_good_input(fleet: Fleet) -> None:
    """Or each of them would be refused for nothing."""
    database = fleet.world.database
    again = fleet.client.enqueue("support", "Refund order 17", session="talk", run_id=fleet.ready["id"])
    assert not again.fresh
    run = factory.a_paused_run(database)
    arguments = {"order_id": "18", "amount_cents": 1}
    decided = fleet.client.decide(
        factory.checkpoint_of(database, run), approved=True, amended_arguments=arguments
    )
    assert decided.decision is not None and decided.decision.amended_arguments == arguments
    uncertain = factory.an_uncertain_run(database)
    assert fleet.client.settle(factory.checkpoint_of(database, uncertain), "happened", result={"ok": True})
    overdue = factory.a_paused_run(database, ttl_s=0.0)
    assert expire.expire_pause(fleet.client.runtime, overdue["suspension_id"])


# --- Settings -----------------------------------------------------------------------------------------------------


def bounded() -> Iterator[Any]:
    for name, field in Settings.model_fields.items():
        limits = [item for item in field.metadata if isinstance(item, Ge | Gt | Le)]
        for limit in limits:
            value = {Ge: lambda at: at - 1, Gt: lambda at: at, Le: lambda at: at + 1}[type(limit)]
            bound = getattr(limit, type(limit).__name__.lower())
            yield pytest.param(name, value(bound), id=f"{name}={value(bound)}")


@pytest.mark.parametrize(("name", "value"), list(bounded()))
def test_a_setting_out_of_its_bounds_names_its_variable_and_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    monkeypatch.setenv(PREFIX + name.upper(), str(value))
    with pytest.raises(errors.InvalidSettings, match=rf"{PREFIX}{name.upper()}.*(greater|less|equal)"):
        load_settings()


@pytest.mark.parametrize("name", [name for name in Settings.model_fields if name.endswith("_s")])
def test_no_duration_is_negative(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(PREFIX + name.upper(), "-1")
    with pytest.raises(errors.InvalidSettings, match=PREFIX + name.upper()):
        load_settings()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"LEASE_RENEW_S": "40"}, ("LEASE_RENEW_S (40)", "LEASE_TTL_S (60)")),
        ({"LEASE_TRUST_S": "15"}, ("LEASE_TRUST_S (15)", "LEASE_RENEW_S (20)", "LEASE_TTL_S (60)")),
        (
            {"SLICE_S": "900", "MODEL_TIMEOUT_S": "60"},
            ("SLICE_S (900)", "MODEL_TIMEOUT_S (60)", "VISIBILITY_TIMEOUT_S (1800)"),
        ),
    ],
)
def test_settings_that_do_not_go_together_are_all_named_by_their_variables(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], named: tuple[str, ...]
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(PREFIX + name, value)
    with pytest.raises(errors.InvalidSettings) as caught:
        load_settings()
    assert [each for each in named if PREFIX + each not in caught.value.message] == []


def test_a_word_where_a_number_belongs_is_refused_without_being_shown_in_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(f"{PREFIX}DATABASE_URL", "mysql://me:hunter2@db/x")
    monkeypatch.setenv(f"{PREFIX}SLOTS", "many")
    with pytest.raises(errors.InvalidSettings) as caught:
        load_settings()
    assert f"{PREFIX}DATABASE_URL" in str(caught.value) or f"{PREFIX}SLOTS" in str(caught.value)
    assert "hunter2" not in str(caught.value)


# --- Hosts --------------------------------------------------------------------------------------------------------


class Everybody:
    """An authorizer that minds nothing."""

    def visible(self, ctx: Any, tools: Any) -> Any:
        return tools

    def authorize(self, ctx: Any, tool: str, arguments: Any, approved: bool) -> None:
        return None


def twice(host: Host) -> None:
    for _ in range(2):

        @host.tool
        def refund(order_id: str) -> str:
            return order_id


def no_such_tool(host: Host) -> None:
    host.agent("support", model="scripted:none", tools=["fly"])


@pytest.mark.parametrize(
    ("arrange", "error", "match"),
    [
        (twice, errors.DuplicateTool, "refund"),
        (no_such_tool, errors.UnknownTool, "fly"),
        (lambda host: host.mark_retry_safe("fly"), errors.UnknownTool, "fly"),
        (
            lambda host: setattr(host, "authorizer", Everybody()),
            errors.PrincipalCodecRequired,
            r"Host\(codec=",
        ),
    ],
    ids=[
        "a tool twice",
        "an agent's tool that is none",
        "a retry-safe name that is none",
        "an authorizer alone",
    ],
)
def test_a_host_that_cannot_work_does_not_start_and_writes_nothing(
    fleet: Fleet, arrange: Callable[[Host], Any], error: type[Exception], match: str
) -> None:
    before = snapshot.everything(fleet.world.database)
    host = Host()
    with pytest.raises(error, match=match):
        arrange(host)
        wiring.build(fleet.world.settings(), host=host)
    assert snapshot.everything(fleet.world.database) == before


@pytest.mark.parametrize(
    ("path", "content", "match"),
    [
        ("shop_that_is_not_there:host", None, "no module named 'shop_that_is_not_there'"),
        ("shop_broken:host", "def (", "does not import: .* line 1"),
        ("shop_raises:host", "1 / 0", "ZeroDivisionError.* line 1"),
        ("shop_lacks:host", "import a_library_that_is_not_there", "a_library_that_is_not_there"),
        ("shop_empty:host", "", "has no attribute 'host'"),
        ("shop_other:host", "host = 17", "is a int, not a Host"),
        ("shop", None, "module:attribute"),
    ],
)
def test_a_host_module_that_does_not_load_says_why(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, content: str | None, match: str
) -> None:
    if content is not None:
        (tmp_path / f"{path.split(':')[0]}.py").write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = snapshot.everything(fleet.world.database)
    with pytest.raises(errors.HostNotLoadable, match=match):
        load_host(path)
    with pytest.raises(errors.HostNotLoadable, match=match):
        wiring.build(fleet.world.settings(host=path))
    sys.modules.pop(path.split(":")[0], None)  # other tests have modules of these names too
    assert snapshot.everything(fleet.world.database) == before
    assert not os.environ.get(f"{PREFIX}HOST")


def test_a_worker_does_not_start_on_a_schema_that_is_behind(empty_database_url: str) -> None:
    host = Host()
    host.agent("support", model="scripted:none")
    rt = wiring.build(load_settings(database_url=empty_database_url), host=host)
    with pytest.raises(errors.SchemaBehind, match="run `cortex-workers migrate`"):
        rt.start()
    rt.database.dispose()

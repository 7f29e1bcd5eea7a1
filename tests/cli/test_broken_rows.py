"""Rows that somebody edited or deleted by hand: lists go on past them with a mark, `show` says what is missing."""

import pytest
from sqlalchemy import text

from cortex_workers.store import agents
from cortex_workers.store.database import Database
from cortex_workers.store.transitions import Row
from cortex_workers.testing import factory
from tests.cli.conftest import Commands, a_worker


def by_hand(database: Database, statement: str, **values: object) -> None:
    """Change rows as somebody with all rights may, without a look at what refers to them."""
    with database.transaction() as unit:
        unit.execute(text("set local session_replication_role = replica"))
        assert unit.execute(text(statement), values).rowcount


@pytest.fixture
def whole(database: Database) -> Row:
    """A row that nobody touches: it is in every list."""
    return factory.a_paused_run(database)


@pytest.fixture
def broken(database: Database, whole: Row) -> Row:
    return factory.a_paused_run(database)


def test_a_run_with_a_broken_document_is_listed_with_a_mark(
    cw: Commands, database: Database, whole: Row, broken: Row
) -> None:
    by_hand(database, """update runs set usage = '["x"]' where id = :id""", id=broken["id"])
    listed = {run["id"]: run["unreadable"] for run in cw("runs", "list", "--json").json}
    assert listed == {whole["id"]: [], broken["id"]: ["usage"]}
    assert "cannot be read: usage" in cw("runs", "list").out
    assert cw("runs", "show", broken["id"], "--json").json["missing"] == ["usage"]


@pytest.mark.parametrize("document", ['"yes"', "[1]", '{"approved": {}}'])
def test_a_question_with_a_broken_decision_is_listed_with_a_mark(
    cw: Commands, database: Database, whole: Row, broken: Row, document: str
) -> None:
    asked = factory.checkpoint_of(database, broken)
    cw("checkpoints", "approve", asked)
    by_hand(
        database, "update checkpoints set decision = cast(:d as jsonb) where id = :id", d=document, id=asked
    )
    listed = {each["id"]: each["unreadable"] for each in cw("checkpoints", "list", "--all", "--json").json}
    assert listed == {factory.checkpoint_of(database, whole): [], asked: ["decision"]}
    assert "cannot be read: decision" in cw("checkpoints", "list", "--all").out
    assert "cannot be read: decision" in cw("checkpoints", "show", asked).out
    assert cw("runs", "show", broken["id"]).code == 0


def test_arguments_that_cannot_be_read_are_not_shown_as_none(
    cw: Commands, database: Database, whole: Row, broken: Row
) -> None:
    by_hand(
        database,
        "update messages set tool_calls = '{' where run_id = :id and role = 'assistant'",
        id=broken["id"],
    )
    listed = [each["unreadable"] for each in cw("checkpoints", "list", "--json").json]
    assert listed == [[], ["arguments of call_0_0"]]
    shown = cw("runs", "show", broken["id"], COLUMNS="200").out
    assert "missing  message 3, arguments of call_0_0" in shown


@pytest.mark.parametrize(
    ("statement", "missing"),
    [
        ("delete from run_specs where run_id = :id", "input and overrides"),
        ("delete from sessions where id = (select session_id from runs where id = :id)", "session ses_"),
        ("delete from suspensions where run_id = :id", "suspension sus_"),
        ("delete from checkpoints where run_id = :id", "the question of its pause"),
        ("update steps set usage = '7' where run_id = :id", "usage of step 0"),
        ("update events set data = '7' where run_id = :id and kind = 'run.claim'", "data of event "),
        ("update checkpoints set metadata = '7' where run_id = :id", "metadata of acp_"),
        ("update pending_calls set payload = '7' where run_id = :id", "what call_0_0 runs with"),
    ],
)
def test_what_is_missing_of_a_run_is_named(
    cw: Commands, database: Database, whole: Row, broken: Row, statement: str, missing: str
) -> None:
    by_hand(database, statement, id=broken["id"])
    shown = cw("runs", "show", broken["id"], COLUMNS="200")
    assert shown.code == 0 and missing in shown.out.split("missing  ")[1]
    for words in (("runs", "list"), ("checkpoints", "list"), ("sessions", "list")):
        assert cw(*words).code == 0
    assert cw("doctor").code in (0, 1)


def test_a_question_whose_pause_is_gone_says_so(cw: Commands, database: Database, broken: Row) -> None:
    asked = factory.checkpoint_of(database, broken)
    by_hand(database, "delete from suspensions where run_id = :id", id=broken["id"])
    assert "cannot be read: suspension" in cw("checkpoints", "show", asked).out


def test_a_broken_version_of_an_agent_keeps_nobody_from_the_others(cw: Commands, database: Database) -> None:
    factory.an_agent(database)
    a_worker(database)
    by_hand(database, "update agent_versions set definition = '[]'")
    with database.read() as unit:
        assert agents.all_versions(unit) == []
    said = cw("enqueue", "support", "hi", "--json")
    assert said.code == 1 and "cannot be read" in said.json["message"]
    assert cw("doctor").code in (0, 1)
    assert cw("sweep").code == 0

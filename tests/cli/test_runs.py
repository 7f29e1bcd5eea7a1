"""`runs`, `enqueue` and `sessions`: what a person reads, what a script reads, and the exit codes."""

import threading

import pytest

from cortex_workers.schemas.ids import RUN, new_id
from cortex_workers.schemas.lifecycle import RunState
from cortex_workers.store.database import Database
from cortex_workers.store.transitions import Guard, Move
from cortex_workers.testing import factory
from tests.cli.conftest import Commands, a_worker
from tests.waiting import wait_until


def test_a_run_is_enqueued_and_its_id_is_all_of_stdout(cw: Commands, database: Database) -> None:
    factory.an_agent(database)
    said = cw("enqueue", "support", "Refund order 17")
    assert said.code == 0
    run = factory.now(database, said.out.strip())
    assert (run["state"], run["agent"], run["scope"]) == ("ready", "support", factory.SCOPE)


def test_the_same_key_again_is_the_same_run_and_done(cw: Commands, database: Database) -> None:
    factory.an_agent(database)
    first, again = cw("enqueue", "support", "17", "--key", "t"), cw("enqueue", "support", "17", "--key", "t")
    assert (first.code, again.code, first.out) == (0, 0, again.out)
    assert "enqueued before" in again.err
    other = cw("enqueue", "support", "18", "--key", "t")
    assert (other.code, other.out) == (1, "")
    assert "[run_id_reused]" in other.err and other.err.count("\n") == 1


def test_the_input_may_come_from_a_pipe(cw: Commands, database: Database) -> None:
    factory.an_agent(database)
    said = cw("enqueue", "support", "-", "--json", input="line one\nline two\n")
    shown = cw("runs", "show", said.json["id"], "--full", "--json").json
    assert shown["entries"][0]["details"] == ["input: line one line two"]


def test_waiting_for_a_run_prints_its_output(cw: Commands, database: Database) -> None:
    factory.an_agent(database)
    run = factory.a_run(database)

    def work() -> None:
        held = factory.a_running_run(database, run=run)
        factory.an_ended_run(database, RunState.COMPLETED, run=held)

    worker = threading.Timer(0.3, work)
    worker.start()
    said = cw("runs", "wait", run["id"], "--timeout", "30")
    worker.join()
    assert (said.code, said.out) == (0, "Done.\n")


@pytest.mark.parametrize(
    ("state", "code"), [(RunState.COMPLETED, 0), (RunState.FAILED, 1), (RunState.CANCELLED, 1)]
)
def test_the_exit_code_of_a_wait_tells_how_it_ended(
    cw: Commands, database: Database, state: RunState, code: int
) -> None:
    run = factory.an_ended_run(database, state)
    said = cw("runs", "wait", run["id"])
    assert said.code == code
    assert cw("runs", "wait", run["id"], "--json").json["state"] == state


def test_a_wait_that_is_too_long_may_be_tried_again(cw: Commands, database: Database) -> None:
    run = factory.a_paused_run(database)
    said = cw("runs", "wait", run["id"], "--timeout", "0.1")
    assert (said.code, said.out) == (75, "")
    assert "waits for a decision on refund" in said.err and "[wait_timeout]" in said.err
    assert cw("runs", "wait", run["id"], "--until-paused").code == 0


def test_runs_are_listed_with_whole_ids(cw: Commands, database: Database) -> None:
    found = [
        factory.a_paused_run(database),
        factory.an_ended_run(database, RunState.FAILED),
        factory.a_running_run(database, owner="host-1:77:abcdef01"),
    ]
    said = cw("runs", "list")
    lines = said.out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [run["id"] for run in reversed(found)]
    assert "on host-1:77 " in lines[1] and "model_failed" in lines[2] and "asks somebody" in lines[3]
    assert max(map(len, lines)) <= 100
    assert [run["id"] for run in cw("runs", "list", "--state", "paused", "--json").json] == [found[0]["id"]]


def test_a_list_goes_on_from_the_last_id(cw: Commands, database: Database) -> None:
    found = [factory.a_run(database)["id"] for _ in range(3)]
    first = cw("runs", "list", "--limit", "2")
    assert f"more: --before {found[1]}" in first.err
    rest = cw("runs", "list", "--limit", "2", "--before", found[1], "--json").json
    assert [run["id"] for run in rest] == found[:1]


def test_a_run_of_another_scope_is_not_there(cw: Commands, database: Database) -> None:
    run = factory.a_run(database, scope="tenant=other")
    assert cw("runs", "list", "--json").json == []
    said = cw("runs", "show", run["id"])
    assert (said.code, said.out) == (1, "") and "[run_not_found]" in said.err
    assert cw("runs", "show", run["id"], "--scope", "tenant=other").code == 0


def test_without_a_scope_nothing_is_shown_and_the_option_is_named(cw: Commands) -> None:
    said = cw("runs", "list", CORTEX_SCOPE="")
    assert (
        said.code == 1 and "--scope" in said.err and "CORTEX_SCOPE" in said.err and "[no_scope]" in said.err
    )


def test_an_error_is_one_json_document_where_json_is_wanted(cw: Commands) -> None:
    unknown = new_id(RUN)
    said = cw("runs", "show", unknown, "--json")
    assert said.code == 1
    assert said.json == {"error": "run_not_found", "message": f"there is no run {unknown} in this scope"}


@pytest.mark.parametrize(
    "words", [("runs", "show"), ("runs", "list", "--limit", "0"), ("runs", "dance"), ("nothing",)]
)
def test_wrong_usage_is_exit_code_two(cw: Commands, words: tuple[str, ...]) -> None:
    assert cw(*words).code == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("runs", "show", "--json"), "Missing argument"),
        (("runs", "list", "--json", "--limit", "0"), "--limit"),
        (("runs", "list", "--jsn", "--json"), "--jsn"),
        (("runs", "dance", "--json"), "dance"),
        (("--json", "runs"), "--json"),
        (("enqueue", "support", "17", "--start-by", "1e300", "--json"), "--start-by"),
        (("enqueue", "support", "17", "--start-by", "nan", "--json"), "--start-by"),
        (("runs", "wait", "arun_1", "--timeout", "inf", "--json"), "a number of seconds"),
        (("enqueue", "support", "--metadata", "{", "--json", "17"), "takes a JSON object"),
    ],
)
def test_wrong_usage_is_one_json_document_where_json_is_wanted(
    cw: Commands, words: tuple[str, ...], says: str
) -> None:
    said = cw(*words)
    assert (said.code, said.json["error"], said.err) == (2, "wrong_usage", "")
    assert says in said.json["message"]


def test_wrong_usage_is_told_to_people_where_json_is_an_argument(cw: Commands) -> None:
    said = cw("runs", "show", "--", "--json", "again")
    assert (said.code, said.out) == (2, "") and "Usage:" in said.err


def test_a_cancel_says_who_stops_and_when(cw: Commands, database: Database) -> None:
    run = factory.a_running_run(database, owner="host-1:77:abcdef01")
    said = cw("runs", "cancel", run["id"], "--reason", "enough")
    assert (said.code, said.out) == (0, f"{run['id']} cancelled\n")
    assert "worker host-1:77:abcdef01 stops" in said.err
    again = cw("runs", "cancel", run["id"])
    assert (again.code, again.out) == (0, f"{run['id']} cancelled before\n")
    assert cw("runs", "cancel", factory.an_ended_run(database, RunState.FAILED)["id"]).code == 1


def test_sessions_are_listed_shown_and_cleared(cw: Commands, database: Database) -> None:
    run = factory.a_run(database, session="customer-9")
    done = factory.a_running_run(database, run=run)
    what = Move(values={"output": "Done."}, session_messages=2)
    factory.move(database, "complete", done, Guard(term=factory.term_of(done)), what)
    (listed,) = cw("sessions", "list", "--json").json
    assert (listed["key"], listed["message_count"]) == ("customer-9", 2)
    shown = cw("sessions", "show", listed["id"])
    assert run["id"] in shown.out and "key customer-9" in shown.out
    assert cw("sessions", "clear", listed["id"], "--json").json == {"session": listed["id"], "hidden": 2}
    assert "cleared after 1 turn" in cw("sessions", "show", listed["id"]).out


def test_a_person_is_told_what_a_run_waits_for_while_they_wait(cw: Commands, database: Database) -> None:
    a_worker(database)
    factory.an_agent(database)
    made = cw("enqueue", "support", "17", "--json").json

    def work() -> None:
        held = factory.a_running_run(database, run=factory.now(database, made["id"]))
        paused = factory.a_paused_run(database, run=held)
        answered = factory.an_answered_run(database, run=paused)
        factory.an_ended_run(database, RunState.COMPLETED, run=factory.a_running_run(database, run=answered))

    worker = threading.Thread(target=work)
    worker.start()
    said = cw("runs", "wait", made["id"])
    worker.join()
    assert (said.code, said.out) == (0, "Done.\n")
    wait_until(lambda: factory.now(database, made["id"])["state"] == "completed", what="its end")

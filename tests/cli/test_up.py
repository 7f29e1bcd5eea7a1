"""`cortex-workers up`: the whole stack in one folder, its end, and every way in which it cannot start."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cortex_workers.embedded import EmbeddedServers
from cortex_workers.embedded.ports import is_free
from tests.waiting import wait_until

pytestmark = pytest.mark.fleet
PROGRAM = Path(sys.executable).with_name("cortex-workers")

HOST = """
from cortex_workers import Host
host = Host()

@host.tool(needs_approval=True)
def refund(order_id: str) -> str:
    "Pay an order back."
    return f"refunded {order_id}"

host.agent("support", model="scripted:script.json", instructions="Help.", tools=["refund"])
"""
SCRIPT = [{"call": [{"tool": "refund", "args": {"order_id": "17"}}]}, {"say": "It says: {last_result}"}]


class Up:
    """One `up` in a folder, and other commands there that find it by themselves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self.process: subprocess.Popen[str] | None = None
        (folder / "agents.py").write_text(HOST)
        (folder / "script.json").write_text(json.dumps(SCRIPT))

    def start(self, *words: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [PROGRAM, "up", "--host", "agents:host", *words], cwd=self.folder, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self._environment(environment),
        )  # fmt: skip
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self.lines.append(line.rstrip())

    def _environment(self, more: dict[str, str]) -> dict[str, str]:
        short = {
            "CORTEX_SWEEP_INTERVAL_S": "1", "CORTEX_LEASE_TTL_S": "3", "CORTEX_LEASE_RENEW_S": "0.8",
            "CORTEX_LEASE_TRUST_S": "2", "CORTEX_SLOTS": "10", "CORTEX_SCOPE": "tenant=acme",
        }  # fmt: skip
        return {**os.environ, **short, **more}

    def says(self, pattern: str, times: int = 1) -> list[str]:
        """Wait until lines of that form were printed."""

        def found() -> list[str]:
            if self.process is not None and self.process.poll() is not None and not self._matching(pattern):
                pytest.fail("up has ended:\n" + "\n".join(self.lines))
            matching = self._matching(pattern)
            return matching if len(matching) >= times else []

        return wait_until(found, what=f"{times} lines like {pattern!r}")

    def _matching(self, pattern: str) -> list[str]:
        return [line for line in self.lines if re.search(pattern, line)]

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Another command of this folder."""
        return subprocess.run(
            [PROGRAM, *words], cwd=self.folder, env=self._environment(environment), capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip

    def family(self) -> list[psutil.Process]:
        """Everything that `up` started, servers included."""
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    made = Up(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.end()
    if (tmp_path / ".cortex").is_dir():
        EmbeddedServers(tmp_path / ".cortex").remove_data()


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_whole_stack_works_in_one_folder_and_ends_without_a_trace(up: Up) -> None:
    port = _free_port()
    up.start("--workers", "2", "--flower-port", str(port))
    up.says(r"^up +│ up; Ctrl-C")
    up.says(r"^worker-\d │ .*worker\.started", times=2)
    run_id = up.run("enqueue", "support", "Refund order 17").stdout.strip()
    paused = up.run("runs", "wait", run_id, "--until-paused", "--json", "--timeout", "60")
    assert json.loads(paused.stdout)["state"] == "paused"
    assert "using the servers of `cortex-workers up`" in paused.stderr
    (asked,) = json.loads(up.run("checkpoints", "list", "--json").stdout)
    assert up.run("checkpoints", "approve", asked["id"]).returncode == 0
    done = up.run("runs", "wait", run_id, "--timeout", "60")
    assert (done.returncode, done.stdout) == (0, "It says: refunded 17\n")
    wait_until(lambda: up.run("doctor").returncode == 0, what="the doctor to be content")
    with socket.create_connection(("127.0.0.1", port), timeout=10):
        pass
    family = up.family()
    assert up.end(signal.SIGINT) == 0
    wait_until(lambda: all(_is_gone(each) for each in family), what="everything to be gone")
    assert not (up.folder / ".cortex" / "up.json").exists()
    after = up.run("runs", "list")
    assert after.returncode == 1 and "CORTEX_DATABASE_URL is not set" in after.stderr


def test_a_worker_that_is_killed_starts_anew_and_what_was_stored_is_there_after_a_restart(up: Up) -> None:
    up.start("--no-flower")
    started = up.says(r"^worker +│ .*worker\.started.*pid=\d+")[0]
    run_id = up.run("enqueue", "support", "Refund order 17").stdout.strip()
    up.run("runs", "wait", run_id, "--until-paused", "--timeout", "60")
    wait_until(lambda: _age_s(_pid(started)) > 6, what="the worker to be past its start")
    os.kill(_pid(started), signal.SIGKILL)
    up.says(r"worker ended with code -9; starting it again")
    up.says(r"^worker +│ .*worker\.started.*pid=\d+", times=2)
    assert up.end() == 0
    up.lines.clear()
    up.start("--no-flower")
    up.says(r"^up +│ up; Ctrl-C")
    (asked,) = json.loads(up.run("checkpoints", "list", "--json").stdout)
    up.run("checkpoints", "approve", asked["id"])
    assert up.run("runs", "wait", run_id, "--timeout", "60").stdout == "It says: refunded 17\n"


def _pid(line: str) -> int:
    found = re.search(r"pid=(\d+)", re.sub(r"\x1b\[[0-9;]*m", "", line))
    assert found is not None
    return int(found[1])


def _age_s(pid: int) -> float:
    return time.time() - float(psutil.Process(pid).create_time())


def test_a_second_up_in_the_folder_is_refused_with_the_process_that_is_there_whatever_else_is_taken(
    up: Up,
) -> None:
    port = str(_free_port())
    up.start("--flower-port", port)
    up.says(r"^up +│ up; Ctrl-C")
    assert up.process is not None
    wait_until(lambda: not is_free(int(port)), what="Flower to have its port")
    second = up.run("up", "--host", "agents:host", "--flower-port", port)
    assert second.returncode == 1
    assert f"another `cortex-workers up` runs in .cortex (process {up.process.pid})" in second.stderr
    assert up.run("runs", "list").returncode == 0, "the first goes on"


def test_when_every_worker_was_asked_to_drain_the_servers_stay(up: Up) -> None:
    up.start("--no-flower")
    up.says(r"^worker +│ .*worker\.started")
    wait_until(lambda: up.run("workers", "drain", "--all").stdout, what="a live worker to ask")
    up.says("no worker is left; the rest goes on until Ctrl-C")
    assert up.run("enqueue", "support", "Refund order 17").returncode == 0
    assert up.end(signal.SIGINT) == 0


def test_what_is_missing_is_told_in_a_line_each(up: Up) -> None:
    (up.folder / "agents.py").write_text("from cortex_workers import Host\nhost = Host()\n")
    (up.folder / "sitecustomize.py").write_text("import sys\nsys.modules['flower'] = None\n")
    up.start(PYTHONPATH=str(up.folder))
    up.says(r"agents:host has no agents")
    up.says(r"no Flower: it is not installed \(pip install 'cortex-workers\[flower\]'\)")
    up.says(r"^up +│ up; Ctrl-C")
    assert up.end() == 0


def test_a_killed_up_takes_everything_with_it_and_leaves_a_folder_that_works(up: Up) -> None:
    up.start("--no-flower")
    up.says(r"^worker +│ .*worker\.started")
    family = up.family()
    assert up.end(signal.SIGKILL) == -signal.SIGKILL
    wait_until(lambda: all(_is_gone(each) for each in family), what="everything to be gone")
    stale = up.run("runs", "list")
    assert stale.returncode == 1 and "CORTEX_DATABASE_URL is not set" in stale.stderr
    up.lines.clear()
    up.start("--no-flower")
    up.says(r"^up +│ up; Ctrl-C")


def test_a_flower_port_that_is_taken_is_told_before_anything_starts(up: Up) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = up.run("up", "--host", "agents:host", "--flower-port", str(port))
    assert said.returncode == 1
    assert f"port {port}, meant for Flower, is in use" in said.stderr and "--no-flower" in said.stderr
    assert not (up.folder / ".cortex").exists()


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("nothing_like_it:host", "no module named 'nothing_like_it'"),
        ("agents:guest", "has no attribute 'guest'"),
        ("broken:host", "broken does not import"),
    ],
)
def test_agents_that_do_not_load_are_told_before_anything_starts(up: Up, host: str, says: str) -> None:
    (up.folder / "broken.py").write_text("1 / 0")
    said = up.run("up", "--host", host, "--no-flower")
    assert said.returncode == 1 and says in said.stderr
    assert said.stderr.count("\n") == 1
    assert not (up.folder / ".cortex").exists()


def test_a_worker_that_cannot_start_ends_it_all(up: Up) -> None:
    agents = up.folder / "agents.py"
    agents.write_text(agents.read_text().replace("scripted:script.json", "scripted:missing.json"))
    up.start("--no-flower")
    assert up.process is not None
    assert up.process.wait(60) == 1
    wait_until(lambda: any("stopping the rest" in line for line in up.lines), what="the reason")
    assert any("missing.json" in line for line in up.lines)


def test_a_data_folder_of_something_else_is_told(up: Up) -> None:
    (up.folder / ".cortex").write_text("a file")
    said = up.run("up", "--host", "agents:host", "--no-flower")
    assert said.returncode == 1 and "cannot hold the embedded servers" in said.stderr

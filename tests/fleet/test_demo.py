"""The demo as a stranger starts it: one command, nothing beside it, and nothing left behind."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from cortex_workers.cli.demo import proof, world
from cortex_workers.cli.demo.feed import Fact
from cortex_workers.cli.demo.fleet import Member
from cortex_workers.cli.demo.teller import Prose
from cortex_workers.cli.demo.world import Line, World
from cortex_workers.embedded import EmbeddedServers
from cortex_workers.host import ToolContext
from cortex_workers.schemas.run import Run
from tests.waiting import wait_until

COMMAND = Path(sys.executable).with_name("cortex-workers")
DEMO_S = 120
"""The demo's own promise: a stranger sees it all within two minutes."""


Start = Callable[..., "Demo"]


class Demo:
    """`cortex-workers demo --json` as a process, its lines read as they come."""

    def __init__(self, folder: Path, *options: str, elsewhere: bool = True) -> None:
        self.folder = folder / "data" / "demo"
        self._errors = folder / f"errors-{len(list(folder.iterdir()))}"
        self.environment = {
            **{key: text for key, text in os.environ.items() if not key.startswith(("CORTEX_", "CELERY_"))},
            "CORTEX_DATA_DIR": str(folder / "data"),
        }
        # A database that it must not touch, and a wish that it must not follow.
        foreign = {"CORTEX_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none", "CORTEX_LEASE_TTL_S": "600"}
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [COMMAND, "demo", "--json", *options],
                env=self.environment | (foreign if elsewhere else {}),
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def all(self, event: str) -> list[dict[str, Any]]:
        """The lines of one event so far."""
        return [line for line in self.lines if line["event"] == event]

    def until(self, event: str) -> dict[str, Any]:
        """Wait for the first line of an event."""
        wait_until(lambda: self.all(event) or self.process.poll() is not None, event, DEMO_S)
        if self.process.poll() is not None:
            self._reader.join(10)
        assert self.all(event), self.lines
        return self.all(event)[0]

    def errors(self) -> str:
        """What it said besides its lines."""
        return self._errors.read_text()

    def wait(self) -> int:
        """Wait for its end and return the exit code."""
        code = self.process.wait(DEMO_S)
        self._reader.join(10)
        return code

    def processes(self) -> list[psutil.Process]:
        """Every process that was started for it: their environment or working folder names its folder."""
        return [each for each in psutil.process_iter() if self._is_ours(each)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if process.pid == self.process.pid or process.status() == psutil.STATUS_ZOMBIE:
                return False
            return process.environ().get(world.FOLDER_VARIABLE) == str(self.folder)
        except psutil.Error:
            return False


@contextmanager
def demos(folder: Path) -> Iterator[Start]:
    """Start demos; none outlives this."""
    started: list[Demo] = []

    def start(*options: str, elsewhere: bool = True) -> Demo:
        started.append(Demo(folder, *options, elsewhere=elsewhere))
        return started[-1]

    yield start
    for each in started:
        with each.process:  # closes the pipe
            each.process.kill()
        for left in each.processes():
            left.kill()
    if (folder / "data/demo/servers").is_dir():
        EmbeddedServers(folder / "data/demo/servers").remove_data()


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Start]:
    with demos(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """A demo that was seen to its end."""
    with demos(tmp_path_factory.mktemp("whole")) as start:
        whole = start()
        assert whole.wait() == 0, (whole.lines, whole.errors())
        yield whole


def test_the_demo_shows_the_main_job_and_ends_well(shown: Demo) -> None:
    summary = shown.lines[-1]
    assert summary["event"] == "summary"
    assert summary["ok"] and not summary["problems"]
    assert summary["runs"] == summary["completed"] == summary["effects"] == 23
    assert summary["double_effects"] == 0
    assert summary["seconds"] < DEMO_S
    assert all({"event", "run_id", "worker", "at"} <= line.keys() for line in shown.lines[:-1])
    assert not shown.processes()


def test_a_killed_workers_runs_go_on_elsewhere_and_pay_once(shown: Demo) -> None:
    killed = shown.all("worker.killed")
    assert len(killed) == shown.lines[-1]["killed_workers"] == 2
    for death in killed:
        mine = [line for line in shown.lines if line.get("run_id") == death["run_id"]]
        claims = [line["worker"] for line in mine if line["event"] == "run.claim"]
        assert claims[0] == death["worker"]
        assert death["worker"] not in claims[1:]
        assert [line["owner"] for line in mine if line["event"] == "run.lapse"] == [death["worker"]]
        assert sum(line["event"] == world.PAID for line in mine) == 1
    before, after = (
        [line["event"] for line in shown.lines if line.get("run_id") == death["run_id"]] for death in killed
    )
    # Dead after the effect: looked up, and never called again. Dead before it: called again, once.
    assert before.count(world.CALLED) == 1
    assert after.count(world.CALLED) == 2


def test_an_approval_is_continued_by_another_worker(shown: Demo) -> None:
    asked, decided = shown.until("run.pause"), shown.until("run.decide")
    assert asked["tool"] == "refund"
    assert decided["decided_by"]
    first, second = (line["worker"] for line in shown.all("run.claim") if line["run_id"] == asked["run_id"])
    assert first != second
    left = shown.until("worker.stopped")
    assert (left["worker"], left["exit_code"]) == (first, 0)


def test_the_same_facts_make_a_story(shown: Demo) -> None:
    text = io.StringIO()
    prose = Prose(Console(file=text, width=500), datetime.fromisoformat(shown.lines[0]["at"]))
    quiet = {line["run_id"] for line in shown.all("run.complete")} - asked_for(shown).keys()
    assert len(quiet) == 20
    for run_id in quiet:
        prose.introduce(run_id, "a voucher", quietly=True)
    for run_id, asked in asked_for(shown).items():
        prose.introduce(run_id, asked)
    for line in shown.lines[:-1]:
        known = {key: line[key] for key in ("event", "run_id", "worker")}
        prose.tell(Fact(**known, at=datetime.fromisoformat(line["at"]), facts=line))
    told = text.getvalue()
    for death in shown.all("worker.killed"):
        assert f"kill -9 {death['pid']}" in told
        assert f"where {death['worker']} left it" in told
    assert "enqueues Refund order 17" in told
    assert "approves: “The machine is back in the store.”" in told
    assert "asks the bank: paid, receipt R-2" in told
    assert "once more, under the same idempotency key" in told
    assert "all 20 completed" in told
    assert "voucher" not in told


def asked_for(shown: Demo) -> dict[str, str]:
    """The three runs of the chapters, by what was asked."""
    ids = list(dict.fromkeys(line["run_id"] for line in shown.all("run.enqueue")))
    return dict(zip(ids[:3], ("Refund order 17", "Pay invoice 4711", "Pay invoice 4712"), strict=True))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_stopped_leaves_nothing_behind(demo: Start, number: int) -> None:
    shown = demo()
    shown.until("run.pause")
    assert len(shown.processes()) >= 3
    shown.process.send_signal(number)
    assert shown.wait() == 130
    assert shown.lines[-1]["event"] == "stopped"
    assert not shown.processes()
    assert not (shown.folder / "servers").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's help is asked for on Linux")
def test_a_demo_that_is_killed_leaves_no_process_behind(demo: Start) -> None:
    shown = demo("--no-flower")
    shown.until("run.pause")
    servers = psutil.Process(shown.process.pid).children(recursive=True)
    shown.process.kill()
    wait_until(lambda: not shown.processes(), "the end of the workers")
    wait_until(lambda: not any(_is_alive(each) for each in servers), "the end of the servers")


def test_a_second_demo_in_the_same_folder_says_so(demo: Start) -> None:
    first = demo("--no-flower")
    first.until("demo.ready")
    second = demo("--no-flower")
    assert second.wait() == 1
    assert f"running process {first.process.pid}" in second.all("failed")[0]["why"]
    assert first.process.poll() is None


def test_a_kept_demo_stays_and_is_found_by_other_commands_until_it_is_stopped(demo: Start) -> None:
    shown = demo("--keep", "--no-flower", elsewhere=False)
    assert shown.until("summary")["ok"]
    listed = subprocess.run(
        [COMMAND, "runs", "list", "--scope", "tenant=demo", "--limit", "50", "--json"],
        env=shown.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert {run["state"] for run in json.loads(listed.stdout)} == {"completed"}
    assert shown.process.poll() is None
    shown.process.send_signal(signal.SIGINT)
    assert shown.wait() == 130
    assert not shown.processes()


def test_a_worker_that_ends_by_itself_ends_the_demo_with_its_last_words(demo: Start) -> None:
    shown = demo("--no-flower")
    victim = shown.until("worker.started")
    os.kill(victim["pid"], signal.SIGKILL)
    assert shown.wait() == 1
    failed = shown.all("failed")[0]
    assert f"{victim['worker']} ended with code -9" in failed["why"]
    assert Path(failed["logs"][victim["worker"]]).exists()
    assert not shown.processes()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- The bank and the proof --------------------------------------------------------------------------------------


def call_of(run_id: str = "run-1") -> ToolContext:
    return ToolContext(run_id=run_id, step=0, call_id="call_0_0", agent="payments")


def test_the_bank_pays_a_key_once(tmp_path: Path) -> None:
    there = World(tmp_path)
    assert there.receipt(call_of().idempotency_key) is None
    assert there.pay(call_of(), "invoice 1", 100) == "R-1"
    assert there.pay(call_of(), "invoice 1", 100) == "R-1"
    assert there.pay(call_of("run-2"), "invoice 2", 100) == "R-2"
    assert there.receipt(call_of().idempotency_key) == "R-1"
    assert len(there.payments()) == 2


def test_the_bank_pays_a_key_once_when_all_ask_at_the_same_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        receipts = set(pool.map(lambda _: World(tmp_path).pay(call_of(), "invoice 1", 100), range(40)))
    assert receipts == {"R-1"}
    assert len(World(tmp_path).payments()) == 1


def test_a_line_that_was_cut_off_is_not_read_yet(tmp_path: Path) -> None:
    there = World(tmp_path)
    there.note(world.CALLED, call_of(), tool="pay_invoice")
    file = tmp_path / "world.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:-5])
    lines, offset = there.lines()
    assert (len(lines), offset) == (1, len(whole))
    file.write_bytes(whole + whole)
    assert len(there.lines(offset)[0]) == 1


def test_a_payment_asked_for_twice_is_counted_even_when_the_bank_knew_it(tmp_path: Path) -> None:
    there = World(tmp_path)
    there.pay(call_of(), "invoice 1", 100)
    assert proof.double_effects(there.lines()[0]) == 0
    there.pay(call_of(), "invoice 1", 100)
    assert proof.double_effects(there.lines()[0]) == 1
    there.pay(call_of("run-2"), "invoice 1", 100)
    assert proof.double_effects(there.lines()[0]) == 2


def test_the_proof_names_what_is_missing() -> None:
    now = datetime.now(UTC)
    summary = proof.sum_up([a_run(now, "failed")], [], [], [], 1.0)
    assert not summary.is_good
    assert summary.problems == (
        "run arun_1 is failed: the reason",
        "0 payments for 1 runs",
        "no worker was killed",
    )


def test_the_proof_wants_the_run_of_a_killed_worker_to_move() -> None:
    now = datetime.now(UTC)
    paid = Line(world.PAID, now, 1, "arun_1", {"what": "invoice 1", "key": "k", "receipt": "R-1"})
    lapse = Fact("run.lapse", now, "arun_1", None, {"owner": "worker-1"})
    claims = [Fact("run.claim", now, "arun_1", name) for name in ("worker-1", "worker-2")]
    with a_killed_process() as dead:
        workers = [Member("worker-1", dead, Path("log"), Path("ready"))]
        whole = [a_run(now, "completed")], [paid]
        assert proof.sum_up(*whole, [claims[0], lapse, claims[1]], workers, 1.0).is_good
        assert not proof.sum_up(*whole, [claims[0], lapse], workers, 1.0).is_good
        assert not proof.sum_up(*whole, [claims[0], lapse, claims[0]], workers, 1.0).is_good
        assert not proof.sum_up(*whole, [claims[0], claims[1]], workers, 1.0).is_good


def a_killed_process() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    process.kill()
    process.wait()
    return process


def a_run(now: datetime, state: str) -> Run:
    return Run.model_validate(
        {
            "id": "arun_1",
            "scope": "tenant=demo",
            "agent": "payments",
            "agent_digest": "d",
            "session_id": "ses_1",
            "state": state,
            "state_since": now,
            "revision": 1,
            "instruction": "start",
            "queue_class": "begun",
            "pool": "main",
            "not_before": now,
            "created_at": now,
            "error_text": "the reason",
        }
    )

"""The README as a stranger types it: migrate, a worker, the producer, the terminal, a sweep by hand."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cortex_workers.embedded import EmbeddedServers
from cortex_workers.embedded.ports import is_free
from cortex_workers.schemas.ids import CHECKPOINT, RUN
from cortex_workers.tasks import flowerconfig
from tests.docs.markdown import page
from tests.docs.shop import ANSWERS, open_shop
from tests.docs.test_commands import typed
from tests.tasks.processes import free_port
from tests.waiting import wait_until

BIN = Path(sys.executable).parent
pytestmark = pytest.mark.fleet


def command(*begins: str) -> list[str]:
    """The command of the README that begins with these words."""
    found = [line for line in typed(page("README.md")) if line.startswith(" ".join(begins))]
    assert found, f"the README does not tell to type: {' '.join(begins)}"
    return shlex.split(found[0], comments=True)


class Terminal:
    """Types commands in the folder of the shop."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment

    def type(self, words: list[str], *more: str) -> str:
        """Type a command and wait for its end; it must go well."""
        done = subprocess.run(
            [str(BIN / words[0]), *words[1:], *more],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, f"{shlex.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def leave_running(self, words: list[str], log: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
        """Start a command as a shell does, and end it by SIGTERM; it must end well."""
        typed = " ".join(word if word.startswith("--conf=$(") else shlex.quote(word) for word in words)
        path = f"{BIN}{os.pathsep}{self.environment['PATH']}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["sh", "-c", f"exec {typed}"],
                env={**self.environment, "PATH": path, **more},
                stdout=output,
                stderr=output,
            )
        try:
            yield process
        finally:
            process.terminate()
            code = process.wait(60)
        assert code == 0, log.read_text()

    def json(self, words: list[str]) -> Any:
        return json.loads(self.type(words, "--json"))


def with_id(words: list[str], kind: str, found: str) -> list[str]:
    """The same command for an id of ours instead of the README's."""
    return [re.sub(rf"^{kind}_\w+$", found, word) for word in words]


def test_what_the_readme_tells_to_type_does_what_it_says(
    tmp_path: Path, empty_database_url: str, broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "ready"
    given = {
        "CORTEX_DATABASE_URL": empty_database_url,
        "CORTEX_BROKER_URL": broker_url,
        "CORTEX_HOST": "shop.agents:host",
        "CORTEX_SCOPE": "tenant=acme",
        "CORTEX_READY_FILE": str(ready),
    }
    with open_shop(tmp_path, monkeypatch, [*ANSWERS, *ANSWERS], **given) as environment:
        terminal = Terminal(environment)
        terminal.type(command("cortex-workers migrate"))
        log = tmp_path / "worker.log"
        with terminal.leave_running(
            command("celery", "-A", "cortex_workers.tasks.app", "worker"), log
        ) as worker:
            wait_until(lambda: ready.exists() or worker.poll() is not None, what="the worker to be ready")
            assert worker.poll() is None, log.read_text()
            _the_producer(terminal)
            _the_terminal(terminal)
            _a_sweep_by_hand(terminal)
            _flower(terminal, tmp_path / "flower.log")


def _the_producer(terminal: Terminal) -> None:
    said = terminal.type(["python", "producer.py"]).splitlines()
    assert said == [
        'approval required for: refund {"order_id": "17", "amount_cents": 1250}',
        "Order 17 is paid back.",
    ]


def _the_terminal(terminal: Terminal) -> None:
    terminal.type(command("cortex-workers enqueue"))
    checkpoints: list[dict[str, Any]] = []
    listing = command("cortex-workers checkpoints list")

    def asked() -> bool:
        checkpoints[:] = terminal.json(listing)
        return bool(checkpoints)

    wait_until(asked, what="the run to ask")
    (checkpoint,) = checkpoints
    terminal.type(with_id(command("cortex-workers checkpoints approve"), CHECKPOINT, checkpoint["id"]))
    terminal.type(["cortex-workers", "runs", "wait", checkpoint["run_id"], "--timeout", "60"])
    listed = terminal.json(command("cortex-workers runs list"))
    assert [run["state"] for run in listed] == ["completed", "completed"]
    story = terminal.type(with_id(command("cortex-workers runs show"), RUN, checkpoint["run_id"]))
    assert "Order 17 is paid back." in story
    assert "seen the invoice" in story


def _a_sweep_by_hand(terminal: Terminal) -> None:
    terminal.type(command("cortex-workers sweep"))
    terminal.type(command("celery", "-A", "cortex_workers.tasks.app", "call"))
    terminal.type(command("cortex-workers doctor"))


def _flower(terminal: Terminal, log: Path) -> None:
    port = free_port()
    words = command("celery", "-A", "cortex_workers.tasks.app", "flower")
    with terminal.leave_running(words, log, FLOWER_PORT=str(port)) as flower:
        wait_until(lambda: not is_free(port) or flower.poll() is not None, what="Flower to listen")
        shown = httpx.get(f"http://127.0.0.1:{port}/tasks")
    # Our columns: the page has read the settings that come with the package, not Flower's own.
    columns = re.findall(r'data-column="(\w+)"', shown.text)
    assert columns == flowerconfig.tasks_columns.split(",")


def test_a_laptop_without_a_key_answers_the_producer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (script,) = page("README.md").blocks("json")
    with open_shop(tmp_path, monkeypatch, []) as environment:
        for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
            del environment[name]
        (scripted,) = set(re.findall(r'model="scripted:[^"]+"', page("README.md").text))
        agents = tmp_path / "shop/agents.py"
        agents.write_text(re.sub(r'model="openai:[^"]+"', scripted, agents.read_text()))
        (tmp_path / "script.json").write_text(script.code)
        log = tmp_path / "up.log"
        words = [*command("cortex-workers", "up"), "--flower-port", str(free_port())]
        with Terminal(environment).leave_running(words, log) as up:
            wait_until(
                lambda: "worker.started" in log.read_text() or up.poll() is not None,
                what="the worker of the stack",
            )
            exported = dict(re.findall(r"│ export (CORTEX_\w+)=(\S+)$", log.read_text(), re.M))
            assert sorted(exported) == ["CORTEX_BROKER_URL", "CORTEX_DATABASE_URL"], log.read_text()
            _the_producer(Terminal({**environment, **exported}))
        EmbeddedServers(tmp_path / ".cortex").remove_data()

"""The README as a stranger types it: migrate, a worker, the producer, the terminal, a sweep by hand."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cortex_workers.schemas.ids import CHECKPOINT, RUN
from tests.docs.markdown import page
from tests.docs.shop import ANSWERS, open_shop
from tests.docs.test_commands import typed
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

    def json(self, words: list[str]) -> Any:
        return json.loads(self.type(words, "--json"))

    @contextmanager
    def leave_running(self, words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Start a command, and end it by SIGTERM; it must end well."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(BIN / words[0]), *words[1:]], env=self.environment, stdout=output, stderr=output
            )
        try:
            yield process
        finally:
            process.terminate()
            code = process.wait(60)
        assert code == 0, log.read_text()


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

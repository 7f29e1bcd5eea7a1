"""The world outside of the workers: a bank, what tools saw, and a slow line between the two.

It is one file that is only ever appended to and flushed line by line: whoever is killed, what was written stays.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cortex_workers.host import ToolContext

FOLDER_VARIABLE = "CORTEX_DEMO_DIR"

PAID, PAID_BEFORE = "bank.paid", "bank.paid_before"
CALLED, LOOKED_UP = "tool.called", "tool.looked_up"

_LONGEST_HOLD_S = 60.0
"""A worker whose demo was lost does not wait for ever."""


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that happened. ``pid`` is the process that wrote it."""

    kind: str
    at: datetime
    pid: int
    run_id: str
    facts: dict[str, Any] = field(default_factory=dict)


class World:
    """The file, seen from any process of the demo."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "world.jsonl"

    @classmethod
    def from_environment(cls) -> World:
        """The world of the demo that started this process.

        Raises: KeyError in a process that no demo started.
        """
        return cls(Path(os.environ[FOLDER_VARIABLE]))

    def pay(self, ctx: ToolContext, what: str, cents: int) -> str:
        """Move money and return the receipt; a known key moves nothing and gets its first receipt."""
        with self._alone():
            receipt = self.receipt(ctx.idempotency_key)
            known = receipt is not None
            receipt = receipt or f"R-{len(self.payments()) + 1}"
            self.note(PAID_BEFORE if known else PAID, ctx, what=what, cents=cents, receipt=receipt)
        return receipt

    def receipt(self, key: str) -> str | None:
        """What the bank answers when it is asked about a key."""
        return next((line.facts["receipt"] for line in self.payments() if line.facts["key"] == key), None)

    def payments(self) -> list[Line]:
        """Every movement of money."""
        return [line for line in self.lines()[0] if line.kind == PAID]

    def note(self, kind: str, ctx: ToolContext, **facts: Any) -> None:
        """Append a line about a call and see it to the disk."""
        content = {
            "kind": kind,
            "at": datetime.now(UTC).isoformat(),
            "pid": os.getpid(),
            "run_id": ctx.run_id,
            "facts": {"key": ctx.idempotency_key, **facts},
        }
        handle = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, (json.dumps(content) + "\n").encode())
            os.fsync(handle)
        finally:
            os.close(handle)

    def lines(self, start: int = 0) -> tuple[list[Line], int]:
        """The whole lines from a byte on, and the byte after them."""
        try:
            with self._file.open("rb") as file:
                file.seek(start)
                content = file.read()
        except FileNotFoundError:
            return [], start
        whole = content[: content.rfind(b"\n") + 1]
        return [_line(text) for text in whole.splitlines()], start + len(whole)

    def hold(self, place: str) -> None:
        """Make the line slow at a place: whoever passes it waits there."""
        (self._folder / f"slow-{place}").touch()

    def release(self, place: str) -> None:
        """Let pass whoever waits at a place."""
        (self._folder / f"slow-{place}").unlink(missing_ok=True)

    def cross(self, place: str) -> None:
        """Pass a place, as soon as it lets one pass."""
        sign = self._folder / f"slow-{place}"
        pause, end = threading.Event(), time.monotonic() + _LONGEST_HOLD_S
        while sign.exists() and time.monotonic() < end:
            pause.wait(0.02)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One payment at a time; the lock of a killed process is gone with it."""
        with (self._folder / "world.lock").open("w") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            yield


def _line(text: bytes) -> Line:
    content = json.loads(text)
    return Line(
        kind=content["kind"],
        at=datetime.fromisoformat(content["at"]),
        pid=content["pid"],
        run_id=content["run_id"],
        facts=content["facts"],
    )

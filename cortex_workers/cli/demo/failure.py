"""What ends the demo early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The last words of one process."""

    name: str
    path: Path
    words: str


class DemoFailed(Exception):
    """The story did not go as it must; the text says where, ``logs`` who said what last."""

    def __init__(self, why: str, logs: Sequence[LogEnd] = ()) -> None:
        super().__init__(why)
        self.logs = tuple(logs)

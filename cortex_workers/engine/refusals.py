"""One line in the log of every refused answer: who tried what, where, and why it was refused; never what they sent.

A warning, so that it is seen in a process that set up no logging of its own.

Source: bug case C46.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cortex_workers import telemetry
from cortex_workers.errors import Refusal
from cortex_workers.schemas.ids import is_id


@contextmanager
def told(door: str, prefix: str, target: str, actor: str | None) -> Iterator[None]:
    """Tell of a refusal on its way out; ``target`` is the run or checkpoint, if it is an id at all."""
    try:
        yield
    except Refusal as refusal:
        known = target if is_id(prefix, target) else "no id"
        telemetry.event("answer.refused", "warning", door=door, target=known, actor=actor, code=refusal.code)
        raise

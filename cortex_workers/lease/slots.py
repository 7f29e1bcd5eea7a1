"""How many runs this process executes at once, and how many of them may be starts.

Begun runs always find a slot that starts cannot take, unless there are only one or two.
Source: rulings 13, 16, 18, 23.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable
from typing import Literal

from cortex_workers import telemetry

Kind = Literal["start", "begun"]
_REMEMBERED_RUNS = 64


def start_limit(total: int) -> int:
    """How many of so many slots starts may hold."""
    return total if total <= 2 else max(1, total - max(2, math.ceil(total / 10)))


class Slots:
    """The slots of one process. ``total`` 0 is a process that only serves its own caller: nothing enters."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.start_limit = start_limit(total)
        self._lock = threading.Lock()
        self._used: dict[Kind, int] = {"start": 0, "begun": 0}
        self._closed = False
        self._on_room: list[Callable[[], None]] = []
        self._last_start_rank = 0
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED_RUNS)
        self._median_s = math.inf

    def try_enter(self, kind: Kind) -> bool:
        """Take a slot; False when there is none for this kind, or this process drains."""
        with self._lock:
            entered = self._has_room(kind)
            if entered:
                self._used[kind] += 1
                telemetry.SLOTS_USED.set(self.used)
            return entered

    def switch(self, held: Kind, wanted: Kind) -> bool:
        """Go on in the same slot with a run of another kind; False when that kind may not have one more."""
        with self._lock:
            allowed = not self._closed and (
                held == wanted or wanted == "begun" or self._used["start"] < self.start_limit
            )
            if allowed:
                self._used[held] -= 1
                self._used[wanted] += 1
            return allowed

    def leave(self, kind: Kind) -> None:
        """Give a slot back.

        Raises: ValueError when none of this kind is taken.
        """
        with self._lock:
            if self._used[kind] < 1:
                raise ValueError(f"no slot of kind {kind} is taken")
            was_full = self.used >= self.total
            self._used[kind] -= 1
            telemetry.SLOTS_USED.set(self.used)
            told = tuple(self._on_room) if was_full else ()
        for callback in told:
            callback()

    def on_room(self, callback: Callable[[], None]) -> None:
        """Call back, in the thread that leaves, whenever the process goes from full to not full.

        It must be quick; the keeper's answer is to write ``slots_used``, at most once a second.
        """
        self._on_room.append(callback)

    def close(self) -> None:
        """Let nothing enter any more (drain); what is inside may leave."""
        # No lock: the byte of a bool cannot be torn, and the watchdog must not wait for anybody.
        self._closed = True

    @property
    def closed(self) -> bool:
        """Whether nothing may enter any more."""
        return self._closed

    @property
    def used(self) -> int:
        """Slots that are taken."""
        return self._used["start"] + self._used["begun"]

    @property
    def free(self) -> int:
        """Slots that a begun run could take."""
        return 0 if self._closed else max(0, self.total - self.used)

    @property
    def free_for_start(self) -> int:
        """Slots that a start could take."""
        return max(0, min(self.free, self.start_limit - self._used["start"]))

    def _has_room(self, kind: Kind) -> bool:
        return (self.free if kind == "begun" else self.free_for_start) > 0

    def note_start_rank(self, rank: int) -> None:
        """Remember the greatest rank of the starts claimed here; the keeper's heartbeat writes it down."""
        with self._lock:
            self._last_start_rank = max(self._last_start_rank, rank)

    @property
    def last_start_rank(self) -> int:
        """The greatest rank of the starts claimed here."""
        return self._last_start_rank

    def note_run(self, seconds: float) -> None:
        """Remember how long a run took here, for the size of the next claim."""
        with self._lock:
            self._seconds.append(seconds)
            self._median_s = statistics.median(self._seconds)

    @property
    def median_run_s(self) -> float:
        """The median time of the latest runs; infinite before the first, so that nobody claims ahead blindly."""
        return self._median_s

"""The tokens of one run as one client sees them: in the order of the steps, and what is lost of them is told.

Two things give a loss away: an index that is skipped, and a step that says more than its tokens did.
Source: runs.md 6.12; issue: a lost window is told, not hidden.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from cortex_workers.ports import Token, TokenSource
from cortex_workers.schemas.stream import StreamEvent, StreamKind

GRACE_S = 0.5
"""So long the rest of a step's tokens is waited for: they travel in the background, its row does not."""
_PACE_S = 0.02


class WatchedTokens:
    """Tokens of steps above ``closed``; those of earlier ones were given before."""

    def __init__(self, source: TokenSource | None, run_id: str, closed: int) -> None:
        self._source = source
        self._run_id = run_id
        self._closed = closed
        self._place: str | None = None
        self._held: deque[Token] = deque()
        self._step = -1
        self._next = 0
        self._chars = 0
        self._told_gap = False
        self._patient = True

    def fetch(self) -> bool:
        """Take what has come; false when nothing has."""
        came = False
        while self._source is not None:
            items, self._place = self._source.read(self._run_id, self._place)
            if not items:
                break
            came = self._patient = True
            self._held.extend(item for item in items if item.step > self._closed)
        return came

    def give(self, cursor: int, upto: int | None = None) -> list[StreamEvent]:
        """The tokens in hand, up to a step where one is given, gaps told before what comes after them."""
        found: list[StreamEvent] = []
        while self._held and (upto is None or self._held[0].step <= upto):
            item = self._held.popleft()
            if item.step <= self._closed:
                continue
            if item.step != self._step or item.index < self._next:
                # The next step, or the same one once more by another worker.
                self._step, self._next, self._chars, self._told_gap = item.step, 0, 0, False
            if item.index > self._next:
                found.append(self._lost(cursor, item.step, self._next, item.index - 1))
            self._next, self._chars = item.index + 1, self._chars + len(item.text)
            data = {"content": item.text, "index": item.index, "step": item.step}
            found.append(StreamEvent(kind=StreamKind.TOKEN, run_id=self._run_id, cursor=cursor, data=data))
        return found

    def end_step(self, step: int, chars: int | None, streams: bool, cursor: int) -> list[StreamEvent]:
        """The rest of a step that is stored now; what is missing of it is told, and nothing of it comes later."""
        if self._source is None or step <= self._closed:
            return []
        found = self.give(cursor, step)
        if streams and chars:
            end = time.monotonic() + GRACE_S
            rest = threading.Event()
            while self._patient and self._is_short(step, chars):
                if time.monotonic() >= end:
                    self._patient = False
                elif not self.fetch():
                    rest.wait(_PACE_S)
                found += self.give(cursor, step)
            if self._is_short(step, chars) and not (self._step == step and self._told_gap):
                found.append(self._lost(cursor, step, self._next if self._step == step else 0, None))
        self._closed = step
        return found

    def _is_short(self, step: int, chars: int) -> bool:
        return self._step != step or self._chars < chars

    def _lost(self, cursor: int, step: int, first: int, last: int | None) -> StreamEvent:
        self._told_gap = True
        data = {"step": step, "from": first, "to": last}
        return StreamEvent(kind=StreamKind.LOST, run_id=self._run_id, cursor=cursor, data=data)

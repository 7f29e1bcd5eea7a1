"""Following a run while it happens, from any process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from cortex_workers.client.base import ClientBase, checked_seconds
from cortex_workers.engine import streaming
from cortex_workers.errors import InvalidArgument
from cortex_workers.ports import TokenSource
from cortex_workers.schemas.stream import StreamEvent

BEFORE_ALL = -1
"""The cursor of who has seen nothing."""
LAST_CURSOR = 2**63 - 1


class Watching(ClientBase):
    """The verbs of those who look on; hanging up changes nothing."""

    def stream(
        self,
        run_id: str,
        *,
        scope: str | None = None,
        after: int = BEFORE_ALL,
        timeout_s: float | None = None,
        tokens: bool = True,
    ) -> Iterator[StreamEvent]:
        """Yield what happened after a cursor and what happens from now on, to the run's end or next pause.

        Facts come from rows: attach again with the cursor of the last event and miss nothing. Tokens of streamed
        agents come beside them while they are kept; a gap is told by an event of kind ``lost``.
        Raises: InvalidId, InvalidArgument, RunNotFound; WaitTimeout when nothing at all happens for ``timeout_s``
        seconds.
        """
        where, cursor, patience_s = (
            self._any_scope(scope),
            _checked_cursor(after),
            _checked_timeout(timeout_s),
        )
        return streaming.follow(
            self._rt, run_id, where, after=cursor, timeout_s=patience_s, tokens=self._tokens(tokens)
        )

    def astream(
        self,
        run_id: str,
        *,
        scope: str | None = None,
        after: int = BEFORE_ALL,
        timeout_s: float | None = None,
        tokens: bool = True,
    ) -> AsyncIterator[StreamEvent]:
        """The same for an event loop, as in a web server: the loop is never blocked.

        Raises: as ``stream``.
        """
        where, cursor, patience_s = (
            self._any_scope(scope),
            _checked_cursor(after),
            _checked_timeout(timeout_s),
        )
        return streaming.afollow(
            self._rt, run_id, where, after=cursor, timeout_s=patience_s, tokens=self._tokens(tokens)
        )

    def _tokens(self, wanted: bool) -> TokenSource | None:
        if not wanted or self.settings.broker_url is None:
            return None
        from cortex_workers.tasks.tokens import TokenReader

        return TokenReader(self.settings)


def _checked_cursor(after: object) -> int:
    if isinstance(after, int) and not isinstance(after, bool) and BEFORE_ALL <= after <= LAST_CURSOR:
        return after
    raise InvalidArgument(
        f"after is the cursor of an event, 0 to {LAST_CURSOR}, or {BEFORE_ALL} for everything"
    )


def _checked_timeout(timeout_s: object) -> float | None:
    return None if timeout_s is None else checked_seconds("timeout_s", timeout_s)

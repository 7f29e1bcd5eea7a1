"""Following a run while it happens, from any process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from cortex_workers.client.base import ClientBase
from cortex_workers.engine import streaming
from cortex_workers.ports import TokenSource
from cortex_workers.schemas.stream import StreamEvent


class Watching(ClientBase):
    """The verbs of those who look on; hanging up changes nothing."""

    def stream(
        self,
        run_id: str,
        *,
        scope: str | None = None,
        after: int = -1,
        timeout_s: float | None = None,
        tokens: bool = True,
    ) -> Iterator[StreamEvent]:
        """Yield what happened after a cursor and what happens from now on, to the run's end or next pause.

        Facts come from rows: attach again with the cursor of the last event and miss nothing. Tokens of streamed
        agents come beside them while they are kept; a gap is told by an event of kind ``lost``.
        Raises: InvalidId, RunNotFound; WaitTimeout when nothing at all happens for ``timeout_s`` seconds.
        """
        where = self._any_scope(scope)
        return streaming.follow(
            self._rt, run_id, where, after=after, timeout_s=timeout_s, tokens=self._tokens(tokens)
        )

    def astream(
        self,
        run_id: str,
        *,
        scope: str | None = None,
        after: int = -1,
        timeout_s: float | None = None,
        tokens: bool = True,
    ) -> AsyncIterator[StreamEvent]:
        """The same for an event loop, as in a web server: the loop is never blocked.

        Raises: as ``stream``.
        """
        where = self._any_scope(scope)
        return streaming.afollow(
            self._rt, run_id, where, after=after, timeout_s=timeout_s, tokens=self._tokens(tokens)
        )

    def _tokens(self, wanted: bool) -> TokenSource | None:
        if not wanted or self.settings.broker_url is None:
            return None
        from cortex_workers.tasks.tokens import TokenReader

        return TokenReader(self.settings)

"""Sessions: the conversations that runs belong to."""

from __future__ import annotations

from typing import Any

from cortex_workers.client.base import ClientBase, checked_limit
from cortex_workers.engine.validate import checked_id
from cortex_workers.errors import (
    SessionNotFound,
)
from cortex_workers.schemas.ids import SESSION
from cortex_workers.store import sessions


class Conversations(ClientBase):
    """The verbs on sessions."""

    def sessions(
        self, *, scope: str | None = None, before: str | None = None, limit: int = 50
    ) -> list[dict[str, Any]]:
        """The sessions of a scope and below, the most recently active first.

        Raises: NoScope, InvalidScope, InvalidId.
        """
        if before is not None:
            checked_id(SESSION, before)
        with self._rt.database.read() as unit:
            return sessions.page(unit, self._need_scope(scope), before=before, limit=checked_limit(limit))

    def session(self, session_id: str, *, scope: str | None = None) -> dict[str, Any]:
        """One session.

        Raises: InvalidId, SessionNotFound.
        """
        checked_id(SESSION, session_id)
        with self._rt.database.read() as unit:
            row = sessions.get_scoped(unit, session_id, self._any_scope(scope))
        if row is None:
            raise SessionNotFound(f"there is no session {session_id} in this scope")
        return dict(row)

    def clear_session(self, session_id: str, *, scope: str | None = None) -> int:
        """Forget a conversation from here on; nothing is deleted. Returns the number of messages hidden.

        Raises: InvalidId, SessionNotFound.
        """
        self.session(session_id, scope=scope)
        return self._rt.database.run(lambda unit: sessions.clear(unit, session_id, self._actor))

"""One transaction: its connection, the hooks inside it, and the notifications its commit will release."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Executable, Row

from cortex_workers.schemas.lifecycle import Transition
from cortex_workers.schemas.notifications import Notification

Publish = Callable[[Notification], None]
Hook = Callable[["Unit", Transition, str | None, Mapping[str, Any]], None]
TransitionHooks = Iterable[Hook]


class Unit:
    """Open between the first statement and the commit; no model, tool or broker call belongs inside."""

    def __init__(self, connection: Connection, hooks: TransitionHooks = ()) -> None:
        self.connection = connection
        self.notifications: list[Notification] = []
        self._hooks = tuple(hooks)

    def announce(self, notification: Notification) -> None:
        """Keep a notification until the commit."""
        self.notifications.append(notification)

    def on_transition(self, row: Transition, before: str | None, after: Mapping[str, Any]) -> None:
        """Tell the rooms of a moved run, inside the transaction; a hook may write, or raise and so undo it."""
        for hook in self._hooks:
            hook(self, row, before, after)

    def execute(self, statement: Executable, parameters: Any = None) -> Any:
        """Run a statement and return its result."""
        return (
            self.connection.execute(statement, parameters)
            if parameters
            else self.connection.execute(statement)
        )

    def one(self, statement: Executable) -> Row[Any] | None:
        """The first row, or None."""
        row: Row[Any] | None = self.connection.execute(statement).first()
        return row

    def all(self, statement: Executable) -> Sequence[Row[Any]]:
        """All rows."""
        rows: Sequence[Row[Any]] = self.connection.execute(statement).all()
        return rows

    def scalar(self, statement: Executable) -> Any:
        """The first column of the first row, or None."""
        return self.connection.execute(statement).scalar()

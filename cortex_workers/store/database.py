"""Engines and pools of one process, never shared across a fork; every transaction begins here.

Source: celery.md 17, 18; ruling 19 (no pre-ping; one retry on a fresh connection before commit).
"""

from __future__ import annotations

import os
import selectors
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, InterfaceError, InvalidatePoolError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from cortex_workers import telemetry
from cortex_workers.errors import SchemaBehind, StoreUnavailable
from cortex_workers.settings import Settings
from cortex_workers.store.unit import Publish, TransitionHooks, Unit

T = TypeVar("T")
_LOST = (OperationalError, InterfaceError)
_NO_SUCH_SCHEMA = ("42P01", "42703", "3F000")
"""A table, column or schema that this code needs is not there."""
_READ_ONLY = "25006"
"""The server takes no writes: a standby that a switch-over has left behind, or a primary that is full."""
_GAVE_UP = ("55P03", "57014", "40P01", "40001")
"""The server is there, and a statement was ended: by the lock or statement timeout, a deadlock, a conflict."""
_Selector: Callable[[], selectors.BaseSelector] = getattr(selectors, "PollSelector", selectors.SelectSelector)
"""Poll needs no descriptor of its own and knows no highest number of one."""


def first_line(error: Exception) -> str:
    """What the driver says, in one line; it names hosts and roles, never passwords."""
    return (str(getattr(error, "orig", error)).strip().splitlines() or ["no reason given"])[0]


def _what_failed(state: str | None) -> str:
    if state == _READ_ONLY:
        return "Postgres takes no writes now"
    return "Postgres ended a statement" if state in _GAVE_UP else "Postgres is not available"


def sqlalchemy_url(url: str) -> str:
    """The same database for SQLAlchemy: psycopg 3 whatever the scheme says."""
    scheme, _, rest = url.partition("://")
    return f"postgresql+psycopg://{rest}" if scheme in ("postgres", "postgresql") else url


def make_engine(settings: Settings, size: int) -> Engine:
    """An engine whose connections keep our timeouts and are safe behind a transaction pooler."""
    args: dict[str, Any] = {
        "connect_timeout": settings.db_connect_timeout_s,
        "keepalives": 1,
        "keepalives_idle": 30,
        "keepalives_interval": 10,
        "keepalives_count": 3,
        # Keepalives are silent while a statement is on its way; without this a cut network holds a renewal for minutes.
        "tcp_user_timeout": 15_000,
        "application_name": f"cortex-workers:{os.getpid()}",
        # None: never prepare by itself, so that a pooler in transaction mode is safe (celery.md 18).
        "prepare_threshold": 5 if settings.db_prepare else None,
    }
    engine = create_engine(
        sqlalchemy_url(settings.require_database()),
        pool_size=size,
        max_overflow=0,
        pool_timeout=10,
        pool_pre_ping=False,
        pool_recycle=900,
        pool_use_lifo=True,
        # Errors of statements reach logs and callers; what the statements carry must not (I10).
        hide_parameters=True,
        connect_args=args,
    )
    _set_timeouts(engine, settings)
    _pass_over_closed(engine)
    return engine


def _set_timeouts(engine: Engine, settings: Settings) -> None:
    options = (
        f"set statement_timeout = {int(settings.db_statement_timeout_s * 1000)}; "
        f"set lock_timeout = {int(settings.db_lock_timeout_s * 1000)}; "
        "set idle_in_transaction_session_timeout = 30000"
    )

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _record: Any) -> None:
        before = connection.autocommit
        connection.autocommit = True
        connection.execute(options)
        connection.autocommit = before


def _pass_over_closed(engine: Engine) -> None:
    """Give out no connection whose server has closed it meanwhile, so that a restart of Postgres costs nobody an error.

    Costs one look at a socket, nothing is sent: an idle connection has nothing to say but its end.
    """

    @event.listens_for(engine, "checkin")
    def _returned(_connection: Any, record: Any) -> None:
        record.info["idle"] = True

    @event.listens_for(engine, "checkout")
    def _given(connection: Any, record: Any, _proxy: Any) -> None:
        if record.info.pop("idle", False) and _has_something_to_say(connection):
            raise InvalidatePoolError("the server closed this connection while it was idle")


def _has_something_to_say(connection: Any) -> bool:
    if connection.closed:
        return True
    with _Selector() as selector:
        selector.register(connection.fileno(), selectors.EVENT_READ)
        return bool(selector.select(0))


class Database:
    """The database of one process: a pool for work and a small one for renewals and drain.

    ``transactions`` counts commits of the pool for work, so that tests can hold the formula of ruling 2 against it.
    """

    def __init__(self, settings: Settings, publish: Publish, hooks: TransitionHooks = ()) -> None:
        self._settings = settings
        self._publish = publish
        self._hooks = tuple(hooks)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self.transactions = 0
        self._build()

    def _build(self) -> None:
        self.engine = make_engine(self._settings, self._settings.db_pool)
        self.lease_engine = make_engine(self._settings, self._settings.db_lease_pool)

    def _engine(self, lease: bool) -> Engine:
        if os.getpid() != self._pid:
            with self._lock:
                if os.getpid() != self._pid:
                    self.engine.dispose(close=False)
                    self.lease_engine.dispose(close=False)
                    self._build()
                    self._pid = os.getpid()
        return self.lease_engine if lease else self.engine

    @contextmanager
    def transaction(self, *, lease: bool = False) -> Iterator[Unit]:
        """One transaction; notifications are released after its commit, in order.

        Raises: StoreUnavailable when Postgres cannot be reached or the connection is lost.
        """
        with self._connection(lease) as connection:
            unit = Unit(connection, self._hooks)
            yield unit
            _commit(connection)
        self._count(lease)
        self._release(unit)

    @contextmanager
    def read(self, *, lease: bool = False) -> Iterator[Unit]:
        """A connection in autocommit for reads and one-statement writes; each statement is its own transaction."""
        with self._connection(lease) as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT")
            unit = Unit(connection, self._hooks)
            yield unit
        self._release(unit)

    def run(self, work: Callable[[Unit], T], *, lease: bool = False) -> T:
        """Do one transaction; when the connection turns out dead before the commit, once more on a fresh one.

        Raises: StoreUnavailable, and whatever ``work`` raises (then nothing was written).
        """
        try:
            return self._once(work, lease)
        except _StaleConnection:
            telemetry.event("store.retry", level="warning")
            self._engine(lease).dispose()
            try:
                return self._once(work, lease)
            except _StaleConnection as error:
                raise StoreUnavailable() from error.__cause__

    def _once(self, work: Callable[[Unit], T], lease: bool) -> T:
        with self._connection(lease) as connection:
            unit = Unit(connection, self._hooks)
            try:
                value = work(unit)
            except _LOST as error:
                if connection.invalidated or getattr(error, "connection_invalidated", False):
                    raise _StaleConnection() from error
                raise
            _commit(connection)
        self._count(lease)
        self._release(unit)
        return value

    def _count(self, lease: bool) -> None:
        if not lease:
            with self._lock:
                self.transactions += 1

    def _release(self, unit: Unit) -> None:
        for notification in unit.notifications:
            self._publish(notification)

    @contextmanager
    def _connection(self, lease: bool) -> Iterator[Connection]:
        try:
            with self._engine(lease).connect() as connection:
                yield connection
        except PoolTimeout as error:
            raise StoreUnavailable("no database connection became free in time") from error
        except DBAPIError as error:
            state = getattr(error.orig, "sqlstate", None)
            if state == _READ_ONLY:
                # The next connections may lead to the server that has taken over.
                self._engine(lease).dispose()
            if error.connection_invalidated or isinstance(error, _LOST) or state == _READ_ONLY:
                raise StoreUnavailable(f"{_what_failed(state)}: {first_line(error)}") from error
            if state in _NO_SUCH_SCHEMA:
                raise SchemaBehind() from None
            raise

    def dispose(self) -> None:
        """Close every connection of this process."""
        self.engine.dispose()
        self.lease_engine.dispose()


def _commit(connection: Connection) -> None:
    """Commit; when the answer is lost, nobody can say whether it went through (``unknown``)."""
    try:
        connection.commit()
    except _LOST as error:
        raise StoreUnavailable("the connection was lost during the commit", unknown=True) from error


class _StaleConnection(Exception):
    """The connection was dead before anything was committed."""

"""Brings a database to the schema of this code, and tells whether it is there.

Twenty migrators at once are harmless: one holds a transaction-level advisory lock, the others find nothing to do.
Source: decision S4; celery.md 18 (no session locks).
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from cortex_workers.errors import SchemaBehind, StoreUnavailable
from cortex_workers.store.database import first_line, sqlalchemy_url

_LOCK = 4_842_017_733
_SCRIPTS = Path(__file__).resolve().parent.parent / "migrations"


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_SCRIPTS))
    return config


def head() -> str:
    """The newest revision this code knows."""
    return str(ScriptDirectory.from_config(_config()).get_current_head())


def current(database_url: str) -> str | None:
    """The revision a database is at; None for an empty one.

    Raises: StoreUnavailable when it cannot be reached.
    """
    engine = create_engine(sqlalchemy_url(database_url))
    try:
        with engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()
    except OperationalError as error:
        raise StoreUnavailable(f"Postgres cannot be reached: {first_line(error)}") from error
    finally:
        engine.dispose()


def upgrade(database_url: str) -> str:
    """Migrate to the newest revision, in one transaction, and return it; a database that is newer stays as it is.

    Raises: StoreUnavailable when the database cannot be reached.
    """
    engine = create_engine(sqlalchemy_url(database_url))
    try:
        with engine.begin() as connection:
            connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": _LOCK})
            config = _config()
            found = MigrationContext.configure(connection).get_current_revision()
            if found is not None and not _is_known(found):
                return found
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    except OperationalError as error:
        raise StoreUnavailable(f"Postgres cannot be reached: {first_line(error)}") from error
    finally:
        engine.dispose()
    return head()


def require_current(database_url: str) -> None:
    """Refuse to start on a database that is behind this code; a newer one is fine (pre migrations come first).

    Raises: SchemaBehind, StoreUnavailable.
    """
    found, wanted = current(database_url), head()
    if found == wanted or (found is not None and not _is_known(found)):
        return
    raise SchemaBehind(
        f"the database schema is at {found or 'nothing'}, this code needs {wanted}; run `cortex-workers migrate`"
    )


def _is_known(revision: str) -> bool:
    """Whether this code knows a revision; one that it does not know was made by newer code."""
    known = ScriptDirectory.from_config(_config()).walk_revisions()
    return revision in {script.revision for script in known}

"""The schema as it is migrated, as `tables.py` declares it, and how a database gets there."""

import ast
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, text

import cortex_workers.migrations
from cortex_workers.errors import SchemaBehind, StoreUnavailable
from cortex_workers.settings import load_settings
from cortex_workers.store import migrate, tables
from cortex_workers.store.database import Database, sqlalchemy_url
from cortex_workers.testing import factory
from tests.waiting import wait_until

VERSIONS = Path(cortex_workers.migrations.__file__).parent / "versions"
FILES = sorted(path for path in VERSIONS.glob("*.py") if path.name != "__init__.py")

CATALOGUE = {
    "columns": """
        select c.relname, a.attname, format_type(a.atttypid, a.atttypmod), l.collname, a.attnotnull,
               pg_get_expr(d.adbin, d.adrelid)
        from pg_attribute a join pg_class c on c.oid = a.attrelid
        left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum
        left join pg_collation l on l.oid = a.attcollation
        where c.relnamespace = 'public'::regnamespace and c.relkind = 'r' and a.attnum > 0 and not a.attisdropped
    """,
    "constraints": """
        select c.relname, o.conname, pg_get_constraintdef(o.oid)
        from pg_constraint o join pg_class c on c.oid = o.conrelid
        where c.relnamespace = 'public'::regnamespace and o.contype <> 'n'
    """,
    "indexes": "select tablename, indexname, indexdef from pg_indexes where schemaname = 'public'",
    "storage": """
        select relname, reloptions from pg_class
        where relnamespace = 'public'::regnamespace and relkind in ('r', 'i') and reloptions is not null
    """,
}


@pytest.fixture
def connection(empty_database_url: str) -> Iterator[Connection]:
    engine = create_engine(sqlalchemy_url(empty_database_url))
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def catalogue(connection: Connection) -> dict[str, list[tuple[Any, ...]]]:
    """What Postgres itself says of every column, constraint and index, but for Alembic's own table."""
    return {
        name: sorted(
            (tuple(row) for row in connection.execute(text(query)) if row[0] != "alembic_version"),
            key=str,
        )
        for name, query in CATALOGUE.items()
    }


def test_a_migrated_database_is_what_the_tables_declare(
    connection: Connection, empty_database_url: str, database_url: str
) -> None:
    tables.metadata.create_all(connection)
    connection.commit()
    declared = catalogue(connection)
    engine = create_engine(sqlalchemy_url(database_url))
    with engine.connect() as migrated:
        found = catalogue(migrated)
        context = MigrationContext.configure(migrated, opts={"compare_type": True})
        assert compare_metadata(context, tables.metadata) == []
    engine.dispose()
    for name in CATALOGUE:
        assert found[name] == declared[name], name
    assert len(found["columns"]) == sum(len(table.columns) for table in tables.metadata.tables.values())


def test_a_difference_is_found(connection: Connection, empty_database_url: str) -> None:
    migrate.upgrade(empty_database_url)
    before = catalogue(connection)
    connection.execute(text("alter table runs alter column rank drop default"))
    connection.execute(text("drop index runs_claim"))
    connection.execute(text("alter table runs drop constraint runs_lease_check"))
    after = catalogue(connection)
    assert {name for name in CATALOGUE if before[name] != after[name]} == {
        "columns",
        "constraints",
        "indexes",
    }


def test_twenty_migrators_at_once_do_it_once(connection: Connection, empty_database_url: str) -> None:
    count = 20
    start = threading.Barrier(count)

    def one(_: int) -> str:
        start.wait()
        return migrate.upgrade(empty_database_url)

    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(one, range(count)))
    assert results == [migrate.head()] * count
    assert connection.execute(text("select version_num from alembic_version")).scalars().all() == [
        migrate.head()
    ]


def test_a_migrator_waits_for_one_that_is_at_work(connection: Connection, empty_database_url: str) -> None:
    connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": migrate._LOCK})
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(migrate.upgrade, empty_database_url)
        waiting = text(
            "select count(*) from pg_locks where locktype = 'advisory' and not granted"
            " and database = (select oid from pg_database where datname = current_database())"
        )
        wait_until(lambda: connection.execute(waiting).scalar(), what="the second migrator to wait")
        assert migrate.current(empty_database_url) is None
        connection.rollback()
        assert second.result() == migrate.head()


def test_migrating_again_changes_nothing(database: Database, database_url: str) -> None:
    run = factory.a_paused_run(database)
    assert migrate.upgrade(database_url) == migrate.head()
    assert factory.now(database, run["id"]) == run


def test_a_migration_that_fails_leaves_nothing_behind(
    connection: Connection, empty_database_url: str, next_revision: Path
) -> None:
    next_revision.write_text(
        next_revision.read_text().replace("add column extra text", "add column broken nonsense")
    )
    with pytest.raises(Exception, match="nonsense"):
        migrate.upgrade(empty_database_url)
    assert (
        connection.execute(text("select count(*) from pg_tables where schemaname = 'public'")).scalar() == 0
    )


# --- Code and database of different age ---------------------------------------------------------------------------


@pytest.fixture
def next_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make this code one revision newer than it is."""
    scripts = tmp_path / "migrations"
    shutil.copytree(VERSIONS.parent, scripts)
    made = scripts / "versions" / "9998_pre_made_up.py"
    made.write_text(
        '"""pre: made up."""\nfrom alembic import op\n'
        f'revision = "{made.stem}"\ndown_revision = "{migrate.head()}"\n'
        'def upgrade() -> None:\n    op.execute("alter table runs add column extra text")\n'
    )
    monkeypatch.setattr(migrate, "_SCRIPTS", scripts)
    return made


def set_revision(url: str, revision: str) -> None:
    engine = create_engine(sqlalchemy_url(url))
    with engine.begin() as connection:
        connection.execute(text("update alembic_version set version_num = :revision"), {"revision": revision})
    engine.dispose()


def test_an_empty_database_is_behind(empty_database_url: str) -> None:
    with pytest.raises(SchemaBehind, match=r"at nothing, .* needs .*; run `cortex-workers migrate`"):
        migrate.require_current(empty_database_url)


def test_a_database_at_this_revision_is_current(database_url: str) -> None:
    migrate.require_current(database_url)
    assert migrate.current(database_url) == migrate.head()


def test_an_older_database_is_behind_until_it_is_migrated(
    database: Database, database_url: str, next_revision: Path
) -> None:
    run = factory.a_run(database)
    with pytest.raises(SchemaBehind, match="needs 9998_pre_made_up"):
        migrate.require_current(database_url)
    assert migrate.upgrade(database_url) == "9998_pre_made_up"
    migrate.require_current(database_url)
    assert factory.now(database, run["id"]) == run


def test_a_newer_database_is_fine_and_left_as_it_is(database: Database, database_url: str) -> None:
    """The old code of a rolling deploy meets the schema of the new one: `pre` migrations go first."""
    set_revision(database_url, "9999_pre_from_the_future")
    migrate.require_current(database_url)
    assert migrate.upgrade(database_url) == "9999_pre_from_the_future"
    assert factory.a_paused_run(database)["state"] == "paused"


def test_the_old_code_works_on_the_new_schema(
    database: Database, database_url: str, next_revision: Path
) -> None:
    migrate.upgrade(database_url)
    assert factory.an_answered_run(database)["state"] == "ready"


def test_a_database_that_is_not_there_is_said_to_be_unavailable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"postgresql://cortex@127.0.0.1:{free.getsockname()[1]}/cortex"
        for ask in (migrate.current, migrate.require_current, migrate.upgrade):
            with pytest.raises(StoreUnavailable, match="cannot be reached"):
                ask(url)


def test_migrations_run_through_their_own_door_only(empty_database_url: str) -> None:
    with pytest.raises(RuntimeError, match="cortex-workers migrate"):
        command.upgrade(migrate._config(), "head")


def test_a_process_that_starts_on_an_empty_database_writes_nothing(
    connection: Connection, empty_database_url: str
) -> None:
    from cortex_workers import Client

    settings = load_settings(database_url=empty_database_url)
    with Client(settings, scope="tenant=acme") as client, pytest.raises(SchemaBehind):
        client.enqueue("support", "hello")
    assert (
        connection.execute(text("select count(*) from pg_tables where schemaname = 'public'")).scalar() == 0
    )


# --- The files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_revision_says_when_to_apply_it_why_and_what_it_locks(path: Path) -> None:
    assert re.fullmatch(r"\d{4}_(pre|post)_[a-z0-9_]+\.py", path.name)
    tree = ast.parse(path.read_text())
    header = ast.get_docstring(tree) or ""
    kind = path.name.split("_")[1]
    assert header.startswith(f"{kind}: ")
    for word in ("Why:", "Locks:", "Expected time:"):
        assert word in header, word
    assert kind == "post" or "Works while older code runs" in header
    with pytest.raises(RuntimeError, match="forward only"):
        ScriptDirectory.from_config(migrate._config()).get_revision(path.stem).module.downgrade()


def test_revisions_are_named_like_their_files_and_form_one_line() -> None:
    line: list[tuple[str, str | None]] = []
    for path in FILES:
        assigned = {
            node.targets[0].id: ast.literal_eval(node.value)  # type: ignore[attr-defined]
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Assign) and node.targets[0].id in ("revision", "down_revision")  # type: ignore[attr-defined]
        }
        assert assigned["revision"] == path.stem
        line.append((assigned["revision"], assigned["down_revision"]))
    assert [number[:4] for number, _ in line] == [f"{index:04}" for index in range(1, len(line) + 1)]
    assert [before for _, before in line] == [None, *(name for name, _ in line[:-1])]
    assert migrate.head() == line[-1][0]

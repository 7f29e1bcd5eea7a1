"""`store/transitions.py` is the only module that writes a state column."""

import ast
import re

import pytest

from tests.architecture.source import Source, modules, strings

WRITER = "store/transitions.py"
COLUMN = "state"

# Methods and parameters of SQLAlchemy and psycopg that take what is to be written.
_WRITING_CALLS = {"values", "execute", "executemany", "on_conflict_do_update", "ordered_values", "set"}

_RAW = re.compile(
    r"\b(update\b.*\bset\b.*\bstate\s*=|insert\s+into\b[^)]*\(\s*([\w\s,]*,)?\s*state\s*[,)])", re.I | re.S
)


def writes(source: Source) -> list[str]:
    """Return where a module writes a column named `state`."""
    found = [source.at(node) for node in source.nodes if isinstance(node, ast.Call) and _writes(node)]
    return found + [source.at(node) for node in strings(source) if _RAW.search(str(node.value))]


def _writes(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in _WRITING_CALLS:
        return False
    if call.func.attr == "values" and any(keyword.arg == COLUMN for keyword in call.keywords):
        return True
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any(_names_the_column(key) for value in given for key in _keys_written(value))


def _keys_written(value: ast.AST) -> list[ast.AST]:
    # Only what stands in the call itself: a subquery given to it is read, not written.
    if isinstance(value, ast.Dict):
        nested = [value for key, value in zip(value.keys, value.values, strict=True) if key is None]
        return [key for key in value.keys if key is not None] + [
            key for each in nested for key in _keys_written(each)
        ]
    if isinstance(value, ast.List | ast.Tuple):
        return [key for each in value.elts for key in _keys_written(each)]
    if isinstance(value, ast.ListComp | ast.GeneratorExp):
        return _keys_written(value.elt)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict":
        return [ast.Constant(keyword.arg) for keyword in value.keywords if keyword.arg] + [
            key for each in value.args for key in _keys_written(each)
        ]
    if isinstance(value, ast.BinOp):
        return _keys_written(value.left) + _keys_written(value.right)
    return []


def _names_the_column(key: ast.AST) -> bool:
    return (isinstance(key, ast.Constant) and key.value == COLUMN) or (
        isinstance(key, ast.Attribute) and key.attr == COLUMN
    )


def test_no_other_module_writes_a_state() -> None:
    assert [found for source in modules() if source.name != WRITER for found in writes(source)] == []


def test_the_writer_writes_states() -> None:
    (writer,) = (source for source in modules() if source.name == WRITER)
    assert writes(writer)


@pytest.mark.parametrize(
    "code",
    [
        'update(runs).where(a).values(state="ready")',
        'update(runs).values({"state": "ready"})',
        'update(runs).values({runs.c.state: "ready"})',
        'insert(calls).values(**{**clean, "state": "pending"})',
        'insert(calls).values(dict(clean, state="pending"))',
        'unit.execute(insert(calls), [{"state": "pending"} for each in them])',
        'unit.execute(insert(calls), [row | {"state": "pending"}])',
        'pg_insert(runs).on_conflict_do_update(index_elements=["id"], set_={"state": "ready"})',
        "connection.execute(text(\"UPDATE runs SET revision = 2, state = 'ready' WHERE id = :id\"))",
        "connection.execute(text(\"insert into runs (id, state) values (1, 'ready')\"))",
    ],
)
def test_each_way_to_write_a_state_is_found(code: str) -> None:
    assert writes(Source("store/made_up.py", code))


@pytest.mark.parametrize(
    "code",
    [
        "select(runs).where(runs.c.state == 'ready')",
        "update(runs).where(runs.c.state == 'ready').values(notified_at=now)",
        'update(sessions).values(live=exists(select(runs).where(runs.c.state == "running")))',
        'shown = {"id": row.id, "state": row.state}',
        'text("UPDATE runs SET notified_at = now() WHERE id = :id AND revision = 3")',
    ],
)
def test_reading_and_showing_a_state_is_not_meant(code: str) -> None:
    assert writes(Source("store/made_up.py", code)) == []

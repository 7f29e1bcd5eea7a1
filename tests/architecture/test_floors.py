"""The floors hold, and the walls between them are not painted on."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, ROOT, imports, modules

CONTRACTS = Path(sys.executable).with_name("lint-imports")

# What the vocabulary may lean on besides the standard library and itself.
_VOCABULARY_MAY_IMPORT = {"pydantic", "pydantic_core", "typeid", "uuid_utils", "cortex_workers"}


def check_floors(folder: Path) -> subprocess.CompletedProcess[str]:
    """Judge the package that lies in a folder by the contracts beside it."""
    return subprocess.run(
        [CONTRACTS, "--no-cache", "--no-logo"],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_import_goes_down() -> None:
    done = check_floors(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "line", "wall"),
    [
        ("engine/seeded.py", "import cortex_workers.tasks", "A floor imports the floors below it"),
        ("newroom.py", '"""A room that was given no floor."""', "A floor imports the floors below it"),
        ("engine/seeded.py", "import celery", "Celery, kombu and Redis are known under tasks only"),
        ("cli/seeded.py", "import redis", "Celery, kombu and Redis are known under tasks only"),
        ("engine/seeded.py", "import sqlalchemy", "SQL is known under store only"),
        ("tasks/seeded.py", "import psycopg", "SQL is known under store only"),
        ("engine/seeded.py", "import openai", "Libraries of model providers are known under llm only"),
        ("tasks/seeded.py", "import typer", "What draws on a terminal is known under cli only"),
        (
            "tasks/seeded.py",
            "import cortex_workers.embedded",
            "Servers in wheels are for the development commands",
        ),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, module: str, line: str, wall: str) -> None:
    shutil.copytree(PACKAGE, tmp_path / "cortex_workers", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "cortex_workers" / module).write_text(f"{line}\n")
    done = check_floors(tmp_path)
    assert done.returncode == 1
    broken = done.stdout.partition("Broken contracts")[2]
    assert wall in broken, done.stdout
    assert module.removesuffix(".py").replace("/", ".") in broken


def test_the_vocabulary_leans_on_next_to_nothing() -> None:
    allowed = _VOCABULARY_MAY_IMPORT | sys.stdlib_module_names
    found = [
        f"{source.at(node)} imports {name}"
        for source in modules()
        if source.floor == "schemas"
        for node, name in imports(source)
        if name.split(".")[0] not in allowed
    ]
    assert found == []


def test_a_leading_underscore_is_not_imported_from_elsewhere() -> None:
    found = [
        f"{source.at(node)} imports {name}"
        for source in modules()
        for node, name in imports(source)
        if name.startswith("cortex_workers.")
        and any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    ]
    assert found == []


def test_no_module_is_a_drawer_for_everything() -> None:
    drawers = {"utils", "util", "helpers", "common", "manager", "misc"}
    assert [
        source.name for source in modules() if drawers & set(source.name.removesuffix(".py").split("/"))
    ] == []

"""The public face is a list, and looking at it costs a producer nothing of the model layer."""

import importlib
import json
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import cortex_workers

# What a service that only enqueues runs must not have to load.
# rich is not here: structlog, our choice for logs, imports it by itself where it is installed.
HEAVY = ["anthropic", "flower", "openai", "pydantic_ai", "typer"]

ENTRY_POINTS = {
    "cortex_workers.cli.__main__",
    "cortex_workers.docs.__main__",
    "cortex_workers.migrations.env",
}


def importable_modules() -> list[str]:
    found = pkgutil.walk_packages(cortex_workers.__path__, "cortex_workers.")
    return sorted(
        each.name for each in found if each.name not in ENTRY_POINTS and ".versions" not in each.name
    )


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after the code."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def declared(module: ModuleType) -> list[str]:
    return list(getattr(module, "__all__", []))


@pytest.mark.parametrize("name", importable_modules())
def test_a_module_has_every_name_it_declares(name: str) -> None:
    module = importlib.import_module(name)
    assert [each for each in declared(module) if not hasattr(module, each)] == []


def test_the_package_has_every_name_it_declares() -> None:
    assert [each for each in declared(cortex_workers) if not hasattr(cortex_workers, each)] == []


def test_the_public_names_are_sorted_and_unique() -> None:
    names = declared(cortex_workers)
    assert len(names) == len(set(names))
    assert set(names) <= set(dir(cortex_workers))


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    with pytest.raises(AttributeError):
        _ = cortex_workers.no_such_name  # type: ignore[attr-defined]


def test_a_producer_does_not_load_the_model_layer() -> None:
    client = "cortex_workers.Client" if "Client" in declared(cortex_workers) else "cortex_workers"
    assert loaded_by(f"import cortex_workers\n{client}") & set(HEAVY) == set()


def test_looking_for_heavy_modules_finds_one() -> None:
    assert "openai" in loaded_by("import openai")

"""Which tests guard which numbered invariant, from the markers in the tests."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import cortex_workers
from cortex_workers.docs.blocks import code, table

NAME = re.compile(r"I([1-9]\d*)")
TESTS = Path(cortex_workers.__file__).parents[1] / "tests"


def invariants() -> str:
    """Every invariant with the files whose tests are marked with it."""
    found = marked(TESTS)
    rows = []
    for name in sorted(filter(NAME.fullmatch, found), key=lambda name: int(name[1:])):
        # No counts: another test in a file that is listed already must not make the page stale.
        files = [f"[{code(file)}](../tests/{file})" for file in sorted(found[name])]
        rows.append([name, ", ".join(files)])
    return table(["invariant", "guarded by the tests marked so in"], rows)


def marked(tests: Path) -> dict[str, dict[str, int]]:
    """By invariant: the test files below a folder, and how many tests of each carry its marker."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for path in sorted(tests.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name, weight in _markers(tree):
            found[name][str(path.relative_to(tests))] += weight
    return {name: dict(files) for name, files in found.items()}


def _markers(tree: ast.Module) -> list[tuple[str, int]]:
    """The invariants named by decorators of tests, and by a ``pytestmark`` (for every test below it)."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found: list[tuple[str, int]] = []

    def visit(body: list[ast.stmt], inherited: list[str]) -> None:
        here = inherited + [name for node in body if _is_pytestmark(node) for name in _named(node)]
        for node in body:
            if isinstance(node, ast.ClassDef):
                own = [name for decorator in node.decorator_list for name in _named(decorator)]
                visit(node.body, here + own)
            elif isinstance(node, functions) and node.name.startswith("test"):
                own = [name for decorator in node.decorator_list for name in _named(decorator)]
                found.extend((name, 1) for name in dict.fromkeys(here + own))

    visit(tree.body, [])
    return found


def _is_pytestmark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets
    )


def _named(node: ast.AST) -> list[str]:
    return [
        str(argument.value)
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "invariant"
        for argument in call.args
        if isinstance(argument, ast.Constant)
    ]

"""The product's source as the walls see it: parsed, not imported."""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cortex_workers"


@dataclass(frozen=True)
class Source:
    """One module of the package, or a piece of code that a test makes up."""

    name: str
    """The path below the package, like `store/runs.py`."""
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def nodes(self) -> Iterator[ast.AST]:
        return ast.walk(self.tree)

    @property
    def floor(self) -> str:
        """The package or module of the root that the module belongs to."""
        return self.name.split("/", maxsplit=1)[0].removesuffix(".py")

    def at(self, node: ast.AST) -> str:
        """Where a finding is, as an editor opens it."""
        return f"cortex_workers/{self.name}:{getattr(node, 'lineno', 1)}"


@functools.cache
def modules() -> tuple[Source, ...]:
    """Return every module of the package."""
    return tuple(
        Source(str(path.relative_to(PACKAGE)), path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))
    )


def docstrings(source: Source) -> set[ast.Constant]:
    """Return the strings that are statements: prose about the code, not part of it."""
    return {
        node.value
        for node in source.nodes
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def strings(source: Source) -> Iterator[ast.Constant]:
    """Return the strings that the code uses."""
    prose = docstrings(source)
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            yield node


def imports(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Return what the module imports, each name in full; names imported from a module include the module."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)

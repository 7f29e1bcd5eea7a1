"""Errors are caught narrowly; where everything must be caught, the line says why.

Such places are edges: code that is not ours (a tool, a model client, a subscriber) or the last frame of a thread.
"""

import ast
import re

import pytest

from tests.architecture.source import Source, modules

# Shorter is a remark, not a reason.
_WORDS_OF_A_REASON = 5

_BROAD = {"Exception", "BaseException"}


def unexplained(source: Source) -> list[str]:
    """Return where a module catches everything, raises nothing for it, and does not say why."""
    lines = source.text.splitlines()
    return [
        source.at(node)
        for node in source.nodes
        if (_swallows(node) or _suppresses(node)) and not _has_reason(lines[getattr(node, "lineno", 1) - 1])
    ]


def _has_reason(line: str) -> bool:
    comment = line.partition("#")[2]
    return len(re.sub(r"noqa: \S+", "", comment).split()) >= _WORDS_OF_A_REASON


def _swallows(node: ast.AST) -> bool:
    return isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and not _raises(node.body)


def _is_broad(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(_is_broad(each) for each in caught.elts)
    return caught is None or (isinstance(caught, ast.Name) and caught.id in _BROAD)


def _raises(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Raise)


def _suppresses(node: ast.AST) -> bool:
    name = node.func if isinstance(node, ast.Call) else None
    called = name.id if isinstance(name, ast.Name) else name.attr if isinstance(name, ast.Attribute) else None
    return isinstance(node, ast.Call) and called == "suppress" and any(_is_broad(each) for each in node.args)


def test_whoever_catches_everything_says_why() -> None:
    assert [found for source in modules() for found in unexplained(source)] == []


@pytest.mark.parametrize(
    "code",
    [
        "try: f()\nexcept Exception: pass",
        "try: f()\nexcept: log()",
        "try: f()\nexcept (ValueError, BaseException) as error: log(error)",
        "with suppress(Exception): f()",
        "with contextlib.suppress(Exception): f()",
        "try: f()\nexcept Exception:  # noqa: BLE001\n    pass",
        "try: f()\nexcept Exception:  # noqa: BLE001  just because\n    pass",
    ],
)
def test_each_way_to_catch_everything_needs_a_reason(code: str) -> None:
    assert unexplained(Source("made/up.py", code))


@pytest.mark.parametrize(
    "code",
    [
        "try: f()\nexcept Exception:\n    undo()\n    raise",
        "try: f()\nexcept ValueError: pass",
        "with suppress(OSError): f()",
        "try: f()\nexcept Exception:  # noqa: BLE001  a tool's error is something the model reads\n    pass",
        "with suppress(Exception):  # the last frame of a thread: nobody would hear\n    f()",
    ],
)
def test_tidying_up_narrow_catches_and_reasons_are_not_meant(code: str) -> None:
    assert unexplained(Source("made/up.py", code)) == []

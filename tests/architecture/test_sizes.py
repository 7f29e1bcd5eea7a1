"""A module is one use case and a function fits a screen."""

import ast

from tests.architecture.source import Source, modules

FUNCTION_LINES = 50
MODULE_LINES = 500


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count a function's lines without its decorators and its docstring."""
    first = function.body[0]
    prose = 0
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        prose = (first.end_lineno or first.lineno) - first.lineno + 1
    return (function.end_lineno or function.lineno) - function.lineno + 1 - prose


def oversized(source: Source) -> list[str]:
    return [
        f"{source.at(node)} {node.name} has {lines_of(node)} lines"
        for node in source.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines_of(node) > FUNCTION_LINES
    ]


def test_functions_fit_a_screen() -> None:
    assert [found for source in modules() for found in oversized(source)] == []


def test_a_function_that_does_not_fit_is_found() -> None:
    body = "\n".join(f"    a{number} = {number}" for number in range(FUNCTION_LINES))
    assert oversized(Source("made/up.py", f'def long():\n    """Prose\n\n    is free.\n    """\n{body}'))
    assert not oversized(Source("made/up.py", f"def fits():\n{body.rpartition(chr(10))[0]}"))


def test_modules_are_one_use_case() -> None:
    sizes = {source.name: source.text.count("\n") for source in modules()}
    assert {name: size for name, size in sizes.items() if size > MODULE_LINES} == {}

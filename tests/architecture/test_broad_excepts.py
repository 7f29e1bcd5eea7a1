"""Errors are caught narrowly; where that cannot be, the place is listed here with its reason."""

import ast

import pytest

from tests.architecture.source import Source, modules

ALLOWED = {
    "tasks/base.py": "the edge to Celery: every error becomes an outcome",
    "notify/hooks.py": "the edge to subscribers: their errors are theirs",
    "schemas/ids.py": "the library raises several kinds, and each means: not an id",
}

_BROAD = {"Exception", "BaseException"}


def broad_excepts(source: Source) -> list[str]:
    """Return where a module catches everything and does not raise it again."""
    return [source.at(node) for node in source.nodes if _swallows(node) or _suppresses(node)]


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


def test_everything_is_caught_only_where_it_must_be() -> None:
    assert [
        found for source in modules() if source.name not in ALLOWED for found in broad_excepts(source)
    ] == []


@pytest.mark.parametrize("name", sorted({source.name for source in modules()} & set(ALLOWED)))
def test_a_listed_place_still_needs_it(name: str) -> None:
    (source,) = (source for source in modules() if source.name == name)
    assert broad_excepts(source), f"{name} catches narrowly now: take it off the list"


@pytest.mark.parametrize(
    "code",
    [
        "try: f()\nexcept Exception: pass",
        "try: f()\nexcept: log()",
        "try: f()\nexcept (ValueError, BaseException) as error: log(error)",
        "with suppress(Exception): f()",
        "with contextlib.suppress(Exception): f()",
    ],
)
def test_each_way_to_catch_everything_is_found(code: str) -> None:
    assert broad_excepts(Source("made/up.py", code))


@pytest.mark.parametrize(
    "code",
    [
        "try: f()\nexcept Exception:\n    undo()\n    raise",
        "try: f()\nexcept ValueError: pass",
        "with suppress(OSError): f()",
    ],
)
def test_tidying_up_and_narrow_catches_are_not_meant(code: str) -> None:
    assert broad_excepts(Source("made/up.py", code)) == []

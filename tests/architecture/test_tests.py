"""The tests keep their own rules: they wait for events, and mock nothing of ours."""

import ast
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, Source, imports

TESTS = ROOT / "tests"

# Where a pause is the thing under test or the pace of a question, not a hope that something has happened meanwhile.
MAY_SLEEP = {
    "waiting.py": "the pace at which `wait_until` asks",
    "fleet/contest.py": "several processes act at a deadline, which is an instant and no event",
}


def sources() -> list[Source]:
    return [Source(str(path.relative_to(TESTS)), path.read_text()) for path in sorted(TESTS.rglob("*.py"))]


def sleeps(source: Source) -> list[str]:
    """Return where a test file lets time pass."""
    return [
        f"tests/{source.name}:{node.lineno}"
        for node in source.nodes
        if isinstance(node, ast.Call)
        and not _only_yields(node)
        and (
            (isinstance(node.func, ast.Attribute) and node.func.attr == "sleep")
            or (isinstance(node.func, ast.Name) and node.func.id == "sleep")
        )
    ]


def _only_yields(call: ast.Call) -> bool:
    return any(isinstance(argument, ast.Constant) and argument.value == 0 for argument in call.args)


def mocks(source: Source) -> list[str]:
    return [
        f"tests/{source.name}:{getattr(node, 'lineno', 1)}"
        for node, name in imports(source)
        if name.startswith(("unittest.mock", "mock."))
    ]


def test_tests_wait_for_events_and_not_for_time_to_pass() -> None:
    assert [found for source in sources() if source.name not in MAY_SLEEP for found in sleeps(source)] == []


def test_tests_mock_nothing() -> None:
    assert [found for source in sources() for found in mocks(source)] == []


@pytest.mark.parametrize(
    "code", ["import time\ntime.sleep(1)", "from time import sleep\nsleep(1)", "anyio.sleep(1)"]
)
def test_a_sleep_is_found(code: str) -> None:
    assert sleeps(Source("made/test_up.py", code))


@pytest.mark.parametrize(
    "code", ["from unittest.mock import patch", "import unittest.mock", "from unittest import mock"]
)
def test_a_mock_is_found(code: str) -> None:
    assert mocks(Source("made/test_up.py", code))


def test_letting_another_coroutine_run_is_no_sleep() -> None:
    assert sleeps(Source("made/test_up.py", "asyncio.sleep(0)")) == []


def test_every_place_that_may_sleep_exists() -> None:
    assert [name for name in MAY_SLEEP if not Path(TESTS, name).exists()] == []

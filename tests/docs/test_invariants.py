"""Every numbered invariant is guarded by tests that say so."""

import re
from pathlib import Path

import pytest

from cortex_workers.docs.invariants import NAME, TESTS, marked
from tests.docs.markdown import page

_DECLARED = re.compile(r"^- \*\*(I\d+)\*\* \*", re.M)


def declared() -> list[str]:
    return _DECLARED.findall(page("cortex_workers/README.md").text)


def test_the_invariants_are_numbered_without_a_gap() -> None:
    assert declared() == [f"I{number}" for number in range(1, 11)]


@pytest.mark.parametrize("name", declared())
def test_an_invariant_has_a_test(name: str) -> None:
    assert marked(TESTS).get(name), f"no test is marked with @pytest.mark.invariant({name!r})"


def test_a_marker_names_an_invariant_that_exists() -> None:
    assert sorted(set(marked(TESTS)) - set(declared())) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('@pytest.mark.invariant("I3")\ndef test_a(): ...', {"I3": 1}),
        ('@pytest.mark.invariant("I3")\n@pytest.mark.invariant("I4")\ndef test_a(): ...', {"I3": 1, "I4": 1}),
        ('pytestmark = pytest.mark.invariant("I1")\ndef test_a(): ...\nasync def test_b(): ...', {"I1": 2}),
        ('pytestmark = [pytest.mark.fleet, pytest.mark.invariant("I1")]\ndef test_a(): ...', {"I1": 1}),
        ('@pytest.mark.invariant("I2")\nclass TestIt:\n    def test_a(self): ...', {"I2": 1}),
        ('@pytest.mark.invariant("I2")\ndef helper(): ...', {}),
        ("text = '@pytest.mark.invariant(\"I2\")'\ndef test_a(): ...", {}),
    ],
)
def test_markers_are_found_where_they_count(tmp_path: Path, code: str, found: dict[str, int]) -> None:
    (tmp_path / "test_made_up.py").write_text(code)
    assert {name: sum(files.values()) for name, files in marked(tmp_path).items()} == found


def test_only_numbers_are_names() -> None:
    assert NAME.fullmatch("I10")
    assert not NAME.fullmatch("I0")
    assert not NAME.fullmatch("a lease is never lost")

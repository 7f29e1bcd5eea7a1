"""Results: what is accepted comes back equal, everything else is a typed failure (bug case C37)."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import json
import sys
import uuid
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter

from cortex_workers.host import ResultNotEncodable, clean_text, cut_result, encode_result


class Colour(enum.Enum):
    RED = "red"


class Level(enum.StrEnum):
    HIGH = "high"


class Line(BaseModel):
    title: str
    when: dt.datetime
    tags: set[str] = set()


class Pair(NamedTuple):
    left: int
    right: str


@dataclasses.dataclass
class Point:
    x: int
    lines: list[Line]


NOON = dt.datetime(2026, 1, 2, 12, tzinfo=dt.timezone(dt.timedelta(hours=2)))
LINE = Line(title="t", when=NOON, tags={"a"})


def test_text_stays_text() -> None:
    assert encode_result('{"a": 1}') == '{"a": 1}'
    assert encode_result("") == ""
    assert encode_result(None) == "null"


@pytest.mark.parametrize(
    "value",
    [
        True,
        0,
        -1.5,
        pytest.param(10**300, id="an integer of 301 digits"),
        [1, "two", None, [False]],
        {"a": {"b": []}, "ä": "ö"},
        LINE,
        Point(1, [LINE]),
        NOON,
        dt.date(2026, 1, 2),
        dt.time(1, 2, 3, 4),
        uuid.UUID(int=7),
        decimal.Decimal("1.10"),
        Colour.RED,
        PurePosixPath("/a/b"),
    ],
)
def test_what_is_accepted_comes_back_equal(value: Any) -> None:
    text = encode_result(value)
    back = (
        TypeAdapter(type(value)).validate_python(json.loads(text))
        if not isinstance(value, PurePosixPath)
        else PurePosixPath(json.loads(text))
    )
    assert back == value


def test_shapes_that_json_writes_otherwise() -> None:
    assert encode_result((1, 2)) == "[1,2]"
    assert encode_result(Pair(1, "x")) == '{"left":1,"right":"x"}'
    assert encode_result(Level.HIGH) == '"high"'
    assert encode_result({"b": 1, "a": 2}) == '{"b":1,"a":2}'


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(json_values.filter(lambda value: not isinstance(value, str)))
def test_any_json_comes_back_equal(value: Any) -> None:
    assert json.loads(encode_result(value)) == value


class Anything:
    pass


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (lambda: None, "a function at $"),
        (sys.stdout, "at $"),
        (Anything(), "a Anything at $"),
        (Anything, "a type at $"),
        ({"a": [{1, 2}]}, r"a set at $.a[0]; return a sorted list"),
        (frozenset(), "a frozenset at $"),
        (b"bytes", "a bytes at $; decode it"),
        ({"a": float("nan")}, "a float at $.a; JSON has no NaN"),
        (float("inf"), "infinity"),
        (decimal.Decimal("NaN"), "a Decimal at $"),
        ({1: "a"}, "its keys must be text, one is a int"),
        ({None: "a"}, "one is a NoneType"),
        ((number for number in [1]), "a generator at $"),
        ({"a": 1}.keys(), "a dict_keys at $"),
        (CYCLE, "contains itself"),
        pytest.param(10**5000, "no JSON", id="an integer of 5001 digits"),
        (3j, "a complex at $"),
        (dt.timedelta(seconds=1), "a timedelta at $"),
    ],
)
def test_everything_else_is_a_typed_failure(value: Any, told: str) -> None:
    with pytest.raises(ResultNotEncodable) as caught:
        encode_result(value)
    assert told in str(caught.value)
    assert str(caught.value).startswith("the tool ran, but")


def test_an_awaitable_that_nobody_awaited_is_named() -> None:
    async def work() -> None: ...

    coroutine = work()
    with pytest.raises(ResultNotEncodable, match="a coroutine at"):
        encode_result(coroutine)
    coroutine.close()


def test_nul_and_lone_surrogates_are_replaced_and_marked() -> None:
    assert clean_text("plain ä 😀") == ("plain ä 😀", False)
    assert clean_text("a\x00b\ud800c\udfff") == ("a\ufffdb\ufffdc\ufffd", True)


@given(st.text(st.characters(), max_size=50))
def test_cleaned_text_can_be_stored(text: str) -> None:
    cleaned, changed = clean_text(text)
    assert "\x00" not in cleaned
    cleaned.encode()
    assert changed is (cleaned != text)
    assert len(cleaned) == len(text)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(1, 300))
def test_a_cut_result_fits_and_is_text(text: str, limit: int) -> None:
    cut = cut_result(text, limit)
    assert len(cut.encode()) <= limit
    if len(text.encode()) <= limit:
        assert cut == text


def test_a_cut_result_says_so() -> None:
    cut = cut_result("ä" * 1000, 500)
    assert cut.startswith("äää")
    assert "this result has 2000 bytes, the limit is 500" in cut
    assert 490 < len(cut.encode()) <= 500

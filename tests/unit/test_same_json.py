"""When two JSON values say the same."""

from typing import Any

import pytest

from cortex_workers.schemas.base import same_json
from cortex_workers.schemas.checkpoint import Decision

SAME = [(1, 1.0), (10**300, 1e300), ({"a": [1, None]}, {"a": [1.0, None]}), ("x", "x"), (True, True)]
DIFFERENT = [
    (1, True), (0, False), ("1", 1), (2**53 + 1, 2**53), ([1], [1, 2]), ({"a": 1}, {"b": 1}), (10**400, 1e300),
    (None, False), ("", None),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), SAME, ids=repr)
def test_a_number_is_the_same_however_it_went_through_the_database(one: Any, other: Any) -> None:
    assert same_json(one, other)
    assert same_json(other, one)


@pytest.mark.parametrize(("one", "other"), DIFFERENT, ids=repr)
def test_what_json_tells_apart_is_not_the_same(one: Any, other: Any) -> None:
    assert not same_json(one, other)
    assert not same_json(other, one)


@pytest.mark.parametrize("other", [1, 2, "true"], ids=repr)
def test_a_decision_with_another_value_is_another_decision(other: Any) -> None:
    one = Decision(approved=True, amended_arguments={"flag": True})
    assert one.same_content(Decision(approved=True, amended_arguments={"flag": True}, actor="somebody else"))
    assert not one.same_content(Decision(approved=True, amended_arguments={"flag": other}))

"""The one pydantic configuration: frozen, strict about unknown fields, canonical JSON for digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError


class Model(BaseModel):
    """A frozen value; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Document(BaseModel):
    """A frozen value read back from a row; unknown fields of a newer writer are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class RowDocument(Document):
    """A document for people to look at. A row that somebody broke by hand is shown as far as it can be read.

    ``unreadable`` names the fields that hold something else than they should; they have their defaults, or what is
    there where they have none.
    """

    unreadable: tuple[str, ...] = ()


D = TypeVar("D", bound=RowDocument)


def read_row(kind: type[D], row: Mapping[str, Any]) -> D:
    """What a row says; it never fails, since one broken row must not hide the others of a list."""
    values = {name: row[name] for name in kind.model_fields if name in row}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        broken = {str(item["loc"][0]) for item in error.errors(include_url=False) if item["loc"]}
    named = (*values.get("unreadable", ()), *sorted(broken))
    kept = {name: value for name, value in values.items() if name not in broken}
    try:
        return kind.model_validate({**kept, "unreadable": named})
    except ValidationError:
        return cast(D, kind.model_construct(**{**values, "unreadable": named}))


def canonical_json(value: Any) -> str:
    """Encode to one text per value: sorted keys, no spaces, no NaN.

    Raises: ValueError for NaN or infinities, TypeError for what JSON cannot hold.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 (hex) over the canonical JSON of a value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def same_json(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same, whichever way a number went through the database: it has no floats.

    ``True`` is no number, as in JSON and unlike in Python.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, float) != isinstance(other, float):
        try:
            both = isinstance(one, int | float) and isinstance(other, int | float)
            return both and float(one) == float(other)
        except OverflowError:
            return False
    return bool(one == other)

"""The one pydantic configuration: frozen, strict about unknown fields, canonical JSON for digests."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict


class Model(BaseModel):
    """A frozen value; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Document(BaseModel):
    """A frozen value read back from a row; unknown fields of a newer writer are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


def canonical_json(value: Any) -> str:
    """Encode to one text per value: sorted keys, no spaces, no NaN.

    Raises: ValueError for NaN or infinities, TypeError for what JSON cannot hold.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 (hex) over the canonical JSON of a value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()

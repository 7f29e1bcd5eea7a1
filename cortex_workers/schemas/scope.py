"""Scopes: one to three key=value levels, broadest first, in one canonical text.

Source: runs.md 2.2; ruling: separators are refused in keys and values, so the text survives the round trip.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_LEVELS = 3
MAX_LEVEL_CHARS = 200


class ScopeError(ValueError):
    """The scope text is malformed; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Scope:
    """A host's own hierarchy, compared and never interpreted."""

    text: str

    @classmethod
    def parse(cls, text: str) -> Scope:
        """Read the canonical text.

        Raises: ScopeError for an empty text, more than three levels, an empty key or value, or a separator in one.
        """
        if not isinstance(text, str) or not text:
            raise ScopeError('a scope is required, like "tenant=acme"')
        levels = text.split("/")
        if len(levels) > MAX_LEVELS:
            raise ScopeError(f"a scope has at most {MAX_LEVELS} levels, this one has {len(levels)}")
        for level in levels:
            key, found, value = level.partition("=")
            if not found or not key or not value or "=" in value:
                raise ScopeError(f"each level of a scope is key=value, {level[:80]!r} is not")
            if len(level) > MAX_LEVEL_CHARS:
                raise ScopeError(f"a level of a scope has at most {MAX_LEVEL_CHARS} characters")
            if any(ord(char) < 32 or 0xD800 <= ord(char) <= 0xDFFF for char in level):
                raise ScopeError("a scope holds no control characters and no lone surrogates")
        return cls(text)

    @property
    def first_level(self) -> str:
        """The broadest level: the key of fairness."""
        return self.text.split("/", 1)[0]

    def covers(self, other: str) -> bool:
        """Tell whether another scope equals this one or lies below it."""
        return other == self.text or other.startswith(self.text + "/")

    def __str__(self) -> str:
        return self.text

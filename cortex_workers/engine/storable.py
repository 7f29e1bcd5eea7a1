"""What a model or foreign code says, made storable: NUL and lone surrogates become U+FFFD, everywhere the same.

Source: decision R17; bug case C30.
"""

from __future__ import annotations

import re
from typing import Any

from cortex_workers.host import clean_text

_REPLACEMENT = "\ufffd"
# A pair of surrogates is one character and stays; any other escape is looked at by itself, a backslash included.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u(0000|[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


def text(value: str) -> str:
    """A text without what Postgres cannot store."""
    return clean_text(value)[0]


def arguments(value: str) -> tuple[str, bool]:
    """The JSON text of a call's arguments, also without such characters written as escapes.

    They would come back as text of the parsed arguments, which are stored for the approver. The flag says whether
    anything was replaced.
    """
    cleaned, marked = clean_text(value)
    if "\\u" not in cleaned:
        return cleaned, marked
    without = _ESCAPE.sub(lambda found: _REPLACEMENT if found[1] else found[0], cleaned)
    return without, marked or without != cleaned


def document(value: Any) -> Any:
    """A JSON value whose texts and keys can be stored."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {text(str(key)): document(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [document(item) for item in value]
    return value

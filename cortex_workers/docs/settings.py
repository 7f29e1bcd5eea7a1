"""The settings as tables, from the class that reads them."""

from __future__ import annotations

import inspect
import re
from typing import Any

from cortex_workers.docs.blocks import code, table
from cortex_workers.settings import PREFIX, Settings

_GROUP = re.compile(r"^    # (.+)$")
_FIELD = re.compile(r"^    ([a-z_0-9]+): ")


def settings() -> str:
    """One table per group, in the order in which the class declares them."""
    schema = Settings.model_json_schema()["properties"]
    parts = []
    for group, names in groups():
        rows = [_row(name, schema[name]) for name in names]
        parts.append(f"**{group}**\n\n{table(['variable', 'default', 'allowed', 'what it is'], rows)}")
    return "\n\n".join(parts)


def groups() -> list[tuple[str, list[str]]]:
    """The headings in the class and the fields below each."""
    found: list[tuple[str, list[str]]] = []
    for line in inspect.getsource(Settings).splitlines():
        heading, field = _GROUP.match(line), _FIELD.match(line)
        if heading:
            found.append((heading[1], []))
        elif field and field[1] in Settings.model_fields:
            found[-1][1].append(field[1])
    return [(heading, names) for heading, names in found if names]


def variable(name: str) -> str:
    """The environment variable of a field."""
    return f"{PREFIX}{name.upper()}"


def _row(name: str, schema: dict[str, Any]) -> list[str]:
    field = Settings.model_fields[name]
    return [code(variable(name)), _default(field.default), _allowed(schema), field.description or ""]


def _default(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return code("true" if value else "false")
    return code(_number(value)) if isinstance(value, int | float) else code(value)


def _allowed(schema: dict[str, Any]) -> str:
    kind = next((item for item in schema.get("anyOf", ()) if item.get("type") != "null"), schema)
    if "enum" in kind:
        return ", ".join(code(item) for item in kind["enum"])
    if "pattern" in kind:
        return code(kind["pattern"])
    if kind["type"] == "boolean":
        return "`true`, `false`"
    if kind["type"] not in ("number", "integer"):
        return "text"
    return _range(kind)


def _range(kind: dict[str, Any]) -> str:
    words = []
    if "exclusiveMinimum" in kind:
        words.append(f"over {_number(kind['exclusiveMinimum'])}")
    elif "minimum" in kind:
        words.append(_number(kind["minimum"]))
    if "maximum" in kind:
        words.append(f"to {_number(kind['maximum'])}")
    return " ".join(words) or "a number"


def _number(value: float) -> str:
    return str(int(value)) if int(value) == value else f"{value:g}"

"""What a command says to a person, to a script, and to a shell: text, one JSON document, an exit code.

Text goes to stdout, errors are one line on stderr. With ``--json`` stdout is exactly one JSON document, also for an
error: ``{"error": code, "message": …}``.
Source: ruling 72 (exit codes).
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, ParamSpec

import typer
from pydantic import BaseModel
from rich.console import Console

from cortex_workers.errors import CortexError, InvalidSettings, InvalidState, NoScope, Unavailable
from cortex_workers.operate.words import iso
from cortex_workers.schemas.checkpoint import Decision
from cortex_workers.settings import PREFIX

DONE, REFUSED, USAGE, TRY_AGAIN = 0, 1, 2, 75
"""0 done or a harmless repeat; 1 refused or failed; 2 wrong usage; 75 not available now, the same again may work."""
_PIPED_WIDTH = 200
_ANY_JSON = """JSON, like '{"amount": 5}' or '"some text"'"""
_AN_OBJECT = """a JSON object, like '{"amount": 5}'"""
_KINDS = {str: "a text", list: "a list", bool: "a truth value", type(None): "null"}

P = ParamSpec("P")


def command(work: Callable[P, int | None]) -> Callable[P, None]:
    """Make a function a command: its return value is the exit code (None: done), its errors are told and mapped."""

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = work(*args, **kwargs)
        except CortexError as error:
            tell_error(error, as_json=bool(kwargs.get("as_json")))
            raise typer.Exit(TRY_AGAIN if isinstance(error, Unavailable) else REFUSED) from None
        raise typer.Exit(code or DONE)

    return run


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\b\n" + "\n".join(["Examples:", *(f"  {line}" for line in lines)])


def tell_error(error: CortexError, *, as_json: bool) -> None:
    """Say what went wrong, once."""
    message = error.message
    if isinstance(error, NoScope):
        message = f"{message.rstrip('.')}: pass --scope or set CORTEX_SCOPE"
    if isinstance(error, InvalidSettings) and message.startswith(f"{PREFIX}DATABASE_URL is not set"):
        message += "; or start `cortex-workers up` in this folder"
    recorded = error.recorded if isinstance(error, InvalidState) else None
    if as_json:
        more = {"recorded": recorded} if isinstance(recorded, Decision) else {}
        print_json({"error": error.code, "message": message, **more})
        return
    if isinstance(recorded, Decision):
        message += f"; recorded: {_decision(recorded)}"
    print(f"error: {' '.join(message.split())} [{error.code}]", file=sys.stderr)


def _decision(recorded: Decision) -> str:
    verdict = str(recorded.outcome) if recorded.outcome else ("approved" if recorded.approved else "rejected")
    by = recorded.decided_by or recorded.actor
    return verdict + (f" by {by}" if by else "") + (f" ({recorded.reason})" if recorded.reason else "")


def print_json(value: Any) -> None:
    """Write one JSON document to stdout."""
    print(json_text(value, indent=2))


def json_text(value: Any, indent: int | None = None) -> str:
    """A value as JSON, our own types included; a time always has the same form."""
    return json.dumps(value, indent=indent, ensure_ascii=False, default=_for_machines)


def _for_machines(value: Any) -> Any:
    if isinstance(value, datetime):
        return iso(value)
    return value.model_dump() if isinstance(value, BaseModel) else str(value)


def note(text: str) -> None:
    """Say something beside the result, on stderr."""
    Console(stderr=True, highlight=False).print(text, style="dim", markup=False, soft_wrap=True)


@functools.cache
def _width() -> int | None:
    # Whoever reads a pipe has no edge at column 80; an id that is cut there is useless.
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPED_WIDTH


def console() -> Console:
    """Where results are drawn."""
    return Console(highlight=False, width=_width(), markup=False, emoji=False)


def given_json(text: str, what: str, wants: str = _ANY_JSON) -> Any:
    """Read a JSON value that was given as an option.

    Raises: typer.BadParameter, which is wrong usage; it says what is wanted and where reading stopped.
    """
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        why = f"{error.msg} at character {error.pos + 1}"
    except RecursionError:
        why = "it is nested too deeply"
    except ValueError as error:
        why = str(error)
    raise typer.BadParameter(f"{what} takes {wants}. This is none: {why}")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def given_object(text: str | None, what: str, wants: str = _AN_OBJECT) -> dict[str, Any] | None:
    """Read a JSON object that was given as an option.

    Raises: typer.BadParameter.
    """
    if text is None:
        return None
    value = given_json(text, what, wants)
    if not isinstance(value, Mapping):
        raise typer.BadParameter(f"{what} takes {wants}. This is {_KINDS.get(type(value), 'a number')}")
    return dict(value)

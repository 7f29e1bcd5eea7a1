"""The command line as a reference, from the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cortex_workers.docs.blocks import code, table

PROGRAM = "cortex-workers"
_OF_EVERY_PROGRAM = {"--help", "--install-completion", "--show-completion"}


def commands() -> str:
    """Every command with its arguments and options."""
    return "\n\n".join(_section(words, command) for words, command in leaves())


def leaves() -> Iterator[tuple[str, Any]]:
    """Every command that does something, with the words that call it, sorted."""
    import typer.main

    from cortex_workers.cli.app import app

    yield from _walk(PROGRAM, typer.main.get_command(app))


def _walk(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    if command.hidden:
        return
    inner = getattr(command, "commands", None)
    if inner is None:
        yield words, command
        return
    for name in sorted(inner):
        yield from _walk(f"{words} {name}", inner[name])


def _section(words: str, command: Any) -> str:
    about = " ".join((command.help or "").split("\n\n")[0].split())
    shown = (item for item in command.params if not getattr(item, "hidden", False))
    rows = [_parameter(item) for item in shown if not _OF_EVERY_PROGRAM & set(item.opts)]
    listed = f"\n\n{table(['argument', 'default', 'what it is'], rows)}" if rows else ""
    return f"### `{words}`\n\n{about}{listed}"


def _parameter(item: Any) -> list[str]:
    shown = [*item.opts, *item.secondary_opts] if item.param_type_name == "option" else [_metavar(item)]
    return [", ".join(code(name) for name in shown), _default(item), " ".join((item.help or "").split())]


def _metavar(item: Any) -> str:
    name = (item.metavar or item.name).upper().strip("[]")
    return f"[{name}]" if not item.required else name


def _default(item: Any) -> str:
    if item.required:
        return "required"
    value = item.default
    if value in (None, False, ()) or callable(value) or type(value).__name__ == "Sentinel":
        return ""
    return code(value)

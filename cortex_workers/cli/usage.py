"""Wrong usage for scripts: with ``--json`` it is one JSON document on stdout, like every other error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from cortex_workers.cli.report import USAGE, print_json

# Typer exports no other of its usage errors, and a newer one does not use click itself.
_UsageError: Any = typer.BadParameter.__base__
_WORDS = "cortex_workers.words"


class Commands(TyperGroup):
    """The root of the commands; what was typed is remembered, since an unread line has no options yet."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> Any:
        """Read the words up to the name of a command."""
        words = tuple(args)
        with _told_as_json(words):
            made = super().make_context(info_name, args, *more, **extra)
        made.meta[_WORDS] = words
        return made

    def invoke(self, ctx: Any) -> Any:
        """Read the rest and do it."""
        with _told_as_json(ctx.meta.get(_WORDS, ())):
            return super().invoke(ctx)


@contextmanager
def _told_as_json(words: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        if not _wants_json(words):
            raise
        print_json({"error": "wrong_usage", "message": error.format_message()})
        raise typer.Exit(USAGE) from None


def _wants_json(words: Sequence[str]) -> bool:
    options = words[: words.index("--")] if "--" in words else words
    return "--json" in options

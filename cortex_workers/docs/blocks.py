"""Generated blocks of Markdown pages: between two markers stands what a function of the code says.

::

    <!-- generated: settings -->
    …
    <!-- end: settings -->

A page may hold any number of blocks; every block of the catalogue stands in at least one page.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Render = Callable[[], str]

_BEGIN = re.compile(r"^<!-- generated: ([a-z-]+) -->$", re.M)
_SKIPPED = {"node_modules", "dist", "build"}
_CONTEXT = 1


class DocsError(Exception):
    """A page has a block that cannot be written."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page that is not what the code says: its path below the root, its text as it should be, and the difference."""

    name: str
    fresh: str
    diff: str


def stale(root: Path, blocks: Mapping[str, Render]) -> list[Page]:
    """Every page with a block that is not fresh.

    Raises: DocsError for an unknown or unclosed block, and for a block of the catalogue that stands nowhere.
    """
    rendered: dict[str, str] = {}
    found, placed = [], set()
    for path in pages(root):
        name, text = str(path.relative_to(root)), path.read_text(encoding="utf-8")
        placed.update(block_names(text))
        fresh = rewritten(name, text, blocks, rendered)
        if fresh != text:
            found.append(Page(name, fresh, _diff(name, text, fresh)))
    missing = sorted(set(blocks) - placed)
    if missing:
        raise DocsError(
            f"no page has the block {missing[0]!r}: put <!-- generated: {missing[0]} --> where it belongs"
        )
    return found


def pages(root: Path) -> Iterator[Path]:
    """The Markdown pages of a checkout; a link to a folder is not followed, so each page comes once."""
    for entry in sorted(root.iterdir()):
        if entry.is_symlink() or entry.name.startswith(".") or entry.name in _SKIPPED:
            continue
        if entry.is_dir():
            yield from pages(entry)
        elif entry.suffix == ".md":
            yield entry


def block_names(text: str) -> list[str]:
    """The names of the blocks in a page, in order."""
    return _BEGIN.findall(text)


def rewritten(
    name: str, text: str, blocks: Mapping[str, Render], rendered: dict[str, str] | None = None
) -> str:
    """A page with all its blocks fresh; ``rendered`` keeps what was rendered for the next page.

    Raises: DocsError naming page and block.
    """
    known = {} if rendered is None else rendered
    kept, position = [], 0
    for begin in _BEGIN.finditer(text):
        block = begin[1]
        if begin.start() < position:
            raise DocsError(f"{name}: the block {block!r} begins inside another")
        if block not in blocks:
            raise DocsError(f"{name}: there is no block {block!r}; one of {', '.join(sorted(blocks))}")
        end = f"<!-- end: {block} -->"
        stop = text.find(end, begin.end())
        if stop < 0:
            raise DocsError(f"{name}: the block {block!r} has no {end}")
        if block not in known:
            known[block] = blocks[block]().strip("\n")
        kept += [text[position : begin.end()], f"\n\n{known[block]}\n\n"]
        position = stop
    return "".join([*kept, text[position:]])


def table(headers: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; a bar or a line break inside a cell is made harmless."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def code(text: object) -> str:
    """A text as code; nothing for nothing."""
    shown = str(text)
    return f"`{shown}`" if shown else ""


def _cell(text: str) -> str:
    """One line, with the code marks of Markdown, and nothing that would end the cell or pass for HTML."""
    parts = " ".join(text.split()).replace("``", "`").replace("|", "\\|").split("`")
    # Every second part stands between two marks, where "<" is itself.
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))


def _diff(name: str, before: str, after: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(True), after.splitlines(True), name, f"{name} (as the code says)", n=_CONTEXT
    )
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)

"""The pages of the project as the tests read them: code blocks, code in the text, links, headings."""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cortex_workers.docs.blocks import pages

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^```([\w-]*)\n(.*?)^```$", re.M | re.S)
_INLINE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block and the line its content begins on."""

    page: str
    language: str
    code: str
    line: int

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Page:
    """One Markdown page."""

    name: str
    text: str

    @property
    def folder(self) -> Path:
        return (ROOT / self.name).parent

    def blocks(self, *languages: str) -> Iterator[Block]:
        for found in _FENCE.finditer(self.text):
            if not languages or found[1] in languages:
                yield Block(self.name, found[1], found[2], self.text[: found.start(2)].count("\n") + 1)

    @property
    def prose(self) -> str:
        """The text without its fenced blocks."""
        return _FENCE.sub("", self.text)

    def code_in_text(self) -> Iterator[str]:
        for found in _INLINE.finditer(self.prose):
            yield " ".join(found[1].split())

    def links(self) -> Iterator[str]:
        yield from _LINK.findall(self.prose)

    @property
    def anchors(self) -> set[str]:
        """What a link to a heading of this page may name."""
        return {anchor(heading) for heading in _HEADING.findall(self.prose)}


def anchor(heading: str) -> str:
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")


@functools.cache
def all_pages() -> tuple[Page, ...]:
    return tuple(Page(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in pages(ROOT))


def page(name: str) -> Page:
    return next(each for each in all_pages() if each.name == name)

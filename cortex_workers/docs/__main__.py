"""The command: write the generated blocks anew, or say which are stale."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import cortex_workers
from cortex_workers.docs.blocks import DocsError, stale
from cortex_workers.docs.catalogue import BLOCKS

ROOT = Path(cortex_workers.__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when every block is fresh, 1 when ``--check`` found a stale one or a page cannot be read."""
    parser = argparse.ArgumentParser("python -m cortex_workers.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 when a block is stale")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: this one)")
    given = parser.parse_args(arguments)
    try:
        return _check(given.root) if given.check else _write(given.root)
    except DocsError as error:
        print(f"docs: {error}", file=sys.stderr)  # noqa: T201  the one sentence that is read
        return 1


def _check(root: Path) -> int:
    found = stale(root, BLOCKS)
    for page in found:
        sys.stdout.write(page.diff)
    if found:
        names = ", ".join(page.name for page in found)
        sys.stdout.write(
            f"\nstale: {names}\n`make docs` writes them anew; look at the change, then commit it.\n"
        )
    return 1 if found else 0


def _write(root: Path) -> int:
    for page in stale(root, BLOCKS):
        (root / page.name).write_text(page.fresh, encoding="utf-8")
        sys.stdout.write(f"wrote {page.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

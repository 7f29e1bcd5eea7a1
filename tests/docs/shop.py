"""The shop of the README in a folder: its files, its settings, and a provider that answers on this machine."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cortex_workers.testing.openai_server import OpenAIServer
from tests.docs.markdown import ROOT, Block, page

PAYMENTS = """
paid = []

def refund(order_id, amount_cents, idempotency_key):
    paid.append((order_id, amount_cents, idempotency_key))
    return f"refunded {amount_cents} cents"
"""
ANSWERS: list[dict[str, Any]] = [
    {"call": [{"tool": "refund", "args": {"order_id": "17", "amount_cents": 1250}}]},
    {"say": "Order 17 is paid back."},
]


def examples(name: str) -> list[Block]:
    return list(page(name).blocks("python"))


def named(block: Block) -> str:
    """The file that an example says it is, in its first line."""
    return block.code.partition("\n")[0].removeprefix("# ").strip()


@contextmanager
def open_shop(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answers: Sequence[dict[str, Any]], **settings: str
) -> Iterator[dict[str, str]]:
    """Make the shop, be in it, and give the environment for the processes that a reader of the README would start."""
    (folder / "shop").mkdir()
    (folder / "shop/payments.py").write_text(PAYMENTS)
    for block in examples("README.md"):
        (folder / named(block)).write_text(block.code)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with OpenAIServer(answers) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        yield {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    for module in [name for name in sys.modules if name == "shop" or name.startswith("shop.")]:
        del sys.modules[module]

"""Loading a host by name: what is wrong is said, with the line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cortex_workers.errors import DuplicateTool, HostNotLoadable
from cortex_workers.host import Host, load_host


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An application's folder: the working directory, not on the import path."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def write(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text)


def test_a_host_is_found_in_the_working_directory(folder: Path) -> None:
    write(
        folder,
        "shop_ok",
        "from cortex_workers.host import Host\nhost = Host()\nclass Box:\n    inner = Host()\n",
    )
    assert isinstance(load_host("shop_ok:host"), Host)
    assert load_host("shop_ok:host") is load_host("shop_ok:host")
    assert isinstance(load_host(" shop_ok:Box.inner "), Host)
    assert str(folder) in sys.path


@pytest.mark.parametrize(
    "path", ["", "shop", "shop:", ":host", "shop.py:host", "shop:host:x", "a b:c", "shop/x:host", None]
)
def test_a_path_of_another_form_is_refused(path: Any, folder: Path) -> None:
    with pytest.raises(HostNotLoadable, match="module:attribute"):
        load_host(path)


def test_a_module_that_is_not_there_says_where_it_was_sought(folder: Path) -> None:
    with pytest.raises(HostNotLoadable, match=f"no module named 'shop_none'.*{folder}"):
        load_host("shop_none.agents:host")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1\nx / 0\n", "ZeroDivisionError: division by zero in .*shop_bad.py line 2"),
        ("x = 1\n\nx = = 2\n", "invalid syntax in .*shop_bad.py line 3"),
        (
            "import module_that_is_missing\n",
            "ModuleNotFoundError: .*module_that_is_missing.*shop_bad.py line 1",
        ),
        ("import os\nraise SystemExit(3)\n", "SystemExit: 3 in .*shop_bad.py line 2"),
        ("def f():\n    raise KeyError('x')\nf()\n", "KeyError: 'x' in .*shop_bad.py line 2"),
    ],
)
def test_a_module_that_does_not_import_says_what_and_where(folder: Path, text: str, told: str) -> None:
    write(folder, "shop_bad", text)
    with pytest.raises(HostNotLoadable, match=told) as caught:
        load_host("shop_bad:host")
    assert caught.value.__cause__ is not None


def test_an_attribute_that_is_not_there_is_named(folder: Path) -> None:
    write(folder, "shop_empty", "x = 1\n")
    with pytest.raises(HostNotLoadable, match="shop_empty has no attribute 'host'"):
        load_host("shop_empty:host")


def test_something_else_than_a_host_is_refused(folder: Path) -> None:
    write(folder, "shop_text", "host = 'a host'\n")
    with pytest.raises(HostNotLoadable, match="is a str, not a Host"):
        load_host("shop_text:host")


def test_a_mistake_of_the_host_s_own_keeps_its_name(folder: Path) -> None:
    text = "from cortex_workers.host import Host\nhost = Host()\ndef f(): ...\nhost.tool(f)\nhost.tool(f)\n"
    write(folder, "shop_twice", text)
    with pytest.raises(DuplicateTool, match="'f'"):
        load_host("shop_twice:host")

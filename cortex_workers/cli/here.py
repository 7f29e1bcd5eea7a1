"""Where the fleet is: what the environment names, else what a running `cortex-workers up` of this folder has started.

A production command never starts a server. When no address is set and `up` runs in this folder, its addresses are used
and a note on stderr says so; otherwise the variable that is missing is named.
Source: decision S8.
"""

from __future__ import annotations

import getpass
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cortex_workers.cli.report import note
from cortex_workers.settings import Settings, load_settings, mask_url

if TYPE_CHECKING:
    from cortex_workers.client import Client
    from cortex_workers.tasks.publish import CeleryPublisher

_FILE = "up.json"
_BLINK_S = 0.5


@dataclass(frozen=True, slots=True)
class Up:
    """A running `up`: its process, and where its servers are."""

    pid: int
    started: float
    database_url: str
    broker_url: str


def announce(folder: Path, database_url: str, broker_url: str) -> None:
    """Write down that this process runs the stack of a folder."""
    from cortex_workers.embedded.identity import ProcessIdentity

    own = ProcessIdentity.own()
    draft = folder / f"{_FILE}.new"
    draft.touch(mode=0o600)  # an address may hold a password
    draft.write_text(json.dumps(asdict(Up(own.pid, own.started, database_url, broker_url))))
    draft.replace(folder / _FILE)


def withdraw(folder: Path) -> None:
    """Take that back."""
    (folder / _FILE).unlink(missing_ok=True)


def running_up(folder: Path) -> Up | None:
    """The `up` that runs in a folder now; a file that a killed one left behind counts for nothing."""
    try:
        found = Up(**json.loads((folder / _FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    from cortex_workers.embedded import ExtraMissing
    from cortex_workers.embedded.identity import ProcessIdentity

    try:
        return found if ProcessIdentity(found.pid, found.started).is_alive() else None
    except ExtraMissing:
        return None


def settings() -> Settings:
    """The settings of a production command.

    Raises: InvalidSettings.
    """
    given = load_settings()
    if given.database_url is not None:
        return given
    up = running_up(Path(given.data_dir))
    if up is None:
        return given
    note(f"using the servers of `cortex-workers up` in {given.data_dir} (process {up.pid})")
    return load_settings(database_url=up.database_url, broker_url=up.broker_url)


def actor(given: Settings) -> str:
    """Who decides: CORTEX_ACTOR, else the user of this terminal (ruling 45)."""
    if given.actor:
        return given.actor
    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):
        return f"cli:{os.getuid()}"


@contextmanager
def client(
    scope: str | None = None, *, announces: bool = False, needs_broker: bool = True
) -> Iterator[Client]:
    """A client of the fleet for one command; ``announces`` when it tells workers something, by hints at its end.

    Raises: InvalidSettings naming the variable that is not set.
    """
    found = settings()
    found.require_database()
    if announces and needs_broker:
        found.require_broker()
    quiet(found)
    from cortex_workers.client import Client

    with Client(found, scope=scope, actor=actor(found), hints=False) as made:
        if not announces or found.broker_url is None:
            yield made
            return
        from cortex_workers.tasks.publish import attach

        publisher = attach(made.runtime)
        yield made
        _send_hints(publisher, mask_url(found.broker_url.get_secret_value()))


def _send_hints(publisher: CeleryPublisher, broker: str) -> None:
    """Wait for the hints of what was stored, and say so where it takes longer than a blink."""
    from cortex_workers.tasks.publish import FLUSH_S

    if publisher.flush(_BLINK_S):
        return
    note(f"stored; waiting {FLUSH_S:g} s at most for the broker at {broker} to take the hint")
    if not publisher.flush_finally(FLUSH_S - _BLINK_S):
        note("it did not: workers learn of it by the next sweep, some seconds later")


def quiet(given: Settings) -> None:
    """Keep the log out of a command's answer; errors still reach stderr."""
    from cortex_workers import telemetry

    telemetry.configure_logging(given.log_format, "error")

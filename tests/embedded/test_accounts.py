"""As whom the servers run: never as root, and for an ordinary user as that user."""

import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

import cortex_workers
from cortex_workers.embedded import EmbeddedError, EmbeddedServers, place

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run something as another user")

TWICE = """
import os, sys
from pathlib import Path
import psutil
from cortex_workers.embedded import EmbeddedServers

for turn in range(2):
    with EmbeddedServers(Path(sys.argv[1]), durable=False) as servers:
        for node in (servers.postgres, servers.valkey):
            print(psutil.Process(node.pid).uids().effective)
            assert Path(sys.argv[1]) in node.data.parents, node.data
"""


@pytest.fixture
def nobodys_folder() -> Iterator[Path]:
    """A folder that belongs to the account `nobody`."""
    folder = Path(tempfile.mkdtemp(prefix="cortex-nobody-", dir="/var/tmp"))
    nobody = pwd.getpwnam("nobody")
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    yield folder
    shutil.rmtree(folder)


def run_as_nobody(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code as `nobody` with this run's packages, in whichever Python of this version that account can reach."""
    nobody = pwd.getpwnam("nobody")
    packages = [str(Path(cortex_workers.__file__).parents[1]), sysconfig.get_paths()["purelib"]]
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidates = [sys.executable, *(f"{folder}/{name}" for folder in ("/usr/bin", "/usr/local/bin"))]

    def run(python: str, *rest: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, *rest],
            user=nobody.pw_uid,
            group=nobody.pw_gid,
            extra_groups=[],
            cwd="/",
            env={"PYTHONPATH": os.pathsep.join(packages), "PATH": os.defpath},
            capture_output=True,
            text=True,
            check=False,
        )

    for python in candidates:
        try:
            if run(python, "-c", "import cortex_workers.embedded, psutil").returncode == 0:
                return run(python, "-c", code, *arguments)
        except PermissionError:
            continue
        except FileNotFoundError:
            continue
    pytest.skip(f"no {name} on this machine can be reached by another user than root")


@as_root
def test_an_ordinary_users_servers_run_as_that_user_in_the_projects_folder(nobodys_folder: Path) -> None:
    done = run_as_nobody(TWICE, str(nobodys_folder / ".cortex"))
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {str(pwd.getpwnam("nobody").pw_uid)}


@as_root
def test_roots_servers_run_as_nobody_and_open_no_folder_of_roots(tmp_path: Path) -> None:
    project = tmp_path / "private"
    project.mkdir(mode=0o700)
    servers = EmbeddedServers(project / ".cortex", durable=False)
    try:
        servers.start()
        uids = {psutil.Process(node.pid).uids().effective for node in (servers.postgres, servers.valkey)}
        assert uids == {pwd.getpwnam("nobody").pw_uid}
        assert project.stat().st_mode & 0o777 == 0o700
        data = servers.postgres.data
        assert data.parent.stat().st_mode & 0o777 == 0o700
        with psycopg.connect(servers.database_url) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
    finally:
        servers.remove_data()
    assert not data.parent.exists()


@as_root
def test_data_of_roots_servers_goes_when_its_folder_has_gone(tmp_path: Path) -> None:
    gone, used, mine = (
        EmbeddedServers(tmp_path / name / ".cortex", postgres=False, durable=False) for name in "abc"
    )
    with gone:
        left = gone.valkey.data.parent
    shutil.rmtree(tmp_path / "a")
    try:
        with used:
            in_use = used.valkey.data.parent
            shutil.rmtree(tmp_path / "b")
            with mine:
                assert not left.exists()
                assert in_use.exists(), "a server still works there"
                kept = mine.valkey.data.parent
            (tmp_path / "b" / ".cortex").mkdir(parents=True)
        with used:
            assert not in_use.exists(), "another folder of the same name has begun anew"
            assert kept.exists(), "its folder is there"
    finally:
        used.remove_data()
        mine.remove_data()
    assert not kept.exists()
    assert not [note for note in kept.parent.glob("*.folder") if str(tmp_path) in note.read_text()]


@as_root
def test_programs_of_root_cannot_be_changed_by_anybody_else(tmp_path: Path) -> None:
    servers = EmbeddedServers(tmp_path / ".cortex", postgres=False, durable=False)
    try:
        with servers:
            program = Path(psutil.Process(servers.valkey.pid).exe())
    finally:
        servers.remove_data()
    for path in [program, *list(program.parents)[:3]]:
        found = path.stat()
        assert (found.st_uid, found.st_mode & 0o022) == (0, 0), path


@as_root
@pytest.mark.parametrize("planted", ["writable", "link"])
def test_a_planted_folder_is_not_executed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    home = tmp_path / "planted"
    if planted == "link":
        (tmp_path / "elsewhere").mkdir()
        home.symlink_to(tmp_path / "elsewhere")
    else:
        home.mkdir()
        home.chmod(0o777)
    monkeypatch.setattr(place, "_ROOT_HOME", home)
    with pytest.raises(EmbeddedError, match="must be a folder that only root can write to"):
        EmbeddedServers(tmp_path / ".cortex").start()


@as_root
def test_a_machine_without_the_account_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_ROOT_ACCOUNT", "no-such-account")
    with pytest.raises(EmbeddedError, match="this machine has no account `no-such-account`"):
        EmbeddedServers(tmp_path / ".cortex").start()

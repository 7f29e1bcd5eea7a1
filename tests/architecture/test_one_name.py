"""One import name: the links at the top are doors for people, and the wheel brings nothing but `cortex_workers`."""

import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

LINKS = ["migrations", "schemas", "tasks"]


def run_python(code: str, *, folder: Path, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of this checkout and the wheel that was built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.mark.parametrize("link", LINKS)
def test_a_link_leads_into_the_package(link: str) -> None:
    assert (ROOT / link).readlink() == Path("cortex_workers", link)


@pytest.mark.parametrize("link", LINKS)
def test_a_link_is_no_import_name(link: str) -> None:
    done = run_python(f"import {link}", folder=ROOT, path=ROOT)
    assert done.returncode == 1
    assert f"ImportError: import cortex_workers.{link}, not {link}" in done.stderr


def test_the_wheel_has_one_top_level_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name.split("/")[0] for name in archive.namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"cortex_workers"}


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    package = ROOT / "cortex_workers"
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if name.startswith("cortex_workers/")}
    here = {
        str(path.relative_to(ROOT))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert here - shipped == set()
    assert "cortex_workers/py.typed" in shipped


def test_the_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import cortex_workers, cortex_workers.tasks, cortex_workers.schemas; print(cortex_workers.__file__)"
    )
    done = run_python(code, folder=tmp_path, path=tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "site")


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        head = Parser().parsestr(archive.read(metadata).decode())
        licences = [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
    assert head["Name"] == "cortex-workers"
    assert head["License-Expression"] == "Apache-2.0"
    assert len(licences) == 1
    assert {"embedded", "flower", "llm"} <= set(head.get_all("Provides-Extra", []))


def test_the_sdist_leaves_the_links_out(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert [member.name for member in members if member.issym() or member.islnk()] == []
    assert {member.name.split("/")[1] for member in members if "/" in member.name} & set(LINKS) == set()

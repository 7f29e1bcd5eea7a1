"""What is generated is fresh, and a stale block is found, wherever it stands."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from cortex_workers.client import Client
from cortex_workers.docs.__main__ import main
from cortex_workers.docs.blocks import DocsError, rewritten, stale, table
from cortex_workers.docs.catalogue import BLOCKS
from cortex_workers.docs.lifecycle import diagram
from cortex_workers.schemas.lifecycle import MACHINES, RUN
from tests.docs.markdown import ROOT

BLOCK = {"settings": lambda: "new"}


def test_every_generated_block_is_fresh() -> None:
    assert "".join(each.diff for each in stale(ROOT, BLOCKS)) == ""


def test_a_stale_block_is_found_with_a_hint_and_then_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    markers = "\n".join(f"<!-- generated: {name} -->\nold\n<!-- end: {name} -->" for name in BLOCKS)
    (tmp_path / "page.md").write_text(markers)
    assert main(["--check", "--root", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "-old" in said
    assert "make docs" in said
    assert main(["--root", str(tmp_path)]) == 0
    assert main(["--check", "--root", str(tmp_path)]) == 0


def test_the_command_runs_as_the_makefile_runs_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cortex_workers.docs", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


def test_the_table_of_verbs_names_every_public_method_of_the_client() -> None:
    verbs = {name for name, _ in inspect.getmembers(Client, inspect.isfunction) if not name.startswith("_")}
    assert verbs > {"enqueue", "decide", "provide_results", "stream"}
    written = BLOCKS["client-verbs"]()
    assert {name for name in verbs if f"| `client.{name}` | " not in written} == set()
    assert all(inspect.getdoc(getattr(Client, name)) for name in verbs)


def test_a_block_is_replaced_between_its_markers_and_nothing_else() -> None:
    text = "before\n<!-- generated: settings -->\nold\n<!-- end: settings -->\nafter\n"
    fresh = rewritten("page.md", text, BLOCK)
    assert fresh == "before\n<!-- generated: settings -->\n\nnew\n\n<!-- end: settings -->\nafter\n"
    assert rewritten("page.md", fresh, BLOCK) == fresh


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<!-- generated: no-such -->\n<!-- end: no-such -->", "there is no block 'no-such'"),
        ("<!-- generated: settings -->\n", "has no <!-- end: settings -->"),
        (
            "<!-- generated: settings -->\n<!-- generated: settings -->\n<!-- end: settings -->",
            "begins inside another",
        ),
    ],
)
def test_a_block_that_cannot_be_written_is_named(text: str, complaint: str) -> None:
    with pytest.raises(DocsError, match=complaint) as raised:
        rewritten("page.md", text, BLOCK)
    assert "page.md" in str(raised.value)


def test_a_block_that_stands_nowhere_is_missed(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("nothing here\n")
    with pytest.raises(DocsError, match="no page has the block 'settings'"):
        stale(tmp_path, BLOCK)


def test_a_linked_folder_is_not_read_twice(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/page.md").write_text("<!-- generated: settings -->\n<!-- end: settings -->\n")
    (tmp_path / "link").symlink_to("real")
    assert [each.name for each in stale(tmp_path, BLOCK)] == ["real/page.md"]


def test_a_cell_cannot_break_its_table() -> None:
    (_, _, row) = table(["a"], [["one | two\nthree <four> `<five>`"]]).splitlines()
    assert row == "| one \\| two three &lt;four> `<five>` |"


def test_a_diagram_has_an_arrow_for_every_way_of_the_table() -> None:
    drawn = diagram("run")
    for row in RUN:
        for source in row.sources or ("[*]",):
            assert any(
                line.strip().startswith(f"{source} --> {row.target}:") and row.name in line
                for line in drawn.splitlines()
            ), row.name


@pytest.mark.parametrize("machine", MACHINES)
def test_every_transition_is_in_its_table(machine: str) -> None:
    written = BLOCKS[f"lifecycle-{machine.replace('_', '-')}"]()
    assert [row.name for row in MACHINES[machine] if f"| `{row.name}` |" not in written] == []

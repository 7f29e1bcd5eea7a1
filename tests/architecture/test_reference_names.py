"""Every exported name of the reference design has a row in `schemas/README.md`: what it is called, and its proof."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

PACKAGE = ROOT / "cortex_workers"
README = PACKAGE / "schemas" / "README.md"
TITLE = "## Names of the reference design"
_ROW = re.compile(r"^\| (`.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
_QUOTED = re.compile(r"`([^`]+)`")

SUSPENSION = """
    MaxResumeInputBytes ErrResumeAdmissionUnavailable ErrResumeAdmissionNotFound ErrResumeAdmissionConflict
    ErrResumeAlreadyStarted ErrVersionClaimUnavailable ClaimVersion Continuation PendingCall
    ReplyDiscoveryStore ListAgentReplyRuns ResumeAdmission ResumeAdmissionPage ResumeAdmissionRequest
    ResumeAdmissionStore ResumeCloser NewResumeCloser Close ResumeClosure Validate
    ResumeClosureAuthorizer AuthorizeResumeClosure ResumeClosureFence WithResumeClosure ResumeClosureRequest Freeze
    ResumeClosureStore CloseResume GetResumeClosure ResumeExpiry ResumeRecoveryStore LatestResumeAdmission
    ExpireResumeAdmission GetResumeExpiry ResumeStart Digest RunConfig Store CreateSuspension GetSuspension
    ClaimSuspension DeleteSuspension ListExpired ListExpiredAcrossScopes ClaimExpiredSuspension SuspendReason
    ReasonApproval ReasonExternalTool ReasonAgentReply Suspension VersionedStore ClaimSuspensionVersion
"""
CHECKPOINT = """
    KindDeferredModelCall MetadataDeferralKind MetadataKind CallDecision Checkpoint PublicList Public Decision
    ListFilter
    Store CreateCheckpoint GetCheckpoint Resolve ListPending CountPending SweepStore ListPendingAcrossScopes
"""
NAMES = sorted({*SUSPENSION.split(), *CHECKPOINT.split()})


def rows(text: str) -> list[tuple[str, str, str]]:
    """Reference names, ours, and the proof, of every row of the table."""
    return _ROW.findall(text.split(TITLE, 1)[1])


def table() -> list[tuple[str, str, str]]:
    return rows(README.read_text())


def said(cell: str) -> set[str]:
    """The names in a cell; a method stands for its type as well."""
    return {part for name in _QUOTED.findall(cell) for part in name.split(".")}


@cache
def defined(path: Path) -> frozenset[str]:
    """Functions, classes, methods and constants of a module, each with its class before it."""

    def within(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from within(node.body, f"{prefix}{node.name}.")
            if isinstance(node, ast.Assign):
                yield from (prefix + target.id for target in node.targets if isinstance(target, ast.Name))

    return frozenset(within(ast.parse(path.read_text()).body)) if path.exists() else frozenset()


def is_a_test(proof: str) -> bool:
    """Whether `folder/test_file.py:test_name` is a test."""
    name, _, test = proof.strip("`").partition(":")
    return test.startswith("test_") and test in defined(ROOT / "tests" / name)


def ours_is_there(name: str) -> bool:
    """Whether `file.py:Name` is there; files without a folder are of this package's first floor, or the package's."""
    file, _, wanted = name.partition(":")
    return any(wanted in defined(folder / file) for folder in (PACKAGE / "schemas", PACKAGE))


def test_the_table_is_read() -> None:
    assert len(table()) > 50
    assert len(NAMES) > 60


@pytest.mark.parametrize("name", NAMES)
def test_every_exported_name_has_a_row(name: str) -> None:
    assert [cell for cell, _, _ in table() if name in said(cell)]


def test_every_row_names_a_test_that_exists() -> None:
    assert [row[0] for row in table() if not is_a_test(row[2])] == []


def test_every_name_of_ours_exists() -> None:
    named = [name for _, ours, _ in table() for name in _QUOTED.findall(ours) if ".py:" in name]
    assert len(named) > 40
    assert [name for name in named if not ours_is_there(name)] == []


@pytest.mark.parametrize(
    "proof",
    [
        "`engine/test_external.py:test_nothing`",
        "`engine/test_nowhere.py:test_x`",
        "`engine/test_external.py`",
        "see above",
    ],
)
def test_a_proof_that_is_none_is_found(proof: str) -> None:
    assert not is_a_test(proof)


def test_a_name_of_ours_that_is_gone_is_found() -> None:
    assert ours_is_there("admission.py:ResumeStart.digest")
    assert not ours_is_there("admission.py:ResumeStart.gone")

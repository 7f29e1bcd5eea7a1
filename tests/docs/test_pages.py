"""Links lead somewhere, named files and functions exist, door signs are complete, and the project speaks of itself."""

import ast
import re
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE
from tests.docs.markdown import ROOT, Page, all_pages, page

_SYMBOL = re.compile(r"((?:[a-z_0-9]+/)*[a-z_0-9]+\.py):(\w+(?:\.\w+)?)")
_FILE = re.compile(r"(?:[a-z_0-9]+/)+[a-z_0-9]+\.py")

# A page is read by people who have this repository and nothing else.
_ELSEWHERE = [
    (re.compile(r"(?<![\w.~/])/(work|home|root|tmp|Users|opt)/"), "a path of somebody's machine"),
    (re.compile(r"\b(rulings?|bug cases?|seeds?) [A-Z]?\d+|\b(house|runs|celery|rulings|decisions|tables)\.md\b"),
     "a note that is not in this repository"),
]  # fmt: skip


def door_signs() -> list[Page]:
    return [each for each in all_pages() if Path(each.name).parent.parent == Path("cortex_workers")]


@pytest.mark.parametrize("name", [each.name for each in all_pages()])
def test_links_lead_somewhere(name: str) -> None:
    assert broken_links(page(name)) == []


def broken_links(given: Page) -> list[str]:
    return [
        link
        for link in given.links()
        if not link.startswith(("https://", "http://", "mailto:")) and not _leads_somewhere(given, link)
    ]


def _leads_somewhere(given: Page, link: str) -> bool:
    target, _, fragment = link.partition("#")
    if not target:
        return fragment in given.anchors
    path = (given.folder / target).resolve()
    if not path.exists() or not path.is_relative_to(ROOT):
        return False
    return not fragment or fragment in Page(str(path.relative_to(ROOT)), path.read_text()).anchors


@pytest.mark.parametrize(
    "link", ["no/such.md", "README.md#no-such-heading", "#nothing", "../outside.md", "../../../etc/hosts"]
)
def test_a_broken_link_is_found(link: str) -> None:
    assert broken_links(Page("README.md", f"# Title\n\n[text]({link})\n")) == [link]


def test_a_good_link_is_not_found() -> None:
    assert (
        broken_links(Page("README.md", "# A `title`\n[a](#a-title) [b](LICENSE) [c](https://x.org/)")) == []
    )


@pytest.mark.parametrize("name", [each.name for each in all_pages()])
def test_the_files_and_functions_that_a_page_names_exist(name: str) -> None:
    assert missing_symbols(page(name)) == []


def missing_symbols(given: Page) -> list[str]:
    missing = []
    for text in given.code_in_text():
        named = _SYMBOL.fullmatch(text)
        if named:
            if not _defines(given, named[1], named[2]):
                missing.append(text)
        elif _FILE.fullmatch(text) and _file(given, text) is None:
            missing.append(text)
    return missing


def _file(given: Page, name: str) -> Path | None:
    for folder in (PACKAGE, given.folder, ROOT, ROOT / "tests"):
        if (folder / name).is_file():
            return folder / name
    return None


def _defines(given: Page, name: str, symbol: str) -> bool:
    path = _file(given, name)
    if path is None:
        return False
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    for part in symbol.split("."):
        found = next((node for node in body if getattr(node, "name", None) == part), None)
        if found is None:
            return False
        body = getattr(found, "body", [])
    return True


def test_a_function_that_is_gone_is_missed() -> None:
    named = "`engine/loop.py:run_loop` `engine/loop.py:gone` `engine/gone.py` `client.py:Client.gone`"
    found = missing_symbols(Page("README.md", named))
    assert found == ["engine/loop.py:gone", "engine/gone.py", "client.py:Client.gone"]


def test_the_walks_name_functions() -> None:
    text = page("cortex_workers/README.md").text
    walks = text[text.index("## Five walks") : text.index("## Invariants")]
    assert len(_SYMBOL.findall(walks)) > 40


def test_every_floor_has_a_sign_on_its_door() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"docs"}
    assert sorted(packages - {Path(each.name).parent.name for each in door_signs()}) == []


@pytest.mark.parametrize("name", [each.name for each in door_signs()])
def test_a_door_sign_names_every_module_behind_the_door(name: str) -> None:
    modules = {path.name for path in (ROOT / name).parent.glob("*.py")} - {"__init__.py"}
    assert sorted(each for each in modules if each not in page(name).text) == []


@pytest.mark.parametrize("name", [each.name for each in all_pages()])
def test_a_page_speaks_of_this_project_alone(name: str) -> None:
    text = page(name).text
    assert [(what, found[0]) for pattern, what in _ELSEWHERE for found in pattern.finditer(text)] == []


@pytest.mark.parametrize("text", ["see ruling 12", "as house.md says", "in /home/me/shop"])
def test_what_lies_elsewhere_is_found(text: str) -> None:
    assert any(pattern.search(text) for pattern, _ in _ELSEWHERE)


def test_the_changelog_has_the_current_version() -> None:
    import cortex_workers

    assert f"\n## {cortex_workers.__version__}\n" in page("CHANGELOG.md").text

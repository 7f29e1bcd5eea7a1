"""What a user can set, see, type or catch is written down."""

import ast
import re

import pytest

from cortex_workers import telemetry
from cortex_workers.docs.errors import tree
from cortex_workers.docs.settings import groups, variable
from cortex_workers.docs.telemetry import catalogue
from cortex_workers.schemas.lifecycle import STATES, TERMINAL_RUN_STATES
from cortex_workers.settings import Settings
from tests.architecture.source import Source, modules, strings
from tests.docs.markdown import all_pages, page

_VARIABLE = re.compile(r"\bCORTEX_[A-Z_]*[A-Z]\b")
# Said by one of our processes to another that it starts, and by nobody else.
_BETWEEN_OURSELVES = {"CORTEX_DEMO_DIR"}
_METRIC = re.compile(r"cw_[a-z_]+")


def named_in(function: str) -> dict[str, set[str]]:
    """By name: where the product says `telemetry.function("name", …)`, both ends of an `if … else` included."""
    found: dict[str, set[str]] = {}
    for source in modules():
        for name in _first_arguments(source, function):
            found.setdefault(name, set()).add(source.name)
    return found


def _first_arguments(source: Source, function: str) -> list[str]:
    return [
        str(value.value)
        for node in source.nodes
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) == f"telemetry.{function}"
        for value in _constants(node.args[0])
    ]


def _constants(node: ast.expr) -> list[ast.Constant]:
    if isinstance(node, ast.IfExp):
        return _constants(node.body) + _constants(node.orelse)
    return [node] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def test_every_setting_stands_in_a_group() -> None:
    assert [name for _, names in groups() for name in names] == list(Settings.model_fields)


def test_every_setting_says_what_it_is() -> None:
    text = page("deploy/settings.md").text
    assert [name for name in Settings.model_fields if f"| `{variable(name)}` |" not in text] == []
    assert [name for name, field in Settings.model_fields.items() if len(field.description or "") < 10] == []


def test_every_variable_that_the_code_reads_is_documented() -> None:
    read = {
        name
        for source in modules()
        for constant in strings(source)
        for name in _VARIABLE.findall(str(constant.value))
    } - _BETWEEN_OURSELVES
    assert "CORTEX_READY_FILE" in read
    text = page("deploy/settings.md").text
    assert sorted(name for name in read if f"`{name}`" not in text) == []


def test_every_variable_that_a_page_names_exists() -> None:
    known = {variable(name) for name in Settings.model_fields}
    known |= {"CORTEX_READY_FILE", "CORTEX_LIVE_FILE", "CORTEX_PROBE"}
    named = {
        (each.name, name)
        for each in all_pages()
        for name in _VARIABLE.findall(each.text)
        if not name.startswith(("CORTEX_TEST_", "CORTEX_MATRIX_"))
    }
    assert sorted(item for item in named if item[1] not in known) == []


def test_every_error_is_documented_with_its_code() -> None:
    text = page("deploy/errors.md").text
    assert [cls.__name__ for cls in tree() if f"`{cls.__name__}` | `{cls.code}` |" not in text] == []


def test_no_two_errors_share_a_code_unless_one_is_the_other() -> None:
    # A late answer is refused, and a run nobody answered fails, for one and the same reason.
    shared = {"suspension_expired"}
    codes = [cls.code for cls in tree()]
    assert {code for code in codes if codes.count(code) > 1} <= shared


def test_every_error_has_a_default_message() -> None:
    assert [cls.__name__ for cls in tree() if not str(cls()).strip().endswith((".", "…", '"'))] == []


CATALOGUES = {"event": telemetry.EVENTS, "span": telemetry.SPANS}


@pytest.mark.parametrize("kind", CATALOGUES)
def test_the_code_names_only_what_the_catalogue_has(kind: str) -> None:
    used = named_in(kind)
    assert used
    assert {name: where for name, where in used.items() if name not in CATALOGUES[kind]} == {}


@pytest.mark.parametrize("kind", CATALOGUES)
def test_everything_in_the_catalogue_is_said_somewhere(kind: str) -> None:
    # Some names are put together from a state or handed on by a caller; then they stand somewhere as text.
    texts = {
        str(constant.value)
        for source in modules()
        if source.name != "telemetry.py"
        for constant in strings(source)
    }
    ended = {f"run.{state}" for state in TERMINAL_RUN_STATES}
    assert sorted(set(CATALOGUES[kind]) - texts - ended) == []


@pytest.mark.parametrize("name", ["event", "span", "metric"])
def test_the_catalogue_is_documented(name: str) -> None:
    text = page("deploy/telemetry.md").text
    names = {
        "event": list(telemetry.EVENTS),
        "span": list(telemetry.SPANS),
        "metric": [item.name for item in catalogue()],
    }[name]
    assert names
    assert [each for each in names if f"| `{each}` |" not in text] == []


def test_metrics_are_declared_in_the_catalogue_only() -> None:
    elsewhere = [
        f"{source.name}: {constant.value}"
        for source in modules()
        if source.name != "telemetry.py"
        for constant in strings(source)
        if _METRIC.fullmatch(str(constant.value)) and "_total" in str(constant.value)
    ]
    assert elsewhere == []


def test_every_metric_that_a_page_names_exists() -> None:
    known = {item.name for item in catalogue()}
    known |= {f"{item.name}{end}" for item in catalogue() for end in ("_bucket", "_count", "_sum")}
    named = {(each.name, name) for each in all_pages() for name in _METRIC.findall(each.text)}
    assert sorted(item for item in named if item[1] not in known) == []


@pytest.mark.parametrize("machine", STATES)
def test_every_state_is_described(machine: str) -> None:
    text = page("cortex_workers/schemas/README.md").text
    assert [state for state in STATES[machine] if f"`{state}`" not in text] == []


def test_every_run_state_has_its_line() -> None:
    text = page("cortex_workers/schemas/README.md").text
    assert [state for state in STATES["run"] if f"\n| `{state}` |" not in text] == []

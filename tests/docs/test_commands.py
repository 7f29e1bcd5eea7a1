"""Every command that a page tells somebody to type exists, with its options."""

import re
import shlex
import tomllib
from collections.abc import Iterator

import pytest

from cortex_workers.docs.commands import PROGRAM, leaves
from cortex_workers.docs.settings import variable
from cortex_workers.schemas.ids import CHECKPOINT, RUN, is_id
from cortex_workers.settings import Settings
from cortex_workers.tasks.routes import TASK_QUEUES
from tests.docs.markdown import ROOT, Page, all_pages, page

SHELL = ("sh", "bash", "shell", "console")
APP = "cortex_workers.tasks.app"
CELERY_COMMANDS = {"worker", "beat", "flower", "call", "inspect", "status", "control"}
_PLACEHOLDER = re.compile(r"<.*>|\[.*\]|…|\.\.\.|COMMAND")


def typed(given: Page) -> Iterator[str]:
    """What a page tells to type: the lines of its shell blocks, and code in the text that begins like a command."""
    for block in given.blocks(*SHELL):
        for line in block.code.replace("\\\n", " ").splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield line.strip().removeprefix("$ ")
    loose = [line for block in given.blocks("") for line in block.code.splitlines()]
    loose += [line.strip() for line in given.prose.splitlines() if line.startswith("    ")]
    yield from (line for line in loose if line.split(" ")[0] in CHECKS)
    for text in given.code_in_text():
        if text.split(" ")[0] in CHECKS and " " in text:
            yield text


def wrong(command: str) -> str | None:
    """What is wrong with a command; None for one that is right, or that is none of ours."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError:
        return f"{command}: not a command line"
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        complaint = _variable(words.pop(0))
        if complaint:
            return complaint
    if not words or words[0] not in CHECKS:
        return None
    complaint = CHECKS[words[0]](words[1:])
    return f"{command}: {complaint}" if complaint else None


def _make(words: list[str]) -> str | None:
    text = (ROOT / "Makefile").read_text()
    known = set(re.findall(r"^([a-z-]+):[^#\n]*## ", text, re.M))
    asked = [word for word in words if "=" not in word and word != "TARGET"]
    return next((f"make has no target {word!r} in its help" for word in asked if word not in known), None)


def _ours(words: list[str]) -> str | None:
    """A command of the command line; a page may name a group of commands, or leave its arguments out."""
    commands = {tuple(name.split()[1:]): command for name, command in leaves()}
    best = max((path for path in commands if tuple(words[: len(path)]) == path), key=len, default=None)
    if best is None:
        groups = {path[:length] for path in commands for length in range(1, len(path))}
        named = tuple(word for word in words if not word.startswith("-") and not _PLACEHOLDER.fullmatch(word))
        return None if not named or named in groups else "no such command"
    rest = [word for word in words[len(best) :] if not _PLACEHOLDER.fullmatch(word)]
    known = {option for item in commands[best].params for option in (*item.opts, *item.secondary_opts)}
    used = [
        word.partition("=")[0] for word in rest if word.startswith("-") and not word.lstrip("-").isdigit()
    ]
    unknown = [option for option in used if option not in known and option != "--help"]
    return f"no option {unknown[0]}" if unknown else None


def _celery(words: list[str]) -> str | None:
    if words[0] == "-A" and words[1] != APP:
        return f"the app is {APP}"
    command, *rest = (words[2:] if words[0] == "-A" else words) or ["…"]
    if command not in CELERY_COMMANDS and not _PLACEHOLDER.fullmatch(command):
        return f"celery has no command {command!r}"
    if command == "call" and rest[0] not in TASK_QUEUES:
        return f"there is no task {rest[0]!r}"
    config = [_file_named_by(word.partition("=")[2]) for word in rest if word.startswith("--conf=")]
    return next((f"{name} does not exist" for name in config if not (ROOT / name).is_file()), None)


def _file_named_by(value: str) -> str:
    """The file that an option names, or that the program in `$(python -m …)` prints the path of."""
    program = re.fullmatch(r"\$\(python -m ([\w.]+)\)", value)
    return f"{program[1].replace('.', '/')}.py" if program else value


def _pip(words: list[str]) -> str | None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words:
        name, _, extras = word.partition("[")
        if name.startswith(PROGRAM):
            unknown = set(filter(None, extras.rstrip("]").split(","))) - set(project["optional-dependencies"])
            if name != PROGRAM or unknown:
                return f"no such package or extra: {name} {sorted(unknown)}"
    return None


def _export(words: list[str]) -> str | None:
    return next(filter(None, map(_variable, words)), None)


def _variable(assignment: str) -> str | None:
    name = assignment.partition("=")[0]
    known = {variable(field) for field in Settings.model_fields}
    ours = name.startswith("CORTEX_") and not name.startswith(("CORTEX_TEST_", "CORTEX_MATRIX_"))
    return f"{name} is no setting" if ours and name not in known | {"CORTEX_PROBE"} else None


CHECKS = {"make": _make, PROGRAM: _ours, "celery": _celery, "pip": _pip, "export": _export}


@pytest.mark.parametrize("name", [each.name for each in all_pages()])
def test_every_command_that_a_page_names_exists(name: str) -> None:
    assert [complaint for command in typed(page(name)) if (complaint := wrong(command))] == []


def test_the_readme_has_commands_to_check() -> None:
    programs = {shlex.split(command, comments=True)[0] for command in typed(page("README.md"))}
    assert programs == set(CHECKS)


@pytest.mark.parametrize(
    "command",
    [
        "make no-such-target",
        "cortex-workers no-such-command",
        "cortex-workers runs no-such-verb",
        "cortex-workers sweep --no-such-option",
        "celery -A shop.tasks worker",
        f"celery -A {APP} no-such-command",
        f"celery -A {APP} call cortex.no_such_task",
        f"celery -A {APP} flower --conf=no/such/file.py",
        f'celery -A {APP} flower --conf="$(python -m cortex_workers.no_such_module)"',
        "pip install 'cortex-workers[no-such-extra]'",
        "export CORTEX_NO_SUCH_SETTING=1",
        "CORTEX_NO_SUCH_SETTING=1 cortex-workers sweep",
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    assert wrong(command)


@pytest.mark.parametrize(
    "command",
    [
        "make ci",
        "make test PYTEST_ARGS='-x'",
        "cortex-workers runs",
        "cortex-workers runs show arun_1",
        f"celery -A {APP} call cortex.sweep_expired",
        "git status",
        "CORTEX_SLOTS=4 cortex-workers up",
    ],
)
def test_a_command_that_exists_is_not_found(command: str) -> None:
    assert wrong(command) is None


def test_ids_in_the_readme_are_ids() -> None:
    text = page("README.md").text
    found = re.findall(rf"\b(({RUN}|{CHECKPOINT})_\w+)", text)
    assert found
    assert [whole for whole, kind in found if not is_id(kind, whole)] == []


def test_every_command_is_documented() -> None:
    text = page("deploy/commands.md").text
    assert [words for words, _ in leaves() if f"### `{words}`\n" not in text] == []


def test_every_command_and_option_says_what_it_is() -> None:
    silent = [words for words, command in leaves() if not command.help]
    silent += [
        f"{words} {item.name}"
        for words, command in leaves()
        for item in command.params
        if not item.help and item.name != "help" and not getattr(item, "hidden", False)
    ]
    assert silent == []


def test_every_make_target_says_what_it_is() -> None:
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.+)$", text, re.M)
    told = set(re.findall(r"^([a-z-]+):[^#\n]*## ", text, re.M))
    assert sorted(set(phony.split()) - told) == []


def test_the_procfile_runs_what_the_readme_tells_to_type() -> None:
    lines = (ROOT / "Procfile").read_text().splitlines()
    commands = {line.partition(":")[2].strip() for line in lines if line.strip()}
    told = {command.partition("#")[0].strip() for command in typed(page("README.md"))}
    assert {command for command in commands if command.startswith("celery")} <= told

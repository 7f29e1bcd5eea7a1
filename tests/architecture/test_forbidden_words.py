"""What Celery offers and this product must not use: time in the broker, its retries, chords, pickles, eager mode."""

import ast

import pytest

from tests.architecture.source import Source, imports, modules, strings

_PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}


def forbidden(source: Source) -> list[str]:
    """Return where and what a module uses that it must not."""
    return [
        *_keywords(source),
        *_attributes(source),
        *(
            f"{source.at(node)} imports {name}"
            for node, name in imports(source)
            if name.split(".")[0] in _PICKLES
        ),
        *(
            f"{source.at(node)} says {node.value!r}"
            for node in strings(source)
            if _is_forbidden(str(node.value))
        ),
    ]


def _keywords(source: Source) -> list[str]:
    return [
        f"{source.at(node)} passes {node.arg}="
        for node in source.nodes
        if isinstance(node, ast.keyword)
        and node.arg is not None
        and (node.arg in {"eta", "countdown"} or "always_eager" in node.arg)
    ]


def _attributes(source: Source) -> list[str]:
    found = []
    for node in source.nodes:
        if isinstance(node, ast.Attribute):
            # A library of that name is what retries are made with.
            celery_retry = node.attr == "retry" and not (
                isinstance(node.value, ast.Name) and node.value.id == "tenacity"
            )
            if celery_retry or node.attr == "chord" or "always_eager" in node.attr:
                found.append(f"{source.at(node)} uses .{node.attr}")
        elif isinstance(node, ast.Name) and (node.id == "chord" or "always_eager" in node.id):
            found.append(f"{source.at(node)} uses {node.id}")
    return found


def _is_forbidden(text: str) -> bool:
    return text in {"pickle", "eta", "countdown", "chord"} or "always_eager" in text


def test_none_of_it_is_used() -> None:
    assert [found for source in modules() for found in forbidden(source)] == []


@pytest.mark.parametrize(
    "code",
    [
        "task.apply_async(args, eta=later)",
        "task.apply_async(args, countdown=3)",
        'task.apply_async(args, **{"countdown": 3})',
        "self.retry(exc=error)",
        "from celery import chord\nchord(header)(body)",
        "celery.chord(header)",
        "app.conf.task_always_eager = True",
        'app.conf.update({"task_always_eager": True})',
        "app.conf.update(task_always_eager=True)",
        'accept_content = ["json", "pickle"]',
        "import pickle",
        "from pickle import loads",
    ],
)
def test_each_of_it_is_found(code: str) -> None:
    assert forbidden(Source("tasks/made_up.py", code))


@pytest.mark.parametrize(
    "code", ['"""Never pickle, no eta."""', "import tenacity\n@tenacity.retry(stop=s)\ndef f(): ..."]
)
def test_prose_and_the_library_for_retries_are_not_meant(code: str) -> None:
    assert forbidden(Source("tasks/made_up.py", code)) == []

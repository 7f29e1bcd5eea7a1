"""The public face and what is told after a commit, from the code."""

from __future__ import annotations

import inspect
from typing import get_args

import cortex_workers
from cortex_workers.client import Client
from cortex_workers.docs.blocks import code, table
from cortex_workers.schemas import notifications as told


def public_names() -> str:
    """Every name of `cortex_workers.__all__`."""
    rows = [
        [code(name), _sentence(getattr(cortex_workers, name))]
        for name in cortex_workers.__all__
        if not name.startswith("__")
    ]
    return table(["name", "what it is"], rows)


def client_verbs() -> str:
    """Every public method of `Client`: part by part, each in the order of its file."""
    members = {
        name: getattr(Client, name)
        for part in reversed(Client.__mro__)
        for name, member in vars(part).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }
    rows = [[code(f"client.{name}"), _sentence(member)] for name, member in members.items()]
    return table(["verb", "what it does"], rows)


def notifications() -> str:
    """Every notification with its fields."""
    union = get_args(get_args(told.Notification)[0])
    rows = []
    for model in union:
        fields = [code(name) for name in model.model_fields if name != "kind"]
        rows.append([code(model.__name__), ", ".join(fields), _sentence(model)])
    return table(["kind", "fields", "when"], rows)


def _sentence(thing: object) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]

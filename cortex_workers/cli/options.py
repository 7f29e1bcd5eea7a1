"""Options that many commands share."""

from __future__ import annotations

import math
from typing import Annotated

import typer


def finite(value: float | None) -> float | None:
    """Refuse what Python reads as a number and nobody can wait for."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter("takes a number of seconds")
    return value


Scope = Annotated[
    str | None,
    typer.Option("--scope", help="Whose rows, like tenant=acme; default CORTEX_SCOPE.", metavar="SCOPE"),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, for errors too.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=1000, help="At most so many rows.", metavar="N")]
Reason = Annotated[str | None, typer.Option("--reason", help="Why; it is recorded.", metavar="TEXT")]
By = Annotated[
    str | None,
    typer.Option(
        "--by", help="Who decides, for people to read; recorded beside CORTEX_ACTOR.", metavar="NAME"
    ),
]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="The run's id, arun_…")]
CheckpointId = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="The checkpoint's id, acp_…")]
SessionId = Annotated[str, typer.Argument(metavar="SESSION", help="The session's id, ses_…")]

"""The tree of commands. Each command imports what it needs when it is called, so that help is quick."""

from __future__ import annotations

from typing import Annotated

import typer

from cortex_workers import __version__
from cortex_workers.cli import answers, checkpoints, enqueue, fleet, local, messages, runs, sessions

app = typer.Typer(
    name="cortex-workers",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"cortex-workers {__version__}")
        raise typer.Exit


@app.callback(
    epilog="\b\n"
    "Try it:         cortex-workers demo\n"
    "On a laptop:    cortex-workers up --host shop.agents:host\n"
    "What is wrong:  cortex-workers doctor\n"
    "Exit codes:     0 done, or nothing left to do; 1 refused or failed;\n"
    "                2 wrong usage; 75 not available, try again"
)
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Durable agent runs on Celery, Redis and Postgres.

    Commands find the fleet by CORTEX_DATABASE_URL and CORTEX_BROKER_URL, or use a running `up` of this folder.
    """


local.add_to(app)
enqueue.add_to(app)
answers.add_to_runs(runs.app)
app.add_typer(runs.app, name="runs")
app.add_typer(answers.app, name="results")
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(sessions.app, name="sessions")
app.add_typer(messages.app, name="messages")
app.add_typer(messages.deliveries, name="deliveries")
fleet.add_to(app)

"""Commands for a laptop: the demo, and the whole stack in one terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from cortex_workers.cli.report import command, examples


@command
def demo(
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line instead of the story.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave everything running until Ctrl-C.")] = False,
    no_flower: Annotated[bool, typer.Option("--no-flower", help="Without Flower.")] = False,
) -> int:
    """Show the main job, start to end.

    Two workers, an approval, a kill -9 in the middle of a tool call; every run ends once. Needs nothing: a real
    PostgreSQL and a real Valkey come as wheels. Takes about two minutes.
    """
    from cortex_workers.cli.demo import run

    return run(json=as_json, keep=keep, flower=not no_flower)


@command
def up(
    host: Annotated[
        str | None,
        typer.Option("--host", help="Your agents, module:attribute; default CORTEX_HOST.", metavar="HOST"),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", min=1, max=32, help="Worker processes.", metavar="N")
    ] = 1,
    no_flower: Annotated[bool, typer.Option("--no-flower", help="Without Flower.")] = False,
    flower_port: Annotated[
        int,
        typer.Option(
            "--flower-port", min=1, max=65535, help="Flower's port on this machine.", metavar="PORT"
        ),
    ] = 5555,
) -> int:
    """Run the whole stack in this terminal.

    Servers, migrations, workers, beat, Flower; Ctrl-C ends all in good order. PostgreSQL and Valkey come from wheels
    and keep their data in .cortex (CORTEX_DATA_DIR); where CORTEX_DATABASE_URL or CORTEX_BROKER_URL is set, that
    server is used instead. Other commands in this folder find a running `up` by themselves.
    """
    from cortex_workers.cli.stack import up as run

    return run(host=host, workers=workers, flower_port=None if no_flower else flower_port)


def add_to(app: typer.Typer) -> None:
    """Make them commands."""
    app.command("demo", epilog=examples("cortex-workers demo", "cortex-workers demo --json"))(demo)
    app.command(
        "up",
        epilog=examples(
            "cortex-workers up --host shop.agents:host",
            "cortex-workers up --host shop.agents:host --workers 2 --no-flower",
        ),
    )(up)

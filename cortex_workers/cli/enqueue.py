"""`cortex-workers enqueue`: store a run for the fleet, and wait for it if one likes."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from cortex_workers.cli import here
from cortex_workers.cli.options import AsJson, Scope, finite
from cortex_workers.cli.report import command, examples, given_object, print_json
from cortex_workers.schemas.run import LATEST_START_S

if TYPE_CHECKING:
    from cortex_workers.schemas.run import Enqueued


Agent = Annotated[str, typer.Argument(metavar="AGENT", help="The agent's name, as its workers publish it.")]
Input = Annotated[
    str,
    typer.Argument(metavar="[INPUT]", help="What it is asked; - or nothing reads stdin.", show_default=False),
]
Key = Annotated[
    str | None,
    typer.Option("--key", help="Your name for this request: the same again returns the first run."),
]
OwnId = Annotated[
    str | None, typer.Option("--run-id", help="The run's id, chosen by you; works like --key.", metavar="RUN")
]
Session = Annotated[
    str | None,
    typer.Option("--session", help="Conversation: an id, a key of yours, or default. None: its own."),
]
Metadata = Annotated[
    str | None, typer.Option("--metadata", help="A JSON object kept with the run.", metavar="JSON")
]
StartBy = Annotated[
    float | None,
    typer.Option(
        "--start-by",
        min=0.001,
        max=LATEST_START_S,
        callback=finite,
        help="Cancel it unless started within so many seconds.",
        metavar="S",
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Wait for its end and print its output.")]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", min=0, callback=finite, help="Wait at most so many seconds.", metavar="S"),
]


@command
def enqueue(
    agent: Agent,
    text: Input = "-",
    scope: Scope = None,
    key: Key = None,
    run_id: OwnId = None,
    session: Session = None,
    metadata: Metadata = None,
    start_by: StartBy = None,
    wait: Wait = False,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> int | None:
    """Store a run for the fleet.

    Any worker takes it from there. Prints the run's id, or with --wait its output.
    """
    about = given_object(metadata, "--metadata")
    given = _input(text)
    with here.client(scope, announces=True) as client:
        made = client.enqueue(
            agent,
            given,
            run_id=run_id,
            key=key,
            session=session,
            metadata=about,
            start_by=timedelta(seconds=start_by) if start_by else None,
        )
        if wait:
            from cortex_workers.cli import follow

            return follow.to_the_end(client, made.id, timeout, as_json=as_json)
        _tell(made, as_json)
    return None


def _input(text: str) -> str:
    if text != "-":
        return text
    if sys.stdin.isatty():
        raise typer.BadParameter("give the input as an argument, or pipe it in")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise typer.BadParameter("what is piped in is not UTF-8 text") from None


def _tell(made: Enqueued, as_json: bool) -> None:
    if as_json:
        print_json(made)
        return
    print(made.id)
    from cortex_workers.cli.report import note

    before = "" if made.fresh else ", was enqueued before"
    note(f"{made.state} in session {made.session_id}{before}; cortex-workers runs show {made.id}")


def add_to(app: typer.Typer) -> None:
    """Make it a command."""
    app.command(
        "enqueue",
        epilog=examples(
            'cortex-workers enqueue support "Refund order 17" --scope tenant=acme',
            "cortex-workers enqueue support - --key ticket-4711 < ticket.txt",
            'cortex-workers enqueue support "Hello" --session customer-9 --wait --timeout 60',
        ),
    )(enqueue)

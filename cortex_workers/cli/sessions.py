"""`cortex-workers sessions`: conversations."""

from __future__ import annotations

from typing import Annotated

import typer

from cortex_workers.cli import here
from cortex_workers.cli.options import AsJson, Limit, Scope, SessionId
from cortex_workers.cli.report import command, console, examples, note, print_json

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Sessions: list, show, clear.")


@app.command("list", epilog=examples("cortex-workers sessions list --scope tenant=acme"))
@command
def list_(
    scope: Scope = None,
    before: Annotated[
        str | None, typer.Option("--before", help="The next page: the last id you saw.")
    ] = None,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """List conversations.

    Of a scope and below, the most recently active first.
    """
    with here.client(scope) as client:
        found = client.sessions(before=before, limit=limit)
        if as_json:
            print_json(found)
            return
        from cortex_workers.cli import draw

        now = draw.database_now(client)
    console().print(draw.sessions(found, now))
    if len(found) == limit:
        note(f"more: --before {found[-1]['id']}")


@app.command("show", epilog=examples("cortex-workers sessions show ses_01h455vb4pex5vsknk084sn02q"))
@command
def show(session_id: SessionId, scope: Scope = None, limit: Limit = 20, as_json: AsJson = False) -> None:
    """Show a conversation.

    Whose it is, and its turns, newest first.
    """
    with here.client(scope) as client:
        found = client.session(session_id)
        turns = client.runs(scope=found["scope"], session=session_id, limit=limit)
        if as_json:
            print_json({**found, "runs": turns})
            return
        from cortex_workers.cli import draw

        now = draw.database_now(client)
    console().print(draw.session(found, turns, now))


@app.command("clear", epilog=examples("cortex-workers sessions clear ses_01h455vb4pex5vsknk084sn02q"))
@command
def clear(session_id: SessionId, scope: Scope = None, as_json: AsJson = False) -> None:
    """Clear a conversation.

    The next turn starts without what was said before. Nothing is deleted.
    """
    with here.client(scope) as client:
        hidden = client.clear_session(session_id)
    if as_json:
        print_json({"session": session_id, "hidden": hidden})
    else:
        print(f"{session_id} cleared, {hidden} messages are not read any more")

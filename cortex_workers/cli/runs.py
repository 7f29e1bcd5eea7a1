"""`cortex-workers runs`: list them, tell one's story, wait for it, cancel it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cortex_workers.cli import here
from cortex_workers.cli.options import AsJson, Limit, Reason, RunId, Scope, finite
from cortex_workers.cli.report import command, console, examples, note, print_json

if TYPE_CHECKING:
    from cortex_workers.engine.cancel import Cancelled

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Runs: list, show, wait, cancel.")


@app.command(
    "list",
    epilog=examples(
        "cortex-workers runs list --scope tenant=acme", "cortex-workers runs list --state paused --json"
    ),
)
@command
def list_(
    scope: Scope = None,
    state: Annotated[str | None, typer.Option("--state", help="Only in this state, like paused.")] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="Only of this agent.")] = None,
    session: Annotated[str | None, typer.Option("--session", help="Only of this session (ses_…).")] = None,
    before: Annotated[
        str | None, typer.Option("--before", help="The next page: the last id you saw.")
    ] = None,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """List runs.

    The newest of a scope and below.
    """
    with here.client(scope) as client:
        found = client.runs(state=state, agent=agent, session=session, before=before, limit=limit)
        if as_json:
            print_json(found)
            return
        from cortex_workers.cli import draw

        now = draw.database_now(client)
    console().print(draw.runs(found, now))
    if len(found) == limit:
        note(f"more: --before {found[-1].id}")


@app.command(
    "show", epilog=examples("cortex-workers runs show arun_01h455vb4pex5vsknk084sn02q --scope tenant=acme")
)
@command
def show(
    run_id: RunId,
    scope: Scope = None,
    full: Annotated[bool, typer.Option("--full", help="Inputs, arguments and results in full.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tell a run's story.

    Steps, calls, pauses, decisions, workers that came and went, in order; and what it waits for.
    """
    from cortex_workers.operate.inspect import timeline

    with here.client(scope) as client:
        run = client.get(run_id)
        found = timeline(client.runtime, run_id, run.scope, None if full else 200)
    if as_json:
        print_json(found)
        return
    from cortex_workers.cli import draw

    console().print(draw.timeline(found))


@app.command("wait", epilog=examples("cortex-workers runs wait arun_01h455vb4pex5vsknk084sn02q --timeout 60"))
@command
def wait(
    run_id: RunId,
    scope: Scope = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0, callback=finite, help="At most so many seconds.")
    ] = None,
    until_paused: Annotated[bool, typer.Option("--until-paused", help="A pause is an end too.")] = False,
    as_json: AsJson = False,
) -> int:
    """Wait for a run's end.

    Prints its output. Exit 0 if it completed, 1 if it ended otherwise, 75 after --timeout.
    """
    from cortex_workers.cli import follow

    with here.client(scope) as client:
        return follow.to_the_end(client, run_id, timeout, as_json=as_json, until_paused=until_paused)


@app.command(
    "cancel",
    epilog=examples('cortex-workers runs cancel arun_01h455vb4pex5vsknk084sn02q --reason "wrong customer"'),
)
@command
def cancel(run_id: RunId, scope: Scope = None, reason: Reason = None, as_json: AsJson = False) -> None:
    """Cancel a run.

    In any state, at once; its worker stops before its next side effect. Again changes nothing.
    """
    from cortex_workers.engine.cancel import Cancelled
    from cortex_workers.errors import InvalidState
    from cortex_workers.schemas.lifecycle import RunState

    with here.client(scope, announces=True) as client:
        try:
            done, before = client.cancel(run_id, reason=reason), False
        except InvalidState:
            found = client.get(run_id)
            if found.state is not RunState.CANCELLED:
                raise
            done, before = Cancelled(run=found), True
        _tell_cancelled(done, before, as_json)


def _tell_cancelled(done: Cancelled, before: bool, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "run": done.run,
                "repeated": before,
                "stops_worker": done.stops_worker,
                "stops_by": done.stops_by,
                "in_flight": list(done.in_flight),
            }
        )
        return
    print(f"{done.run.id} cancelled" + (" before" if before else ""))
    _tell_who_stops(done)


def _tell_who_stops(done: Cancelled) -> None:
    if done.stops_by is not None:
        note(
            f"worker {done.stops_worker} stops at its next step, by {done.stops_by:%H:%M:%S} UTC at the latest"
        )
    if done.in_flight:
        note(f"may still take effect: {', '.join(done.in_flight)} (see runs show)")

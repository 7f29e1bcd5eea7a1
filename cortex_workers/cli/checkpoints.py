"""`cortex-workers checkpoints`: what people are asked, and their answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cortex_workers.cli import here
from cortex_workers.cli.options import AsJson, By, CheckpointId, Limit, Reason, Scope
from cortex_workers.cli.report import command, console, examples, given_json, given_object, note, print_json

if TYPE_CHECKING:
    from cortex_workers.schemas.checkpoint import Checkpoint

_AMENDED = (
    "all arguments of the call as a JSON object, like '{{\"amount_cents\": 500}}' "
    "(cortex-workers checkpoints show {} prints those it has)"
)

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Checkpoints: list, show, approve, reject, settle."
)


@app.command(
    "list",
    epilog=examples(
        "cortex-workers checkpoints list --scope tenant=acme",
        "cortex-workers checkpoints list --all --run arun_01h455vb4pex5vsknk084sn02q",
    ),
)
@command
def list_(
    scope: Scope = None,
    everything: Annotated[bool, typer.Option("--all", help="Decided and closed ones too.")] = False,
    run: Annotated[str | None, typer.Option("--run", help="Only of this run (arun_…).")] = None,
    after: Annotated[str | None, typer.Option("--after", help="The next page: the last id you saw.")] = None,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """List what waits for a decision.

    In a scope and below, oldest first.
    """
    with here.client(scope) as client:
        found = client.checkpoints(pending_only=not everything, run_id=run, after=after, limit=limit)
        if as_json:
            print_json(found)
            return
        from cortex_workers.cli import draw

        now = draw.database_now(client)
    console().print(draw.checkpoints(found, now))
    if any(each.state == "pending" and len(each.pending) > 1 for each in found):
        note(
            "several calls: approve with --call and --reject-call decides each; checkpoints show has their ids"
        )
    if len(found) == limit:
        note(f"more: --after {found[-1].id}")


@app.command("show", epilog=examples("cortex-workers checkpoints show acp_01h455vb4pex5vsknk084sn02q"))
@command
def show(checkpoint_id: CheckpointId, scope: Scope = None, as_json: AsJson = False) -> None:
    """Show one question.

    Its calls with their arguments, its deadline, and for an uncertain effect what is known of it.
    """
    from cortex_workers.operate.inspect import evidence

    with here.client(scope) as client:
        found = client.checkpoint(checkpoint_id)
        known = evidence(client.runtime, found)
        if as_json:
            print_json({**found.model_dump(), "evidence": known})
            return
        from cortex_workers.cli import draw

        now = draw.database_now(client)
    console().print(draw.checkpoint(found, known, now))


@app.command(
    "approve",
    epilog=examples(
        'cortex-workers checkpoints approve acp_01h455vb4pex5vsknk084sn02q --reason "seen the invoice"',
        "cortex-workers checkpoints approve acp_01h455vb4pex5vsknk084sn02q --amend '{\"amount_cents\": 500}'",
        "cortex-workers checkpoints approve acp_01h455vb4pex5vsknk084sn02q --call call_0_0 --reject-call call_0_1",
    ),
)
@command
def approve(
    checkpoint_id: CheckpointId,
    scope: Scope = None,
    amend: Annotated[
        str | None,
        typer.Option("--amend", help="All arguments to run with instead, a JSON object.", metavar="JSON"),
    ] = None,
    call: Annotated[
        list[str] | None,
        typer.Option(
            "--call", help="Approve only this call; again for more. Every call must be decided.", metavar="ID"
        ),
    ] = None,
    reject_call: Annotated[
        list[str] | None,
        typer.Option("--reject-call", help="Reject this call; again for more.", metavar="ID"),
    ] = None,
    reason: Reason = None,
    by: By = None,
    as_json: AsJson = False,
) -> None:
    """Approve a pause.

    As a whole, or call by call with --call and --reject-call; --amend then fits a single --call. The run goes on on
    any worker. The same decision again changes nothing.
    """
    amended = given_object(amend, "--amend", _AMENDED.format(checkpoint_id))
    with here.client(scope, announces=True) as client:
        if call or reject_call:
            calls = _calls(call or [], reject_call or [], amended, reason)
            done = client.decide(checkpoint_id, calls=calls, reason=reason, decided_by=by)
        else:
            done = client.decide(
                checkpoint_id, approved=True, reason=reason, decided_by=by, amended_arguments=amended
            )
        _tell(done, as_json)


def _calls(
    approved: list[str], rejected: list[str], amended: dict[str, Any] | None, reason: str | None
) -> dict[str, dict[str, Any]]:
    if amended is not None and len(approved) != 1:
        raise typer.BadParameter("--amend fits exactly one --call")
    twice = set(approved) & set(rejected)
    if twice:
        raise typer.BadParameter(f"the call {min(twice)} is both approved and rejected")
    decided: dict[str, dict[str, Any]] = {
        call_id: {"approved": True, "amended_arguments": amended} for call_id in approved
    }
    decided.update({call_id: {"approved": False, "reason": reason} for call_id in rejected})
    return decided


@app.command(
    "reject",
    epilog=examples(
        'cortex-workers checkpoints reject acp_01h455vb4pex5vsknk084sn02q --reason "not our customer"'
    ),
)
@command
def reject(
    checkpoint_id: CheckpointId,
    scope: Scope = None,
    reason: Reason = None,
    by: By = None,
    as_json: AsJson = False,
) -> None:
    """Reject a pause.

    As a whole; the run fails, or its model is told, as the agent says.
    """
    with here.client(scope, announces=True) as client:
        done = client.decide(checkpoint_id, approved=False, reason=reason, decided_by=by)
        _tell(done, as_json)


@app.command(
    "settle",
    epilog=examples(
        'cortex-workers checkpoints settle acp_01h455vb4pex5vsknk084sn02q --happened --result \'{"receipt": "R-1"}\'',
        "cortex-workers checkpoints settle acp_01h455vb4pex5vsknk084sn02q --did-not-happen",
        'cortex-workers checkpoints settle acp_01h455vb4pex5vsknk084sn02q --stop --reason "ask the bank first"',
    ),
)
@command
def settle(
    checkpoint_id: CheckpointId,
    scope: Scope = None,
    happened: Annotated[bool, typer.Option("--happened", help="It took effect; needs --result.")] = False,
    result: Annotated[
        str | None, typer.Option("--result", help="What the call returned, as JSON.", metavar="JSON")
    ] = None,
    did_not_happen: Annotated[
        bool, typer.Option("--did-not-happen", help="It took no effect: run it again, with the same key.")
    ] = False,
    now: Annotated[
        bool,
        typer.Option(
            "--now", help="With --did-not-happen: do not wait until the old worker can act no more."
        ),
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End the run; the outcome stays unknown.")] = False,
    reason: Reason = None,
    by: By = None,
    as_json: AsJson = False,
) -> None:
    """Settle an uncertain effect.

    Say what became of a call whose worker was lost while it ran.
    """
    outcome = _outcome(happened, did_not_happen, stop)
    value = _result(happened, result)
    if now and not did_not_happen:
        raise typer.BadParameter("--now belongs to --did-not-happen")
    with here.client(scope, announces=True) as client:
        done = client.settle(checkpoint_id, outcome, result=value, reason=reason, decided_by=by, now=now)
        _tell(done, as_json)


def _outcome(happened: bool, did_not_happen: bool, stop: bool) -> str:
    if happened + did_not_happen + stop != 1:
        raise typer.BadParameter("say one of --happened, --did-not-happen, --stop")
    return "happened" if happened else "did_not_happen" if did_not_happen else "stop"


def _result(happened: bool, result: str | None) -> Any:
    if happened != (result is not None):
        raise typer.BadParameter(
            "--happened goes with --result, which is what the call returned (null if nothing)"
        )
    return given_json(result, "--result") if result is not None else None


def _tell(done: Checkpoint, as_json: bool) -> None:
    if as_json:
        print_json(done)
        return
    decision = done.decision
    said = "closed" if decision is None else "approved" if decision.approved else "rejected"
    if decision is not None and decision.outcome is not None:
        said = f"settled as {str(decision.outcome).replace('_', ' ')}"
    print(f"{done.id} {said}")
    note(f"cortex-workers runs show {done.run_id}")

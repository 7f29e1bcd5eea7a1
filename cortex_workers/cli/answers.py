"""`cortex-workers results` and `runs answers`, `close-uncertain`, `stream`: answers from outside, a run live."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cortex_workers.cli import here
from cortex_workers.cli.options import AsJson, Limit, RunId, Scope, finite
from cortex_workers.cli.report import DONE, REFUSED, command, console, examples, given_json, note, print_json

if TYPE_CHECKING:
    from cortex_workers.schemas.admission import ResumeAdmission

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Results of tools that run outside: provide."
)

_RESULTS = """a list of results, like '[{"tool_call_id": "call_0_0", "content": "ok"}]'"""

Call = Annotated[
    str | None, typer.Option("--call", help="One call's id; without it, all of them.", metavar="ID")
]


@app.command(
    "provide",
    epilog=examples(
        "cortex-workers results provide arun_01h455vb4pex5vsknk084sn02q --call call_0_0 --content '{\"parcel\": 7}'",
        'cortex-workers results provide arun_01h455vb4pex5vsknk084sn02q --call call_0_0 --error "out of stock"',
        "cortex-workers results provide arun_01h455vb4pex5vsknk084sn02q "
        '--all \'[{"tool_call_id": "call_0_0", "content": "ok"}]\'',
    ),
)
@command
def provide(
    run_id: RunId,
    scope: Scope = None,
    call: Call = None,
    content: Annotated[
        str | None, typer.Option("--content", help="What the call returned, as JSON.", metavar="JSON")
    ] = None,
    error: Annotated[
        str | None,
        typer.Option("--error", help="Why there is no result; the model reads it.", metavar="TEXT"),
    ] = None,
    everything: Annotated[
        str | None, typer.Option("--all", help="Every result of the pause, a JSON list.", metavar="JSON")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Answer a run that waits for a tool outside.

    One call, or with --all the whole pause. The same answer again changes nothing.
    """
    from cortex_workers.schemas.admission import ToolResult

    if (call is None) == (everything is None):
        raise typer.BadParameter("say either --call with its --content or --error, or --all")
    done: ResumeAdmission | None
    with here.client(scope, announces=True) as client:
        if everything is not None:
            if content is not None or error is not None:
                raise typer.BadParameter("--content and --error belong to --call")
            done = client.provide_results(run_id, _results(everything))
        else:
            assert call is not None
            if (content is None) == (error is None):
                raise typer.BadParameter("a call has either --content or --error")
            value = given_json(content, "--content") if content is not None else None
            done = client.provide_result(run_id, ToolResult(tool_call_id=call, content=value, error=error))
    _tell(run_id, done, as_json)


def _results(text: str) -> list[Any]:
    from pydantic import TypeAdapter, ValidationError

    from cortex_workers.schemas.admission import ToolResult

    given = given_json(text, "--all", _RESULTS)
    try:
        found = TypeAdapter(list[ToolResult]).validate_python(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        said = first["msg"].removeprefix("Value error, ")
        raise typer.BadParameter(
            f"--all takes {_RESULTS}. {f'At {where}: ' if where else ''}{said}"
        ) from None
    for index, each in enumerate(found):
        if not each.model_fields_set & {"content", "error"}:
            raise typer.BadParameter(f"--all takes {_RESULTS}. At {index}: a content or an error is missing")
    return found


def _tell(run_id: str, done: Any, as_json: bool) -> None:
    if as_json:
        print_json({"run_id": run_id, "admission": shown(done) if done is not None else None})
        return
    if done is None:
        print(f"{run_id}: kept; other calls of this pause are open")
    else:
        print(f"{run_id}: admitted" + ("" if done.fresh else " before"))
    note(f"cortex-workers runs show {run_id}")


def shown(admission: Any) -> dict[str, Any]:
    """An admission for people and scripts: its input as the JSON it is."""
    values: dict[str, Any] = admission.model_dump(mode="json")
    values["request"]["input"] = json.loads(admission.request.input)
    return {**values, "fresh": admission.fresh}


def add_to_runs(runs: typer.Typer) -> None:
    """Put the commands on a run's answers and its stream among those on runs."""
    runs.command(
        "answers",
        epilog=examples(
            "cortex-workers runs answers arun_01h455vb4pex5vsknk084sn02q",
            "cortex-workers runs answers arun_01h455vb4pex5vsknk084sn02q --expire sus_01h455vb4pex5vsknk084sn02q",
        ),
    )(answers)
    runs.command(
        "close-uncertain",
        epilog=examples(
            "cortex-workers runs close-uncertain arun_01h455vb4pex5vsknk084sn02q",
            "cortex-workers runs close-uncertain arun_01h455vb4pex5vsknk084sn02q "
            "--dead web-1:4711:0a1b2c3d --dead web-2:815:4e5f6071",
        ),
    )(close_uncertain)
    runs.command("stream", epilog=examples("cortex-workers runs stream arun_01h455vb4pex5vsknk084sn02q"))(
        stream
    )


@command
def answers(
    run_id: RunId,
    scope: Scope = None,
    after: Annotated[
        str | None, typer.Option("--after", help="The next page: the last pause you saw.")
    ] = None,
    limit: Limit = 50,
    expire: Annotated[
        str | None,
        typer.Option("--expire", help="Give up the answer to this pause (sus_…), if nobody began with it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the answers that were admitted for a run.

    Needs the run's exact scope. --expire fails the run, for an answer that nobody has begun to work on.
    """
    with here.client(scope) as client:
        if expire is not None:
            _expire(client, run_id, expire, as_json)
            return
        page = client.admissions(run_id, after=after, limit=min(limit, 256))
    if as_json:
        print_json({"admissions": [shown(item) for item in page.admissions], "next": page.next})
        return
    from cortex_workers.cli import draw

    console().print(draw.admissions(page.admissions))
    if page.next is not None:
        note(f"more: --after {page.next}")


def _expire(client: Any, run_id: str, suspension_id: str, as_json: bool) -> None:
    digest = client.admission(run_id, suspension_id).request_digest
    done = client.expire_admission(run_id, suspension_id, digest)
    if as_json:
        print_json({**done.model_dump(mode="json"), "fresh": done.fresh})
        return
    print(f"{run_id}: the answer was given up" + ("" if done.fresh else " before"))


@command
def close_uncertain(
    run_id: RunId,
    scope: Scope = None,
    dead: Annotated[
        list[str] | None,
        typer.Option(
            "--dead",
            help="You vouch that this process is gone for good; again for more.",
            metavar="WORKER",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Close a run that nobody can vouch for.

    For a run that began with an answer from outside and lost its worker: it ends as incomplete. What a tool began
    outside stays as it is; nothing is repeated or taken back. Every process that ever held the run has to be gone:
    noted as ended, or named with --dead. A refusal says who may still be there. Needs the run's exact scope. Again
    changes nothing.
    """
    with here.client(scope, announces=True) as client:
        done = client.close_uncertain(run_id, dead or ())
    if as_json:
        print_json({**done.model_dump(mode="json"), "fresh": done.fresh})
        return
    print(f"{run_id}: closed as incomplete" + ("" if done.fresh else " before"))
    note(f"cortex-workers runs show {run_id}")


@command
def stream(
    run_id: RunId,
    scope: Scope = None,
    after: Annotated[
        int,
        typer.Option("--after", min=-1, max=2**63 - 1, help="Go on after this cursor.", metavar="N"),
    ] = -1,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0, callback=finite, help="Give up when so many seconds are silent."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Watch a run live.

    To its end or next pause; tokens of streamed agents too. With --json, one JSON object a line. Exit 0 when it
    completed or paused, 1 when it ended otherwise, 75 after --timeout.
    """
    from cortex_workers.schemas.stream import StreamKind

    last = StreamKind.ERROR
    with here.client(scope) as client:
        for event in client.stream(run_id, after=after, timeout_s=timeout):
            last = event.kind
            if as_json:
                print(json.dumps(event.model_dump(mode="json"), ensure_ascii=False), flush=True)
            else:
                _show(event)
    return DONE if last in (StreamKind.DONE, StreamKind.SUSPENDED) else REFUSED


def _show(event: Any) -> None:
    data = event.data
    if event.kind == "token":
        print(data["content"], end="", flush=True)
    elif event.kind == "tool_call":
        print(f"\n→ {data['tool_name']}({data['arguments']})", flush=True)
    elif event.kind == "done":
        print(f"\n{data['output'] or ''}", flush=True)
    elif event.kind == "suspended":
        names = ", ".join(call["name"] for call in data["pending"])
        note(f"paused ({data['reason']}): {names}")
    elif event.kind == "error":
        note(f"ended: {data.get('message') or data.get('code')}")
    else:
        note(f"{event.kind} {json.dumps(data, ensure_ascii=False)}")

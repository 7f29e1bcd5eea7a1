"""`cortex-workers messages` and `deliveries`: talk with agents, and look after what is on its way."""

from __future__ import annotations

from typing import Annotated

import typer

from cortex_workers.cli import here
from cortex_workers.cli.options import AsJson, Limit, RunId, Scope
from cortex_workers.cli.report import command, console, examples, note, print_json

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Messages between agents and people: send, answer, inbox, conversations, show.",
)
deliveries = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Messages on their way: list, redrive."
)

_CONVERSATION = "conv_01h455vb4pex5vsknk084sn02q"
Performative = Annotated[
    str, typer.Option("--performative", help="What the message does: inform, request, refuse, cancel, …")
]
Sender = Annotated[str | None, typer.Option("--as", help="Who speaks; default CORTEX_ACTOR.", metavar="NAME")]
Before = Annotated[str | None, typer.Option("--before", help="The next page: the last id you saw.")]
OnBehalf = Annotated[
    str | None,
    typer.Option(
        "--on-behalf-of", help="For whom the answer counts, when several were asked.", metavar="NAME"
    ),
]


@app.command(
    "send",
    epilog=examples(
        'cortex-workers messages send pricing "The dollar is up."',
        'cortex-workers messages send pricing,stock "What do you have?" --performative request',
    ),
)
@command
def send(
    to: Annotated[str, typer.Argument(metavar="TO", help="An agent, or several with commas between them.")],
    content: Annotated[str, typer.Argument(metavar="TEXT", help="What to say.")],
    performative: Performative = "inform",
    sender: Sender = None,
    conversation: Annotated[
        str | None, typer.Option("--conversation", help="Go on with this conversation.", metavar="ID")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", help="Your own id of it: the same key sends once.", metavar="KEY")
    ] = None,
    scope: Scope = None,
    as_json: AsJson = False,
) -> None:
    """Send a message.

    A request and its kind start a run of whoever is addressed; a fact waits in the inbox; cancel ends a conversation.
    """
    with here.client(scope, announces=True) as client:
        sent = client.send(
            [name for name in to.split(",") if name.strip()],
            content,
            performative=performative,
            sender=sender,
            conversation_id=conversation,
            key=key,
        )
    if as_json:
        print_json(sent.model_dump(mode="json", exclude_none=True))
        return
    print(f"{sent.message_id}: sent")
    for item in sent.deliveries:
        print(f"  {item.delivery_id} to {item.receiver.agent}")
    note(f"cortex-workers messages show {sent.conversation_id}")


@app.command(
    "answer",
    epilog=examples('cortex-workers messages answer arun_01h455vb4pex5vsknk084sn02q "12 EUR"'),
)
@command
def answer(
    run_id: RunId,
    content: Annotated[str, typer.Argument(metavar="TEXT", help="The answer.")],
    call: Annotated[
        str | None, typer.Option("--call", help="Which call, when the run waits for several.", metavar="ID")
    ] = None,
    performative: Performative = "inform",
    sender: Sender = None,
    on_behalf_of: OnBehalf = None,
    scope: Scope = None,
    as_json: AsJson = False,
) -> None:
    """Answer a run that waits for another agent, in that agent's place."""
    with here.client(scope, announces=True) as client:
        sent = client.answer(
            run_id,
            content,
            call_id=call,
            performative=performative,
            sender=sender,
            on_behalf_of=on_behalf_of,
        )
    if as_json:
        print_json(sent.model_dump(mode="json", exclude_none=True))
        return
    print(f"{run_id}: answered")
    note(f"cortex-workers runs show {run_id}")


@app.command("inbox", epilog=examples("cortex-workers messages inbox pricing --all"))
@command
def inbox(
    owner: Annotated[str, typer.Argument(metavar="NAME", help="An agent, or a person who has spoken.")],
    everything: Annotated[bool, typer.Option("--all", help="Also what was read before.")] = False,
    conversation: Annotated[
        str | None, typer.Option("--conversation", help="Only of this conversation.", metavar="ID")
    ] = None,
    after: Annotated[
        str | None, typer.Option("--after", help="The next page: the last delivery you saw.")
    ] = None,
    limit: Limit = 50,
    scope: Scope = None,
    as_json: AsJson = False,
) -> None:
    """Read what has arrived for somebody, oldest first; it is read from then on.

    Needs the exact scope.
    """
    with here.client(scope) as client:
        items = client.inbox(
            owner, unread_only=not everything, conversation_id=conversation, after=after, limit=limit
        )
    if as_json:
        print_json([item.model_dump(mode="json", exclude_none=True) for item in items])
        return
    if not items:
        note("nothing new")
    for item in items:
        print(f"{item.delivery_id}  {item.sender} ({item.performative}): {item.content}")


@app.command("conversations", epilog=examples("cortex-workers messages conversations --status open"))
@command
def conversations(
    status: Annotated[str | None, typer.Option("--status", help="Only these: open or closed.")] = None,
    before: Before = None,
    limit: Limit = 50,
    scope: Scope = None,
    as_json: AsJson = False,
) -> None:
    """List the newest conversations of a scope and below."""
    with here.client(scope) as client:
        found = client.conversations(status=status, before=before, limit=limit)
    if as_json:
        print_json([item.model_dump(mode="json") for item in found])
        return
    from cortex_workers.cli import draw

    console().print(draw.conversations(found))


@app.command("show", epilog=examples(f"cortex-workers messages show {_CONVERSATION}"))
@command
def show(
    conversation_id: Annotated[
        str, typer.Argument(metavar="CONVERSATION", help="The conversation's id, conv_…")
    ],
    after: Annotated[int, typer.Option("--after", help="Only messages after this hop.", metavar="N")] = 0,
    limit: Limit = 100,
    scope: Scope = None,
    as_json: AsJson = False,
) -> None:
    """Show a conversation with its messages, oldest first."""
    with here.client(scope) as client:
        thread = client.conversation(conversation_id)
        found = client.messages(conversation_id, after=after, limit=limit)
    if as_json:
        print_json(
            {
                "conversation": thread.model_dump(mode="json"),
                "messages": [item.model_dump(mode="json") for item in found],
            }
        )
        return
    print(f"{thread.id}: {thread.status}, {thread.hops_used} of {thread.hop_ceiling} messages")
    for item in found:
        print(
            f"{item.hop:>4}  {item.sender} → {', '.join(item.receivers)} ({item.performative}): {item.content}"
        )


@deliveries.command("list", epilog=examples("cortex-workers deliveries list --state failed"))
@command
def list_deliveries(
    state: Annotated[
        str | None, typer.Option("--state", help="Only these; failed ones wait for you.")
    ] = None,
    before: Before = None,
    limit: Limit = 50,
    scope: Scope = None,
    as_json: AsJson = False,
) -> None:
    """List the newest deliveries of a scope and below."""
    with here.client(scope) as client:
        found = client.deliveries(state=state, before=before, limit=limit)
    if as_json:
        print_json([item.model_dump(mode="json") for item in found])
        return
    from cortex_workers.cli import draw

    console().print(draw.deliveries(found))


@deliveries.command(
    "redrive", epilog=examples("cortex-workers deliveries redrive dlv_01h455vb4pex5vsknk084sn02q")
)
@command
def redrive(
    delivery_id: Annotated[str, typer.Argument(metavar="DELIVERY", help="The delivery's id, dlv_…")],
    scope: Scope = None,
    as_json: AsJson = False,
) -> None:
    """Send a failed delivery on its way again, with a fresh count of attempts."""
    with here.client(scope, announces=True) as client:
        moved = client.redrive(delivery_id)
    if as_json:
        print_json(moved.model_dump(mode="json"))
        return
    print(f"{delivery_id}: {moved.state}")

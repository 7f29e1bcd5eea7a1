"""Commands for the fleet as a whole: sweep, workers, doctor, migrate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cortex_workers.cli import here
from cortex_workers.cli.options import AsJson, Reason
from cortex_workers.cli.report import DONE, REFUSED, command, console, examples, note, print_json
from cortex_workers.settings import PREFIX

if TYPE_CHECKING:
    from cortex_workers.client import Client
    from cortex_workers.schemas.outcomes import Swept
    from cortex_workers.settings import Settings

workers = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Worker processes: list, drain.")


@workers.command("list", epilog=examples("cortex-workers workers list"))
@command
def list_workers(
    everything: Annotated[bool, typer.Option("--all", help="Those that have ended too.")] = False,
    as_json: AsJson = False,
) -> None:
    """List worker processes.

    The youngest first.
    """
    from cortex_workers.store import workers as rows

    with here.client() as client:
        with client.runtime.database.read() as unit:
            found = rows.list_all(unit, include_ended=everything)
        if as_json:
            print_json(found)
            return
        from cortex_workers.cli import draw

        now = draw.database_now(client)
    console().print(draw.workers(found, now))


@workers.command(
    "drain",
    epilog=examples(
        'cortex-workers workers drain worker-7:4711 --reason "host is going down"',
        "cortex-workers workers drain --all",
    ),
)
@command
def drain(
    worker: Annotated[
        str | None,
        typer.Argument(metavar="[WORKER]", help="Its id, or a part that only it has.", show_default=False),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All live workers.")] = False,
    reason: Reason = None,
    as_json: AsJson = False,
) -> None:
    """Ask workers to end.

    They take no new work, hand off what they run, and exit; their runs go on elsewhere.
    """
    if (worker is None) == (not everything):
        raise typer.BadParameter("name a worker, or say --all")
    from cortex_workers.operate.drain import drain as ask

    with here.client() as client:
        asked = ask(client.runtime, worker, here.actor(client.settings), reason)
    if as_json:
        print_json({"asked": asked})
        return
    for each in asked:
        print(each)
    note("asked; each reads it with its next heartbeat" if asked else "there is no live worker")


@command
def sweep(
    passes: Annotated[
        list[str] | None, typer.Option("--pass", help="Only this pass; may be given again.", metavar="NAME")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Sweep now, from here.

    Whatever beat does: free runs of dead workers, expire pauses, repeat lost hints (the one thing for which it needs
    the broker). Prints the rows moved per pass.
    """
    from cortex_workers.sweep import frame

    unknown = sorted(set(passes or ()) - set(frame.NAMES))
    if unknown:
        raise typer.BadParameter(f"no such pass: {', '.join(unknown)}; there are {', '.join(frame.NAMES)}")
    with here.client(announces=True, needs_broker="hints" in (passes or ())) as client:
        wanted = _possible(client, passes)
        swept = _swept(client, wanted)
        left = [name for name in wanted if name not in swept.done]
        _tell_swept(swept, wanted, left, as_json)


def _possible(client: Client, passes: list[str] | None) -> list[str]:
    """The passes to do; without a broker none that hints, and somebody who did not name it is told."""
    from cortex_workers.sweep import frame

    wanted = [name for name in frame.NAMES if not passes or name in passes]
    if client.settings.broker_url is not None:
        return wanted
    note(f"{PREFIX}BROKER_URL is not set: no hints are repeated, workers find what is freed by themselves")
    return [name for name in wanted if name != "hints"]


def _swept(client: Client, wanted: list[str]) -> Swept:
    from cortex_workers.sweep import frame
    from cortex_workers.tasks.depth import BrokerDepth

    if client.settings.broker_url is None:
        return frame.sweep(client.runtime, wanted, by="operator", force=True)
    depth = BrokerDepth(client.settings)
    client.runtime.depth = depth
    try:
        return frame.sweep(client.runtime, wanted, by="operator", force=True)
    finally:
        depth.close()


def _tell_swept(swept: Swept, wanted: list[str], left: list[str], as_json: bool) -> None:
    from cortex_workers.sweep.frame import SETTLE_S

    if as_json:
        print_json({**swept.model_dump(), "left": left})
        return
    for name in wanted:
        print(f"{name:<12} {swept.done[name]}" if name in swept.done else f"{name:<12} left")
    if left:
        note(
            "left: another sweep is at it, or after a time without sweeps leases are left alone for "
            f"{SETTLE_S:g} s, so that workers that live renew first; sweep again"
        )


@command
def doctor(as_json: AsJson = False) -> int:
    """Look at everything, say what to do.

    Settings, database, schema, clock, broker, sweeps, workers, agents, waiting runs, uncertain effects. Exit 1 when
    something keeps runs from going on.
    """
    from cortex_workers.errors import InvalidSettings
    from cortex_workers.operate import doctor as operate

    try:
        found = _examined(here.settings())
    except InvalidSettings as error:
        found = [operate.fail("settings", error.message, "correct these variables (see deploy/settings.md)")]
    broken = any(check.status == "fail" for check in found)
    if as_json:
        print_json({"ok": not broken, "checks": found})
    else:
        from cortex_workers.cli import draw

        console().print(draw.checks(found))
    return REFUSED if broken else DONE


def _examined(settings: Settings) -> list[Any]:
    from cortex_workers.operate import doctor as operate
    from cortex_workers.tasks.depth import BrokerDepth

    here.quiet(settings)
    depth = BrokerDepth(settings) if settings.broker_url is not None else None
    try:
        return list(operate.examine(settings, depth))
    finally:
        if depth is not None:
            depth.close()


@command
def migrate(
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether there is something to do; exit 1 if so.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Bring the database up to date.

    To the schema of this version. Any number at once is harmless; a second time there is nothing to do.
    """
    from cortex_workers.errors import SchemaBehind
    from cortex_workers.store import migrate as store

    url = here.settings().require_database()
    before, head = store.current(url), store.head()
    try:
        store.require_current(url)
        behind = False
    except SchemaBehind:
        behind = True
    after = store.upgrade(url) if behind and not check else before
    facts = {"before": before, "at": after, "head": head, "behind": behind and check}
    _tell_schema(facts, as_json)
    return REFUSED if facts["behind"] else DONE


def _tell_schema(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(facts)
    elif facts["behind"]:
        print(
            f"behind: at {facts['at'] or 'nothing'}, this version needs {facts['head']}; run cortex-workers migrate"
        )
    elif facts["before"] != facts["at"]:
        print(f"migrated from {facts['before'] or 'nothing'} to {facts['at']}")
    else:
        print(f"nothing to do: at {facts['at']}")


def add_to(app: typer.Typer) -> None:
    """Make them commands."""
    app.command(
        "sweep", epilog=examples("cortex-workers sweep", "cortex-workers sweep --pass lapses --pass hints")
    )(sweep)
    app.add_typer(workers, name="workers")
    app.command("doctor", epilog=examples("cortex-workers doctor", "cortex-workers doctor --json"))(doctor)
    app.command("migrate", epilog=examples("cortex-workers migrate", "cortex-workers migrate --check"))(
        migrate
    )

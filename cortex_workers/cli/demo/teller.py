"""Who tells the demo: as a story for a person, or as JSON lines for a program."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from typing import Any, Protocol

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from cortex_workers.cli import draw
from cortex_workers.cli.demo.failure import LogEnd
from cortex_workers.cli.demo.feed import Fact
from cortex_workers.cli.demo.fleet import Fleet
from cortex_workers.cli.demo.proof import Summary
from cortex_workers.cli.demo.words import Narrator
from cortex_workers.cli.report import json_text
from cortex_workers.operate.inspect import Timeline


class Teller(Protocol):
    """What the story needs to be told."""

    def ready(self, fleet: Fleet) -> None:
        """Tell who is there."""
        ...

    def chapter(self, title: str, what: str) -> None:
        """Begin a part of the story."""
        ...

    def introduce(self, run_id: str, text: str, quietly: bool = False) -> None:
        """Name a run before anything of it is told; a quiet one is not told line by line."""
        ...

    def tell(self, fact: Fact) -> None:
        """Tell one thing that happened."""
        ...

    def busy(self, what: str) -> AbstractContextManager[Any]:
        """Show that something takes time."""
        ...

    def retell(self, timeline: Timeline) -> None:
        """Tell one run once more, as an operator sees it."""
        ...

    def end(self, summary: Summary) -> None:
        """Tell how it ended."""
        ...

    def failed(self, why: str, logs: Sequence[LogEnd]) -> None:
        """Tell that it went wrong, and where to look."""
        ...

    def kept(self, environment: Mapping[str, str]) -> None:
        """Tell that everything stays until Ctrl-C, and what can be done meanwhile in which environment."""
        ...

    def stopped(self) -> None:
        """Tell that somebody ended the demo and nothing of it runs any more."""
        ...


class JsonLines:
    """One object a line: event, run_id, worker, at, and what else is known."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def ready(self, fleet: Fleet) -> None:
        for each in fleet.workers:
            self.tell(Fact("worker.started", datetime.now(UTC), worker=each.name, facts={"pid": each.pid}))
        self.tell(Fact("demo.ready", datetime.now(UTC), facts={"flower": fleet.flower_url}))

    def chapter(self, title: str, what: str) -> None:
        self.tell(Fact("demo.chapter", datetime.now(UTC), facts={"title": title}))

    def introduce(self, run_id: str, text: str, quietly: bool = False) -> None:
        return

    def tell(self, fact: Fact) -> None:
        first = {"event": fact.event, "run_id": fact.run_id, "worker": fact.worker, "at": fact.at}
        self._line({**first, **{key: value for key, value in fact.facts.items() if key not in first}})

    def busy(self, what: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def retell(self, timeline: Timeline) -> None:
        self.tell(
            Fact("run.timeline", timeline.now, timeline.run.id, facts={"entries": list(timeline.entries)})
        )

    def end(self, summary: Summary) -> None:
        self._line({"event": "summary", **summary.as_json()})

    def failed(self, why: str, logs: Sequence[LogEnd]) -> None:
        where = {each.name: str(each.path) for each in logs}
        self._line({"event": "failed", "at": datetime.now(UTC), "why": why, "logs": where})

    def kept(self, environment: Mapping[str, str]) -> None:
        return

    def stopped(self) -> None:
        self._line({"event": "stopped", "at": datetime.now(UTC)})

    def _line(self, content: dict[str, Any]) -> None:
        self._console.out(json_text(content), highlight=False)


_TRY = (
    'enqueue support "Refund order 17"',
    "checkpoints list",
    "checkpoints approve CHECKPOINT --reason 'I have seen it'",
    "runs list",
    "runs show RUN",
)
_WHY = """
Why it works
  A run is rows in Postgres. Messages only wake workers; a lost one is sent again.
  Who writes for a run names its lease. A worker that died, or was thought to be dead, can write no more.
  A call is recorded before it is made. What may have happened is looked up or asked, never guessed.

`cortex-workers demo --keep` leaves everything up to play with; README.md tells how to write your own agents.
"""


class Prose:
    """Lines for a person: seconds since the start, who, and what it means."""

    def __init__(self, console: Console, began: datetime) -> None:
        self._console = console
        self._began = began
        self._narrator = Narrator()

    def ready(self, fleet: Fleet) -> None:
        took = (datetime.now(UTC) - self._began).total_seconds()
        self._console.print(
            f"[bold]cortex-workers demo[/]\nPostgreSQL and Valkey, {len(fleet.workers)} Celery workers and beat run "
            f"after {took:.1f} s, all of them real.\nOnly the model is not: it follows a script."
        )
        if fleet.flower_url is not None:
            self._console.print(f"Flower shows the fleet: [link={fleet.flower_url}]{fleet.flower_url}[/link]")

    def chapter(self, title: str, what: str) -> None:
        self._console.print()
        self._console.print(Rule(Text(title, "bold"), align="left", style="dim"))
        self._console.print(Text(what, "italic"))
        self._console.print()

    def introduce(self, run_id: str, text: str, quietly: bool = False) -> None:
        self._narrator.introduce(run_id, text, quietly)

    def tell(self, fact: Fact) -> None:
        line = self._narrator.line(fact)
        if line is None:
            return
        row = Table.grid(padding=(0, 2, 0, 0), expand=True)
        row.add_column(width=8, justify="right", style="dim", no_wrap=True)
        row.add_column(width=9, no_wrap=True)
        row.add_column(ratio=1)
        seconds = (fact.at - self._began).total_seconds()
        row.add_row(f"{seconds:.1f} s", Text(line.who, line.style), Text.from_markup(line.text))
        self._console.print(row)

    def busy(self, what: str) -> AbstractContextManager[Any]:
        return self._console.status(Text(what, "dim"), spinner="dots")

    def retell(self, timeline: Timeline) -> None:
        self.chapter("The last run once more", "What `cortex-workers runs show` tells an operator.")
        self._console.print(draw.timeline(timeline))

    def end(self, summary: Summary) -> None:
        table = Table.grid(padding=(0, 3, 0, 2))
        for name, value, good in summary.rows():
            table.add_row(Text(name, "dim"), Text(value, "bold green" if good else "bold red"))
        self._console.print()
        self._console.print(Rule(Text("How it ended", "bold"), align="left", style="dim"))
        self._console.print(table)
        for problem in summary.problems:
            self._console.print(Text(f"  wrong: {problem}", "bold red"))
        if summary.is_good:
            self._console.print(_WHY)

    def failed(self, why: str, logs: Sequence[LogEnd]) -> None:
        for each in logs:
            self._console.print(Text(f"\n{each.name}, the end of {each.path}", "bold"))
            self._console.print(Text(each.words or "(it said nothing)", "dim"))
        # Last, where a person looks first.
        self._console.print(Text(f"\nThe demo went wrong: {why}", "bold red"))

    def kept(self, environment: Mapping[str, str]) -> None:
        self._console.print(
            "\n[bold]Everything stays up until Ctrl-C.[/] In another terminal, in this folder:\n"
        )
        for name, value in environment.items():
            self._console.out(f"  export {name}={value}")
        me = "cortex-workers" if shutil.which("cortex-workers") else os.path.relpath(sys.argv[0])
        for line in _TRY:
            self._console.out(f"  {me} {line}")

    def stopped(self) -> None:
        self._console.print("\n[bold]Stopped.[/] Nothing of the demo runs any more.")

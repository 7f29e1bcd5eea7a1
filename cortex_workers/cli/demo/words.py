"""The words for what happened, so that a stranger understands what it means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.markup import escape

from cortex_workers.cli.demo import world
from cortex_workers.cli.demo.feed import Fact

_COLOURS = ("cyan", "magenta", "blue", "yellow", "bright_green", "bright_magenta")
LEASE_S = 3.0
"""Short, so that nobody waits a minute for the end of a dead worker's lease."""
PERSON, BANK, SWEEPER, PRODUCER = "Ada", "bank", "sweeper", "producer"


@dataclass(frozen=True, slots=True)
class Told:
    """One line: who, in which style, and the text as rich markup."""

    who: str
    style: str
    text: str


@dataclass(slots=True)
class Known:
    """What has been told of one run so far."""

    asked: str
    quiet: bool = False
    holder: str | None = None
    looked_up: int = 0


class Narrator:
    """Finds the words; remembers what was told, so that a second time reads as one."""

    def __init__(self) -> None:
        self._runs: dict[str, Known] = {}

    def introduce(self, run_id: str, text: str, quietly: bool) -> None:
        """Name a run."""
        self._runs[run_id] = Known(text, quietly)

    def line(self, fact: Fact) -> Told | None:
        """The line for a fact; None when it needs none."""
        run = self._runs.get(fact.run_id or "")
        words = _WORDS.get(fact.event)
        if words is None or (run is not None and run.quiet):
            return None
        told = words(fact, run or Known(""))
        if told is None:
            return None
        who, text = told
        return Told(who, _style(who), text)


Words = Callable[[Fact, Known], tuple[str, str] | None]


def _style(who: str) -> str:
    if who.startswith("worker-"):
        return f"bold {_COLOURS[(int(who.removeprefix('worker-')) - 1) % len(_COLOURS)]}"
    return {PERSON: "bold", BANK: "bold green", SWEEPER: "bold yellow"}.get(who, "dim")


def money(cents: int) -> str:
    """An amount as people write it."""
    return f"{cents / 100:,.2f}"


def call(tool: str, arguments: Mapping[str, Any]) -> str:
    """A call as people write it."""
    inside = ", ".join(
        f"{name.removesuffix('_cents')}={money(value) if name.endswith('_cents') else value}"
        for name, value in arguments.items()
    )
    return escape(f"{tool}({inside})")


def _worker(fact: Fact) -> str:
    return fact.worker or "worker"


def _enqueued(fact: Fact, run: Known) -> tuple[str, str]:
    return PRODUCER, f"enqueues [bold]{escape(run.asked)}[/]: a row in Postgres, and a hint to the workers"


def _claimed(fact: Fact, run: Known) -> tuple[str, str]:
    before, run.holder = run.holder, fact.worker
    if before is None:
        text = f"claims the run: a lease of {LEASE_S:g} s in its row, renewed while the worker lives"
    elif before == fact.worker:
        text = "claims the run again and goes on at the step where it was left"
    else:
        text = f"claims the run and goes on at the step where {before} left it"
    return _worker(fact), text


def _called(fact: Fact, run: Known) -> tuple[str, str]:
    facts = fact.facts
    if facts["tool"] == "find_order":
        order = facts["result"]
        found = f"{order['item']}, {money(order['paid_cents'])} paid, {order['status']}"
        return _worker(fact), f"calls find_order: {found}"
    again = ", [bold]once more, under the same idempotency key[/]" if facts["attempt"] > 1 else ""
    return _worker(fact), f"calls {facts['tool']}: {money(facts['cents'])} for {facts['what']}{again}"


def _asked(fact: Fact, run: Known) -> tuple[str, str]:
    wanted = call(fact.facts["tool"], fact.facts["arguments"])
    return (
        _worker(fact),
        f"stops before [bold]{wanted}[/]: that needs a person. The run is paused; until somebody decides it is "
        "rows and nothing else, no thread, no message, no worker",
    )


def _decided(fact: Fact, run: Known) -> tuple[str, str]:
    return str(fact.facts["decided_by"]), f"approves: “{escape(str(fact.facts['reason']))}”"


def _paid(fact: Fact, run: Known) -> tuple[str, str]:
    facts = fact.facts
    return (
        BANK,
        f"[green]pays {money(facts['cents'])}[/], {escape(facts['what'])}, receipt {facts['receipt']}",
    )


def _paid_before(fact: Fact, run: Known) -> tuple[str, str]:
    return BANK, f"[bold red]is asked to pay once more[/] for {escape(fact.facts['what'])}; it knows the key"


def _looked_up(fact: Fact, run: Known) -> tuple[str, str]:
    receipt, run.looked_up = fact.facts["receipt"], run.looked_up + 1
    if run.looked_up > 1:
        return _worker(fact), f"asks the bank again: [bold]{'not paid' if receipt is None else 'paid'}[/]"
    asks = "finds a call that was started and has no outcome. It does not guess, it asks the bank"
    if receipt is None:
        return _worker(fact), f"{asks}: [bold]not paid[/]"
    return _worker(fact), f"{asks}: [bold]paid, receipt {receipt}[/]. That is the result; nothing is repeated"


def _lapsed(fact: Fact, run: Known) -> tuple[str, str]:
    return SWEEPER, f"finds that the lease of {fact.facts.get('owner')} has run out, and frees the run"


def _handed_back(fact: Fact, run: Known) -> tuple[str, str] | None:
    if fact.facts.get("reason") != "uncertain_settle":
        return None
    return (
        _worker(fact),
        f"puts the run back for {fact.facts['wait_s']:.1f} s: what the dead worker sent may still be on its way, so "
        "“not paid” counts only after the call's own timeout",
    )


def _completed(fact: Fact, run: Known) -> tuple[str, str]:
    output = f" “{escape(str(fact.facts['output']))}”" if fact.facts.get("output") else ""
    return _worker(fact), f"[bold green]completes the run:[/]{output}"


def _failed(fact: Fact, run: Known) -> tuple[str, str]:
    return fact.worker or SWEEPER, f"[bold red]the run failed[/]: {escape(str(fact.facts.get('error', '')))}"


def _killed(fact: Fact, run: Known) -> tuple[str, str]:
    return _worker(
        fact
    ), f"[bold white on red] kill -9 {fact.facts['pid']} [/] in its call, {fact.facts['when']}"


def _note(fact: Fact, run: Known) -> tuple[str, str] | None:
    """What the demo did itself, in its own words."""
    return (str(fact.facts["who"]), str(fact.facts["text"])) if "text" in fact.facts else None


_WORDS: dict[str, Words] = {
    "run.enqueue": _enqueued,
    "run.claim": _claimed,
    "run.lapse": _lapsed,
    "run.hand_back_reclaimable": _handed_back,
    "run.pause": _asked,
    "run.decide": _decided,
    "run.complete": _completed,
    "run.fail": _failed,
    world.CALLED: _called,
    world.PAID: _paid,
    world.PAID_BEFORE: _paid_before,
    world.LOOKED_UP: _looked_up,
    "worker.killed": _killed,
    "worker.started": _note,
    "worker.stopping": _note,
    "worker.stopped": _note,
    "flower.ended": _note,
    "mass.enqueued": _note,
    "mass.completed": _note,
}

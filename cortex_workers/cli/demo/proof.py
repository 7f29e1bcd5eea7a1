"""What the demo must have shown, counted from rows, the bank's file and exit codes; nothing is taken for granted."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cortex_workers.cli.demo.feed import Fact
from cortex_workers.cli.demo.fleet import Member
from cortex_workers.cli.demo.world import PAID, PAID_BEFORE, Line
from cortex_workers.schemas.lifecycle import RunState
from cortex_workers.schemas.run import Run


@dataclass(frozen=True, slots=True)
class Summary:
    """How it ended; ``problems`` is empty when everything is as it must be."""

    runs: int
    completed: int
    workers: int
    killed_workers: int
    reclaims: int
    payments: int
    double_effects: int
    seconds: float
    problems: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Whether the demo showed what it is there for."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """The last line of `--json`."""
        return {
            "runs": self.runs,
            "completed": self.completed,
            "workers": self.workers,
            "killed_workers": self.killed_workers,
            "reclaims": self.reclaims,
            "effects": self.payments,
            "double_effects": self.double_effects,
            "seconds": round(self.seconds, 1),
            "ok": self.is_good,
            "problems": list(self.problems),
        }

    def rows(self) -> list[tuple[str, str, bool]]:
        """Name, value, and whether the value is as it must be."""
        return [
            ("runs completed", f"{self.completed} of {self.runs}", self.completed == self.runs),
            ("workers killed with -9", f"{self.killed_workers} of {self.workers}", self.killed_workers > 0),
            ("runs taken from the dead", str(self.reclaims), self.reclaims >= self.killed_workers),
            ("payments made", f"{self.payments} for {self.runs} runs", self.payments == self.runs),
            ("payments made twice", str(self.double_effects), self.double_effects == 0),
        ]


def double_effects(lines: Iterable[Line]) -> int:
    """How often the bank was made to pay for something once more, under the same key or another one."""
    asked = Counter(line.facts["what"] for line in lines if line.kind in (PAID, PAID_BEFORE))
    return sum(count - 1 for count in asked.values())


def sum_up(
    runs: Sequence[Run],
    lines: Sequence[Line],
    facts: Sequence[Fact],
    workers: Sequence[Member],
    seconds: float,
) -> Summary:
    """Count, and name whatever is not as it must be."""
    killed = [each.name for each in workers if each.process.returncode == -signal.SIGKILL]
    paid = sum(line.kind == PAID for line in lines)
    doubled = double_effects(lines)
    problems = [
        f"run {run.id} is {run.state}: {run.error_text or 'no reason given'}"
        for run in runs
        if run.state is not RunState.COMPLETED
    ]
    if doubled:
        problems.append(f"{doubled} payments were asked for twice")
    if paid != len(runs):
        problems.append(f"{paid} payments for {len(runs)} runs")
    if not killed:
        problems.append("no worker was killed")
    problems += _not_moved(sorted(facts, key=lambda fact: fact.at), killed)
    return Summary(
        runs=len(runs),
        completed=sum(run.state is RunState.COMPLETED for run in runs),
        workers=len(workers),
        killed_workers=len(killed),
        reclaims=sum(run.reclaim_total for run in runs),
        payments=paid,
        double_effects=doubled,
        seconds=seconds,
        problems=tuple(problems),
    )


def _not_moved(facts: Sequence[Fact], killed: Sequence[str]) -> list[str]:
    """A killed worker's runs must lapse, and each must go on with another worker."""
    lapses = [(place, fact) for place, fact in enumerate(facts) if fact.event == "run.lapse"]
    owners = {fact.facts.get("owner") for _, fact in lapses}
    problems = [f"no run of {name} lapsed, which was killed in one" for name in killed if name not in owners]
    for place, lapse in lapses:
        owner = lapse.facts.get("owner")
        heirs = [
            each.worker for each in facts[place:] if each.event == "run.claim" and each.run_id == lapse.run_id
        ]
        if owner in killed and (not heirs or owner in heirs):
            problems.append(f"run {lapse.run_id} of {owner} did not go on with another worker: {heirs}")
    return problems

"""What happens in the demo, in order; every line that is told was read from rows, files or exit codes."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

from cortex_workers.cli.demo import world
from cortex_workers.cli.demo.failure import DemoFailed
from cortex_workers.cli.demo.feed import Fact, Feed
from cortex_workers.cli.demo.fleet import Fleet, Member
from cortex_workers.cli.demo.host import FROM_BANK, TO_BANK
from cortex_workers.cli.demo.teller import Teller
from cortex_workers.cli.demo.words import PERSON, PRODUCER
from cortex_workers.cli.demo.world import World
from cortex_workers.client import Client
from cortex_workers.schemas.run import EnqueueRun

T = TypeVar("T")

VOUCHERS = 20
DEADLINE_S = 45.0
"""For each thing waited for; only a demo that goes wrong, or a very busy machine, comes near it."""
_LOOK_S = 0.05


class Story:
    """The chapters. ``runs`` and ``facts`` are what the proof is made from."""

    def __init__(self, client: Client, there: World, fleet: Fleet, feed: Feed, teller: Teller) -> None:
        self._client = client
        self._world = there
        self._fleet = fleet
        self._feed = feed
        self._teller = teller
        self.runs: list[str] = []
        self.killed_runs: list[str] = []
        self.facts: list[Fact] = []

    def a_person_is_asked(self) -> None:
        """A run pauses for an approval, its worker is replaced meanwhile, another one continues."""
        self._teller.chapter(
            "1  A refund that needs a person",
            "The agent wants to pay money back. Somebody has to agree, and that may take days.",
        )
        run_id = self._enqueue("support", "Refund order 17")
        asked = self._until(run_id, "run.pause", "the model and its tools")
        self._deploy(self._worker_of(asked))
        self._client.decide(
            asked.facts["checkpoint_id"],
            approved=True,
            decided_by=PERSON,
            reason="The machine is back in the store.",
        )
        self._until(run_id, "run.complete", "another worker")

    def killed_after_the_payment(self) -> None:
        """A worker dies between an effect and its record; the lookup keeps the effect from being repeated."""
        self._teller.chapter(
            "2  Killed just after the money moved",
            "The bank has paid, its answer is on the way, and the worker dies. Paying again would be wrong.",
        )
        self._world.hold(FROM_BANK)
        run_id = self._enqueue("payments", "Pay invoice 4711")
        paid = self._until(run_id, world.PAID, "the payment")
        self._kill(paid, "with the bank's answer still on its way")
        self._world.release(FROM_BANK)
        self._until(run_id, "run.lapse", "the end of the dead worker's lease")
        self._until(run_id, "run.complete", "another worker")
        self._ready()

    def killed_before_the_payment(self) -> None:
        """A worker dies between the start record and its effect; a mass of runs arrives meanwhile."""
        self._teller.chapter(
            "3  Killed just before the money moved",
            "The call was started, the bank never heard of it, and the worker dies. Not paying would be wrong.",
        )
        self._world.hold(TO_BANK)
        run_id = self._enqueue("payments", "Pay invoice 4712")
        called = self._until(run_id, world.CALLED, "the payment")
        self._kill(called, "with the payment still on its way to the bank")
        self._world.release(TO_BANK)
        self._mass()
        self._until(run_id, "run.lapse", "the end of the dead worker's lease")
        self._until(run_id, "run.complete", "the moment from which “not paid” is certain")

    def settle(self) -> None:
        """Tell what is left to tell."""
        self._look()
        if self._fleet.lost_flower is not None:
            text = f"has ended by itself, see {self._fleet.lost_flower}"
            self._note("flower.ended", "Flower", text)

    def _mass(self) -> None:
        scope = str(self._client.settings.scope)
        requests = [
            EnqueueRun(agent="vouchers", input=f"customer {number}", scope=scope)
            for number in range(1, VOUCHERS + 1)
        ]
        began = time.monotonic()
        made = {each.id for each in self._client.enqueue_many(requests)}
        for run_id in made:
            self._teller.introduce(run_id, "a voucher", quietly=True)
        self.runs += sorted(made)
        self._note("mass.enqueued", PRODUCER, f"enqueues {VOUCHERS} more runs meanwhile", runs=VOUCHERS)
        self._wait(lambda: made <= self._completed().keys(), f"{VOUCHERS} more runs")
        took = time.monotonic() - began
        by = sorted({name for run_id, name in self._completed().items() if run_id in made})
        text = f"[bold green]all {VOUCHERS} completed[/] in {took:.1f} s; nobody waits for a dead worker"
        self._note("mass.completed", by[0] if len(by) == 1 else "workers", text, runs=VOUCHERS, workers=by)

    def _enqueue(self, agent: str, text: str) -> str:
        made = self._client.enqueue(agent, text)
        self._teller.introduce(made.id, text)
        self.runs.append(made.id)
        return made.id

    def _deploy(self, leaving: Member) -> None:
        """A rolling deploy while the run waits: nobody has to be there for it."""
        coming = self._fleet.start_worker()
        text = f"while {PERSON} thinks: {coming.name} starts, {leaving.name} is told to stop (SIGTERM)"
        self._note("worker.stopping", "deploy", text, leaving.name, pid=leaving.pid)
        with self._teller.busy(f"{leaving.name} stops"):
            code = self._fleet.ask_to_stop(leaving)
        if code != 0:
            raise DemoFailed(f"{leaving.name} ended with code {code} after SIGTERM")
        self._note("worker.stopped", leaving.name, "has left, exit code 0", leaving.name, exit_code=code)

    def _kill(self, caught: Fact, when: str) -> None:
        worker = self._worker_of(caught)
        self._fleet.kill(worker)
        self.killed_runs.append(str(caught.run_id))
        self._look()
        facts = {"pid": worker.pid, "when": when}
        self._tell(Fact("worker.killed", datetime.now(UTC), caught.run_id, worker.name, facts))
        heir = self._fleet.start_worker()
        text = f"starts {heir.name}; until its lease ends, the row still names {worker.name}"
        self._note("worker.started", "platform", text, heir.name, pid=heir.pid)

    def _note(self, event: str, who: str, text: str, worker: str | None = None, **facts: Any) -> None:
        """Tell something the demo itself did."""
        self._look()
        self._tell(Fact(event, datetime.now(UTC), None, worker, {"who": who, "text": text, **facts}))

    def _ready(self) -> None:
        with self._teller.busy("the new worker starts"):
            self._fleet.wait_ready(DEADLINE_S)

    def _worker_of(self, fact: Fact) -> Member:
        found = next((each for each in self._fleet.workers if each.name == fact.worker), None)
        if found is None:
            raise DemoFailed(f"{fact.event} came from {fact.worker}, which is no worker of this demo")
        return found

    def _completed(self) -> dict[str, str]:
        """The runs told as completed, and by whom."""
        done = [fact for fact in self.facts if fact.event == "run.complete" and fact.run_id is not None]
        return {str(fact.run_id): fact.worker or "somebody" for fact in done}

    def _until(self, run_id: str, event: str, what: str) -> Fact:
        def found() -> list[Fact]:
            return [fact for fact in self.facts if (fact.run_id, fact.event) == (run_id, event)]

        return self._wait(found, what)[0]

    def _wait(self, done: Callable[[], T], what: str) -> T:
        """Tell what happens until something has.

        Raises: DemoFailed after the deadline, or when a process or a run ended badly.
        """
        end = time.monotonic() + DEADLINE_S
        with self._teller.busy(f"waiting for {what}"):
            while not (found := done()):
                self._fleet.check()
                if time.monotonic() > end:
                    raise DemoFailed(f"nothing came of {what} within {DEADLINE_S:.0f} s")
                self._look()
                time.sleep(_LOOK_S)  # rows are looked at, as anybody outside would
        return found

    def _look(self) -> None:
        for fact in self._feed.look():
            self._tell(fact)

    def _tell(self, fact: Fact) -> None:
        self.facts.append(fact)
        self._teller.tell(fact)
        if fact.event in ("run.fail", "run.uncertain") and fact.run_id in self.runs:
            raise DemoFailed(f"run {fact.run_id} went wrong: {fact.event} {dict(fact.facts)}")

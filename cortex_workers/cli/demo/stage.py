"""Sets the stage, has the story told, and clears everything away, however it ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from cortex_workers import telemetry
from cortex_workers.cli import here
from cortex_workers.cli.demo import proof, teller, world
from cortex_workers.cli.demo.failure import DemoFailed
from cortex_workers.cli.demo.feed import Feed
from cortex_workers.cli.demo.fleet import Fleet
from cortex_workers.cli.demo.story import DEADLINE_S, Story
from cortex_workers.cli.demo.teller import Teller
from cortex_workers.cli.demo.words import LEASE_S
from cortex_workers.cli.demo.world import World
from cortex_workers.client import Client
from cortex_workers.embedded import EmbeddedServers
from cortex_workers.errors import CortexError
from cortex_workers.operate.inspect import Timeline, timeline
from cortex_workers.settings import Settings
from cortex_workers.store import migrate

SETTINGS = {
    "CORTEX_HOST": "cortex_workers.cli.demo.host:host",
    "CORTEX_SCOPE": "tenant=demo",
    "CORTEX_LEASE_TTL_S": str(LEASE_S),
    "CORTEX_LEASE_RENEW_S": "0.8",
    "CORTEX_LEASE_TRUST_S": "2",
    "CORTEX_SWEEP_INTERVAL_S": "1",
    "CORTEX_HEAL_KNOWN_S": "0.5",
    "CORTEX_HEAL_UNKNOWN_S": "1",
    # "Not paid" is believed as soon as the dead worker's call would have timed out.
    "CORTEX_UNCERTAIN_SETTLE_S": "0",
    "CORTEX_SLOTS": "20",
    "CORTEX_DB_POOL": "8",
    "CORTEX_DRAIN_S": "8",
    "CORTEX_LOG_FORMAT": "json",
}
_WORKER_ID = re.compile(r"\S+:\d+:[0-9a-f]{8}")
_OURS = ("CORTEX_", "CELERY_", "FLOWER_")


class Stopped(BaseException):
    """Somebody ended the demo; nothing on the way out may take it for an error and go on."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Everything that runs."""

    client: Client
    world: World
    fleet: Fleet
    feed: Feed
    addresses: dict[str, str]


def run(*, json: bool, keep: bool, flower: bool) -> int:
    """Play the demo from beginning to end; returns the exit code."""
    began, clock = datetime.now(UTC), time.monotonic()
    console = Console(highlight=False, soft_wrap=json)
    speaker: Teller = teller.JsonLines(console) if json else teller.Prose(console, began)
    telemetry.configure_logging("json", "error")
    folder = Path(os.environ.get("CORTEX_DATA_DIR") or Settings.model_fields["data_dir"].default)
    elsewhere = "CORTEX_DATABASE_URL" in os.environ
    try:
        with _stoppable(), _stage(folder.absolute() / "demo", speaker, flower) as stage:
            good = _play(stage, speaker, clock)
            if keep:
                with _at_hand(folder, stage, elsewhere) as environment:
                    speaker.kept(environment)
                    _until_stopped(stage.fleet)
            return 0 if good else 1
    except DemoFailed as error:
        speaker.failed(str(error), error.logs)
        return 1
    except CortexError as error:
        speaker.failed(str(error), ())
        return 1
    except Stopped:
        speaker.stopped()
        return 130


def _play(stage: Stage, speaker: Teller, clock: float) -> bool:
    story = Story(stage.client, stage.world, stage.fleet, stage.feed, speaker)
    story.a_person_is_asked()
    story.killed_after_the_payment()
    story.killed_before_the_payment()
    story.settle()
    runs = [stage.client.get(run_id) for run_id in story.runs]
    lines, _ = stage.world.lines()
    summary = proof.sum_up(runs, lines, story.facts, stage.fleet.workers, time.monotonic() - clock)
    speaker.retell(_retold(stage, story.killed_runs[-1]))
    speaker.end(summary)
    return summary.is_good


def _retold(stage: Stage, run_id: str) -> Timeline:
    """A run as `runs show` tells it, with the workers' short names."""
    told = timeline(stage.client.runtime, run_id, str(stage.client.settings.scope))

    def name(found: re.Match[str]) -> str:
        return stage.fleet.name_of(found[0]) or found[0]

    entries = [each.model_copy(update={"what": _WORKER_ID.sub(name, each.what)}) for each in told.entries]
    return told.model_copy(update={"entries": tuple(entries)})


@contextmanager
def _stage(folder: Path, speaker: Teller, flower: bool) -> Iterator[Stage]:
    """Start everything in one folder, and end it again.

    Raises: DemoFailed with everybody's last words, CortexError of the servers.
    """
    with ExitStack() as undo:
        environment = undo.enter_context(_servers(folder, speaker))
        fleet = Fleet(folder / "log", dict(os.environ))
        undo.callback(fleet.end)
        try:
            with speaker.busy("two workers and beat start"):
                stage = _start(undo, fleet, World(folder), flower, environment)
            speaker.ready(fleet)
            undo.callback(_deaf)
            yield stage
        except (DemoFailed, CortexError) as error:
            raise DemoFailed(str(error), fleet.last_words()) from error


@contextmanager
def _servers(folder: Path, speaker: Teller) -> Iterator[dict[str, str]]:
    """PostgreSQL and Valkey, empty and with the tables made, and the environment that names them."""
    servers = EmbeddedServers(folder / "servers", durable=False)
    servers.remove_data()  # of a demo that was killed
    clear_away = servers.remove_data
    try:
        with speaker.busy("PostgreSQL and Valkey start"):
            servers.start()
        _forget_the_last_time(folder)
        environment = {
            **SETTINGS,
            "CORTEX_DATABASE_URL": servers.database_url,
            "CORTEX_BROKER_URL": servers.broker_url,
            world.FOLDER_VARIABLE: str(folder),
        }
        with _environment(environment):
            with speaker.busy("the tables are made"):
                migrate.upgrade(servers.database_url)
            yield environment
    except (DemoFailed, CortexError):
        clear_away = servers.stop  # what they said and hold may tell why
        raise
    finally:
        clear_away()


def _forget_the_last_time(folder: Path) -> None:
    shutil.rmtree(folder / "log", ignore_errors=True)
    for file in folder.iterdir():
        if file.is_file():
            file.unlink()


def _start(undo: ExitStack, fleet: Fleet, there: World, flower: bool, environment: dict[str, str]) -> Stage:
    """Two workers, beat, and Flower when it is wanted; the workers are ready when this returns."""
    for _ in range(2):
        fleet.start_worker()
    fleet.start_beat()
    if flower:
        fleet.start_flower()
    client = undo.enter_context(Client())
    feed = Feed(client, there, fleet)
    fleet.wait_ready(DEADLINE_S)
    return Stage(client, there, fleet, feed, environment)


@contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    """Only the demo's own settings count, here and in its children."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(_OURS):
            del os.environ[name]
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _stoppable() -> Iterator[None]:
    """Make Ctrl-C and SIGTERM raise `Stopped`, once; what follows is not disturbed again."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        _deaf()
        raise Stopped

    for each in before:
        signal.signal(each, stop)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _deaf() -> None:
    """From here on everything is being put away, which takes seconds and must not be cut short."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)


@contextmanager
def _at_hand(folder: Path, stage: Stage, elsewhere: bool) -> Iterator[dict[str, str]]:
    """Let other commands find the fleet, and give the environment that they need besides.

    They find it by themselves, unless they would find another one first.
    """
    names = ["CORTEX_SCOPE"]
    if elsewhere or here.running_up(folder) is not None:
        yield {name: stage.addresses[name] for name in ["CORTEX_DATABASE_URL", "CORTEX_BROKER_URL", *names]}
        return
    here.announce(folder, stage.addresses["CORTEX_DATABASE_URL"], stage.addresses["CORTEX_BROKER_URL"])
    try:
        yield {name: stage.addresses[name] for name in names}
    finally:
        here.withdraw(folder)


def _until_stopped(fleet: Fleet) -> NoReturn:
    """Leave everything running until somebody ends the demo.

    Raises: Stopped, DemoFailed when a process of the fleet has ended.
    """
    while True:
        fleet.check()
        time.sleep(0.5)  # until a signal or the end of a process, which it looks for

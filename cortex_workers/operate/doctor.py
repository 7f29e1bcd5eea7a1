"""Looks at everything a fleet needs and says of each: fine, worth a look, or broken, what it means, and what to do.

Source: issue of the main job (CLI); celery.md 18, 23; rulings 16, 53.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Literal

from cortex_workers.errors import CortexError, StoreUnavailable
from cortex_workers.operate import serving
from cortex_workers.operate.words import many, span
from cortex_workers.ports import HintDepth
from cortex_workers.schemas.base import Document
from cortex_workers.settings import PREFIX, Settings, mask_url
from cortex_workers.store import migrate, overview, sweeps, workers
from cortex_workers.store.database import Database
from cortex_workers.store.unit import Unit
from cortex_workers.sweep import frame

Status = Literal["ok", "warn", "fail"]
OLDEST_SUPPORTED = 140_000
SKEW_S = 2.0
WAITING_WARN_S, WAITING_FAIL_S = 60.0, 600.0
_OF_SERVER = 3
"""The first checks of the database are of the server; the rest is about the fleet's rows."""
_OTHER_VARIABLES = ("PROBE", "READY_FILE", "LIVE_FILE")


class Check(Document):
    """One finding; ``do`` is empty when there is nothing to do."""

    name: str
    status: Status
    says: str
    do: str = ""


def ok(name: str, says: str) -> Check:
    """A finding that needs nothing."""
    return Check(name=name, status="ok", says=says)


def warn(name: str, says: str, do: str) -> Check:
    """Something to look at."""
    return Check(name=name, status="warn", says=says, do=do)


def fail(name: str, says: str, do: str) -> Check:
    """Something that keeps runs from going on."""
    return Check(name=name, status="fail", says=says, do=do)


def examine(settings: Settings, depth: HintDepth | None = None) -> list[Check]:
    """Every check, in the order in which one would repair; ``depth`` is how the broker is asked."""
    rows = _database(settings)
    return [_settings(settings), *rows[:_OF_SERVER], _broker(settings, depth), *rows[_OF_SERVER:]]


# --- Settings and broker ----------------------------------------------------------------------------------------------


def _settings(settings: Settings) -> Check:
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    known |= {f"{PREFIX}{name}" for name in _OTHER_VARIABLES}
    strange = [name for name in sorted(os.environ) if name.startswith(PREFIX) and name not in known]
    strange = [name for name in strange if not name.startswith((f"{PREFIX}TEST_", f"{PREFIX}MATRIX_"))]
    if strange:
        return warn(
            "settings",
            f"unknown variables, which nobody reads: {', '.join(strange)}",
            "correct the name (see deploy/settings.md) or remove them",
        )
    return ok(
        "settings",
        f"pool {settings.pool}, lease {span(settings.lease_ttl_s)}, {settings.slots} slots a process",
    )


def _broker(settings: Settings, depth: HintDepth | None) -> Check:
    if settings.broker_url is None:
        return fail(
            "broker", f"{PREFIX}BROKER_URL is not set", "set it to the Redis or RabbitMQ that carries hints"
        )
    where = mask_url(settings.broker_url.get_secret_value())
    waiting = {
        kind: depth.depth(settings.queue_for(kind)) if depth is not None else None
        for kind in ("resume", "continue", "sweep")
    }
    if None in waiting.values():
        return fail(
            "broker",
            f"{where} cannot be reached; runs still go on, found by workers and their own sweeps, but late",
            "start it, or correct the address",
        )
    told = ", ".join(f"{settings.queue_for(kind)} {count}" for kind, count in waiting.items())
    return ok("broker", f"{where}; waiting: {told}")


# --- Database ---------------------------------------------------------------------------------------------------------


def _database(settings: Settings) -> list[Check]:
    if settings.database_url is None:
        return [fail("database", f"{PREFIX}DATABASE_URL is not set", "set it to the PostgreSQL of the fleet")]
    where = mask_url(settings.database_url.get_secret_value())
    database = Database(settings, lambda _notification: None)
    try:
        with database.read() as unit:
            began = datetime.now(UTC)
            at = overview.now(unit)
            took = datetime.now(UTC) - began
            server = overview.server(unit)
        found = [_server(where, server, took.total_seconds()), _schema(settings)]
        found.append(_skew(at - (began + took / 2)))
        if found[1].status == "fail":
            return found
        with database.read() as unit:
            return [*found, *(_guarded(name, check, unit, settings) for name, check in _OF_ROWS)]
    except StoreUnavailable as error:
        return [fail("database", f"{where}: {error.message}", "start PostgreSQL, or correct the address")]
    finally:
        database.dispose()


def _guarded(name: str, check: Callable[[Unit, Settings], Check], unit: Unit, settings: Settings) -> Check:
    try:
        return check(unit, settings)
    except CortexError as error:
        return fail(name, f"could not be looked at: {error.message}", "look at the database's log")


def _server(where: str, server: object, took_s: float) -> Check:
    row = dict(server)  # type: ignore[call-overload]
    if int(row["version_num"]) < OLDEST_SUPPORTED:
        return fail("database", f"{where} is PostgreSQL {row['version']}", "use PostgreSQL 14 or newer")
    return ok("database", f"{where}, PostgreSQL {row['version']}, answers in {span(took_s)}")


def _schema(settings: Settings) -> Check:
    found, wanted = migrate.current(settings.require_database()), migrate.head()
    try:
        migrate.require_current(settings.require_database())
    except CortexError:
        return fail(
            "schema", f"at {found or 'nothing'}, this version needs {wanted}", "run `cortex-workers migrate`"
        )
    if found != wanted:
        return warn("schema", f"at {found}, newer than this version ({wanted})", "finish the deploy")
    return ok("schema", f"at {found}")


def _skew(skew: timedelta) -> Check:
    seconds = skew.total_seconds()
    if abs(seconds) > SKEW_S:
        return warn(
            "clock",
            f"this machine is {span(abs(seconds))} {'behind' if seconds > 0 else 'ahead of'} the database; "
            "deadlines and leases go by the database and are right, times in logs are not",
            "set up time synchronisation",
        )
    return ok("clock", f"{span(abs(seconds))} apart from the database")


# --- Rows -------------------------------------------------------------------------------------------------------------


def _sweep(unit: Unit, settings: Settings) -> Check:
    age = sweeps.oldest_age_s(unit, [each.name for each in frame.PASSES if each.every_s is None])
    start = "start beat: celery -A cortex_workers.tasks.app beat"
    if age is None:
        return warn("sweep", "nobody ever swept this database", start)
    if age > 3 * settings.sweep_interval_s:
        return fail(
            "sweep",
            f"the last one ended {span(age)} ago (every {span(settings.sweep_interval_s)} is meant): deadlines pass "
            "unseen and runs of dead workers stay where they are",
            start,
        )
    return ok("sweep", f"the last one ended {span(age)} ago")


def _workers(unit: Unit, settings: Settings) -> Check:
    alive = [each for each in workers.list_all(unit) if each.alive and each.slots > 0]
    counts = overview.counts_across_scopes(unit)
    waiting = counts.get("ready", 0) + counts.get("reclaimable", 0)
    if not alive:
        says = f"none is alive; {many(waiting, 'run')} waiting" if waiting else "none is alive"
        do = "start one: celery -A cortex_workers.tasks.app worker"
        return fail("workers", says, do) if waiting else warn("workers", says, do)
    slots = sum(each.slots for each in alive)
    free = sum(max(each.slots - each.slots_used, 0) for each in alive)
    draining = sum(1 for each in alive if each.draining_at or each.drain_requested_at)
    says = f"{len(alive)} alive, {free} of {slots} slots free" + (
        f", {draining} draining" if draining else ""
    )
    versions = sorted({each.version for each in alive})
    if len(versions) > 1:
        says += f"; versions {', '.join(versions)}"
    if free == 0 and waiting:
        return warn("workers", f"{says}; {many(waiting, 'run')} waiting", "start more workers")
    return ok("workers", says)


def _connections(unit: Unit, settings: Settings) -> Check:
    server = overview.server(unit)
    alive = sum(1 for each in workers.list_all(unit) if each.alive and each.slots > 0)
    most = alive * (settings.db_pool + settings.db_lease_pool) + 10
    allowed = int(server["max_connections"] * 0.8)
    says = f"{server['connections']} open, {server['max_connections']} allowed"
    if most > allowed:
        return warn(
            "connections",
            f"{says}; {alive} workers with pools as here may open {most}",
            "raise max_connections, lower CORTEX_DB_POOL, or put a pooler in front",
        )
    return ok("connections", says)


def _agents(unit: Unit, settings: Settings) -> Check:
    unserved = overview.unserved_across_scopes(unit)
    if unserved:
        first = unserved[0]
        why = serving.why_unserved(unit, first["pool"], first["agent"], first["digest"])
        count = sum(int(row["number"]) for row in unserved)
        more = f" (and {len(unserved) - 1} more versions)" if len(unserved) > 1 else ""
        return fail(
            "agents",
            f"{many(count, 'run')} waiting for a worker that can run them: {why}{more}",
            "start workers that have it",
        )
    idle = overview.agents_without_worker(unit)
    if idle:
        return warn(
            "agents",
            f"no live worker runs the current version of: {', '.join(idle)}",
            "start a worker that has them; new runs of them wait",
        )
    return ok("agents", "every agent has a live worker")


def _waiting(unit: Unit, settings: Settings) -> Check:
    age = overview.oldest_ready_s_across_scopes(unit)
    counts = overview.counts_across_scopes(unit)
    states = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if ":" not in name)
    waits = ", ".join(f"{count} {name[5:]}" for name, count in sorted(counts.items()) if ":" in name)
    says = (states or "no live runs") + (f" (waiting for: {waits})" if waits else "")
    if age is None:
        return ok("runs", says)
    says += f"; the oldest that could start has waited {span(age)}"
    if age > WAITING_FAIL_S:
        return fail("runs", says, "start more workers, or see why these do not claim it")
    if age > WAITING_WARN_S:
        return warn("runs", says, "start more workers")
    return ok("runs", says)


def _overdue(unit: Unit, settings: Settings) -> Check:
    late = overview.overdue_across_scopes(unit, 2 * settings.sweep_interval_s)
    found = [f"{count} {what}" for what, count in sorted(late.items()) if count]
    if found:
        return fail(
            "overdue",
            f"{' and '.join(found)} ended more than two sweep intervals ago and nobody acted",
            "run `cortex-workers sweep` and look for sweep.row_failed in the log",
        )
    return ok("overdue", "no lease and no pause is past its time")


def _uncertain(unit: Unit, settings: Settings) -> Check:
    found = overview.uncertain_across_scopes(unit)
    left = (
        f"{many(found['left_open'], 'call')} of ended runs without a known outcome"
        if found["left_open"]
        else ""
    )
    if found["asked"]:
        return warn(
            "effects",
            f"{many(found['asked'], 'call')} may have taken effect, somebody is asked: {', '.join(found['first'])}"
            + (f"; {left}" if left else ""),
            "look at each (checkpoints show ID) and settle it: "
            "checkpoints settle ID --happened --result JSON | --did-not-happen | --stop",
        )
    return ok("effects", left or "none is uncertain")


_OF_ROWS: tuple[tuple[str, Callable[[Unit, Settings], Check]], ...] = (
    ("connections", _connections),
    ("sweep", _sweep),
    ("workers", _workers),
    ("agents", _agents),
    ("runs", _waiting),
    ("overdue", _overdue),
    ("effects", _uncertain),
)

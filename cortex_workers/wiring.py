"""The composition root: every concrete class and hook of a process, wired once.

Only the broker's publisher is added above, by `tasks` or `client`.
Source: house.md principle 13; rulings 26, 32, 53.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Literal

from cortex_workers import __version__, telemetry
from cortex_workers.a2a.bus import ToolBus
from cortex_workers.a2a.hooks import on_transition
from cortex_workers.engine.runtime import Runtime, Served, Versions
from cortex_workers.errors import Misconfiguration, UnknownModel
from cortex_workers.host import Host, load_host
from cortex_workers.lease.drain import DrainSwitch
from cortex_workers.lease.identity import holder_id, worker_id
from cortex_workers.lease.keeper import DrainRequest, LeaseKeeper
from cortex_workers.lease.loops import Loops, ThreadRunner
from cortex_workers.lease.slots import Slots
from cortex_workers.notify.hooks import Hooks
from cortex_workers.ports import ModelClient
from cortex_workers.settings import Settings
from cortex_workers.store import agents, migrate, waits, workers
from cortex_workers.store.claims import READER_VERSION
from cortex_workers.store.database import Database
from cortex_workers.store.unit import Hook, Unit

Role = Literal["worker", "client"]


def build(
    settings: Settings,
    *,
    host: Host | None = None,
    role: Role = "worker",
    drain: DrainSwitch | None = None,
    transition_hooks: Iterable[Hook] = (),
) -> Runtime:
    """Wire a process. A worker loads the host that its settings name; a client has one only when it is given.

    Nothing is started and the database is not reached yet.
    Raises: HostNotLoadable, Misconfiguration of the host.
    """
    if role == "worker" and host is None:
        if settings.host is None:
            raise Misconfiguration(
                "CORTEX_HOST is not set; it names the agents and tools, like shop.agents:host"
            )
        host = load_host(settings.host)
    if host is not None:
        host.check()
    hooks = Hooks()
    for kinds, subscriber in host.subscribers if host is not None else ():
        hooks.subscribe(subscriber, *kinds)
    database = Database(settings, hooks.publish, (on_transition, *transition_hooks))
    slots = Slots(settings.slots if role == "worker" else 0)
    drain = drain or DrainSwitch()
    me = worker_id() if role == "worker" else holder_id()
    keeper = LeaseKeeper(database, settings, me, slots=slots, on_drain_request=_ask_to_drain(drain))
    return Runtime(
        settings=settings,
        database=database,
        hooks=hooks,
        host=host,
        worker_id=me,
        keeper=keeper,
        slots=slots,
        drain=drain,
        loops=Loops(),
        threads=ThreadRunner(settings, drain),
        versions=Versions(database),
        served=Served(host),
        resolve_model=_model_resolver(host),
        bus=ToolBus() if host is not None and host.messaging else None,
        starter=start,
        stopper=stop,
    )


def _ask_to_drain(drain: DrainSwitch) -> Callable[[DrainRequest], None]:
    return lambda _request: drain.set()


def _model_resolver(host: Host | None) -> Callable[[str], ModelClient]:
    def resolve(model: str) -> ModelClient:
        # Imported on use: a producer never loads the model layer.
        from cortex_workers.llm.resolve import client_for

        if host is None:
            raise UnknownModel("this process has no host and calls no model")
        return client_for(host, model)

    return resolve


def start(rt: Runtime, queues: Iterable[str] = ()) -> None:
    """Begin to hold runs: check the schema and the models, publish the agents, register the worker, start the keeper.

    Raises: SchemaBehind, StoreUnavailable, UnknownModel, Misconfiguration.
    """
    host = rt.require_host()
    migrate.require_current(rt.settings.require_database())
    is_worker = rt.slots.total > 0
    if is_worker:
        from cortex_workers.llm.resolve import check_models

        check_models(host)
    definitions = list(host.definitions().values())
    own = [rt.versions.add(item) for item in definitions]
    with rt.database.read() as unit:
        known = agents.all_versions(unit)
    for digest, definition in [*zip(own, definitions, strict=True), *known]:
        rt.served.look_at(digest, definition)

    def register(unit: Unit) -> None:
        workers.register(
            unit,
            rt.worker_id,
            version=__version__,
            reader_version=READER_VERSION,
            slots=rt.slots.total,
            pool=rt.settings.pool,
            agents=rt.served.digests,
            own_agents=own if is_worker else (),
            queues=list(queues),
            heartbeat_every_s=rt.settings.lease_renew_s,
        )
        if is_worker:
            agents.publish(unit, definitions)
            # What waited for somebody like this worker need not wait for the sweep.
            waits.end_unserved(unit, rt.settings.sweep_page)
        else:
            agents.add_versions(unit, definitions)

    rt.database.run(register)
    rt.registered = True
    rt.keeper.start()
    telemetry.event("worker.started", worker_id=rt.worker_id, agents=[item.name for item in definitions])


def stop(rt: Runtime, ended_as: str = "stopped") -> None:
    """End a process's part: its keeper, loops, hints, row and connections. Whatever it still held lapses."""
    rt.slots.close()
    rt.keeper.stop()
    rt.loops.close()
    try:
        if rt.registered:
            rt.database.run(lambda unit: workers.end(unit, rt.worker_id, ended_as), lease=True)
    except Exception as error:  # at the very end nothing may keep a process from leaving
        telemetry.event("worker.stopped", "warning", worker_id=rt.worker_id, error=type(error).__name__)
    rt.flush(2.0)
    for close in rt.closers:
        close()
    rt.database.dispose()


def close_at_exit(rt: Runtime, owner: object) -> Callable[[], object]:
    """Stop a runtime when its owner is collected or the interpreter ends; returns what does it earlier."""
    return weakref.finalize(owner, stop, rt)

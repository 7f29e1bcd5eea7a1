"""Ask workers to drain: they take no new work, hand off what they run, and end.

Source: ruling 71; tables.md (workers).
"""

from __future__ import annotations

from cortex_workers.engine.runtime import Runtime
from cortex_workers.engine.validate import checked_text
from cortex_workers.errors import WorkerNotFound
from cortex_workers.store import workers
from cortex_workers.store.unit import Unit


def drain(rt: Runtime, worker: str | None, by: str, reason: str | None = None) -> list[str]:
    """Ask one worker (its id, or a part of it that only one live worker has), or None: all of them.

    They read it with their next heartbeat; asking again changes nothing. Returns the ids of those asked.
    Raises: WorkerNotFound, UnstorableText.
    """
    if reason is not None:
        checked_text("the reason", reason)
    if worker is None:
        return rt.database.run(lambda unit: workers.request_drain(unit, None, by, reason))
    chosen = _find(rt, worker)
    return rt.database.run(lambda unit: workers.request_drain(unit, chosen, by, reason))


def _find(rt: Runtime, worker: str) -> str:
    def live(unit: Unit) -> list[str]:
        return [each.id for each in workers.list_all(unit) if each.alive]

    with rt.database.read() as unit:
        known = live(unit)
    if worker in known:
        return worker
    matching = [each for each in known if worker and worker in each]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise WorkerNotFound(
            f"{worker!r:.80} is a part of {len(matching)} live workers: {', '.join(matching[:5])}"
        )
    raise WorkerNotFound(f"there is no live worker {worker!r:.80}; see `cortex-workers workers list`")

"""What the store should allow, said a second time in plain Python, and what must hold after every step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cortex_workers.schemas.lease import Term
from cortex_workers.schemas.lifecycle import TERMINAL_RUN_STATES, Fence, LeaseEffect, Transition
from cortex_workers.schemas.notifications import Notification
from cortex_workers.store.transitions import Guard, Row

WAITING = ("ready", "reclaimable")
CALLS = ("RunReady", "RunReclaimable", "ResumeAdmitted")
"""The kinds of notification that call a worker."""
BY_THE_TURN = {"wait_reason", "notified_at"}
"""What a recomputation of a session's turn may change on runs that did not move."""


@dataclass(frozen=True)
class World:
    """All rows of one example at one moment."""

    at: datetime
    runs: Mapping[str, Row]
    pauses: Mapping[str, Row]
    events: Sequence[tuple[str, int, int]]
    """Run, ordinal and revision, in the order of the ordinals."""
    sessions: Mapping[str, Row]


def allows(row: Transition, run: Row, guard: Guard, world: World) -> bool:
    """Whether a transition should go through."""
    if run["state"] not in row.sources:
        return False
    if row.fence in (Fence.OWNER, Fence.TERM):
        return holds(run, guard.term) and (row.fence is Fence.TERM or run["lease_expires_at"] > world.at)
    if row.fence is Fence.LAPSED:
        return bool(run["lease_expires_at"] <= world.at)
    if row.fence is Fence.OVERDUE_START:
        in_time = run["start_by"] is None or run["start_by"] > world.at
        return run["queue_class"] == "start" and not in_time
    if guard.revision is not None and guard.revision != run["revision"]:
        return False
    if row.fence in (Fence.LIVE_PAUSE, Fence.THIS_PAUSE, Fence.OVERDUE_PAUSE):
        return _pause_allows(row.fence, run, guard, world)
    return True


def holds(run: Row, term: Term | None) -> bool:
    """Whether a term is the one under which a run is held."""
    assert term is not None
    return bool(
        run["state"] == "running" and (run["lease_owner"], run["revision"]) == (term.owner, term.revision)
    )


def _pause_allows(fence: Fence, run: Row, guard: Guard, world: World) -> bool:
    pause = world.pauses.get(guard.suspension_id or "")
    if pause is None or run["suspension_id"] != pause["id"] or pause["ended_at"] is not None:
        return False
    overdue = pause["expires_at"] is not None and pause["expires_at"] <= world.at
    return {Fence.LIVE_PAUSE: not overdue, Fence.OVERDUE_PAUSE: overdue, Fence.THIS_PAUSE: True}[fence]


def claimable(run: Row, at: datetime) -> bool:
    """Whether any worker that serves a run may claim it now."""
    waits = run["state"] in WAITING and run["wait_reason"] is None and run["not_before"] <= at
    too_late = run["queue_class"] == "start" and run["start_by"] is not None and run["start_by"] <= at
    return bool(waits and not too_late)


def best(world: World) -> str | None:
    """The run that a worker should take next: begun ones first, in the order of their ranks."""
    found = [run for run in world.runs.values() if claimable(run, world.at)]
    return min(found, key=lambda run: (run["queue_class"], run["rank"]))["id"] if found else None


def due(world: World) -> tuple[set[str], set[str], set[str]]:
    """The runs whose lease is over, the pauses past their deadline, the runs not started in time."""
    runs, pauses = world.runs.values(), world.pauses.values()
    lapsed = {run["id"] for run in runs if run["state"] == "running" and run["lease_expires_at"] <= world.at}
    overdue = {
        pause["id"]
        for pause in pauses
        if not pause["ended_at"] and pause["expires_at"] and pause["expires_at"] <= world.at
    }
    unstarted = [run for run in runs if run["state"] == "ready" and run["queue_class"] == "start"]
    return (
        lapsed,
        overdue,
        {run["id"] for run in unstarted if run["start_by"] and run["start_by"] <= world.at},
    )


# --- What holds after every step ----------------------------------------------------------------------------------


def check_only_this_moved(before: World, after: World, moved: str | None) -> None:
    """A refusal changes nothing; a success changes one run, and of its siblings only whose turn it is."""
    for run_id, old in before.runs.items():
        new = after.runs[run_id]
        if run_id == moved:
            assert new["revision"] == old["revision"] + 1, "a success raises the revision by one"
            continue
        differ = {name for name in old if old[name] != new[name]}
        may = BY_THE_TURN if moved and _siblings(before.runs[moved], old) else set()
        assert differ <= may, f"{run_id} changed without being moved: {differ}"
    if moved is None:
        assert after.events == before.events
        assert after.pauses == before.pauses
        assert after.sessions == before.sessions


def check_moved(row: Transition, old: Row, new: Row) -> None:
    """What the row of the table says of the run that moved."""
    assert new["state"] == row.target
    fenced = old["lease_expires_at"] if row.lease is LeaseEffect.FENCE else old["fenced_until"]
    assert new["fenced_until"] == fenced, (
        "what is taken from a holder is fenced until its lease would have ended"
    )
    assert new["reclaim_count"] == (0 if row.good_end else old["reclaim_count"] + row.counts_reclaim)
    assert new["queue_class"] == ("begun" if row.begins else old["queue_class"])
    assert new["instruction"] == (row.instruction or old["instruction"])


def _siblings(one: Row, other: Row) -> bool:
    return bool(one["session_id"] == other["session_id"] and other["shared"])


def check_laws(before: World, after: World) -> None:
    """What no sequence of steps may break."""
    for run in after.runs.values():
        leased = (run["lease_owner"] is not None, run["lease_expires_at"] is not None)
        assert leased == (run["state"] == "running",) * 2, "running and leased are one thing"
        live = [
            pause for pause in after.pauses.values() if pause["run_id"] == run["id"] and not pause["ended_at"]
        ]
        expected = [run["suspension_id"]] if run["state"] == "paused" else []
        assert [pause["id"] for pause in live] == expected, "a run is paused on exactly one live pause"
        old = before.runs.get(run["id"])
        if old is not None and old["state"] in TERMINAL_RUN_STATES:
            assert {**run, "fenced_until": None} == {**old, "fenced_until": None}, (
                "a terminal row never changes"
            )
    _check_events(after)
    _check_sessions(after)


def _check_events(after: World) -> None:
    """One event a revision, in the order of the revisions, within the ordinals that were given out."""
    expected = {run["id"]: list(range(1, run["revision"] + 1)) for run in after.runs.values()}
    found: dict[str, list[int]] = {}
    for run_id, ordinal, revision in after.events:
        found.setdefault(run_id, []).append(revision)
        assert ordinal < after.runs[run_id]["next_seq"]
    assert found == expected
    assert len({(run_id, ordinal) for run_id, ordinal, _ in after.events}) == len(after.events)


def _check_sessions(after: World) -> None:
    for session in after.sessions.values():
        mine = [run for run in after.runs.values() if run["session_id"] == session["id"]]
        ended = [run["completion_seq"] for run in mine if run["state"] in TERMINAL_RUN_STATES]
        assert sorted(ended) == list(range(1, session["completion_seq"] + 1)), "each end takes the next place"
        serial = [run for run in mine if run["serial"]]
        running = [run for run in serial if run["state"] == "running"]
        assert len(running) <= 1, "a serial session has one running run"
        _check_turn(after.at, serial, running)


def _check_turn(at: datetime, serial: Sequence[Row], running: Sequence[Row]) -> None:
    """Whoever runs has the turn, else the first begun, else the first start; nobody waits for nobody."""
    waiting = [run for run in serial if run["state"] in WAITING]
    have_it = [run["id"] for run in waiting if run["wait_reason"] != "turn"]
    fenced = [run["fenced_until"] for run in serial if run["state"] == "cancelled" and run["fenced_until"]]
    if running or any(until > at for until in fenced):
        assert have_it == []
    elif waiting and not fenced:
        first = min(waiting, key=lambda run: (run["queue_class"], run["session_seq"]))
        assert have_it == [first["id"]]
    for run in waiting:
        # Until the waits pass looks again, it may wait for a time that has come.
        assert run["wait_reason"] in (None, "turn", "later")


def check_told(before: World, after: World, told: Sequence[Notification], quietly: str | None) -> None:
    """Whatever may be claimed and could not before is told of; ``quietly`` names what was handed back."""
    kinds: dict[str, list[Any]] = {}
    for news in told:
        kinds.setdefault(news.run_id, []).append(news)
    for run in after.runs.values():
        old = before.runs.get(run["id"])
        # Told of while it waits for a time, it would only be looked at in vain; healing tells of it then.
        free = claimable(run, after.at)
        was_free = old is not None and claimable(old, before.at)
        moved = old is not None and old["revision"] != run["revision"]
        if free and (moved or not was_free) and run["id"] != quietly:
            told_of = [item for item in kinds.get(run["id"], []) if item.kind in CALLS]
            assert [item.revision for item in told_of] == [run["revision"]], f"{run['id']} was not told of"

"""I1 to I6 of the bug cases, read from the rows, the broker and the tools' lines; never asked of our own code."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import psycopg
import redis

from cortex_workers.schemas.lifecycle import RUN, TERMINAL_RUN_STATES

Connection = psycopg.Connection[dict[str, Any]]
Row = Mapping[str, Any]

_ENDED = sorted(str(state) for state in TERMINAL_RUN_STATES)
_MOVES = {f"run.{each.name}": each for each in RUN}
_FIRST = ""


def effects_once(effects: Iterable[Row]) -> None:
    """I1: no idempotency key has two effects."""
    twice = {key: count for key, count in Counter(line["key"] for line in effects).items() if count > 1}
    assert not twice, f"these happened more than once: {twice}"


def left_behind(connection: Connection) -> list[dict[str, Any]]:
    """I4: leases that ran out, and pauses past their deadline that may be expired."""
    lapsed = (
        "SELECT id, 'lapsed lease' AS what FROM runs WHERE state = 'running' AND lease_expires_at <= now()"
    )
    overdue = (
        "SELECT s.id, 'overdue pause' AS what FROM suspensions s JOIN runs r ON r.id = s.run_id"
        " JOIN sessions e ON e.id = s.session_id"
        " WHERE s.ended_at IS NULL AND s.expires_at <= now() AND r.state = 'paused' AND e.gated_at IS NULL"
    )
    return connection.execute(f"{lapsed} UNION ALL {overdue}".encode()).fetchall()


def messages(broker: "redis.Redis", unacknowledged: bool = True) -> dict[str, int]:
    """I5: what lies in the queues, or is held unacknowledged by a worker."""
    found: dict[str, int] = {}
    for key in broker.keys("*"):  # type: ignore[union-attr]
        name = key.decode()
        if ":cw." in name and broker.type(key) == b"list":
            found[name] = int(broker.llen(key))  # type: ignore[arg-type]
        elif unacknowledged and name.endswith("unacked"):
            found[name] = int(broker.hlen(key))  # type: ignore[arg-type]
    return {name: count for name, count in found.items() if count}


def rows(connection: Connection) -> None:
    """I2, I3 and I6, for every run there is."""
    for run in connection.execute("SELECT id, state, revision FROM runs ORDER BY id").fetchall():
        events = connection.execute(
            "SELECT kind, revision, run_seq FROM events WHERE run_id = %s AND run_seq IS NOT NULL ORDER BY run_seq",
            (run["id"],),
        ).fetchall()
        history(run, [event for event in events if event["kind"] in _MOVES])
        said = connection.execute(
            "SELECT * FROM messages WHERE run_id = %s ORDER BY seq", (run["id"],)
        ).fetchall()
        steps = connection.execute(
            "SELECT count(*) AS n FROM steps WHERE run_id = %s", (run["id"],)
        ).fetchall()[0]["n"]
        conversation(run, said, steps)
    open_questions = connection.execute(
        "SELECT c.id, r.state FROM checkpoints c JOIN runs r ON r.id = c.run_id"
        " WHERE c.state = 'pending' AND r.state = ANY(%s)",
        (_ENDED,),
    ).fetchall()
    assert not open_questions, f"I6: an ended run still asks: {open_questions}"


def history(run: Row, events: list[dict[str, Any]]) -> None:
    """I2: the moves follow one another as the machine allows, one revision each, and nothing follows an end."""
    state = _FIRST
    for number, event in enumerate(events, start=1):
        move = _MOVES[event["kind"]]
        came_from = [str(source) for source in move.sources] or [_FIRST]
        told = f"I2: {run['id']}: {[each['kind'] for each in events]}"
        assert state in came_from, f"{told}: {event['kind']} from {state}"
        assert event["revision"] == number, f"{told}: revision {event['revision']} at move {number}"
        state = str(move.target)
    assert (state, len(events)) == (run["state"], run["revision"]), (
        f"I2: {run['id']} is {run['state']}: {events}"
    )


def conversation(run: Row, said: list[dict[str, Any]], steps: int) -> None:
    """I3: each call has one result, after it and before the next answer; nothing is said twice."""
    told = f"I3: {run['id']}: {[(row['role'], row['tool_call_id'] or row['tool_calls']) for row in said]}"
    waiting: set[str] = set()
    seen: set[str] = set()
    for row in said:
        if row["role"] == "tool":
            assert row["tool_call_id"] in waiting, f"{told}: a result without a call"
            waiting.discard(row["tool_call_id"])
            continue
        assert not waiting, f"{told}: calls without results"
        ids = [each["id"] for each in json.loads(row["tool_calls"] or "[]")]
        assert len(set(ids)) == len(ids) and not seen & set(ids), f"{told}: a call twice"
        seen |= set(ids)
        waiting = set(ids)
    answers = [row["step_index"] for row in said if row["role"] == "assistant"]
    assert answers == sorted(set(answers)), f"{told}: a step twice"
    assert len(answers) == steps, f"{told}: {steps} steps"
    if run["state"] == "completed":
        assert not waiting and said[-1]["role"] == "assistant", f"{told}: it ends without an answer"
    if run["state"] in ("ready", "running", "reclaimable"):
        raise AssertionError(f"{run['id']} is still {run['state']}")

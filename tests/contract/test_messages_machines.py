"""The machines of deliveries and questions: a row moves from its source states only, and each move is one revision."""

from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from cortex_workers.schemas.ids import CONVERSATION, DELIVERY, MESSAGE, new_id
from cortex_workers.schemas.lifecycle import MACHINES, STATES, Transition
from cortex_workers.store import a2a_conversations, a2a_deliveries, clock, tables, transitions
from cortex_workers.store.database import Database
from cortex_workers.testing import factory

TABLES = {"delivery": (tables.a2a_deliveries, "id"), "ask": (tables.a2a_asks, "reply_with")}
CASES = [
    pytest.param(machine, row, state, id=f"{machine}-{row.name}-{state}")
    for machine in TABLES
    for row in MACHINES[machine]
    for state in STATES[machine]
]


def made(machine: str) -> dict[str, Any]:
    if machine == "delivery":
        return {
            "id": new_id(DELIVERY),
            "scope": factory.SCOPE,
            "message_id": new_id(MESSAGE),
            "conversation_id": new_id(CONVERSATION),
            "receiver_agent": "pricing",
            "kind": "directive",
        }
    return {
        "scope": factory.SCOPE,
        "reply_with": new_id(MESSAGE),
        "message_id": new_id(MESSAGE),
        "conversation_id": new_id(CONVERSATION),
        "expected": 1,
        "deadline": clock.wall(),
    }


def arrange(database: Database, machine: str, state: str) -> dict[str, Any]:
    """A row in a state, whichever way leads there."""
    row = made(machine)
    table, key = TABLES[machine]
    creating = next(item for item in MACHINES[machine] if not item.sources)
    database.run(lambda unit: transitions.create_in(unit, machine, creating.name, [row]))
    with database.transaction() as unit:
        # Past every door of the store: only the state matters here.
        unit.execute(
            text(f"update {table.name} set state = :state where {key} = :key"),
            {"state": state, "key": row[key]},
        )
    return row


@pytest.mark.parametrize(("machine", "row", "state"), CASES)
def test_a_row_moves_from_its_source_states_only(
    common_database: Database, machine: str, row: Transition, state: str
) -> None:
    found = arrange(common_database, machine, state)
    table, key = TABLES[machine]
    if not row.sources:
        with pytest.raises(IntegrityError):
            common_database.run(lambda unit: transitions.create_in(unit, machine, row.name, [found]))
        return
    moved = common_database.run(
        lambda unit: transitions.apply_in(unit, machine, row.name, [table.c[key] == found[key]], {})
    )
    assert [item["state"] for item in moved] == ([row.target] if state in row.sources else [])


@pytest.mark.parametrize("change", [{"owner": "worker-z"}, {"revision": 1}, {"revision": 9}], ids=str)
@pytest.mark.parametrize("name", ["answer", "await_remote", "retry", "admit", "fail"])
def test_only_who_took_a_delivery_ends_its_call(
    common_database: Database, name: str, change: dict[str, Any]
) -> None:
    """g26"""
    row = arrange(common_database, "delivery", "queued")
    with common_database.read() as unit:
        queued = a2a_deliveries.get(unit, row["id"])
    assert queued is not None
    held = common_database.run(lambda unit: a2a_deliveries.call(unit, queued, "worker-a", 60.0))
    assert held is not None
    assert common_database.run(lambda unit: a2a_deliveries.call(unit, queued, "worker-b", 60.0)) is None
    stranger = {**held, **change}
    assert common_database.run(lambda unit: a2a_deliveries.finish_call(unit, name, stranger, {})) is None
    ended = common_database.run(lambda unit: a2a_deliveries.finish_call(unit, name, held, {}))
    assert ended is not None
    assert (ended["revision"], ended["owner"]) == (held["revision"] + 1, None)


def test_a_lapsed_call_is_taken_over_and_not_before(common_database: Database) -> None:
    """g25"""
    row = arrange(common_database, "delivery", "queued")

    def call(owner: str, lease_s: float) -> Any:
        with common_database.read() as unit:
            now = a2a_deliveries.get(unit, row["id"])
        assert now is not None
        return common_database.run(lambda unit: a2a_deliveries.call(unit, now, owner, lease_s))

    assert call("worker-a", 60.0) is not None
    assert call("worker-b", 60.0) is None
    with common_database.transaction() as unit:
        unit.execute(text("update a2a_deliveries set lease_expires_at = now() - interval '1 second'"))
    taken = call("worker-b", 60.0)
    assert (taken["owner"], taken["attempts"]) == ("worker-b", 2)


def test_two_first_messages_of_a_peers_thread_make_one_conversation(common_database: Database) -> None:
    """g15: in the same instant."""
    import threading
    from concurrent.futures import ThreadPoolExecutor

    start, context = threading.Barrier(8), new_id(MESSAGE)

    def begin(_: int) -> str:
        row = {
            "id": new_id(CONVERSATION),
            "scope": factory.SCOPE,
            "initiator": "x@paris",
            "participants": [],
            "hop_ceiling": 8,
            "peer_node": "paris",
            "peer_context": context,
        }
        start.wait()
        return str(common_database.run(lambda unit: a2a_conversations.begin(unit, row))["id"])

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(begin, range(8)))) == 1

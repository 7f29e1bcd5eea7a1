"""The lock order of every door of messages, read off its statements."""

from typing import Any

from tests.contract import test_lock_order as orders
from tests.contract.recorder import Recorder, Statement, recording
from tests.engine.talking import ANSWERS, Talk, ask, inbox, send
from tests.engine.world import World, say, turn

ORDER = [
    "sessions",
    "tenants",
    "a2a_conversations",
    "runs",
    "suspensions",
    "pending_calls",
    "checkpoints",
    "a2a_deliveries",
    "a2a_asks",
]


def out_of_order(transaction: list[Statement]) -> list[str]:
    held: list[str] = []
    for statement in transaction:
        for table, may_wait in statement.locks:
            if table not in ORDER or table in held:
                continue
            held.append(table)
            if may_wait and any(ORDER.index(table) < ORDER.index(other) for other in held[:-1]):
                return held
    return []


def check(recorder: Recorder) -> None:
    wrong = {str(found): one for one in recorder.transactions if (found := out_of_order(one))}
    assert list(wrong) == [], "\n\n".join(
        f"{found}:\n" + "\n".join(statement.sql[:300] for statement in one) for found, one in wrong.items()
    )
    waited_for = {
        name for one in recorder.transactions for item in one for name, waits in item.locks if waits
    }
    assert waited_for >= {
        "sessions",
        "a2a_conversations",
        "runs",
        "suspensions",
        "a2a_deliveries",
        "a2a_asks",
    }


def test_every_door_of_messages_takes_its_locks_in_order(world: World) -> None:
    from cortex_workers.sweep import frame

    script: dict[str, Any] = {
        "match": [
            {"input_contains": "ask", "turns": [turn(ask(["pricing", "stock"])), say()]},
            {"input_contains": "two", "turns": [turn(ask("pricing"), ask("stock")), say()]},
            {
                "input_contains": "send",
                "turns": [turn(send("pricing", performative="request")), turn(inbox()), say()],
            },
            {"default": True, "turns": [say()]},
        ]
    }
    talk = Talk(world, {"sales": script, "pricing": ANSWERS, "stock": ANSWERS})
    with recording(talk.worker.rt.database, talk.client.runtime.database) as recorder:
        for text in ("ask", "two", "send"):
            for session in (None, "talk"):
                talk.begin("sales", text, session=session)
        talk.all_quiet()
        answered = talk.begin("sales", "ask")
        talk.client.answer(answered, "By hand.", on_behalf_of="pricing")
        talk.client.answer(answered, "By hand.", on_behalf_of="stock")
        closed = talk.begin("sales", "two")
        for row in talk.asked(closed):
            talk.client.send("stock", "", performative="cancel", conversation_id=row["conversation_id"])
        cancelled = talk.begin("sales", "ask", session="talk")
        talk.client.cancel(cancelled)
        overdue = talk.begin("sales", "two", session="talk")
        world.later(301)
        frame.sweep(talk.worker.rt, force=True)
        assert world.run(overdue)["state"] == "ready"
        expired = talk.begin("sales", "ask")
        world.later(700)
        frame.sweep(talk.worker.rt, ["expiries"], force=True)
        assert world.run(expired)["state"] == "failed"
        talk.client.send("pricing", "Hello")
        talk.client.inbox("pricing")
    check(recorder)


def test_an_order_that_is_wrong_is_found() -> None:
    assert [name for name in ORDER if not name.startswith("a2a_")] == orders.ORDER
    made = [
        Statement("select 1 from a2a_asks for update", {}),
        Statement("select 1 from runs for update", {}),
    ]
    assert out_of_order(made) == ["a2a_asks", "runs"]

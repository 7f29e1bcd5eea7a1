"""Questions whose time is over are answered with a word the model can read; what was left behind is put right.

Source: messaging.md c.9, i.4; rulings 25, 65, 67.
"""

from __future__ import annotations

from cortex_workers.a2a import answer, words
from cortex_workers.engine.runtime import Runtime
from cortex_workers.schemas.a2a import Address
from cortex_workers.store import a2a_asks, a2a_deliveries, runs, suspensions
from cortex_workers.store.transitions import Row
from cortex_workers.store.unit import Unit


def expire_ask(rt: Runtime, key: str) -> bool:
    """End one overdue question (token and scope in one text); false when it was answered first."""
    token, _, scope = key.partition("\n")
    return rt.database.run(lambda unit: _expire(unit, rt, scope, token))


def _expire(unit: Unit, rt: Runtime, scope: str, token: str) -> bool:
    asked = a2a_asks.get(unit, scope, token)
    if asked is None:
        return False
    held = answer.hold(unit, asked["conversation_id"], asked)
    if held.ask is None or not held.open or not held.ask["overdue"]:
        return False
    on_the_way = {
        a2a_deliveries.receiver(row): row for row in a2a_deliveries.of_message(unit, asked["message_id"])
    }

    def why(receiver: Address) -> str:
        return _silence(unit, held.ask or {}, receiver, on_the_way.get(receiver))

    return answer.seal(unit, rt, held.ask, "timeout", why)


def _silence(unit: Unit, asked: Row, receiver: Address, delivery: Row | None) -> str:
    run = runs.get(unit, delivery["run_id"]) if delivery is not None and delivery["run_id"] else None
    reason = None
    if run is not None and run["state"] == "paused":
        pause = suspensions.get(unit, run["suspension_id"])
        reason = pause["reason"] if pause is not None else None
    return words.silence(str(receiver), asked["deadline"], delivery, run, reason)


def retire_ask(rt: Runtime, key: str) -> bool:
    """Close a question whose run does not wait for it any more."""
    token, _, scope = key.partition("\n")

    def work(unit: Unit) -> bool:
        asked = a2a_asks.get(unit, scope, token)
        if asked is None or asked["asker_run_id"] is None:
            return False
        run = runs.lock(unit, asked["asker_run_id"])
        if run is not None and run["state"] == "paused" and run["suspension_id"] == asked["suspension_id"]:
            return False
        return bool(a2a_asks.retire(unit, asked["asker_run_id"]))

    return rt.database.run(work)


def end_pause(rt: Runtime, suspension_id: str) -> bool:
    """Give a run that waits for agents what became of its questions, when all of them are closed."""
    with rt.database.read() as unit:
        pause = suspensions.get(unit, suspension_id)
        asked = a2a_asks.of_run(unit, pause["run_id"], open_only=False) if pause is not None else []
    mine = [row for row in asked if row["suspension_id"] == suspension_id]

    def work(unit: Unit) -> bool:
        done = False
        for row in mine:
            held = answer.hold(unit, row["conversation_id"], row)
            if held.ask is None or held.open:
                return False
            done = answer.settle(unit, rt, held.ask, lambda receiver: f"{receiver} did not answer")
        return done

    return rt.database.run(work)

"""Time: what is overdue is told, what ended retires its questions, and at an instant exactly one wins."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from cortex_workers.engine.ledger import discover_replies
from cortex_workers.errors import AskNotFound, AskSealed, CortexError, InvalidSettings, NotSuspended
from cortex_workers.settings import load_settings
from cortex_workers.store import tables
from cortex_workers.sweep import frame
from cortex_workers.testing.clock import stopped_clock
from tests.engine.talking import ANSWERS, ASKS, Talk, ask, asks, deliveries
from tests.engine.world import SCOPE, World, call, say, turn

BROADCAST = [turn(ask(["pricing", "stock"])), say("{last_result}")]


@pytest.fixture
def talk(world: World) -> Talk:
    return Talk(world, {"sales": ASKS, "many": BROADCAST, "pricing": ANSWERS, "stock": ANSWERS})


def sweep(talk: Talk, *names: str) -> dict[str, int]:
    return dict(frame.sweep(talk.worker.rt, names or None, by="test", force=True).done)


def admitted(talk: Talk, run_id: str) -> int:
    admissions = tables.resume_admissions
    return len(talk.world.rows(admissions, admissions.c.run_id == run_id))


def test_at_the_deadline_the_run_goes_on_with_what_has_come(talk: Talk) -> None:
    """g63: a word for everybody who is silent, and what he is doing; sweeping again changes nothing."""
    run_id = talk.begin("many")
    (asked,) = talk.asked(run_id)
    talk.client.send("many", "5 EUR", sender="pricing", in_reply_to=asked["reply_with"])
    assert sweep(talk, "asks") == {"asks": 0}
    talk.world.later(301)
    assert sweep(talk, "asks") == {"asks": 1}
    before = talk.world.rows(asks), talk.world.rows(tables.resume_admissions)
    for _ in range(3):
        sweep(talk, "asks", "replies")
    assert (talk.world.rows(asks), talk.world.rows(tables.resume_admissions)) == before
    assert talk.worker.finish(run_id)["state"] == "completed"
    result = talk.result(run_id)
    assert (result["complete"], [item["sender"] for item in result["replies"]]) == (
        False,
        ["pricing", "stock"],
    )
    silent = result["replies"][1]
    assert silent["performative"] == "failure"
    assert "stock did not reply before the deadline" in silent["content"]
    assert silent["content"].endswith("it has not begun")
    assert talk.world.call(run_id)["state"] == "completed", "data for the model, no failure of the tool"


@pytest.mark.parametrize(
    ("script", "doing"),
    [
        (ANSWERS, "it still works on it"),
        ([turn(call("pay", amount=1)), say()], "it waits for a person"),
        ([turn(ask("stock", reply_by_s=30)), say()], "it waits for another agent"),
    ],
)
def test_a_timeout_says_what_the_peer_is_doing(world: World, script: Any, doing: str) -> None:
    """ruling 65"""
    talk = Talk(world, {"sales": ASKS, "pricing": script, "stock": ANSWERS})
    run_id = talk.begin("sales")
    (expert,) = talk.carry()
    if script is not ANSWERS:
        talk.worker.finish(expert)
        world.sql(
            "update a2a_asks set deadline = deadline + interval '1 day' where asker_run_id = :id", id=expert
        )
    world.later(301)
    sweep(talk, "asks")
    talk.worker.finish(run_id)
    assert talk.result(run_id)["replies"][0]["content"].endswith(doing)


def test_a_timeout_does_not_stop_the_peer_and_its_answer_is_mail(talk: Talk) -> None:
    """g56, j28"""
    run_id = talk.begin("sales")
    (expert,) = talk.carry()
    talk.world.later(301)
    sweep(talk, "asks")
    talk.worker.finish(expert)
    talk.settle()
    assert admitted(talk, run_id) == 1
    assert [item.content for item in talk.client.inbox("sales")] == ["12 EUR"]


def test_a_broken_bus_does_not_hold_a_run_for_ever(talk: Talk) -> None:
    """g66: with the sweep of questions stopped, the run ends after deadline, grace and one interval, not before."""
    run_id = talk.begin("sales")
    with stopped_clock() as clock:
        (pause,) = talk.world.pauses(run_id)
        clock.set(pause["expires_at"] - timedelta(microseconds=1))
        assert sweep(talk, "expiries") == {"expiries": 0}
        clock.set(pause["expires_at"])
        assert sweep(talk, "expiries") == {"expiries": 0}, "the bus has one interval more"
        clock.advance(talk.worker.rt.settings.sweep_interval_s)
        assert sweep(talk, "expiries") == {"expiries": 1}
    run = talk.world.run(run_id)
    assert (run["state"], run["error_code"]) == ("failed", "suspension_expired")
    assert [row["seal_kind"] for row in talk.asked(run_id)] == ["retired"]


def test_the_sweep_that_tells_comes_before_the_sweep_that_ends(talk: Talk) -> None:
    """g65, g67; h35: after an outage longer than the grace the model still hears of it."""
    run_id = talk.begin("sales")
    talk.world.later(601)
    done = sweep(talk)
    assert (done["asks"], done["expiries"]) == (1, 0)
    assert talk.worker.finish(run_id)["state"] == "completed"
    assert talk.result(run_id)["complete"] is False


@pytest.mark.parametrize("grace_s", [0.0, 300.0])
def test_at_one_instant_either_the_timeout_or_the_end_wins(world: World, grace_s: float) -> None:
    """g65, g66: never both, never neither."""
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS})
    worker = world.worker(reply_grace_s=grace_s)
    outcomes = set()
    for _ in range(8):
        run_id = str(talk.client.enqueue("sales", "Go").id)
        worker.finish(run_id)
        (pause,) = world.pauses(run_id)
        world.sql(
            "update suspensions set expires_at = now() - interval '1 hour' where id = :id", id=pause["id"]
        )
        world.sql(
            "update a2a_asks set deadline = now() - interval '1 hour' where asker_run_id = :id", id=run_id
        )
        race(lambda: sweep(talk, "asks"), lambda: sweep(talk, "expiries"))
        state = world.run(run_id)["state"]
        assert (state, admitted(talk, run_id)) in {("ready", 1), ("failed", 0)}
        outcomes.add(state)
    assert outcomes <= {"ready", "failed"}


def test_a_negative_grace_is_refused() -> None:
    """g66"""
    with pytest.raises(InvalidSettings, match="REPLY_GRACE_S"):
        load_settings(reply_grace_s=-1)


@pytest.mark.parametrize("how", ["cancel", "expire"])
def test_who_asked_and_has_ended_waits_no_more(talk: Talk, how: str) -> None:
    """g70: undelivered questions are retired, late replies are mail and resume nobody."""
    run_id, other = talk.begin("sales"), talk.begin("sales")
    first, second = talk.queued()
    talk.deliver(first["id"])
    for each in (run_id, other):
        if how == "cancel":
            talk.client.cancel(each)
        else:
            talk.world.sql("update suspensions set expires_at = now() - interval '1 hour'")
            sweep(talk, "expiries")
    assert {row["seal_kind"] for row in talk.world.rows(asks)} == {"retired"}
    assert talk.delivery(second["id"])["state"] == "retired"
    talk.all_quiet()
    assert talk.delivery(first["id"])["state"] == "delivered"
    assert [item.content for item in talk.client.inbox("sales")] == ["12 EUR"]
    assert {talk.world.run(each)["state"] for each in (run_id, other)} == {
        "cancelled" if how == "cancel" else "failed"
    }
    with pytest.raises(AskNotFound):
        talk.client.answer(run_id, "Too late.")


def test_a_pause_that_returns_to_the_model_retires_its_questions(world: World) -> None:
    """g70, with ``on_expiry``: the model is told by the engine, as the last resort."""
    talk = Talk(world, {"sales": {"script": ASKS, "on_expiry": "return_to_model"}, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    world.later(700)
    assert sweep(talk, "expiries") == {"expiries": 1}
    assert talk.worker.finish(run_id)["state"] == "completed"
    assert "nobody answered before" in talk.result(run_id)["error"]
    assert [row["seal_kind"] for row in talk.asked(run_id)] == ["retired"]


def test_a_closed_question_whose_run_was_not_told_is_told_by_the_sweep(talk: Talk) -> None:
    """g72, g73: a half that only a repair by hand can leave; it is told once."""
    run_id = talk.begin("sales")
    talk.world.sql("update a2a_asks set state = 'sealed', seal_kind = 'answered', sealed_at = now()")
    assert sweep(talk, "replies") == {"replies": 1}
    assert (talk.world.run(run_id)["state"], admitted(talk, run_id)) == ("ready", 1)
    assert sweep(talk, "replies") == {"replies": 0}
    assert talk.worker.finish(run_id)["state"] == "completed"
    assert talk.result(run_id)["complete"] is False


def test_a_question_whose_run_has_left_is_closed_by_the_sweep(talk: Talk) -> None:
    """g39, g70: the other half that a repair by hand can leave."""
    run_id = talk.begin("sales")
    talk.client.cancel(run_id)
    talk.world.sql("update a2a_asks set state = 'open', seal_kind = null, sealed_at = null")
    assert sweep(talk, "replies") == {"replies": 0}, "it may be on its way"
    talk.world.later(61)
    assert sweep(talk, "replies") == {"replies": 1}
    assert [row["seal_kind"] for row in talk.world.rows(asks)] == ["retired"]


def test_runs_that_wait_for_agents_are_found_by_scope(talk: Talk) -> None:
    """g77: with those that were answered and have not begun."""
    waiting, answered_ = talk.begin("sales"), talk.begin("sales")
    talk.client.answer(answered_, "4 EUR")
    rt = talk.client.runtime
    assert discover_replies(rt, SCOPE, None, 256) == sorted([waiting, answered_])
    assert discover_replies(rt, SCOPE, min(waiting, answered_), 1) == [max(waiting, answered_)]
    assert discover_replies(rt, "tenant=other", None, 256) == []


# --- Races -----------------------------------------------------------------------------------------------------------


def race(*works: Callable[[], Any]) -> list[Any]:
    """Do all of it in the same instant; an error of ours is an answer."""
    start = threading.Barrier(len(works))

    def one(work: Callable[[], Any]) -> Any:
        start.wait()
        try:
            return work()
        except CortexError as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(one, works))


def test_reply_timeout_cancel_and_end_of_the_asker_race_and_one_wins(world: World) -> None:
    """g64: one seal, one admission at most, and nothing is lost."""
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS})
    for _ in range(10):
        run_id = talk.begin("sales")
        (asked,) = talk.asked(run_id)
        (expert,) = talk.carry()
        talk.worker.finish(expert)
        (due,) = talk.due()
        world.sql("update a2a_asks set deadline = now() - interval '1 minute' where state = 'open'")
        found = race(
            lambda row=due: talk.deliver(row["id"]),
            lambda: sweep(talk, "asks"),
            lambda asked=asked: talk.client.send(
                "pricing", "", performative="cancel", conversation_id=asked["conversation_id"]
            ),
            lambda run_id=run_id: talk.client.cancel(run_id),
            lambda run_id=run_id: talk.client.answer(run_id, "By hand."),
        )
        unexpected = [
            item
            for item in found
            if isinstance(item, Exception) and not isinstance(item, AskNotFound | AskSealed | NotSuspended)
        ]
        unexpected = [
            item for item in unexpected if item.code not in ("conversation_closed", "invalid_state")
        ]  # type: ignore[attr-defined]
        assert unexpected == []
        (sealed,) = talk.asked(run_id) or world.rows(asks, asks.c.asker_run_id == run_id)
        assert sealed["state"] == "sealed"
        run = world.run(run_id)
        assert run["state"] in ("ready", "cancelled")
        assert admitted(talk, run_id) == (0 if sealed["seal_kind"] == "retired" else 1)
        talk.all_quiet()


def test_two_last_answers_in_one_instant_resume_once(world: World) -> None:
    """g54: no lost wake-up, no double."""
    talk = Talk(world, {"sales": BROADCAST, "pricing": ANSWERS, "stock": ANSWERS})
    for _ in range(10):
        run_id = talk.begin("sales")
        for expert in talk.carry():
            talk.worker.finish(expert)
        first, second = talk.due()
        done = race(lambda row=first: talk.deliver(row["id"]), lambda row=second: talk.deliver(row["id"]))
        assert done == ["settled", "settled"]
        assert (world.run(run_id)["state"], admitted(talk, run_id)) == ("ready", 1)
        assert talk.worker.finish(run_id)["state"] == "completed"
        assert len(talk.result(run_id)["replies"]) == 2
    assert [row for row in world.rows(deliveries) if row["state"] != "delivered"] == []


def test_many_speak_in_one_instant_and_each_gets_a_hop_of_its_own(world: World) -> None:
    """g12: never more than the ceiling, without a gap."""
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS})
    first = talk.client.send("pricing", "1")
    found = race(
        *[
            lambda number=number: talk.client.send(
                "pricing", str(number), conversation_id=first.conversation_id
            )
            for number in range(16)
        ]
    )
    assert sum(isinstance(item, Exception) for item in found) == 16 - 7
    assert [row["hop"] for row in talk.said()] == list(range(1, 9))


@pytest.mark.parametrize(
    "times", [8, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
def test_two_who_answer_one_another_in_one_instant(world: World, times: int) -> None:
    """Issue 5: no deadlock, no lost answer: replies are stored away from the end of either run (ruling 63)."""
    match = {
        "match": [
            {"input_contains": "Begin", "turns": [turn(ask("{other}")), say("{last_result}")]},
            {"default": True, "turns": [say("Here you are.")]},
        ]
    }

    def script(other: str) -> Any:
        turns = [turn(ask(other)), say("{last_result}")]
        return {"match": [{**match["match"][0], "turns": turns}, match["match"][1]]}

    talk = Talk(world, {"ann": script("bob"), "bob": script("ann")})
    for _ in range(times):
        askers = [talk.begin("ann", "Begin"), talk.begin("bob", "Begin")]
        for expert in talk.carry():
            talk.worker.finish(expert)
        due = talk.due()
        assert len(due) == 2
        done = race(*[lambda row=row: talk.deliver(row["id"]) for row in due])
        assert done == ["settled", "settled"]
        for run_id in askers:
            assert talk.worker.finish(run_id)["state"] == "completed"
            assert talk.result(run_id)["replies"][0]["content"] == "Here you are."

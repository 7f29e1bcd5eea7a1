"""Questions between agents: the pause, the answer, and what neither may do."""

from tests.engine.talking import ANSWERS, ASKS, Talk
from tests.engine.world import World


def test_an_agent_asks_another_and_goes_on_with_its_answer(world: World) -> None:
    talk = Talk(world, {"sales": ASKS, "pricing": ANSWERS})
    run_id = talk.begin("sales")
    assert world.run(run_id)["state"] == "paused"
    (expert,) = talk.carry()
    talk.worker.finish(expert)
    talk.settle()
    assert talk.worker.finish(run_id)["state"] == "completed"
    assert talk.result(run_id)["complete"] is True
    assert [item["content"] for item in talk.result(run_id)["replies"]] == ["12 EUR"]

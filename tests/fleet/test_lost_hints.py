"""An answer whose hint is lost after a good commit: the row is decided, and the run goes on without its client.

Bug case C14 (b).
"""

import signal

from cortex_workers.embedded import ValkeyNode
from cortex_workers.schemas.admission import ToolResult
from tests.fleet.bench import Bench, call, say


def test_an_answer_whose_hint_is_lost_is_in_and_its_run_goes_on(own_broker: ValkeyNode, bench: Bench) -> None:
    bench.worker()
    decided = bench.enqueue(call("refund", amount=1), say("refunded"))
    answered = bench.enqueue(call("quote", item="desk"), say("{last_result}"))
    question = bench.asked(decided)
    bench.paused(answered)
    own_broker.stop(signal.SIGKILL)
    first = bench.client.decide(question, approved=True)
    receipt = bench.client.provide_results(answered, [ToolResult(tool_call_id="call_0_0", content="12 EUR")])
    # Nobody has to send it again; whoever does is told what is in the row.
    assert bench.client.decide(question, approved=True) == first
    again = bench.client.provide_results(answered, [ToolResult(tool_call_id="call_0_0", content="12 EUR")])
    assert (receipt.fresh, again.fresh, again) == (True, False, receipt.model_copy(update={"fresh": False}))
    # What the client kept to send later is lost with its process, and what the broker had with the broker.
    bench.client.close()
    own_broker.start()
    rows = bench.completed([decided, answered])
    assert [row["output"] for row in rows] == ["refunded", "12 EUR"]
    assert bench.did() == {"refund": 1}

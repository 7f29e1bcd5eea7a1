"""Many messages between agents, and the queries that read them: a part of `test_plans.py`."""

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import text

from cortex_workers.schemas.a2a import Address
from cortex_workers.store import (
    a2a_asks,
    a2a_conversations,
    a2a_deliveries,
    a2a_due,
    a2a_inbox,
    a2a_messages,
)
from cortex_workers.store.database import Database
from cortex_workers.store.unit import Unit

SCOPE, CONVERSATION, RUN = "tenant=t1", "conv_00000101", "arun_h00000101"
BOX = Address("agent1")

USED: Mapping[str, Mapping[str, Callable[[Unit], Any]]] = {
    "a2a_conversations_peer": {
        "a peer's thread": lambda unit: a2a_conversations.of_peer(unit, SCOPE, "paris", "thread-101")
    },
    "a2a_conversations_scope": {"list": lambda unit: a2a_conversations.page(unit, SCOPE)},
    "a2a_messages_hop": {
        "a conversation": lambda unit: a2a_messages.of_conversation(unit, CONVERSATION),
        "who has spoken": lambda unit: a2a_messages.has_spoken(unit, CONVERSATION, "ann"),
    },
    "a2a_messages_dedupe": {"sent before": lambda unit: a2a_messages.by_key(unit, SCOPE, "key-101")},
    "a2a_messages_origin": {"what a run has sent": lambda unit: a2a_messages.sent_by(unit, RUN)},
    "a2a_deliveries_run": {
        "its run has ended": lambda unit: a2a_deliveries.run_has_ended(unit, "arun_r00000101")
    },
    "a2a_deliveries_due": {"pass": lambda unit: a2a_due.deliveries_across_scopes(unit, None, 100)},
    "a2a_deliveries_settle": {"pass": lambda unit: a2a_due.deliveries_across_scopes(unit, None, 100)},
    "a2a_deliveries_lapsed": {"pass": lambda unit: a2a_due.deliveries_across_scopes(unit, None, 100)},
    "a2a_deliveries_unread": {"inbox": lambda unit: a2a_inbox.page(unit, SCOPE, BOX)},
    "a2a_deliveries_mail": {
        "all that came": lambda unit: a2a_inbox.page(unit, SCOPE, BOX, unread_only=False)
    },
    "a2a_deliveries_conversation": {
        "end it": lambda unit: a2a_deliveries.retire_of_conversation(unit, CONVERSATION, "ended")
    },
    "a2a_deliveries_scope": {"list": lambda unit: a2a_deliveries.page(unit, SCOPE)},
    "a2a_deliveries_failed": {"dead letters": lambda unit: a2a_deliveries.page(unit, SCOPE, state="failed")},
    "a2a_asks_call": {
        "what a run asked": lambda unit: a2a_asks.of_run(unit, RUN),
        "it waits no more": lambda unit: a2a_asks.retire(unit, RUN),
    },
    "a2a_asks_due": {
        "pass": lambda unit: a2a_due.asks_across_scopes(unit, None, 100),
    },
    "a2a_asks_conversation": {"end it": lambda unit: a2a_asks.open_in(unit, CONVERSATION)},
    "a2a_messages_pk": {
        "chain": lambda unit: a2a_messages.chain(unit, RUN),
        "replies": lambda unit: a2a_asks.replies(unit, {"scope": SCOPE, "reply_with": "token-00000101"}),
    },
    "a2a_deliveries_message_id_receiver_agent_receiver_node_key": {
        "of a message": lambda unit: a2a_deliveries.of_message(unit, "msg_00000101"),
        "not any more": lambda unit: a2a_deliveries.retire_of_messages(unit, ["msg_00000101"], "ended"),
    },
    "a2a_asks_pk": {"a token": lambda unit: a2a_asks.get(unit, SCOPE, "token-00000101")},
}

_ROWS = """
    insert into a2a_conversations (id, scope, initiator, participants, hop_ceiling, hops_used, peer_node, peer_context)
    select 'conv_' || lpad(n::text, 8, '0'), 'tenant=t' || n % 50, 'ann', '[]', 8, 2,
           case when n % 10 = 1 then 'paris' end, case when n % 10 = 1 then 'thread-' || n end
    from generate_series(1, :count) n;
    insert into a2a_messages (id, scope, conversation_id, hop, performative, sender, receivers, content, reply_with,
                              dedupe_key, origin_run_id)
    select 'msg_' || lpad(n::text, 8, '0'), 'tenant=t' || n % 50, 'conv_' || lpad(n::text, 8, '0'), 1, 'request', 'ann',
           '["agent1"]', 'hello', case when n % 2 = 1 then 'token-' || lpad(n::text, 8, '0') end,
           case when n % 10 = 1 then 'key-' || n end, case when n % 2 = 1 then 'arun_h' || lpad(n::text, 8, '0') end
    from generate_series(1, :count) n;
    insert into a2a_deliveries (id, scope, message_id, conversation_id, receiver_agent, kind, state, run_id,
                                next_attempt_at, settle_due_at, lease_expires_at, read_at)
    select 'dlv_' || lpad(n::text, 8, '0'), 'tenant=t' || n % 50, 'msg_' || lpad(n::text, 8, '0'),
           'conv_' || lpad(n::text, 8, '0'), 'agent' || n % 7,
           case when n % 3 = 0 then 'informative' else 'directive' end,
           case when n % 3 = 0 then 'delivered' when n % 100 = 1 then 'queued' when n % 100 = 2 then 'delivering'
                when n % 100 = 4 then 'running' when n % 100 = 5 then 'failed' else 'delivered' end,
           case when n % 3 <> 0 then 'arun_r' || lpad(n::text, 8, '0') end,
           now() + cast('1 day' as interval) * (n % 100), case when n % 100 = 4 then now() + interval '1 day' end,
           case when n % 100 = 2 then now() + interval '1 day' end,
           case when n % 30 <> 0 then now() end
    from generate_series(1, :count) n;
    insert into a2a_asks (scope, reply_with, message_id, conversation_id, asker_run_id, suspension_id, call_id,
                          expected, deadline, state)
    select scope, reply_with, id, conversation_id, origin_run_id, 'sus_' || id, 'call_0', 1,
           now() + interval '1 day', case when hop = 1 and right(id, 2) = '01' then 'open' else 'sealed' end
    from a2a_messages where reply_with is not null;
    insert into a2a_answers (scope, reply_with, responder_agent, responder_node, message_id, ordinal)
    select scope, reply_with, 'agent1', '', message_id, 1 from a2a_asks
"""


def seed(database: Database, count: int = 20_000) -> None:
    """Conversations of one message each, most of them over."""
    with database.transaction() as unit:
        for statement in _ROWS.split(";"):
            unit.execute(text(statement), {"count": count} if ":count" in statement else {})

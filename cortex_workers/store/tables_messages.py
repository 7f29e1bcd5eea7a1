"""The tables of messages between agents: conversations, messages, deliveries, questions, answers. Read them through
`tables.py`.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Index,
    Integer,
    LargeBinary,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from cortex_workers.store.columns import Id, Time, made, metadata, states_of

a2a_conversations = Table(
    "a2a_conversations",
    metadata,
    Column("id", Id, primary_key=True),
    Column("scope", Id, nullable=False),
    Column("protocol", Text),
    Column("initiator", Id, nullable=False),
    Column("participants", JSONB, nullable=False),
    Column("status", Text, nullable=False, server_default="open"),
    Column("hop_ceiling", Integer, nullable=False),
    Column("hops_used", Integer, nullable=False, server_default="0"),
    Column("peer_node", Text),
    Column("peer_context", Text),
    made(),
    CheckConstraint("status in ('open', 'closed')", name="status"),
    # a peer's thread and ours are paired once
    Index(
        "a2a_conversations_peer",
        "scope",
        "peer_node",
        "peer_context",
        unique=True,
        postgresql_where=text("peer_node is not null and peer_context is not null"),
    ),
    # conversations list
    Index("a2a_conversations_scope", "scope", text("id desc")),
    postgresql_with={"fillfactor": "70"},
)

a2a_messages = Table(
    "a2a_messages",
    metadata,
    Column("id", Id, primary_key=True),
    Column("scope", Id, nullable=False),
    Column("conversation_id", Id, nullable=False),
    Column("hop", Integer, nullable=False),
    Column("performative", Text, nullable=False),
    Column("sender", Id, nullable=False),
    Column("receivers", JSONB, nullable=False),
    Column("reply_to", JSONB, nullable=False, server_default=text("'[]'::jsonb")),
    Column("content", Text, nullable=False),
    Column("labels", JSONB, nullable=False, server_default=text("'{}'::jsonb")),
    Column("reply_with", Text),
    Column("in_reply_to", Text),
    Column("reply_by", Time),
    Column("origin_run_id", Id),
    Column("chain_depth", SmallInteger, nullable=False, server_default="0"),
    Column("principal", LargeBinary),
    Column("dedupe_key", Text),
    Column("answers_delivery_id", Id),
    Column("partition", Id),
    Column("metadata", JSONB, nullable=False, server_default=text("'{}'::jsonb")),
    made(),
    # a conversation, oldest first
    Index("a2a_messages_hop", "conversation_id", "hop", unique=True),
    # the same send again
    Index(
        "a2a_messages_dedupe",
        "scope",
        "dedupe_key",
        unique=True,
        postgresql_where=text("dedupe_key is not null"),
    ),
    # one automatic reply to a delivery
    Index(
        "a2a_messages_answers",
        "answers_delivery_id",
        unique=True,
        postgresql_where=text("answers_delivery_id is not null"),
    ),
    Index(
        "a2a_messages_reply_with",
        "scope",
        "reply_with",
        unique=True,
        postgresql_where=text("reply_with is not null"),
    ),
    # what one run has sent: its quota, its session's conversations
    Index("a2a_messages_origin", "origin_run_id", postgresql_where=text("origin_run_id is not null")),
)

a2a_deliveries = Table(
    "a2a_deliveries",
    metadata,
    Column("id", Id, primary_key=True),
    Column("scope", Id, nullable=False),
    Column("message_id", Id, nullable=False),
    Column("conversation_id", Id, nullable=False),
    Column("receiver_agent", Id, nullable=False),
    Column("receiver_node", Id, nullable=False, server_default=""),
    Column("kind", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("revision", BigInteger, nullable=False, server_default="1"),
    Column("owner", Text),
    Column("lease_expires_at", Time),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("next_attempt_at", Time, nullable=False, server_default=func.clock_timestamp()),
    Column("notified_at", Time),
    Column("run_id", Id),
    Column("settle_due_at", Time),
    Column("remote_task_id", Text),
    Column("reply_message_id", Id),
    Column("fail_code", Text),
    Column("error", Text),
    Column("accepted_at", Time),
    Column("settled_at", Time),
    Column("read_at", Time),
    Column("read_by_call", Text),
    Column("partition", Id),
    made(),
    CheckConstraint(states_of("delivery"), name="state"),
    CheckConstraint("kind in ('informative', 'control', 'directive', 'remote')", name="kind"),
    UniqueConstraint("message_id", "receiver_agent", "receiver_node"),
    # the recipient's run has ended
    Index("a2a_deliveries_run", "run_id", unique=True, postgresql_where=text("run_id is not null")),
    # deliveries pass
    Index(
        "a2a_deliveries_due",
        "next_attempt_at",
        "id",
        postgresql_where=text("state in ('queued', 'awaiting_remote')"),
    ),
    Index(
        "a2a_deliveries_settle",
        "settle_due_at",
        "id",
        postgresql_where=text("state = 'running' and settle_due_at is not null"),
    ),
    Index("a2a_deliveries_lapsed", "lease_expires_at", "id", postgresql_where=text("state = 'delivering'")),
    # inbox, oldest first
    Index(
        "a2a_deliveries_unread",
        "scope",
        "receiver_agent",
        "id",
        postgresql_where=text("state = 'delivered' and kind = 'informative' and read_at is null"),
    ),
    Index(
        "a2a_deliveries_mail",
        "scope",
        "receiver_agent",
        "id",
        postgresql_where=text("state = 'delivered' and kind = 'informative'"),
    ),
    # of a conversation: closing it, showing it
    Index("a2a_deliveries_conversation", "conversation_id", "id"),
    # deliveries list
    Index("a2a_deliveries_scope", "scope", text("id desc")),
    # those that wait for an operator
    Index("a2a_deliveries_failed", "scope", text("id desc"), postgresql_where=text("state = 'failed'")),
    postgresql_with={"fillfactor": "70"},
)

a2a_asks = Table(
    "a2a_asks",
    metadata,
    Column("scope", Id, primary_key=True),
    Column("reply_with", Text, primary_key=True),
    Column("message_id", Id, nullable=False),
    Column("conversation_id", Id, nullable=False),
    Column("asker_run_id", Id),
    Column("suspension_id", Id),
    Column("call_id", Text),
    Column("expected", Integer, nullable=False),
    Column("deadline", Time, nullable=False),
    Column("state", Text, nullable=False),
    Column("sealed_at", Time),
    Column("seal_kind", Text),
    Column("revision", BigInteger, nullable=False, server_default="1"),
    made(),
    CheckConstraint(states_of("ask"), name="state"),
    # what a run waits for
    Index(
        "a2a_asks_call",
        "asker_run_id",
        "call_id",
        unique=True,
        postgresql_where=text("asker_run_id is not null"),
    ),
    # asks pass
    Index("a2a_asks_due", "deadline", "reply_with", postgresql_where=text("state = 'open'")),
    # closing a conversation
    Index("a2a_asks_conversation", "conversation_id", postgresql_where=text("state = 'open'")),
)

a2a_answers = Table(
    "a2a_answers",
    metadata,
    Column("scope", Id, primary_key=True),
    Column("reply_with", Text, primary_key=True),
    Column("responder_agent", Id, primary_key=True),
    Column("responder_node", Id, primary_key=True),
    Column("message_id", Id, nullable=False),
    Column("ordinal", Integer, nullable=False),
    Column("on_behalf_by", Text),
    Column("arrived_at", Time, nullable=False, server_default=func.clock_timestamp()),
)

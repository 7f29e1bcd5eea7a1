"""pre: messages between agents: conversations, messages, deliveries, questions, answers.

Why: agents that talk. Locks: none, the tables are new. Expected time: under a second.
Works while older code runs: it does not know the tables.
"""

from __future__ import annotations

from alembic import op

revision = "0003_pre_messages"
down_revision = "0002_pre_admissions"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    CREATE TABLE a2a_conversations (
        id TEXT COLLATE "C" NOT NULL,
        scope TEXT COLLATE "C" NOT NULL,
        protocol TEXT,
        initiator TEXT COLLATE "C" NOT NULL,
        participants JSONB NOT NULL,
        status TEXT DEFAULT 'open' NOT NULL,
        hop_ceiling INTEGER NOT NULL,
        hops_used INTEGER DEFAULT '0' NOT NULL,
        peer_node TEXT,
        peer_context TEXT,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        CONSTRAINT a2a_conversations_pk PRIMARY KEY (id),
        CONSTRAINT a2a_conversations_status_check CHECK (status in ('open', 'closed'))
    )
     WITH (fillfactor = 70)
    """,
    """
    CREATE UNIQUE INDEX a2a_conversations_peer ON a2a_conversations (scope, peer_node, peer_context) WHERE peer_node is not null and peer_context is not null
    """,
    """
    CREATE INDEX a2a_conversations_scope ON a2a_conversations (scope, id desc)
    """,
    """
    CREATE TABLE a2a_messages (
        id TEXT COLLATE "C" NOT NULL,
        scope TEXT COLLATE "C" NOT NULL,
        conversation_id TEXT COLLATE "C" NOT NULL,
        hop INTEGER NOT NULL,
        performative TEXT NOT NULL,
        sender TEXT COLLATE "C" NOT NULL,
        receivers JSONB NOT NULL,
        reply_to JSONB DEFAULT '[]'::jsonb NOT NULL,
        content TEXT NOT NULL,
        labels JSONB DEFAULT '{}'::jsonb NOT NULL,
        reply_with TEXT,
        in_reply_to TEXT,
        reply_by TIMESTAMP WITH TIME ZONE,
        origin_run_id TEXT COLLATE "C",
        chain_depth SMALLINT DEFAULT '0' NOT NULL,
        principal BYTEA,
        dedupe_key TEXT,
        answers_delivery_id TEXT COLLATE "C",
        partition TEXT COLLATE "C",
        metadata JSONB DEFAULT '{}'::jsonb NOT NULL,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        CONSTRAINT a2a_messages_pk PRIMARY KEY (id)
    )
    """,
    """
    CREATE UNIQUE INDEX a2a_messages_answers ON a2a_messages (answers_delivery_id) WHERE answers_delivery_id is not null
    """,
    """
    CREATE UNIQUE INDEX a2a_messages_dedupe ON a2a_messages (scope, dedupe_key) WHERE dedupe_key is not null
    """,
    """
    CREATE UNIQUE INDEX a2a_messages_hop ON a2a_messages (conversation_id, hop)
    """,
    """
    CREATE INDEX a2a_messages_origin ON a2a_messages (origin_run_id) WHERE origin_run_id is not null
    """,
    """
    CREATE UNIQUE INDEX a2a_messages_reply_with ON a2a_messages (scope, reply_with) WHERE reply_with is not null
    """,
    """
    CREATE TABLE a2a_deliveries (
        id TEXT COLLATE "C" NOT NULL,
        scope TEXT COLLATE "C" NOT NULL,
        message_id TEXT COLLATE "C" NOT NULL,
        conversation_id TEXT COLLATE "C" NOT NULL,
        receiver_agent TEXT COLLATE "C" NOT NULL,
        receiver_node TEXT COLLATE "C" DEFAULT '' NOT NULL,
        kind TEXT NOT NULL,
        state TEXT NOT NULL,
        revision BIGINT DEFAULT '1' NOT NULL,
        owner TEXT,
        lease_expires_at TIMESTAMP WITH TIME ZONE,
        attempts INTEGER DEFAULT '0' NOT NULL,
        next_attempt_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        notified_at TIMESTAMP WITH TIME ZONE,
        run_id TEXT COLLATE "C",
        settle_due_at TIMESTAMP WITH TIME ZONE,
        remote_task_id TEXT,
        reply_message_id TEXT COLLATE "C",
        fail_code TEXT,
        error TEXT,
        accepted_at TIMESTAMP WITH TIME ZONE,
        settled_at TIMESTAMP WITH TIME ZONE,
        read_at TIMESTAMP WITH TIME ZONE,
        read_by_call TEXT,
        partition TEXT COLLATE "C",
        created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        CONSTRAINT a2a_deliveries_pk PRIMARY KEY (id),
        CONSTRAINT a2a_deliveries_state_check CHECK (state in ('queued', 'delivering', 'running', 'awaiting_remote', 'delivered', 'failed', 'retired')),
        CONSTRAINT a2a_deliveries_kind_check CHECK (kind in ('informative', 'control', 'directive', 'remote')),
        CONSTRAINT a2a_deliveries_message_id_receiver_agent_receiver_node_key UNIQUE (message_id, receiver_agent, receiver_node)
    )
     WITH (fillfactor = 70)
    """,
    """
    CREATE INDEX a2a_deliveries_conversation ON a2a_deliveries (conversation_id, id)
    """,
    """
    CREATE INDEX a2a_deliveries_due ON a2a_deliveries (next_attempt_at, id) WHERE state in ('queued', 'awaiting_remote')
    """,
    """
    CREATE INDEX a2a_deliveries_failed ON a2a_deliveries (scope, id desc) WHERE state = 'failed'
    """,
    """
    CREATE INDEX a2a_deliveries_lapsed ON a2a_deliveries (lease_expires_at, id) WHERE state = 'delivering'
    """,
    """
    CREATE INDEX a2a_deliveries_mail ON a2a_deliveries (scope, receiver_agent, id) WHERE state = 'delivered' and kind = 'informative'
    """,
    """
    CREATE UNIQUE INDEX a2a_deliveries_run ON a2a_deliveries (run_id) WHERE run_id is not null
    """,
    """
    CREATE INDEX a2a_deliveries_scope ON a2a_deliveries (scope, id desc)
    """,
    """
    CREATE INDEX a2a_deliveries_settle ON a2a_deliveries (settle_due_at, id) WHERE state = 'running' and settle_due_at is not null
    """,
    """
    CREATE INDEX a2a_deliveries_unread ON a2a_deliveries (scope, receiver_agent, id) WHERE state = 'delivered' and kind = 'informative' and read_at is null
    """,
    """
    CREATE TABLE a2a_asks (
        scope TEXT COLLATE "C" NOT NULL,
        reply_with TEXT NOT NULL,
        message_id TEXT COLLATE "C" NOT NULL,
        conversation_id TEXT COLLATE "C" NOT NULL,
        asker_run_id TEXT COLLATE "C",
        suspension_id TEXT COLLATE "C",
        call_id TEXT,
        expected INTEGER NOT NULL,
        deadline TIMESTAMP WITH TIME ZONE NOT NULL,
        state TEXT NOT NULL,
        sealed_at TIMESTAMP WITH TIME ZONE,
        seal_kind TEXT,
        revision BIGINT DEFAULT '1' NOT NULL,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        CONSTRAINT a2a_asks_pk PRIMARY KEY (scope, reply_with),
        CONSTRAINT a2a_asks_state_check CHECK (state in ('open', 'sealed'))
    )
    """,
    """
    CREATE UNIQUE INDEX a2a_asks_call ON a2a_asks (asker_run_id, call_id) WHERE asker_run_id is not null
    """,
    """
    CREATE INDEX a2a_asks_conversation ON a2a_asks (conversation_id) WHERE state = 'open'
    """,
    """
    CREATE INDEX a2a_asks_due ON a2a_asks (deadline, reply_with) WHERE state = 'open'
    """,
    """
    CREATE TABLE a2a_answers (
        scope TEXT COLLATE "C" NOT NULL,
        reply_with TEXT NOT NULL,
        responder_agent TEXT COLLATE "C" NOT NULL,
        responder_node TEXT COLLATE "C" NOT NULL,
        message_id TEXT COLLATE "C" NOT NULL,
        ordinal INTEGER NOT NULL,
        on_behalf_by TEXT,
        arrived_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        CONSTRAINT a2a_answers_pk PRIMARY KEY (scope, reply_with, responder_agent, responder_node)
    )
    """,
)


def upgrade() -> None:
    """Create the tables."""
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    """Refuse: migrations go forward only.

    Raises: RuntimeError always.
    """
    raise RuntimeError("migrations go forward only; restore a backup instead")

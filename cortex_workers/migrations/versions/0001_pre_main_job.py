"""pre: the tables of the main job: runs, sessions, pauses, calls, events, workers, sweeps.

Why: the first release. Locks: none, every table is new. Expected time: under a second.
Works while older code runs: there is none.
"""

from __future__ import annotations

from alembic import op

revision = "0001_pre_main_job"
down_revision = None
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    CREATE TABLE adjudications (
        seq BIGSERIAL NOT NULL,
        run_id TEXT COLLATE "C" NOT NULL,
        session_id TEXT COLLATE "C" NOT NULL,
        scope TEXT COLLATE "C" NOT NULL,
        call_id TEXT NOT NULL,
        attempt INTEGER NOT NULL,
        checkpoint_id TEXT COLLATE "C" NOT NULL,
        suspension_id TEXT COLLATE "C" NOT NULL,
        workload TEXT NOT NULL,
        specialist TEXT NOT NULL,
        outcome TEXT NOT NULL,
        scope_of_verdict TEXT NOT NULL,
        authority TEXT NOT NULL,
        disposition TEXT,
        refusal TEXT,
        approver TEXT,
        approver_principal BYTEA,
        note TEXT,
        decided_at TIMESTAMP WITH TIME ZONE,
        adjudicated_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        CONSTRAINT adjudications_pk PRIMARY KEY (seq),
        CONSTRAINT adjudications_run_id_call_id_attempt_key UNIQUE (run_id, call_id, attempt)
    )
    """,
    """
    CREATE INDEX adjudications_export ON adjudications (scope, workload, adjudicated_at)
    """,
    """
    CREATE INDEX adjudications_session ON adjudications (session_id, seq)
    """,
    """
    CREATE TABLE agent_versions (
        digest TEXT NOT NULL,
        name TEXT COLLATE "C" NOT NULL,
        published_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        definition JSONB NOT NULL,
        CONSTRAINT agent_versions_pk PRIMARY KEY (digest)
    )
    """,
    """
    CREATE INDEX agent_versions_name ON agent_versions (name)
    """,
    """
    CREATE TABLE agents (
        name TEXT COLLATE "C" NOT NULL,
        current_digest TEXT NOT NULL,
        pool TEXT DEFAULT 'main' NOT NULL,
        CONSTRAINT agents_pk PRIMARY KEY (name)
    )
    """,
    """
    CREATE TABLE checkpoints (
        id TEXT COLLATE "C" NOT NULL,
        scope TEXT COLLATE "C" NOT NULL,
        run_id TEXT COLLATE "C" NOT NULL,
        agent TEXT COLLATE "C" NOT NULL,
        suspension_id TEXT COLLATE "C",
        kind TEXT NOT NULL,
        reason TEXT NOT NULL,
        step_index INTEGER NOT NULL,
        state TEXT NOT NULL,
        closed_as TEXT,
        decision JSONB,
        decider_principal BYTEA,
        decided_at TIMESTAMP WITH TIME ZONE,
        metadata JSONB DEFAULT '{}'::jsonb NOT NULL,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        CONSTRAINT checkpoints_pk PRIMARY KEY (id),
        CONSTRAINT checkpoints_state_check CHECK (state in ('pending', 'resolved'))
    )
    """,
    """
    CREATE INDEX checkpoints_open ON checkpoints (id) WHERE state = 'pending' and suspension_id is not null
    """,
    """
    CREATE UNIQUE INDEX checkpoints_pause ON checkpoints (suspension_id) WHERE suspension_id is not null
    """,
    """
    CREATE INDEX checkpoints_pending ON checkpoints (scope, id) WHERE state = 'pending'
    """,
    """
    CREATE INDEX checkpoints_run ON checkpoints (run_id, id)
    """,
    """
    CREATE TABLE events (
        id TEXT COLLATE "C" DEFAULT 'evt_' || lpad(to_hex((extract(epoch from clock_timestamp()) * 1000000)::bigint), 14, '0') || substr(md5(random()::text), 1, 12) NOT NULL,
        at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        scope TEXT COLLATE "C" NOT NULL,
        session_id TEXT COLLATE "C",
        run_id TEXT COLLATE "C",
        run_seq BIGINT,
        conversation_id TEXT COLLATE "C",
        kind TEXT NOT NULL,
        actor TEXT,
        worker_id TEXT,
        revision BIGINT,
        data JSONB,
        CONSTRAINT events_pk PRIMARY KEY (id)
    )
    """,
    """
    CREATE UNIQUE INDEX events_run ON events (run_id, run_seq) WHERE run_seq is not null
    """,
    """
    CREATE INDEX events_scope ON events (scope, id)
    """,
    """
    CREATE INDEX events_session ON events (session_id, id)
    """,
    """
    CREATE TABLE messages (
        run_id TEXT COLLATE "C" NOT NULL,
        seq BIGINT NOT NULL,
        step_index INTEGER NOT NULL,
        role TEXT NOT NULL,
        content TEXT NOT NULL,
        tool_calls TEXT,
        tool_call_id TEXT,
        tool_name TEXT,
        is_error BOOLEAN DEFAULT false NOT NULL,
        raw TEXT,
        marked BOOLEAN DEFAULT false NOT NULL,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        CONSTRAINT messages_pk PRIMARY KEY (run_id, seq)
    )
    """,
    """
    CREATE TABLE pending_calls (
        suspension_id TEXT COLLATE "C" NOT NULL,
        call_id TEXT NOT NULL,
        run_id TEXT COLLATE "C" NOT NULL,
        session_id TEXT COLLATE "C" NOT NULL,
        ordinal INTEGER NOT NULL,
        kind TEXT NOT NULL,
        answerable_by TEXT NOT NULL,
        prompt TEXT,
        response_schema JSONB,
        payload JSONB,
        reply_with TEXT,
        answer BYTEA,
        answer_digest TEXT,
        answered_at TIMESTAMP WITH TIME ZONE,
        answered_by TEXT,
        door TEXT,
        CONSTRAINT pending_calls_pk PRIMARY KEY (suspension_id, call_id)
    )
    """,
    """
    CREATE INDEX pending_calls_call ON pending_calls (run_id, call_id)
    """,
    """
    CREATE INDEX pending_calls_open ON pending_calls (session_id, suspension_id, ordinal) WHERE answered_at is null
    """,
    """
    CREATE INDEX pending_calls_reply ON pending_calls (reply_with) WHERE reply_with is not null
    """,
    """
    CREATE TABLE run_specs (
        run_id TEXT COLLATE "C" NOT NULL,
        input TEXT NOT NULL,
        overrides JSONB,
        principal BYTEA,
        request_digest TEXT NOT NULL,
        metadata JSONB,
        system_prompt TEXT,
        config JSONB NOT NULL,
        CONSTRAINT run_specs_pk PRIMARY KEY (run_id)
    )
    """,
    """
    CREATE TABLE runs (
        id TEXT COLLATE "C" NOT NULL,
        scope TEXT COLLATE "C" NOT NULL,
        agent TEXT COLLATE "C" NOT NULL,
        agent_digest TEXT NOT NULL,
        workload TEXT,
        session_id TEXT COLLATE "C" NOT NULL,
        session_seq BIGINT NOT NULL,
        serial BOOLEAN DEFAULT false NOT NULL,
        shared BOOLEAN DEFAULT false NOT NULL,
        origin TEXT DEFAULT 'producer' NOT NULL,
        origin_delivery_id TEXT COLLATE "C",
        chain_depth SMALLINT DEFAULT '0' NOT NULL,
        ask_deadline TIMESTAMP WITH TIME ZONE,
        state TEXT NOT NULL,
        state_since TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        revision BIGINT DEFAULT '1' NOT NULL,
        lease_owner TEXT,
        lease_expires_at TIMESTAMP WITH TIME ZONE,
        fenced_until TIMESTAMP WITH TIME ZONE,
        instruction TEXT NOT NULL,
        suspension_id TEXT COLLATE "C",
        queue_class TEXT DEFAULT 'start' NOT NULL,
        pool TEXT DEFAULT 'main' NOT NULL,
        rank BIGINT DEFAULT '0' NOT NULL,
        not_before TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        wait_reason TEXT,
        hold_reason TEXT,
        notified_at TIMESTAMP WITH TIME ZONE,
        notified_count INTEGER DEFAULT '0' NOT NULL,
        min_reader INTEGER DEFAULT '1' NOT NULL,
        handed_off BOOLEAN DEFAULT false NOT NULL,
        reclaim_count INTEGER DEFAULT '0' NOT NULL,
        reclaim_total INTEGER DEFAULT '0' NOT NULL,
        hand_backs INTEGER DEFAULT '0' NOT NULL,
        interrupted_at TIMESTAMP WITH TIME ZONE,
        interrupted_reason TEXT,
        stop_requested_at TIMESTAMP WITH TIME ZONE,
        stop_requested_reason TEXT,
        start_by TIMESTAMP WITH TIME ZONE,
        claimed_at TIMESTAMP WITH TIME ZONE,
        leased_time FLOAT DEFAULT '0' NOT NULL,
        next_step INTEGER DEFAULT '0' NOT NULL,
        new_messages_from INTEGER,
        history_upto BIGINT,
        history_floor BIGINT,
        next_seq BIGINT DEFAULT '0' NOT NULL,
        step_count INTEGER DEFAULT '0' NOT NULL,
        usage JSONB DEFAULT '{}'::jsonb NOT NULL,
        output TEXT,
        error_code TEXT,
        error_text TEXT,
        completion_seq BIGINT,
        started_at TIMESTAMP WITH TIME ZONE,
        completed_at TIMESTAMP WITH TIME ZONE,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        CONSTRAINT runs_pk PRIMARY KEY (id),
        CONSTRAINT runs_state_check CHECK (state in ('created', 'ready', 'running', 'paused', 'reclaimable', 'completed', 'failed', 'cancelled', 'incomplete')),
        CONSTRAINT runs_lease_check CHECK ((state = 'running') = (lease_owner is not null) and (state = 'running') = (lease_expires_at is not null)),
        CONSTRAINT runs_pause_check CHECK (state <> 'paused' or suspension_id is not null)
    )
     WITH (fillfactor = 70)
    """,
    """
    CREATE INDEX runs_claim ON runs (pool, queue_class, rank, not_before, id) WHERE state in ('ready', 'reclaimable') and wait_reason is null
    """,
    """
    CREATE INDEX runs_completion ON runs (session_id, completion_seq) WHERE completion_seq is not null
    """,
    """
    CREATE INDEX runs_fenced ON runs (fenced_until, id) WHERE state = 'cancelled' and fenced_until is not null
    """,
    """
    CREATE INDEX runs_lapsed ON runs (lease_expires_at, id) WHERE state = 'running'
    """,
    """
    CREATE INDEX runs_later ON runs (not_before, id) WHERE wait_reason = 'later'
    """,
    """
    CREATE UNIQUE INDEX runs_one_turn ON runs (session_id) WHERE state = 'running' and serial
    """,
    """
    CREATE INDEX runs_owner ON runs (lease_owner) WHERE lease_owner is not null
    """,
    """
    CREATE INDEX runs_paused ON runs (scope, id) WHERE state = 'paused'
    """,
    """
    CREATE INDEX runs_scope ON runs (scope, created_at desc, id desc)
    """,
    """
    CREATE UNIQUE INDEX runs_session ON runs (session_id, session_seq)
    """,
    """
    CREATE INDEX runs_start_by ON runs (start_by, id) WHERE start_by is not null and state = 'ready' and queue_class = 'start'
    """,
    """
    CREATE INDEX runs_turn ON runs (session_id, session_seq) WHERE state in ('ready', 'running', 'reclaimable')
    """,
    """
    CREATE INDEX runs_waiting ON runs (wait_reason, state_since, id) WHERE wait_reason is not null
    """,
    """
    CREATE TABLE sessions (
        id TEXT COLLATE "C" NOT NULL,
        scope TEXT COLLATE "C" NOT NULL,
        agent TEXT COLLATE "C" NOT NULL,
        key TEXT,
        turn_seq BIGINT DEFAULT '0' NOT NULL,
        completion_seq BIGINT DEFAULT '0' NOT NULL,
        history_floor BIGINT DEFAULT '0' NOT NULL,
        message_count BIGINT DEFAULT '0' NOT NULL,
        last_event_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        gate_id TEXT COLLATE "C",
        gated_at TIMESTAMP WITH TIME ZONE,
        aborted_at TIMESTAMP WITH TIME ZONE,
        aborted_reason TEXT,
        aborted_by TEXT,
        effects_acked_at TIMESTAMP WITH TIME ZONE,
        effects_acked_by TEXT,
        effects_acked_reason TEXT,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        CONSTRAINT sessions_pk PRIMARY KEY (id)
    )
    """,
    """
    CREATE INDEX sessions_aborted ON sessions (id) WHERE aborted_at is not null
    """,
    """
    CREATE INDEX sessions_gated ON sessions (id) WHERE gated_at is not null
    """,
    """
    CREATE UNIQUE INDEX sessions_key ON sessions (scope, agent, key) WHERE key is not null and (key <> 'default' or aborted_at is null)
    """,
    """
    CREATE INDEX sessions_recent ON sessions (scope, last_event_at desc, id)
    """,
    """
    CREATE TABLE steps (
        run_id TEXT COLLATE "C" NOT NULL,
        step_index INTEGER NOT NULL,
        id TEXT COLLATE "C" NOT NULL,
        model TEXT NOT NULL,
        usage JSONB NOT NULL,
        finish_reason TEXT NOT NULL,
        term_revision BIGINT NOT NULL,
        seq BIGINT NOT NULL,
        started_at TIMESTAMP WITH TIME ZONE NOT NULL,
        completed_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        CONSTRAINT steps_pk PRIMARY KEY (run_id, step_index)
    )
    """,
    """
    CREATE TABLE suspensions (
        id TEXT COLLATE "C" NOT NULL,
        run_id TEXT COLLATE "C" NOT NULL,
        session_id TEXT COLLATE "C" NOT NULL,
        scope TEXT COLLATE "C" NOT NULL,
        run_revision BIGINT NOT NULL,
        reason TEXT NOT NULL,
        step_index INTEGER NOT NULL,
        next_step INTEGER NOT NULL,
        messages_upto BIGINT NOT NULL,
        usage JSONB NOT NULL,
        schema_version INTEGER DEFAULT '1' NOT NULL,
        digest TEXT NOT NULL,
        on_expiry TEXT NOT NULL,
        expires_at TIMESTAMP WITH TIME ZONE,
        deferral_kind TEXT,
        deferral_ref TEXT,
        next_poll_at TIMESTAMP WITH TIME ZONE,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        ended_at TIMESTAMP WITH TIME ZONE,
        ended_as TEXT,
        CONSTRAINT suspensions_pk PRIMARY KEY (id)
    )
    """,
    """
    CREATE INDEX suspensions_due ON suspensions (expires_at, id) WHERE ended_at is null and expires_at is not null
    """,
    """
    CREATE UNIQUE INDEX suspensions_live ON suspensions (run_id) WHERE ended_at is null
    """,
    """
    CREATE INDEX suspensions_poll ON suspensions (next_poll_at, id) WHERE ended_at is null and next_poll_at is not null
    """,
    """
    CREATE INDEX suspensions_run ON suspensions (run_id, created_at)
    """,
    """
    CREATE TABLE sweeps (
        name TEXT NOT NULL,
        started_at TIMESTAMP WITH TIME ZONE,
        finished_at TIMESTAMP WITH TIME ZONE,
        worker_id TEXT,
        cursor TEXT,
        due INTEGER DEFAULT '0' NOT NULL,
        done INTEGER DEFAULT '0' NOT NULL,
        skipped INTEGER DEFAULT '0' NOT NULL,
        CONSTRAINT sweeps_pk PRIMARY KEY (name)
    )
    """,
    """
    CREATE TABLE tenants (
        key TEXT COLLATE "C" NOT NULL,
        last_rank BIGINT DEFAULT '0' NOT NULL,
        CONSTRAINT tenants_pk PRIMARY KEY (key)
    )
     WITH (fillfactor = 70)
    """,
    """
    CREATE TABLE tool_calls (
        id TEXT COLLATE "C" NOT NULL,
        run_id TEXT COLLATE "C" NOT NULL,
        step_index INTEGER NOT NULL,
        call_id TEXT NOT NULL,
        ordinal INTEGER NOT NULL,
        session_id TEXT COLLATE "C" NOT NULL,
        provider_call_id TEXT,
        tool TEXT NOT NULL,
        class TEXT NOT NULL,
        effects TEXT NOT NULL,
        state TEXT NOT NULL,
        message_seq BIGINT,
        executed_args TEXT,
        amended_by TEXT,
        result_seq BIGINT,
        result_digest TEXT,
        error TEXT,
        term_owner TEXT,
        term_revision BIGINT,
        attempt INTEGER DEFAULT '1' NOT NULL,
        seq BIGINT NOT NULL,
        started_at TIMESTAMP WITH TIME ZONE,
        finished_at TIMESTAMP WITH TIME ZONE,
        late_result TEXT,
        late_at TIMESTAMP WITH TIME ZONE,
        settled_as TEXT,
        settled_by TEXT,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        CONSTRAINT tool_calls_pk PRIMARY KEY (id),
        CONSTRAINT tool_calls_state_check CHECK (state in ('pending', 'started', 'completed', 'failed', 'denied', 'unknown')),
        CONSTRAINT tool_calls_run_id_step_index_call_id_key UNIQUE (run_id, step_index, call_id),
        CONSTRAINT tool_calls_run_id_call_id_key UNIQUE (run_id, call_id)
    )
     WITH (fillfactor = 80)
    """,
    """
    CREATE INDEX tool_calls_uncertain ON tool_calls (session_id, seq) WHERE state = 'started' and class <> 'retry_safe'
    """,
    """
    CREATE TABLE workers (
        id TEXT NOT NULL,
        version TEXT NOT NULL,
        reader_version INTEGER NOT NULL,
        agents TEXT[] DEFAULT '{}'::text[] NOT NULL,
        own_agents TEXT[] DEFAULT '{}'::text[] NOT NULL,
        queues TEXT[] DEFAULT '{}'::text[] NOT NULL,
        slots INTEGER DEFAULT '0' NOT NULL,
        slots_used INTEGER DEFAULT '0' NOT NULL,
        pool TEXT DEFAULT 'main' NOT NULL,
        last_start_rank BIGINT DEFAULT '0' NOT NULL,
        started_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        heartbeat_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        heartbeat_every_s FLOAT DEFAULT '20' NOT NULL,
        draining_at TIMESTAMP WITH TIME ZONE,
        drain_requested_at TIMESTAMP WITH TIME ZONE,
        drain_requested_by TEXT,
        drain_reason TEXT,
        pause_sessions BOOLEAN DEFAULT false NOT NULL,
        ended_at TIMESTAMP WITH TIME ZONE,
        ended_as TEXT,
        CONSTRAINT workers_pk PRIMARY KEY (id)
    )
     WITH (fillfactor = 50)
    """,
    """
    CREATE INDEX workers_live ON workers (heartbeat_at) WHERE ended_at is null
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

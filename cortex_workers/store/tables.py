"""Every table, constraint and index; each index names the query it serves.

The names are binding (tables.md). State columns are written by `transitions.py` only.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
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
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from cortex_workers.store.columns import EVENT_ID, Id, Time, made, metadata, states_of
from cortex_workers.store.tables_messages import (
    a2a_answers,
    a2a_asks,
    a2a_conversations,
    a2a_deliveries,
    a2a_messages,
)
from cortex_workers.store.tables_pauses import (
    adjudications,
    checkpoints,
    pending_calls,
    resume_admissions,
    resume_receipts,
    suspensions,
)

__all__ = [
    "EVENT_ID",
    "Id",
    "Time",
    "a2a_answers",
    "a2a_asks",
    "a2a_conversations",
    "a2a_deliveries",
    "a2a_messages",
    "adjudications",
    "agent_versions",
    "agents",
    "checkpoints",
    "events",
    "messages",
    "metadata",
    "pending_calls",
    "resume_admissions",
    "resume_receipts",
    "run_specs",
    "runs",
    "sessions",
    "steps",
    "suspensions",
    "sweeps",
    "tenants",
    "tool_calls",
    "workers",
]

agents = Table(
    "agents",
    metadata,
    Column("name", Id, primary_key=True),
    Column("current_digest", Text, nullable=False),
    Column("pool", Text, nullable=False, server_default="main"),
)

agent_versions = Table(
    "agent_versions",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("name", Id, nullable=False),
    Column("published_at", Time, nullable=False, server_default=func.clock_timestamp()),
    Column("definition", JSONB, nullable=False),
    Index("agent_versions_name", "name"),
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", Id, primary_key=True),
    Column("scope", Id, nullable=False),
    Column("agent", Id, nullable=False),
    Column("key", Text),
    Column("turn_seq", BigInteger, nullable=False, server_default="0"),
    Column("completion_seq", BigInteger, nullable=False, server_default="0"),
    Column("history_floor", BigInteger, nullable=False, server_default="0"),
    Column("message_count", BigInteger, nullable=False, server_default="0"),
    Column("last_event_at", Time, nullable=False, server_default=func.clock_timestamp()),
    Column("gate_id", Id),
    Column("gated_at", Time),
    Column("aborted_at", Time),
    Column("aborted_reason", Text),
    Column("aborted_by", Text),
    Column("effects_acked_at", Time),
    Column("effects_acked_by", Text),
    Column("effects_acked_reason", Text),
    made(),
    # enqueue: find or create the session of a caller's key
    Index(
        "sessions_key",
        "scope",
        "agent",
        "key",
        unique=True,
        postgresql_where=text("key is not null and (key <> 'default' or aborted_at is null)"),
    ),
    # sessions list
    Index("sessions_recent", "scope", text("last_event_at desc"), "id"),
    Index("sessions_gated", "id", postgresql_where=text("gated_at is not null")),
    Index("sessions_aborted", "id", postgresql_where=text("aborted_at is not null")),
)

tenants = Table(
    "tenants",
    metadata,
    Column("key", Id, primary_key=True),
    Column("last_rank", BigInteger, nullable=False, server_default="0"),
    postgresql_with={"fillfactor": "70"},
)

run_specs = Table(
    "run_specs",
    metadata,
    Column("run_id", Id, primary_key=True),
    Column("input", Text, nullable=False),
    Column("overrides", JSONB),
    Column("principal", LargeBinary),
    Column("request_digest", Text, nullable=False),
    Column("metadata", JSONB),
    Column("system_prompt", Text),
    Column("config", JSONB, nullable=False),
)

runs = Table(
    "runs",
    metadata,
    Column("id", Id, primary_key=True),
    Column("scope", Id, nullable=False),
    Column("agent", Id, nullable=False),
    Column("agent_digest", Text, nullable=False),
    Column("workload", Text),
    Column("session_id", Id, nullable=False),
    Column("session_seq", BigInteger, nullable=False),
    Column("serial", Boolean, nullable=False, server_default=text("false")),
    Column("shared", Boolean, nullable=False, server_default=text("false")),
    Column("origin", Text, nullable=False, server_default="producer"),
    Column("origin_delivery_id", Id),
    Column("chain_depth", SmallInteger, nullable=False, server_default="0"),
    Column("ask_deadline", Time),
    Column("state", Text, nullable=False),
    Column("state_since", Time, nullable=False, server_default=func.clock_timestamp()),
    Column("revision", BigInteger, nullable=False, server_default="1"),
    Column("lease_owner", Text),
    Column("lease_expires_at", Time),
    Column("fenced_until", Time),
    Column("instruction", Text, nullable=False),
    Column("suspension_id", Id),
    Column("queue_class", Text, nullable=False, server_default="start"),
    Column("pool", Text, nullable=False, server_default="main"),
    Column("rank", BigInteger, nullable=False, server_default="0"),
    Column("not_before", Time, nullable=False, server_default=func.clock_timestamp()),
    Column("wait_reason", Text),
    Column("hold_reason", Text),
    Column("notified_at", Time),
    Column("notified_count", Integer, nullable=False, server_default="0"),
    Column("min_reader", Integer, nullable=False, server_default="1"),
    Column("handed_off", Boolean, nullable=False, server_default=text("false")),
    Column("reclaim_count", Integer, nullable=False, server_default="0"),
    Column("reclaim_total", Integer, nullable=False, server_default="0"),
    Column("hand_backs", Integer, nullable=False, server_default="0"),
    Column("interrupted_at", Time),
    Column("interrupted_reason", Text),
    Column("stop_requested_at", Time),
    Column("stop_requested_reason", Text),
    Column("start_by", Time),
    Column("claimed_at", Time),
    Column("leased_time", Float, nullable=False, server_default="0"),
    Column("next_step", Integer, nullable=False, server_default="0"),
    Column("new_messages_from", Integer),
    Column("history_upto", BigInteger),
    Column("history_floor", BigInteger),
    Column("next_seq", BigInteger, nullable=False, server_default="0"),
    Column("step_count", Integer, nullable=False, server_default="0"),
    Column("usage", JSONB, nullable=False, server_default=text("'{}'::jsonb")),
    Column("output", Text),
    Column("error_code", Text),
    Column("error_text", Text),
    Column("completion_seq", BigInteger),
    Column("started_at", Time),
    Column("completed_at", Time),
    made(),
    CheckConstraint(states_of("run"), name="state"),
    CheckConstraint(
        "(state = 'running') = (lease_owner is not null) and (state = 'running') = (lease_expires_at is not null)",
        name="lease",
    ),
    CheckConstraint("state <> 'paused' or suspension_id is not null", name="pause"),
    # one running run per serial session
    Index("runs_one_turn", "session_id", unique=True, postgresql_where=text("state = 'running' and serial")),
    Index("runs_session", "session_id", "session_seq", unique=True),
    # history: completed runs in order of completion
    Index(
        "runs_completion", "session_id", "completion_seq", postgresql_where=text("completion_seq is not null")
    ),
    # claim-next, healing, demand
    Index(
        "runs_claim",
        "pool",
        "queue_class",
        "rank",
        "not_before",
        "id",
        postgresql_where=text("state in ('ready', 'reclaimable') and wait_reason is null"),
    ),
    # waits pass: the wait is over
    Index("runs_later", "not_before", "id", postgresql_where=text("wait_reason = 'later'")),
    # waits pass: nobody served it
    Index(
        "runs_waiting", "wait_reason", "state_since", "id", postgresql_where=text("wait_reason is not null")
    ),
    # waits pass: a cancelled run still holds its session's turn
    Index(
        "runs_fenced",
        "fenced_until",
        "id",
        postgresql_where=text("state = 'cancelled' and fenced_until is not null"),
    ),
    # turn of a session
    Index(
        "runs_turn",
        "session_id",
        "session_seq",
        postgresql_where=text("state in ('ready', 'running', 'reclaimable')"),
    ),
    # lists
    Index("runs_paused", "scope", "id", postgresql_where=text("state = 'paused'")),
    Index("runs_scope", "scope", text("created_at desc"), text("id desc")),
    # lapse pass
    Index("runs_lapsed", "lease_expires_at", "id", postgresql_where=text("state = 'running'")),
    # watchdog, worker's page
    Index("runs_owner", "lease_owner", postgresql_where=text("lease_owner is not null")),
    # start_by pass
    Index(
        "runs_start_by",
        "start_by",
        "id",
        postgresql_where=text("start_by is not null and state = 'ready' and queue_class = 'start'"),
    ),
    postgresql_with={"fillfactor": "70"},
)

messages = Table(
    "messages",
    metadata,
    Column("run_id", Id, primary_key=True),
    Column("seq", BigInteger, primary_key=True),
    Column("step_index", Integer, nullable=False),
    Column("role", Text, nullable=False),
    Column("content", Text, nullable=False),
    Column("tool_calls", Text),
    Column("tool_call_id", Text),
    Column("tool_name", Text),
    Column("is_error", Boolean, nullable=False, server_default=text("false")),
    Column("raw", Text),
    Column("marked", Boolean, nullable=False, server_default=text("false")),
    made(),
)

steps = Table(
    "steps",
    metadata,
    Column("run_id", Id, primary_key=True),
    Column("step_index", Integer, primary_key=True),
    Column("id", Id, nullable=False),
    Column("model", Text, nullable=False),
    Column("usage", JSONB, nullable=False),
    Column("finish_reason", Text, nullable=False),
    Column("term_revision", BigInteger, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("started_at", Time, nullable=False),
    Column("completed_at", Time, nullable=False, server_default=func.clock_timestamp()),
)

tool_calls = Table(
    "tool_calls",
    metadata,
    Column("id", Id, primary_key=True),
    Column("run_id", Id, nullable=False),
    Column("step_index", Integer, nullable=False),
    Column("call_id", Text, nullable=False),
    Column("ordinal", Integer, nullable=False),
    Column("session_id", Id, nullable=False),
    Column("provider_call_id", Text),
    Column("tool", Text, nullable=False),
    Column("class", Text, nullable=False),
    Column("effects", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("message_seq", BigInteger),
    Column("executed_args", Text),
    Column("amended_by", Text),
    Column("result_seq", BigInteger),
    Column("result_digest", Text),
    Column("error", Text),
    Column("term_owner", Text),
    Column("term_revision", BigInteger),
    Column("attempt", Integer, nullable=False, server_default="1"),
    Column("seq", BigInteger, nullable=False),
    Column("started_at", Time),
    Column("finished_at", Time),
    Column("late_result", Text),
    Column("late_at", Time),
    Column("settled_as", Text),
    Column("settled_by", Text),
    made(),
    CheckConstraint(states_of("tool_call"), name="state"),
    UniqueConstraint("run_id", "step_index", "call_id"),
    UniqueConstraint("run_id", "call_id"),
    # uncertain calls of a session
    Index(
        "tool_calls_uncertain",
        "session_id",
        "seq",
        postgresql_where=text("state = 'started' and class <> 'retry_safe'"),
    ),
    postgresql_with={"fillfactor": "80"},
)

events = Table(
    "events",
    metadata,
    Column("id", Id, primary_key=True, server_default=text(EVENT_ID)),
    Column("at", Time, nullable=False, server_default=func.clock_timestamp()),
    Column("scope", Id, nullable=False),
    Column("session_id", Id),
    Column("run_id", Id),
    Column("run_seq", BigInteger),
    Column("conversation_id", Id),
    Column("kind", Text, nullable=False),
    Column("actor", Text),
    Column("worker_id", Text),
    Column("revision", BigInteger),
    Column("data", JSONB),
    Index("events_run", "run_id", "run_seq", unique=True, postgresql_where=text("run_seq is not null")),
    Index("events_session", "session_id", "id"),
    Index("events_scope", "scope", "id"),
)

workers = Table(
    "workers",
    metadata,
    Column("id", Text, primary_key=True),
    Column("version", Text, nullable=False),
    Column("reader_version", Integer, nullable=False),
    Column("agents", ARRAY(Text), nullable=False, server_default=text("'{}'::text[]")),
    Column("own_agents", ARRAY(Text), nullable=False, server_default=text("'{}'::text[]")),
    Column("queues", ARRAY(Text), nullable=False, server_default=text("'{}'::text[]")),
    Column("slots", Integer, nullable=False, server_default="0"),
    Column("slots_used", Integer, nullable=False, server_default="0"),
    Column("pool", Text, nullable=False, server_default="main"),
    Column("last_start_rank", BigInteger, nullable=False, server_default="0"),
    Column("started_at", Time, nullable=False, server_default=func.clock_timestamp()),
    Column("heartbeat_at", Time, nullable=False, server_default=func.clock_timestamp()),
    Column("heartbeat_every_s", Float, nullable=False, server_default="20"),
    Column("draining_at", Time),
    Column("drain_requested_at", Time),
    Column("drain_requested_by", Text),
    Column("drain_reason", Text),
    Column("pause_sessions", Boolean, nullable=False, server_default=text("false")),
    Column("ended_at", Time),
    Column("ended_as", Text),
    Index("workers_live", "heartbeat_at", postgresql_where=text("ended_at is null")),
    postgresql_with={"fillfactor": "50"},
)

sweeps = Table(
    "sweeps",
    metadata,
    Column("name", Text, primary_key=True),
    Column("started_at", Time),
    Column("finished_at", Time),
    Column("worker_id", Text),
    Column("cursor", Text),
    Column("due", Integer, nullable=False, server_default="0"),
    Column("done", Integer, nullable=False, server_default="0"),
    Column("skipped", Integer, nullable=False, server_default="0"),
)

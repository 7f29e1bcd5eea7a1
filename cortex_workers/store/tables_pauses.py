"""The tables of pauses: suspensions, their calls, checkpoints, verdicts. Read them through `tables.py`."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from cortex_workers.store.columns import Id, Time, made, metadata, states_of

suspensions = Table(
    "suspensions",
    metadata,
    Column("id", Id, primary_key=True),
    Column("run_id", Id, nullable=False),
    Column("session_id", Id, nullable=False),
    Column("scope", Id, nullable=False),
    Column("run_revision", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("step_index", Integer, nullable=False),
    Column("next_step", Integer, nullable=False),
    Column("messages_upto", BigInteger, nullable=False),
    Column("usage", JSONB, nullable=False),
    Column("schema_version", Integer, nullable=False, server_default="1"),
    Column("digest", Text, nullable=False),
    Column("on_expiry", Text, nullable=False),
    Column("expires_at", Time),
    Column("deferral_kind", Text),
    Column("deferral_ref", Text),
    Column("next_poll_at", Time),
    made(),
    Column("ended_at", Time),
    Column("ended_as", Text),
    # all pauses of a run, for people
    Index("suspensions_run", "run_id", "created_at"),
    # one live pause per run
    Index("suspensions_live", "run_id", unique=True, postgresql_where=text("ended_at is null")),
    # expiry pass
    Index(
        "suspensions_due",
        "expires_at",
        "id",
        postgresql_where=text("ended_at is null and expires_at is not null"),
    ),
    Index(
        "suspensions_poll",
        "next_poll_at",
        "id",
        postgresql_where=text("ended_at is null and next_poll_at is not null"),
    ),
)

pending_calls = Table(
    "pending_calls",
    metadata,
    Column("suspension_id", Id, primary_key=True),
    Column("call_id", Text, primary_key=True),
    Column("run_id", Id, nullable=False),
    Column("session_id", Id, nullable=False),
    Column("ordinal", Integer, nullable=False),
    Column("kind", Text, nullable=False),
    Column("answerable_by", Text, nullable=False),
    Column("prompt", Text),
    Column("response_schema", JSONB),
    Column("payload", JSONB),
    Column("reply_with", Text),
    Column("answer", LargeBinary),
    Column("answer_digest", Text),
    Column("answered_at", Time),
    Column("answered_by", Text),
    Column("door", Text),
    Index("pending_calls_call", "run_id", "call_id"),
    Index("pending_calls_reply", "reply_with", postgresql_where=text("reply_with is not null")),
    Index(
        "pending_calls_open",
        "session_id",
        "suspension_id",
        "ordinal",
        postgresql_where=text("answered_at is null"),
    ),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("id", Id, primary_key=True),
    Column("scope", Id, nullable=False),
    Column("run_id", Id, nullable=False),
    Column("agent", Id, nullable=False),
    Column("suspension_id", Id),
    Column("kind", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("step_index", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("closed_as", Text),
    Column("decision", JSONB),
    Column("decider_principal", LargeBinary),
    Column("decided_at", Time),
    Column("metadata", JSONB, nullable=False, server_default=text("'{}'::jsonb")),
    made(),
    CheckConstraint(states_of("checkpoint"), name="state"),
    Index(
        "checkpoints_pause", "suspension_id", unique=True, postgresql_where=text("suspension_id is not null")
    ),
    # the queue of a decider, oldest first
    Index("checkpoints_pending", "scope", "id", postgresql_where=text("state = 'pending'")),
    # orphans pass: pending ones by id, across scopes
    Index(
        "checkpoints_open",
        "id",
        postgresql_where=text("state = 'pending' and suspension_id is not null"),
    ),
    Index("checkpoints_run", "run_id", "id"),
)

adjudications = Table(
    "adjudications",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=True),
    Column("run_id", Id, nullable=False),
    Column("session_id", Id, nullable=False),
    Column("scope", Id, nullable=False),
    Column("call_id", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("checkpoint_id", Id, nullable=False),
    Column("suspension_id", Id, nullable=False),
    Column("workload", Text, nullable=False),
    Column("specialist", Text, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("scope_of_verdict", Text, nullable=False),
    Column("authority", Text, nullable=False),
    Column("disposition", Text),
    Column("refusal", Text),
    Column("approver", Text),
    Column("approver_principal", LargeBinary),
    Column("note", Text),
    Column("decided_at", Time),
    Column("adjudicated_at", Time, nullable=False, server_default=func.clock_timestamp()),
    UniqueConstraint("run_id", "call_id", "attempt"),
    Index("adjudications_session", "session_id", "seq"),
    Index("adjudications_export", "scope", "workload", "adjudicated_at"),
)


resume_admissions = Table(
    "resume_admissions",
    metadata,
    Column("run_id", Id, primary_key=True),
    Column("suspension_id", Id, primary_key=True),
    Column("scope", Id, nullable=False),
    Column("input", LargeBinary, nullable=False),
    Column("request_digest", Text, nullable=False),
    Column("suspension_digest", Text, nullable=False),
    Column("run_revision", BigInteger, nullable=False),
    Column("claimed_revision", BigInteger, nullable=False),
    Column("schema_version", Integer, nullable=False, server_default="1"),
    Column("admitted_at", Time, nullable=False, server_default=func.clock_timestamp()),
    Column("admitted_by", Text),
    Column("door", Text, nullable=False),
    # pages and discovery, exact scope
    Index("resume_admissions_scope", "scope", "run_id", "suspension_id"),
)

resume_receipts = Table(
    "resume_receipts",
    metadata,
    Column("run_id", Id, primary_key=True),
    Column("suspension_id", Id, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("digest", Text, nullable=False),
    Column("document", JSONB),
    Column("run_revision", BigInteger, nullable=False),
    Column("event_id", Id),
    Column("at", Time, nullable=False, server_default=func.clock_timestamp()),
    CheckConstraint("kind in ('start', 'expiry', 'closure')", name="kind"),
    # a start and an expiry exclude each other (ruling 41)
    Index(
        "resume_receipts_once",
        "run_id",
        "suspension_id",
        unique=True,
        postgresql_where=text("kind in ('start', 'expiry')"),
    ),
)

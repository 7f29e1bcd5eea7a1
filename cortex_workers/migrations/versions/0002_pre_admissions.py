"""pre: the admission ledger: answers from outside, and the receipts of what became of them.

Why: external tools. Locks: none, the tables are new. Expected time: under a second.
Works while older code runs: it does not know the tables.
"""

from __future__ import annotations

from alembic import op

revision = "0002_pre_admissions"
down_revision = "0001_pre_main_job"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    CREATE TABLE resume_admissions (
        run_id TEXT COLLATE "C" NOT NULL,
        suspension_id TEXT COLLATE "C" NOT NULL,
        scope TEXT COLLATE "C" NOT NULL,
        input BYTEA NOT NULL,
        request_digest TEXT NOT NULL,
        suspension_digest TEXT NOT NULL,
        run_revision BIGINT NOT NULL,
        claimed_revision BIGINT NOT NULL,
        schema_version INTEGER DEFAULT '1' NOT NULL,
        admitted_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        admitted_by TEXT,
        door TEXT NOT NULL,
        CONSTRAINT resume_admissions_pk PRIMARY KEY (run_id, suspension_id)
    )
    """,
    """
    CREATE INDEX resume_admissions_scope ON resume_admissions (scope, run_id, suspension_id)
    """,
    """
    CREATE TABLE resume_receipts (
        run_id TEXT COLLATE "C" NOT NULL,
        suspension_id TEXT COLLATE "C" NOT NULL,
        kind TEXT NOT NULL,
        digest TEXT NOT NULL,
        document JSONB,
        run_revision BIGINT NOT NULL,
        event_id TEXT COLLATE "C",
        at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
        CONSTRAINT resume_receipts_pk PRIMARY KEY (run_id, suspension_id, kind),
        CONSTRAINT resume_receipts_kind_check CHECK (kind in ('start', 'expiry', 'closure'))
    )
    """,
    """
    CREATE UNIQUE INDEX resume_receipts_once ON resume_receipts (run_id, suspension_id) WHERE kind in ('start', 'expiry')
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

"""Runs migrations on the connection that `store/migrate.py` hands over; the lock is taken there."""

from __future__ import annotations

from alembic import context

connection = context.config.attributes.get("connection")
if connection is None:
    raise RuntimeError("migrations run through `cortex-workers migrate`, which holds the lock that makes them safe")

context.configure(connection=connection, transaction_per_migration=False)
with context.begin_transaction():
    context.run_migrations()

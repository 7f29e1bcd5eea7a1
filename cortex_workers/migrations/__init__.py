"""Alembic migrations: forward only, `pre` before the new code, `post` after it."""

if __name__ != "cortex_workers.migrations":
    raise ImportError(f"import cortex_workers.migrations, not {__name__}: the link at the top level is a door for people")

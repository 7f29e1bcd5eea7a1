"""Postgres: the only room with SQL."""

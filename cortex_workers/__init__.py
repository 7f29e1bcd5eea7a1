"""Durable LLM agent runs on Celery, Redis and Postgres."""

"""PostgreSQL and Valkey from wheels, for development."""

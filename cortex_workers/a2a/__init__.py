"""Messages between agents: sent, carried, answered (see README.md)."""

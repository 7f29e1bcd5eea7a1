"""Model clients: the scripted one, and the adapter for real providers."""

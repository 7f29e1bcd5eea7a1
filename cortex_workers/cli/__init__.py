"""The cortex-workers command."""

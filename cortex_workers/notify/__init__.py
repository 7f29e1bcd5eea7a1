"""After-commit notifications."""

"""The command `cortex-workers`: every command is one call of `Client` or of an operator's use case."""

from __future__ import annotations


def main() -> None:
    """Run the command line of this process."""
    # Imported on use: other modules of this package are loaded by worker processes, which need no terminal.
    from cortex_workers.cli.app import app

    app()

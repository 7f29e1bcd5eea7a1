"""The demo: real servers, real workers, a real SIGKILL, and a model that follows a script."""

from __future__ import annotations


def run(*, json: bool = False, keep: bool = False, flower: bool = True) -> int:
    """Play the demo and return the exit code: 0 when every run ended once and no effect was doubled.

    ``json`` prints one object a line instead of the story; ``keep`` leaves the fleet running until Ctrl-C.
    """
    # Imported on use: the workers of the demo import this package for its host, and need no terminal.
    from cortex_workers.cli.demo import stage

    return stage.run(json=json, keep=keep, flower=flower)

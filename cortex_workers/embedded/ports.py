"""Ports on the loopback address."""

import random
import socket

from cortex_workers.embedded.errors import EmbeddedError, PortInUse

LOOPBACK = "127.0.0.1"

# Below the range from which Linux and macOS give ports to outgoing connections, so that a remembered port stays free.
_RANGE = range(20_000, 30_000)
_TRIES = 200

# The system's randomness: a test run seeds the shared generator alike in all its processes.
_random = random.SystemRandom()


def is_free(port: int) -> bool:
    """Say whether a server could listen on the port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the servers do: a port in TIME_WAIT is free, one that is listened on is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def pick(wanted: int | None, remembered: int | None) -> int:
    """Return the wanted port, else the remembered one if it is free, else a free one.

    Raises: PortInUse if a wanted port is taken.
    """
    if wanted is not None:
        if not is_free(wanted):
            raise in_use(wanted)
        return wanted
    if remembered is not None and is_free(remembered):
        return remembered
    for _ in range(_TRIES):
        port = _random.choice(_RANGE)
        if is_free(port):
            return port
    raise EmbeddedError(f"no free port was found on {LOOPBACK} between {_RANGE.start} and {_RANGE.stop}")


def in_use(port: int) -> PortInUse:
    """Make the sentence for a port that is taken."""
    return PortInUse(
        f"port {port} on {LOOPBACK} is in use by another program: free it, or choose another port"
    )

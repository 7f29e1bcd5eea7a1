"""The error tree of the fleet: the one place to import an error from."""

from cortex_workers.errors.messages import *  # noqa: F403
from cortex_workers.errors.tree import *  # noqa: F403

"""Flower's settings as a file beside the units and the compose file; what they are stands in the package."""

from cortex_workers.tasks.flowerconfig import *  # noqa: F403  Flower takes every name that it finds here

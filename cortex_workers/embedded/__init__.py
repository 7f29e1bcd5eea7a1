"""PostgreSQL and Valkey from wheels, for development."""

from cortex_workers.embedded.errors import DataUnusable, EmbeddedError, ExtraMissing, FolderInUse, PortInUse
from cortex_workers.embedded.node import Node
from cortex_workers.embedded.postgres import PostgresNode
from cortex_workers.embedded.servers import EmbeddedServers
from cortex_workers.embedded.valkey import ValkeyNode

__all__ = [
    "DataUnusable",
    "EmbeddedError",
    "EmbeddedServers",
    "ExtraMissing",
    "FolderInUse",
    "Node",
    "PortInUse",
    "PostgresNode",
    "ValkeyNode",
]

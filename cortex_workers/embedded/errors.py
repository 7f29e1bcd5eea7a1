"""What can keep the embedded servers from starting, each told in one sentence."""

from typing import ClassVar

from cortex_workers.errors import Misconfiguration


class EmbeddedError(Misconfiguration):
    """The embedded servers cannot run here."""

    code: ClassVar[str] = "embedded_unavailable"


class ExtraMissing(EmbeddedError):
    """The packages that carry the servers are not installed."""

    code = "embedded_extra_missing"


class FolderInUse(EmbeddedError):
    """Another living process owns the servers of this folder."""

    code = "embedded_folder_in_use"


class PortInUse(EmbeddedError):
    """The port is taken by another program."""

    code = "embedded_port_in_use"


class DataUnusable(EmbeddedError):
    """The data folder is not one that these servers can open."""

    code = "embedded_data_unusable"

"""The host: agents and tools by name, and the ports that the application supplies.

A host module builds one ``Host``; workers load it from ``CORTEX_HOST=module:attribute``.
"""

from cortex_workers.host import foreign
from cortex_workers.host.arguments import BadArguments, ParsedArguments
from cortex_workers.host.codec import JsonPrincipalCodec
from cortex_workers.host.context import ToolContext
from cortex_workers.host.load import load_host
from cortex_workers.host.registry import Host
from cortex_workers.host.results import ResultNotEncodable, clean_text, cut_result, encode_result
from cortex_workers.host.tool import DidNotHappen, Happened, LookupAnswer, Tool, Unknown

__all__ = [
    "BadArguments",
    "DidNotHappen",
    "Happened",
    "Host",
    "JsonPrincipalCodec",
    "LookupAnswer",
    "ParsedArguments",
    "ResultNotEncodable",
    "Tool",
    "ToolContext",
    "Unknown",
    "clean_text",
    "cut_result",
    "encode_result",
    "foreign",
    "load_host",
]

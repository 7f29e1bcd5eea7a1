"""A buyer whose only tool runs outside: for the worker of a test."""

from cortex_workers import Host
from cortex_workers.llm.scripted import ScriptedModel
from tests.engine.outside import quote

host = Host()
host.external_tool(quote)
host.agent(
    "buyer",
    model=ScriptedModel(
        [{"call": [{"tool": "quote", "args": {"item": "{input}"}}]}, {"say": "It costs {last_result}"}]
    ),
    instructions="Buy.",
    tools=["quote"],
)

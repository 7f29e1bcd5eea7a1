"""Why nobody runs an agent version, in words that name what is missing.

Source: ruling 53 (`doctor` names the missing tool).
"""

from __future__ import annotations

from cortex_workers.schemas.agent import AgentDefinition
from cortex_workers.store import overview
from cortex_workers.store.unit import Unit


def short(digest: str) -> str:
    """A version's digest, as much of it as a person compares."""
    return digest[:8]


def why_unserved(unit: Unit, pool: str, agent: str, digest: str) -> str:
    """What live workers of a pool lack to run a version: the agent, or tools of that name, class and effects."""
    wanted = overview.definition(unit, digest)
    brought = overview.versions_brought(unit, pool, agent)
    if not brought:
        return f"no live worker of pool {pool} has an agent named {agent}"
    if wanted is None:
        return f"version {short(digest)} of agent {agent} is gone or cannot be read"
    missing = missing_tools(wanted, brought)
    if missing:
        return f"live workers of pool {pool} lack what version {short(digest)} of {agent} uses: {', '.join(missing)}"
    return f"no live worker of pool {pool} has said yet that it runs version {short(digest)} of {agent}"


def missing_tools(wanted: AgentDefinition, brought: list[AgentDefinition]) -> list[str]:
    """The tools of a version that none of the others has with the same class and effects."""
    there = {(tool.name, tool.tool_class, tool.effects) for each in brought for tool in each.tools}
    names = {name for name, _, _ in there}
    return [
        f"tool {tool.name}" + (f" (there, but not {tool.tool_class})" if tool.name in names else "")
        for tool in wanted.tools
        if (tool.name, tool.tool_class, tool.effects) not in there
    ]

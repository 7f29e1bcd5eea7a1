"""The state machines as tables and diagrams, from `schemas/lifecycle.py`."""

from __future__ import annotations

from cortex_workers.docs.blocks import code, table
from cortex_workers.schemas.lifecycle import MACHINES
from cortex_workers.schemas.states import (
    TERMINAL_DELIVERY_STATES,
    TERMINAL_RUN_STATES,
    TERMINAL_TOOL_CALL_STATES,
    AskState,
    CheckpointState,
    LeaseEffect,
    Transition,
)

_TERMINAL = {
    "run": {str(state) for state in TERMINAL_RUN_STATES},
    "checkpoint": {str(CheckpointState.RESOLVED)},
    "tool_call": {str(state) for state in TERMINAL_TOOL_CALL_STATES},
    "delivery": {str(state) for state in TERMINAL_DELIVERY_STATES},
    "ask": {str(AskState.SEALED)},
}
_LEASE = {
    LeaseEffect.NONE: "",
    LeaseEffect.TAKE: "taken",
    LeaseEffect.DROP: "dropped",
    LeaseEffect.FENCE: "dropped, its end remembered",
}


def lifecycle(machine: str) -> str:
    """Diagram and table of one machine."""
    return f"{diagram(machine)}\n\n{transitions(machine)}"


def diagram(machine: str) -> str:
    """The Mermaid drawing: one arrow per pair of states, labelled with the transitions that take it."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for row in MACHINES[machine]:
        for source in row.sources or ("[*]",):
            arrows.setdefault((str(source), str(row.target)), []).append(row.name)
    lines = [f"    {source} --> {target}: {', '.join(names)}" for (source, target), names in arrows.items()]
    reached = {target for _, target in arrows}
    ends = [f"    {state} --> [*]" for state in sorted(_TERMINAL[machine] & reached)]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, *ends, "```"])


def transitions(machine: str) -> str:
    """Every row of the machine's table."""
    if machine == "run":
        headers = ["transition", "from", "to", "only if", "lease", "tells", "what happened"]
        return table(headers, [_run_row(row) for row in MACHINES[machine]])
    headers = ["transition", "from", "to", "only if", "what happened"]
    return table(headers, [_row(row) for row in MACHINES[machine]])


def _row(row: Transition) -> list[str]:
    sources = ", ".join(code(source) for source in row.sources) or "(none)"
    return [code(row.name), sources, code(row.target), str(row.fence), row.says]


def _run_row(row: Transition) -> list[str]:
    name, sources, target, fence, says = _row(row)
    tells = ", ".join(code(item) for item in row.announces)
    if row.why:
        tells += f" ({row.why.replace('_', '-')})"
    return [name, sources, target, fence, _LEASE[row.lease], tells, f"{says}{_notes(row)}"]


def _notes(row: Transition) -> str:
    notes = []
    if row.counts_reclaim:
        notes.append("counts one reclaim")
    if row.good_end:
        notes.append("the count of reclaims starts anew")
    if row.ends_pause_as:
        notes.append(f"the pause ends as {row.ends_pause_as}")
    return f" *{'; '.join(notes)}*" if notes else ""

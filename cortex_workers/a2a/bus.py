"""The three tools of agents, as the engine's loop calls them (`engine/bus.py`).

Source: messaging.md (c); rulings 3, 62.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cortex_workers.a2a import accept, ask, closing, inbox
from cortex_workers.a2a.shape import speech
from cortex_workers.engine.bus import Asked
from cortex_workers.engine.execution import Execution, Planned
from cortex_workers.errors import Refusal
from cortex_workers.host.messaging import INBOX
from cortex_workers.schemas.base import canonical_json
from cortex_workers.schemas.performatives import Performative
from cortex_workers.store.unit import Unit


class ToolBus:
    """Carries out the tools; whatever is refused is a text for the model, never an error of the run."""

    def look_at_ask(self, ex: Execution, planned: Planned) -> str | None:
        """As the engine says."""
        try:
            with ex.rt.database.read() as unit:
                ask.look(unit, ex, planned)
        except Refusal as error:
            return error.message
        return None

    def write_asks(self, unit: Unit, ex: Execution, waiting: Sequence[Planned], suspension_id: str) -> Asked:
        """As the engine says."""
        return ask.write(unit, ex, waiting, suspension_id)

    def act(self, unit: Unit, ex: Execution, planned: Planned) -> str:
        """As the engine says; a refusal has written nothing."""
        try:
            said = _read(unit, ex, planned) if planned.call.name == INBOX else _send(unit, ex, planned)
        except Refusal as error:
            said = {"error": error.message}
        return canonical_json(said)


def _send(unit: Unit, ex: Execution, planned: Planned) -> dict[str, Any]:
    said = speech(ask.outgoing(ex, planned), ex.rt.settings.message_bytes)
    who = ask.origin(ex, planned)
    if said.performative is Performative.CANCEL:
        sent = closing.close(unit, ex.rt, said, who)
    else:
        accept.refuse_limits(unit, ex.rt, who)
        sent = accept.accept(unit, ex.rt, said, who)
    return sent.model_dump(exclude_none=True)


def _read(unit: Unit, ex: Execution, planned: Planned) -> dict[str, Any]:
    items = inbox.of_run(unit, ex, planned)
    if not items:
        return {"status": "nothing new"}
    return {"messages": [item.model_dump(exclude_none=True) for item in items]}

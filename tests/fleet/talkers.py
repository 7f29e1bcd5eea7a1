"""The host of the fleet's tests on messages: the clerk's tools, and agents that do what they are told or asked.

A run's input is a list of turns, as in `hosts.py`; a message's words are the same list for whoever is asked.
"""

import json

from cortex_workers import Host
from cortex_workers.llm.script import Turn
from cortex_workers.llm.scripted import ScriptedModel, turn_index
from cortex_workers.ports import Admitted, Assignment
from cortex_workers.schemas.llm import ModelRequest
from tests.fleet import hosts


class AdmitAll:
    """Takes every assignment, and leaves a line each time it is asked."""

    def assign(self, assignment: Assignment) -> Admitted:
        hosts._append("assigned", {"run": assignment.run_id, "message": assignment.message_id})
        return Admitted()


def obey(request: ModelRequest) -> Turn:
    """The turn that the newest input asks for, whoever speaks."""
    asked = next(message.content for message in reversed(request.messages) if message.role == "user")
    words = asked if asked.startswith("[") else asked.split("\n\n")[1]
    return Turn.model_validate(json.loads(words)[turn_index(request.messages)])


host = Host(messaging=True, handoff=AdmitAll())
for name in ("note", "charge", "refund"):
    host.tools[name] = hosts.host.tools[name]
MODEL = ScriptedModel(obey, keep_requests=10)
for name in ("planner", "first", "second"):
    host.agent(name, model=MODEL, instructions="Do as you are told.", tools=["note", "charge", "refund"])

"""The scripted model, where tests look for it."""

from cortex_workers.llm.script import Case, Script, ScriptedCall, Turn
from cortex_workers.llm.scripted import ScriptedModel, check_conversation

__all__ = ["Case", "Script", "ScriptedCall", "ScriptedModel", "Turn", "check_conversation"]

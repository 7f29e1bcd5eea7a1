"""A small shop whose model does what the input says: for the workers of these tests."""

import os
import threading
from pathlib import Path

from cortex_workers import Host
from cortex_workers.llm.script import Turn
from cortex_workers.llm.scripted import ScriptedModel
from cortex_workers.schemas.llm import ModelRequest

host = Host()


@host.tool(retry_safe=True)
def wait_for(file: str) -> str:
    """Wait until a file is gone.

    Args:
        file: where it is
    """
    path = Path(file)
    path.with_suffix(".entered").write_text(str(os.getpid()))
    while path.exists():
        threading.Event().wait(0.01)
    return "it is gone"


def answer(request: ModelRequest) -> Turn:
    """`wait FILE` calls the tool once; anything else is answered at once."""
    asked = next(message.content for message in reversed(request.messages) if message.role == "user")
    if request.messages[-1].role != "tool" and asked.startswith("wait "):
        return Turn.model_validate(
            {"call": [{"tool": "wait_for", "args": {"file": asked.removeprefix("wait ")}}]}
        )
    return Turn(say=f"You said: {asked}")


host.agent("echo", model=ScriptedModel(answer), instructions="Do as you are told.", tools=["wait_for"])

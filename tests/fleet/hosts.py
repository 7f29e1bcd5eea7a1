"""The host of the fleet's tests: a model that does what a run's input says, and tools that leave a line per effect.

`FLEET_FOLDER` is where the lines and the files that tools wait at are. A line holds the idempotency key, so two lines
with one key are an effect that happened twice.
"""

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

from cortex_workers import DidNotHappen, Happened, Host, ToolContext
from cortex_workers.host import LookupAnswer
from cortex_workers.llm.script import Turn
from cortex_workers.llm.scripted import ScriptedModel, turn_index
from cortex_workers.llm.spend_gate import SpendGate
from cortex_workers.schemas.llm import ModelRequest

host = Host()
_LOOK_S = 0.01


def _folder() -> Path:
    return Path(os.environ["FLEET_FOLDER"])


def _append(name: str, line: dict[str, Any]) -> None:
    """One write of one line: whole whatever kills this process."""
    file = os.open(_folder() / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


def _effect(ctx: ToolContext, tool: str, **more: Any) -> None:
    line = {"tool": tool, "key": ctx.idempotency_key, "run": ctx.run_id, "attempt": ctx.attempt}
    _append("effects", {**line, "pid": os.getpid(), "at": time.time(), **more})


def _looked_up(ctx: ToolContext, answer: Any) -> LookupAnswer:
    """What the books say: the lines that hold this call's key."""
    books = _folder() / "effects"
    lines = books.read_text().splitlines() if books.exists() else []
    found = any(json.loads(line)["key"] == ctx.idempotency_key for line in lines)
    return Happened(answer) if found else DidNotHappen()


def _wait_while_there(gate: str) -> None:
    """Say where this is, and wait until a file is removed."""
    file = _folder() / gate
    _append(f"{gate}.entered", {"pid": os.getpid()})
    pause = Event()
    while file.exists():
        pause.wait(_LOOK_S)


@host.tool(retry_safe=True)
def note(text: str, ctx: ToolContext) -> str:
    """Write something down; may happen again."""
    _append("notes", {"key": ctx.idempotency_key, "run": ctx.run_id, "pid": os.getpid()})
    return f"noted {text}"


@host.tool
def charge(amount: int, ctx: ToolContext) -> str:
    """Take money; the books tell afterwards whether it happened."""
    _effect(ctx, "charge", amount=amount)
    return f"charged {amount}"


@charge.lookup
def _charged(amount: int, ctx: ToolContext) -> LookupAnswer:
    return _looked_up(ctx, f"charged {amount}")


@host.tool
def pay(amount: int, ctx: ToolContext) -> str:
    """Pay; nobody can tell afterwards whether it happened."""
    _effect(ctx, "pay", amount=amount)
    return f"paid {amount}"


@host.tool(needs_approval=True)
def refund(amount: int, ctx: ToolContext) -> str:
    """Give money back, if a person says so."""
    _effect(ctx, "refund", amount=amount)
    return f"refunded {amount}"


@refund.lookup
def _refunded(amount: int, ctx: ToolContext) -> LookupAnswer:
    return _looked_up(ctx, f"refunded {amount}")


@host.tool(needs_approval=True, approval_ttl=timedelta(seconds=0.5), on_expiry="return_to_model")
def refund_soon(amount: int, ctx: ToolContext) -> str:
    """Give money back, if a person says so within half a second."""
    _effect(ctx, "refund_soon", amount=amount)
    return f"refunded {amount}"


@host.tool(retry_safe=True)
def wait_at(gate: str) -> str:
    """Wait while a file is there, whatever else happens."""
    _wait_while_there(gate)
    return f"past {gate}"


@host.tool
def pay_and_wait(amount: int, gate: str, ctx: ToolContext) -> str:
    """Pay, then wait while a file is there; nobody can tell afterwards whether it happened."""
    _effect(ctx, "pay_and_wait", amount=amount)
    _wait_while_there(gate)
    return f"paid {amount}"


@host.tool
def wait_and_pay(amount: int, gate: str, ctx: ToolContext) -> str:
    """Wait while a file is there, then pay, come what may."""
    _wait_while_there(gate)
    _effect(ctx, "wait_and_pay", amount=amount)
    return f"paid {amount}"


@host.tool(retry_safe=True)
def burn(seconds: float) -> str:
    """Compute in plain Python without pause."""
    end, turns = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        turns += sum(range(100))
    return f"burnt {seconds:g}"


def quote(item: str) -> str:  # type: ignore[empty-body]
    """Ask a supplier, who answers from outside."""


def quote_soon(item: str) -> str:  # type: ignore[empty-body]
    """Ask a supplier who has half a second to answer."""


host.external_tool(quote)
host.external_tool(quote_soon, ttl=timedelta(seconds=0.5))


def obey(request: ModelRequest) -> Turn:
    """The turn that the newest input asks for: an input is a list of turns (see `tests.fleet.bench.script`)."""
    asked = next(message.content for message in reversed(request.messages) if message.role == "user")
    index = turn_index(request.messages)
    heard = [
        message.content for message in request.messages if message.role == "assistant" and message.content
    ]
    line = {"run": request.run_id, "step": request.step, "turn": index, "pid": os.getpid(), "heard": heard}
    _append("model", line)
    return Turn.model_validate(json.loads(asked)[index])


MODEL = ScriptedModel(obey, keep_requests=10)
TOOLS = list(host.tools)

host.agent("clerk", model=MODEL, instructions="Do as you are told.", tools=TOOLS)
host.agent("parallel", model=MODEL, instructions="Do as you are told.", tools=TOOLS, turns="parallel")
host.agent(
    "careful",
    model=SpendGate(MODEL, max_tokens=1),
    instructions="Do as you are told, if a person says that it is worth it.",
    tools=TOOLS,
)

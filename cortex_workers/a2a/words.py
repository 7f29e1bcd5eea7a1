"""What agents read: the input that a message becomes, and why an answer did not come.

Source: messaging.md c.9, e.1, e.5; ruling 65.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from cortex_workers.schemas.performatives import Performative
from cortex_workers.store.transitions import Row

_AT_WORK = "it still works on it"
_HAS_NOT_BEGUN = "it has not begun"
_WAITS = {
    "approval": "it waits for a person",
    "external_tool": "it waits for a result from outside",
    "agent_reply": "it waits for another agent",
}


def input_of(message: Row) -> str:
    """A message as the input of the receiver's run: who speaks, the kind of speech, the words, the deadline."""
    labels: Mapping[str, str] = message["labels"]
    shown = "".join(f" [{name}: {labels[name]}]" for name in ("ontology", "protocol") if labels.get(name))
    text = f"{message['sender']} ({message['performative']}){shown}:\n\n{message['content']}"
    if message["reply_by"] is not None:
        text += f"\n\nAn answer is wanted by {rfc3339(message['reply_by'])}."
    return text


def rfc3339(at: datetime) -> str:
    """A time for an agent to read."""
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def reply_of(run: Row) -> tuple[Performative, str] | None:
    """What a run that was started by a message has to say; None while it has not ended."""
    if run["state"] == "completed":
        return Performative.INFORM, run["output"] or ""
    if run["state"] == "cancelled":
        return Performative.FAILURE, f"{run['agent']} could not answer: the work was cancelled"
    if run["state"] in ("failed", "incomplete"):
        why = run["error_text"] or run["error_code"] or "it failed"
        return Performative.FAILURE, f"{run['agent']} could not answer: {why}"
    return None


def silence(
    receiver: str, deadline: datetime, delivery: Row | None, run: Row | None, reason: str | None
) -> str:
    """Why there is no answer from somebody at the deadline, and what he is doing."""
    text = f"{receiver} did not reply before the deadline {rfc3339(deadline)}"
    if delivery is None:
        return text
    if delivery["state"] == "queued":
        return f"{text}; {_HAS_NOT_BEGUN}"
    if run is None:
        return f"{text}; {_AT_WORK}" if delivery["state"] in ("delivering", "awaiting_remote") else text
    if run["state"] == "paused":
        return f"{text}; {_WAITS.get(reason or '', 'it waits')}"
    return f"{text}; {_AT_WORK}"

"""Prefixed, time-sortable ids (UUIDv7 in base32), one type per entity.

Source: seed engine, id; runs.md 2.1.
"""

from __future__ import annotations

from typing import NewType

from typeid import TypeID

RunId = NewType("RunId", str)
StepId = NewType("StepId", str)
ToolCallId = NewType("ToolCallId", str)
SuspensionId = NewType("SuspensionId", str)
CheckpointId = NewType("CheckpointId", str)
SessionId = NewType("SessionId", str)
EventId = NewType("EventId", str)

RUN = "arun"
STEP = "astp"
TOOL_CALL = "tcall"
SUSPENSION = "sus"
CHECKPOINT = "acp"
SESSION = "ses"
EVENT = "evt"

PREFIXES = {
    RUN: "run",
    STEP: "step",
    TOOL_CALL: "tool call",
    SUSPENSION: "suspension",
    CHECKPOINT: "checkpoint",
    SESSION: "session",
    EVENT: "event",
}


def new_id(prefix: str) -> str:
    """Make a fresh id of one kind; later ids sort after earlier ones."""
    return str(TypeID(prefix=prefix))


def is_id(prefix: str, text: object) -> bool:
    """Tell whether a text is a well-formed id of exactly this kind."""
    if not isinstance(text, str) or not text.startswith(prefix + "_"):
        return False
    try:
        return bool(TypeID.from_string(text).prefix == prefix)
    except Exception:  # noqa: BLE001  the library raises several kinds; each means "not an id"
        return False


def id_from_digest(prefix: str, sha256_hex: str) -> str:
    """Derive an id from a digest, always the same one; its version bits say 8 (custom).

    Source: ruling 55 (`key=` derives the run id).
    """
    from uuid_utils import UUID

    raw = bytearray(bytes.fromhex(sha256_hex)[:16])
    raw[6] = (raw[6] & 0x0F) | 0x80
    raw[8] = (raw[8] & 0x3F) | 0x80
    return str(TypeID.from_uuid(prefix=prefix, suffix=UUID(bytes=bytes(raw))))

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
MessageId = NewType("MessageId", str)
ConversationId = NewType("ConversationId", str)
DeliveryId = NewType("DeliveryId", str)

RUN = "arun"
STEP = "astp"
TOOL_CALL = "tcall"
SUSPENSION = "sus"
CHECKPOINT = "acp"
SESSION = "ses"
EVENT = "evt"
MESSAGE = "msg"
CONVERSATION = "conv"
DELIVERY = "dlv"

PREFIXES = {
    RUN: "run",
    STEP: "step",
    TOOL_CALL: "tool call",
    SUSPENSION: "suspension",
    CHECKPOINT: "checkpoint",
    SESSION: "session",
    EVENT: "event",
    MESSAGE: "message",
    CONVERSATION: "conversation",
    DELIVERY: "delivery",
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


def same_suffix(prefix: str, text: str) -> str:
    """The id of another kind that belongs to this one: a delivery and the run it starts differ in the prefix only."""
    return f"{prefix}_{text.split('_', 1)[1]}"


def id_from_digest(prefix: str, sha256_hex: str) -> str:
    """Derive an id from a digest, always the same one; its version bits say 8 (custom).

    Source: ruling 55 (`key=` derives the run id).
    """
    from uuid_utils import UUID

    raw = bytearray(bytes.fromhex(sha256_hex)[:16])
    raw[6] = (raw[6] & 0x0F) | 0x80
    raw[8] = (raw[8] & 0x3F) | 0x80
    return str(TypeID.from_uuid(prefix=prefix, suffix=UUID(bytes=bytes(raw))))

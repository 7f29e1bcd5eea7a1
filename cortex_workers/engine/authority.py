"""Under whom a run acts: its own stored scope and principal, never the worker's or the decider's.

Source: runs.md 8; ruling 56.
"""

from __future__ import annotations

from typing import Any

from cortex_workers.errors import (
    CortexError,
    InvalidArgument,
    PrincipalRevoked,
    PrincipalUndecodable,
    RefusedForNow,
)
from cortex_workers.host import Host, foreign
from cortex_workers.ports import PrincipalCodec


def encode(codec: PrincipalCodec | None, principal: Any) -> bytes | None:
    """A principal as the row keeps it; None stays None.

    Raises: InvalidArgument for a principal without a codec, or one that the codec cannot encode.
    """
    if principal is None:
        return None
    if codec is None:
        raise InvalidArgument("a principal needs a codec: pass Client(codec=…) and Host(codec=…)")
    try:
        data = codec.encode(principal)
    except CortexError:
        raise
    except BaseException as error:  # noqa: BLE001  foreign code: what it cannot encode is a bad argument
        foreign.let_through(error)
        raise InvalidArgument(
            f"the codec cannot encode this principal: {foreign.told(error)[:300]}"
        ) from error
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidArgument(f"the codec must encode a principal to bytes, not {type(data).__name__}")
    return bytes(data)


def restore(host: Host | None, data: bytes | None, hand_backs: int) -> Any:
    """The principal a run started under.

    Raises: RefusedForNow when it cannot be decoded right now, PrincipalRevoked when it never can be again.
    """
    codec = host.codec if host is not None else None
    if data is None or codec is None:
        return None
    try:
        return codec.decode(bytes(data))
    except PrincipalRevoked:
        raise
    except PrincipalUndecodable as error:
        raise RefusedForNow(
            "the principal cannot be decoded right now", retry_in_s=backoff_s(hand_backs), reason="principal"
        ) from error
    except BaseException as error:  # noqa: BLE001  foreign code: an unexpected error is "not now", never a lost run
        foreign.let_through(error)
        raise RefusedForNow(
            f"the principal codec raised {type(error).__name__}",
            retry_in_s=backoff_s(hand_backs),
            reason="principal",
        ) from error


def backoff_s(hand_backs: int) -> float:
    """The wait after a refusal for now: 1 s, doubling, at most 5 minutes (ruling 15)."""
    return float(min(300.0, 2.0 ** min(hand_backs, 9)))

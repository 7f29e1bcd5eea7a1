"""A codec for principals that are JSON, or of one type that pydantic knows."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from cortex_workers.errors import InvalidArgument, PrincipalUndecodable
from cortex_workers.schemas.base import canonical_json


class JsonPrincipalCodec:
    """Stores principals as JSON.

    Without a type: dicts, lists and text that come back equal. With one (a pydantic model, a dataclass, a
    TypedDict): values of that type. Nothing here tells whether a principal is still valid: a codec of your
    own raises PrincipalRevoked for that.
    Source: ruling 56.
    """

    def __init__(self, principal_type: Any = None) -> None:
        self._adapter: TypeAdapter[Any] | None = (
            None if principal_type is None else TypeAdapter(principal_type)
        )

    def encode(self, principal: Any) -> bytes:
        """Encode one principal.

        Raises: InvalidArgument for what would not come back equal.
        """
        try:
            if self._adapter is not None:
                data = self._adapter.dump_json(principal, by_alias=True, warnings="error")
                back = self._adapter.validate_json(data)
            else:
                data = canonical_json(principal).encode()
                back = json.loads(data)
        except (TypeError, ValueError, RecursionError, PydanticSerializationError) as error:
            raise InvalidArgument(
                f"the principal cannot be stored as JSON: {type(error).__name__}"
            ) from error
        if back != principal:
            raise InvalidArgument("the principal does not come back equal from JSON; use text keys and lists")
        return data

    def decode(self, data: bytes) -> Any:
        """Decode a stored principal.

        Raises: PrincipalUndecodable; another version of this worker may be able to.
        """
        try:
            return json.loads(data) if self._adapter is None else self._adapter.validate_json(data)
        except ValidationError as error:
            raise PrincipalUndecodable(
                f"the stored principal is not of this type ({error.error_count()} problems)"
            ) from None
        except ValueError as error:
            raise PrincipalUndecodable("the stored principal is no JSON") from error

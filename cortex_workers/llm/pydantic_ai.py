"""The real model clients: pydantic-ai-slim's direct API, translated to and from our own types.

Only ``direct``, ``messages``, ``models``, ``tools.ToolDefinition``, settings and errors of that library are used, and
only here and in ``raw``. Nothing of it is stored: what a provider needs back verbatim (ids, signatures) travels in
``raw``, a document of our own. Retries of the SDK are off, since the run owns retrying.
Source: decision S6, ruling 59.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary

from pydantic_ai import direct, exceptions
from pydantic_ai import messages as theirs
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition as TheirTool

from cortex_workers.errors import ModelFailed, ModelUnavailable
from cortex_workers.llm.raw import restore_parts, restored_call_ids, write_raw
from cortex_workers.schemas.llm import (
    Message,
    ModelDelta,
    ModelReply,
    ModelRequest,
    ToolCall,
    ToolDefinition,
    Usage,
)

_WORTH_ANOTHER_TRY = frozenset({408, 409, 425, 429})
_CODE = re.compile(r"[\w.:-]{1,64}")


class PydanticAIClient:
    """One provider's model. ``provider`` is the prefix of the model's name; raw documents of others are not sent.

    Connections belong to an event loop. A worker has one for all model calls; on another one ``build`` makes the
    model anew.
    """

    def __init__(self, build: Callable[[], Model], provider: str) -> None:
        self._build = build
        self._provider = provider
        # Built at once, so that a missing key shows when a worker starts.
        self._unbound: Model | None = build()
        self._models: WeakKeyDictionary[asyncio.AbstractEventLoop, Model] = WeakKeyDictionary()

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Answer one request. Cancelling the task closes the connection.

        Raises: ModelUnavailable, ModelFailed.
        """
        messages = to_messages(request, self._provider)
        with sorted_errors():
            response = await direct.model_request(
                self._model(),
                messages,
                model_settings=to_settings(request),
                model_request_parameters=to_parameters(request.tools),
            )
        return to_reply(response, self._provider)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """Answer one request piece by piece; the last delta carries the whole reply.

        Raises: ModelUnavailable, ModelFailed.
        """
        messages = to_messages(request, self._provider)
        with sorted_errors():
            opened = direct.model_request_stream(
                self._model(),
                messages,
                model_settings=to_settings(request),
                model_request_parameters=to_parameters(request.tools),
            )
            async with opened as streamed:
                async for event in streamed:
                    text = _text_of(event)
                    if text:
                        yield ModelDelta(content=text)
                response = streamed.get()
        if response.state != "complete":
            raise ModelUnavailable("the provider's answer broke off")
        yield ModelDelta(reply=to_reply(response, self._provider))

    async def aclose(self) -> None:
        """Close the provider's connections on this event loop."""
        async with self._model():
            pass

    def _model(self) -> Model:
        loop = asyncio.get_running_loop()
        model = self._models.get(loop)
        if model is None:
            model = self._models[loop] = self._unbound or self._build()
            self._unbound = None
        return model


def to_messages(request: ModelRequest, provider: str) -> list[theirs.ModelMessage]:
    """A request's conversation in the library's types; what is not the assistant's is one message per turn."""
    found: list[theirs.ModelMessage] = []
    names: dict[str, str] = {}
    ids: dict[str, str] = {}
    for message in request.messages:
        if message.role == "assistant":
            found.append(restore_parts(message, provider) or _plain_response(message))
            names.update({call.id: call.name for call in message.tool_calls})
            ids.update(restored_call_ids(message, provider))
            continue
        part = _request_part(message, names, ids)
        newest = found[-1] if found else None
        if isinstance(newest, theirs.ModelRequest):
            newest.parts = [*newest.parts, part]
        else:
            found.append(theirs.ModelRequest(parts=[part]))
    if request.system:
        newest = found[-1] if found else None
        if not isinstance(newest, theirs.ModelRequest):
            raise ModelFailed("malformed conversation: nothing to answer")
        newest.instructions = request.system
    return found


def to_reply(response: theirs.ModelResponse, provider: str) -> ModelReply:
    """The library's response in our types.

    Raises: ModelFailed for a filtered answer, ModelUnavailable for one that the provider gave up.
    """
    if response.finish_reason == "content_filter":
        raise ModelFailed("the provider's content filter stopped the answer")
    if response.finish_reason == "error":
        raise ModelUnavailable("the provider gave up in the middle of the answer")
    calls = [part for part in response.parts if isinstance(part, theirs.ToolCallPart)]
    return ModelReply(
        content="".join(part.content for part in response.parts if isinstance(part, theirs.TextPart)),
        tool_calls=tuple(_call(part) for part in calls),
        usage=Usage(
            input_tokens=response.usage.input_tokens,
            output_tokens=response.usage.output_tokens,
            cache_read_tokens=response.usage.cache_read_tokens,
            cache_write_tokens=response.usage.cache_write_tokens,
            requests=1,
        ),
        # The Responses protocol calls a turn with tool calls "completed", as any other.
        finish_reason="tool_calls"
        if calls and response.finish_reason != "length"
        else response.finish_reason or "stop",
        model=response.model_name or "",
        raw=write_raw(response, provider),
    )


def _plain_response(message: Message) -> theirs.ModelResponse:
    parts: list[theirs.ModelResponsePart] = []
    if message.content:
        parts.append(theirs.TextPart(message.content))
    parts += [
        theirs.ToolCallPart(call.name, args=call.arguments, tool_call_id=call.id)
        for call in message.tool_calls
    ]
    return theirs.ModelResponse(parts=parts)


def _request_part(message: Message, names: dict[str, str], ids: dict[str, str]) -> theirs.ModelRequestPart:
    if message.role == "user":
        return theirs.UserPromptPart(message.content)
    call_id = message.tool_call_id or ""
    return theirs.ToolReturnPart(
        tool_name=message.tool_name or names.get(call_id, ""),
        content=message.content,
        tool_call_id=ids.get(call_id, call_id),
        outcome="failed" if message.is_error else "success",
    )


def _call(part: theirs.ToolCallPart) -> ToolCall:
    arguments = part.args if isinstance(part.args, str) else part.args_as_json_str()
    return ToolCall(id=part.tool_call_id, name=part.tool_name, arguments=arguments)


def _text_of(event: Any) -> str:
    if isinstance(event, theirs.PartStartEvent) and isinstance(event.part, theirs.TextPart):
        return event.part.content
    if isinstance(event, theirs.PartDeltaEvent) and isinstance(event.delta, theirs.TextPartDelta):
        return event.delta.content_delta
    return ""


def to_parameters(tools: Sequence[ToolDefinition]) -> ModelRequestParameters:
    """The tools of a request in the library's types."""
    return ModelRequestParameters(
        function_tools=[
            TheirTool(name=tool.name, description=tool.description, parameters_json_schema=tool.parameters)
            for tool in tools
        ]
    )


def to_settings(request: ModelRequest) -> ModelSettings:
    """The agent's own settings, below what the request says; one attempt only."""
    settings: dict[str, Any] = dict(request.settings)
    if request.max_tokens is not None:
        settings["max_tokens"] = request.max_tokens
    if request.temperature is not None:
        settings["temperature"] = request.temperature
    if request.timeout_s is not None:
        settings["timeout"] = settings["request_timeout"] = request.timeout_s
    settings["max_retries"] = 0
    return cast(ModelSettings, settings)


@contextmanager
def sorted_errors() -> Iterator[None]:
    """Turn the library's errors into the two that the run knows. Their texts may hold prompts; ours do not."""
    try:
        yield
    except exceptions.ModelAPIError as error:
        raise _sort(error) from error
    except (exceptions.ContentFilterError, exceptions.OutputTokenLimitExceeded) as error:
        raise ModelFailed(f"the model's answer cannot be used: {type(error).__name__}") from error
    except exceptions.UserError as error:
        raise ModelFailed(f"the model cannot be asked like this: {str(error)[:300]}") from error
    except Exception as error:
        # An answer of another shape than promised surfaces as whatever the library stumbled over.
        raise ModelUnavailable(f"the provider's answer could not be read: {type(error).__name__}") from error


def _sort(error: exceptions.ModelAPIError) -> ModelUnavailable | ModelFailed:
    told = _told(error)
    refused = isinstance(error, exceptions.ModelRequestRejectedError | exceptions.ModelQuotaExceededError)
    if isinstance(error, exceptions.ModelHTTPError):
        # A quota that is used up comes as 429 too, and waiting does not fill it.
        again = error.status_code in _WORTH_ANOTHER_TRY or error.status_code >= 500
        refused = not again or isinstance(error, exceptions.ModelQuotaExceededError)
    if refused:
        return ModelFailed(f"the provider refused the request: {told}")
    return ModelUnavailable(f"the provider is not available: {told}", retry_after_s=error.retry_after)


def _told(error: exceptions.ModelAPIError) -> str:
    """Status and the provider's own code: what can be shown and looked up."""
    words = []
    if isinstance(error, exceptions.ModelHTTPError):
        words.append(f"HTTP {error.status_code}")
    for code in (error.provider_error_code, error.provider_error_type):
        if isinstance(code, str) and _CODE.fullmatch(code) and code not in words:
            words.append(code)
    if not words:
        words.append(type(error).__name__)
    return f"{', '.join(words)} (model {error.model_name})"

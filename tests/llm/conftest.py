"""Clients of the local OpenAI server, and requests to send."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import pytest
from pydantic_ai.models import infer_model

from cortex_workers.llm.pydantic_ai import PydanticAIClient
from cortex_workers.schemas.llm import Message, ModelReply, ModelRequest
from cortex_workers.testing.openai_server import Answer, OpenAIServer

T = TypeVar("T")
Ask = Callable[[PydanticAIClient, OpenAIServer], Awaitable[T]]


@pytest.fixture(params=["openai", "openai-chat"])
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def talk(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Sequence[Any], Ask[Any]], tuple[Any, OpenAIServer]]:
    """Run an exchange against a server with these answers; returns its result and the server."""

    def run(
        answers: Sequence[Answer | dict[str, Any]], ask: Ask[T], base_url: str | None = None
    ) -> tuple[T, OpenAIServer]:
        async def exchange(server: OpenAIServer) -> T:
            monkeypatch.setenv("OPENAI_BASE_URL", base_url or server.base_url)
            monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
            client = PydanticAIClient(partial(infer_model, f"{provider}:gpt-5-mini"), provider)
            try:
                return await ask(client, server)
            finally:
                await client.aclose()

        with OpenAIServer(answers) as server:
            return asyncio.run(exchange(server)), server

    return run


def user(text: str) -> Message:
    return Message(role="user", content=text)


def said(reply: ModelReply, **changed: Any) -> Message:
    """The assistant's message as the engine stores it."""
    fields = {"content": reply.content, "tool_calls": reply.tool_calls, "raw": reply.raw, **changed}
    return Message(role="assistant", **fields)


def request(*messages: Message, **fields: Any) -> ModelRequest:
    return ModelRequest(model="gpt-5-mini", messages=messages or (user("hello"),), **fields)

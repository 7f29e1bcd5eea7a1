"""Names of models become clients, and what is missing is named."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from cortex_workers.errors import Misconfiguration, UnknownModel
from cortex_workers.host import Host
from cortex_workers.llm import resolve as room
from cortex_workers.llm.pydantic_ai import PydanticAIClient
from cortex_workers.llm.resolve import check_models, client_for, resolve
from cortex_workers.llm.scripted import ScriptedModel
from cortex_workers.testing.openai_server import OpenAIServer
from tests.llm.conftest import request


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_clients", {})


def test_a_scripted_model_is_named_by_its_file_and_built_once(tmp_path: Path) -> None:
    file = tmp_path / "script.json"
    file.write_text(json.dumps([{"say": "x"}]))
    client = resolve(f"scripted:{file}")
    assert isinstance(client, ScriptedModel)
    assert resolve(f"scripted:{file}") is client


@pytest.mark.parametrize(
    "name", ["openai:gpt-5-mini", "openai-chat:gpt-5-mini", "openai-responses:gpt-5", "ollama:x"]
)
def test_providers_go_by_their_own_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    monkeypatch.setenv("OLLAMA_BASE_URL", "http://127.0.0.1:1/v1")
    assert isinstance(resolve(name), PydanticAIClient)


@pytest.mark.parametrize("name", ["", "gpt-5", ":gpt", "openai:", "test", "nobody:gpt-5", "host:agent"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(UnknownModel):
        resolve(name)


def test_a_misspelt_provider_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(UnknownModel, match="no provider 'opanai'; did you mean 'openai'") as caught:
        resolve("opanai:foo")
    assert "known are anthropic, bedrock, google" in caught.value.message
    with pytest.raises(UnknownModel, match="no provider 'nobody'; known are "):
        resolve("nobody:gpt-5")


def test_a_missing_package_is_named_by_our_extra() -> None:
    with pytest.raises(UnknownModel, match=r"pip install 'cortex-workers\[llm-anthropic\]'"):
        resolve("anthropic:claude-sonnet-4-5")
    with pytest.raises(UnknownModel, match=r"pip install 'pydantic-ai-slim\[cohere\]'"):
        resolve("cohere:command")


def test_without_the_model_layer_the_extra_is_named() -> None:
    """In a process of its own, where pydantic-ai cannot be imported."""
    code = textwrap.dedent(
        """
        import sys
        sys.modules["pydantic_ai"] = None
        from cortex_workers.errors import UnknownModel
        from cortex_workers.llm.resolve import resolve
        for name in ("openai:x", "fireworks:x", "antropic:x"):
            try:
                resolve(name)
            except UnknownModel as error:
                print(error.message)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "cortex-workers[llm-openai]" in done.stdout
    assert "cortex-workers[llm]" in done.stdout
    assert "did you mean 'anthropic'?" in done.stdout


def test_naming_models_does_not_import_the_model_layer() -> None:
    code = (
        "import sys; from cortex_workers.llm.resolve import resolve; from cortex_workers.host import Host;"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'pydantic_ai', 'openai', 'httpx', 'httpx2'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_a_missing_key_is_a_misconfiguration_that_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(Misconfiguration, match="OPENAI_API_KEY") as caught:
        resolve("openai:gpt-5-mini")
    assert not isinstance(caught.value, UnknownModel)


def test_one_client_serves_one_event_loop_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept-alive connections of a loop that has ended are not used again."""
    with OpenAIServer([{"say": "one"}, {"say": "two"}, {"say": "three"}]) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        client = resolve("openai-chat:gpt-5-mini")
        assert isinstance(client, PydanticAIClient)
        said = []
        for _ in range(2):

            async def ask(client: PydanticAIClient = client) -> str:
                try:
                    return (await client.complete(request())).content
                finally:
                    await client.aclose()

            said.append(asyncio.run(ask()))
        assert said == ["one", "two"]


def test_the_host_s_own_models_come_first(tmp_path: Path) -> None:
    built: list[str] = []

    def build() -> ScriptedModel:
        built.append("x")
        return ScriptedModel([{"say": "x"}])

    mine = ScriptedModel([{"say": "mine"}])
    host = Host(models={"fast": build})
    host.agent("named", model="fast")
    host.agent("given", model=mine)
    definitions = host.definitions()
    assert definitions["given"].model == "host:given"
    assert client_for(host, "host:given") is mine
    assert client_for(host, "fast") is client_for(host, "fast")
    assert built == ["x"]


def test_a_worker_finds_a_broken_model_at_start() -> None:
    host = Host()
    host.agent("support", model="nobody:gpt")
    with pytest.raises(UnknownModel, match="agent 'support'"):
        check_models(host)


@pytest.mark.parametrize("source", [lambda: "no client", lambda: None])
def test_a_builder_of_something_else_is_refused(source: Any) -> None:
    host = Host()
    host.agent("a", model=source)
    with pytest.raises(UnknownModel, match="not a ModelClient"):
        check_models(host)


def test_a_builder_that_fails_is_named() -> None:
    host = Host(models={"fast": lambda: ScriptedModel.from_file("/nowhere/x"), "slow": lambda: 1 / 0})  # type: ignore[dict-item, return-value]
    with pytest.raises(Misconfiguration, match="/nowhere/x"):
        client_for(host, "fast")
    with pytest.raises(UnknownModel, match="'slow' cannot be built: ZeroDivisionError"):
        client_for(host, "slow")


def test_another_host_s_client_is_not_known_here() -> None:
    with pytest.raises(UnknownModel, match="'support'"):
        client_for(Host(), "host:support")

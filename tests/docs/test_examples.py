"""Every Python example of the pages runs: against a real PostgreSQL, with a scripted model or a local provider."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cortex_workers import Client, DidNotHappen, Happened, Host, wiring
from cortex_workers.engine import slot
from cortex_workers.errors import Refusal
from cortex_workers.host import load_host
from cortex_workers.settings import load_settings
from tests.docs.markdown import Block, all_pages
from tests.docs.shop import ANSWERS, examples, named, open_shop

RUN_HERE = {
    "README.md",
    "cortex_workers/host/README.md",
    "cortex_workers/llm/README.md",
    "cortex_workers/testing/README.md",
}
# What shows a shape and is not a program, with the reason.
SHAPES = {"tests/README.md": "shows how a test waits; what it waits for is the reader's"}


@pytest.fixture
def environment(
    tmp_path: Path, database_url: str, broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """The README's shop, open, in the folder of the test."""
    given = {"CORTEX_DATABASE_URL": database_url, "CORTEX_BROKER_URL": broker_url}
    with open_shop(tmp_path, monkeypatch, ANSWERS, **given) as environment:
        yield environment


@contextmanager
def worker(host: Host) -> Iterator[None]:
    """A worker's slot in a thread: what a task does, without Celery."""
    rt = wiring.build(load_settings(), host=host, role="worker")
    rt.start()
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(0.02):
            try:
                slot.work(rt, None, "start")
            except Refusal:
                continue

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(10)
        rt.stop()


def test_every_example_is_run_or_told_why_not() -> None:
    with_examples = {each.name for each in all_pages() if any(each.blocks("python", "py"))}
    assert with_examples - RUN_HERE - set(SHAPES) == set()
    assert with_examples >= RUN_HERE


@pytest.mark.parametrize(
    "block", [each for name in SHAPES for each in examples(name)], ids=lambda block: block.where
)
def test_a_shape_is_python_at_least(block: Block) -> None:
    compile(block.code, block.where, "exec")


def test_the_readme_names_its_files() -> None:
    assert [named(block) for block in examples("README.md")] == ["shop/agents.py", "producer.py"]


@pytest.mark.parametrize("block", examples("README.md"), ids=named)
def test_host_and_producer_have_about_ten_lines(block: Block) -> None:
    code = [line for line in block.code.splitlines() if line.strip() and not line.startswith("#")]
    assert len(code) <= 10


def test_the_producer_of_the_readme_gets_its_answer_from_the_host_of_the_readme(
    environment: dict[str, str],
) -> None:
    host = load_host("shop.agents:host")
    with worker(host):
        done = subprocess.run(
            [sys.executable, "producer.py"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=75,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        'approval required for: refund {"order_id": "17", "amount_cents": 1250}',
        "Order 17 is paid back.",
    ]
    ((order_id, cents, key),) = sys.modules["shop.payments"].paid
    assert (order_id, cents) == ("17", 1250)
    assert key.startswith("arun_")


def executed(block: Block) -> dict[str, Any]:
    """What an example defines."""
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(block.code, block.where, "exec"), names)
    return names


def test_the_host_example_declares_what_it_describes() -> None:
    host: Host = executed(examples("cortex_workers/host/README.md")[0])["host"]
    host.check()
    refund, find = host.tools["refund"], host.tools["find_order"]
    assert refund.spec.needs_approval
    assert refund.spec.has_lookup
    assert refund.spec.timeout_s == 20
    assert find.spec.retry_safe
    assert find.is_async
    assert find.spec.parameters["properties"]["order_id"]["description"] == "the number on the invoice"


def test_the_lookup_of_the_host_example_tells_the_truth() -> None:
    from cortex_workers import ToolContext

    tool = executed(examples("cortex_workers/host/README.md")[0])["host"].tools["refund"]
    ctx = ToolContext(run_id="arun_1", step=0, call_id="c1", agent="support")
    arguments = tool.validate('{"order_id": "17", "amount_cents": 1250}')
    assert tool.lookup_call(arguments, ctx) == DidNotHappen()
    result = tool.call(arguments, ctx)
    assert tool.lookup_call(arguments, ctx) == Happened(result)


PACKED: list[dict[str, Any]] = [
    {"call": [{"tool": "pack", "args": {"order_id": "17"}}]},
    {"say": "Order 17 is in parcel 7."},
]


def test_the_example_of_a_tool_outside_answers_the_run_that_waits(
    tmp_path: Path,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    declares, runs_outside = examples("cortex_workers/host/README.md")
    assert "external_tool" not in declares.code
    settings = {"CORTEX_DATABASE_URL": database_url, "CORTEX_SCOPE": "tenant=acme"}
    with open_shop(tmp_path, monkeypatch, PACKED, **settings):
        names = executed(runs_outside)
        with worker(names["host"]), Client() as client:
            run = client.enqueue("shipping", "Order 17, please")
            names["warehouse"](run.id)
            assert client.wait(run.id, timeout_s=60).output == "Order 17 is in parcel 7."
        spec = names["host"].tools["pack"].spec
    assert capsys.readouterr().out == 'to do: pack {"order_id": "17"}\n'
    assert (spec.tool_class, spec.external_ttl_s) == ("external", 2 * 86_400)


def test_the_example_of_a_spend_gate_asks_before_the_long_call_only(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = examples("cortex_workers/llm/README.md")
    host: Host = executed(block)["host"]
    settings = {"CORTEX_DATABASE_URL": database_url, "CORTEX_SCOPE": "tenant=acme"}
    answers = [{"say": "Nothing."}, {"say": "Much."}]
    with open_shop(tmp_path, monkeypatch, answers, **settings), worker(host), Client() as client:
        cheap = client.enqueue("analyst", "A line.")
        assert client.wait(cheap.id, timeout_s=60).output == "Nothing."
        dear = client.enqueue("analyst", "A line. " * 30_000)
        assert client.wait(dear.id, timeout_s=60, until_paused=True).state == "paused"
        (question,) = client.checkpoints()
        assert "the limit is 50000" in question.reason
        client.decide(question.id, approved=True)
        assert client.wait(dear.id, timeout_s=60).output == "Much."


def test_the_testing_example_needs_nothing_that_is_not_in_it() -> None:
    (block,) = examples("cortex_workers/testing/README.md")
    exec(compile(block.code, block.where, "exec"), {"__name__": "example"})

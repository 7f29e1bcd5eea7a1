"""Flower as we ship it: it shows workers, queues and tasks, nothing private, and nothing to those without a login.

Bug case C50.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from flower.urls import handlers

from cortex_workers import Client
from cortex_workers.settings import Settings
from cortex_workers.tasks import flowerconfig
from tests.tasks.processes import ROOT, CeleryProcess, free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.fleet

LOGIN = ("ops", "a-password")
BROKER_PASSWORD = "the-broker-s-own-secret"
PROMPT = "the customer's private question"
OPEN = {"/metrics", "/healthcheck", "/static/style.css"}
LOGIN_PAGES = {"/login", "/logout"}

Start = Callable[..., CeleryProcess]


def paths() -> list[str]:
    """Every address that Flower has, with something in the place of each pattern."""
    found = []
    for each in handlers:
        pattern = getattr(each, "regex", None)
        text = pattern.pattern if pattern is not None else each[0]
        if text not in (".*", ".*$"):
            found.append(
                re.sub(r"\([^)]*\)", "style.css" if "static" in text else "x", text)
                .rstrip("$")
                .removesuffix("/?")
            )
    return sorted(set(found))


@pytest.fixture
def flower(tmp_path: Path, database_url: str, broker_url: str) -> Iterator[httpx.Client]:
    """Flower beside a worker that has finished a run, on a broker whose address holds a password."""
    secret_url = broker_url.replace("redis://", f"redis://default:{BROKER_PASSWORD}@")
    environment = {
        "CORTEX_DATABASE_URL": database_url,
        "CORTEX_BROKER_URL": secret_url,
        "CORTEX_HOST": "tests.tasks.hosts:host",
        "FLOWER_BASIC_AUTH": ":".join(LOGIN),
        "FLOWER_PORT": str(free_port()),
    }
    page = ["flower", f"--conf={flowerconfig.__file__}"]
    with (
        CeleryProcess(tmp_path, page, environment),
        httpx.Client(base_url=f"http://127.0.0.1:{environment['FLOWER_PORT']}") as browser,
        CeleryProcess(tmp_path, ["worker", "-l", "info"], environment) as worker,
    ):
        wait_until(lambda: answers(browser), what="Flower")
        worker.until(" ready.")
        with Client(
            Settings(database_url=database_url, broker_url=secret_url), scope="tenant=acme"
        ) as producer:
            run = producer.enqueue("echo", PROMPT)
            assert producer.wait(run.id, timeout_s=60).output == f"You said: {PROMPT}"
        browser.headers["X-Run"] = run.id
        yield browser


def answers(browser: httpx.Client) -> bool:
    try:
        return browser.get("/healthcheck").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.invariant("I10")
def test_flower_shows_the_fleet_with_ids_only(flower: httpx.Client) -> None:
    run_id = flower.headers["X-Run"]
    tasks = wait_until(
        lambda: {
            uuid: task
            for uuid, task in flower.get("/api/tasks", auth=LOGIN).json().items()
            if task["name"] == "cortex.continue_run" and task["state"] == "SUCCESS"
        },
        what="the finished task in Flower",
    )
    (task,) = [task for task in tasks.values() if run_id in task["kwargs"]]
    assert task["kwargs"] == f"run_id={run_id}"
    assert task["args"] == "()"
    # The worker may have found the run in the table before it read the message.
    assert re.match(r"\{'outcome': '(continued|refused)', 'run_id': 'arun_\w+', ", task["result"])
    # Flower waits a second for the worker's answer; on a busy machine it is asked again.
    workers = wait_until(
        lambda: flower.get("/api/workers", params={"refresh": "1"}, auth=LOGIN).json(),
        what="the worker in Flower",
    )
    ((name, worker),) = workers.items()
    assert name.startswith("worker-")
    assert {queue["name"] for queue in worker["active_queues"]} == {
        "cw.continue",
        "cw.resume",
        "cw.a2a",
        "cw.sweep",
    }
    assert {"cortex.continue_run", "cortex.sweep_expired"} <= set(worker["registered"])
    lengths = flower.get("/api/queues/length", auth=LOGIN).json()["active_queues"]
    assert {queue["name"]: queue["messages"] for queue in lengths}["cw.continue"] == 0
    seen = [path for path in paths() if private(flower.get(path, auth=LOGIN))]
    seen += [
        path for path in (f"/worker/{name}", "/broker", "/tasks") if private(flower.get(path, auth=LOGIN))
    ]
    seen += [uuid for uuid in tasks if private(flower.get(f"/task/{uuid}", auth=LOGIN))]
    assert seen == []


def private(response: httpx.Response) -> bool:
    return any(word in response.text for word in (PROMPT, "private question", BROKER_PASSWORD))


def test_nobody_comes_in_without_a_login_and_nobody_gives_orders_with_one(flower: httpx.Client) -> None:
    for path in paths():
        if path in OPEN | LOGIN_PAGES:
            continue
        for method in ("GET", "POST"):
            answer = flower.request(method, path)
            assert answer.status_code in (401, 405), f"{method} {path}: {answer.status_code}"
            assert not private(answer)
    orders = [path for path in paths() if re.search(r"/api/(worker|task)/(?!info|result|types)", path)]
    assert len(orders) == 14
    for path in orders:
        answer = flower.post(path, auth=LOGIN, json={})
        assert answer.status_code == 403, f"{path}: {answer.status_code}"
    foreign = flower.post(
        "/api/task/send-task/x", auth=LOGIN, json={}, headers={"Origin": "https://elsewhere"}
    )
    assert foreign.status_code == 403


@pytest.mark.parametrize("conf", [flowerconfig.__file__, str(ROOT / "deploy" / "flowerconfig.py")])
def test_flower_is_not_opened_to_the_network_without_a_login(
    tmp_path: Path, broker_url: str, conf: str
) -> None:
    process = CeleryProcess(
        tmp_path,
        ["flower", f"--conf={conf}"],
        {"CORTEX_BROKER_URL": broker_url, "FLOWER_ADDRESS": "0.0.0.0"},
    )
    with process:
        assert process.process.wait(timeout=60) == 1
        assert process.output.strip().splitlines()[-1] == (
            "Flower would be open to the network on '0.0.0.0' without a login: set FLOWER_BASIC_AUTH=user:password"
        )

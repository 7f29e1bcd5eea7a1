"""A bench for each test, checked at its end."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.bench import Bench


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """A fleet of the test's own, on `own_postgres` and `own_broker` where the test asks for these.

    When the test has passed, I1 to I6 are asserted.
    """
    made = Bench(
        tmp_path,
        _address(request, "own_postgres", "database_url"),
        _address(request, "own_broker", "broker_url"),
    )
    failures = request.session.testsfailed
    try:
        yield made
        if request.session.testsfailed == failures:
            made.check()
    except BaseException:
        failures = -1
        raise
    finally:
        if request.session.testsfailed != failures:
            _tell(made)
        made.end()


def _address(request: pytest.FixtureRequest, own: str, shared: str) -> str:
    if own in request.fixturenames:
        return str(request.getfixturevalue(own).url)
    return str(request.getfixturevalue(shared))


def _tell(bench: Bench) -> None:
    for process in bench.processes:
        print(f"--- {process.name}: {process.status}, {process.exit_code}")
        print(process.logs()[-6000:])

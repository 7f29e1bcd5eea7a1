"""What a process says: by the catalogue, and in a producer's process no more than its own logging lets through."""

import subprocess
import sys

import pytest
import structlog

from cortex_workers import telemetry


def said(code: str) -> tuple[str, str]:
    """What a fresh process prints: standard output and standard error."""
    done = subprocess.run(
        [sys.executable, "-c", f"import logging\nfrom cortex_workers import telemetry\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout, done.stderr


def test_a_producer_is_not_talked_to_about_ordinary_things() -> None:
    assert said(
        'telemetry.event("run.enqueued", "debug", run_id="arun_1"); telemetry.event("run.claimed")'
    ) == (
        "",
        "",
    )


def test_a_producer_hears_of_warnings_on_standard_error() -> None:
    out, err = said('telemetry.event("hint.failed", "warning", waiting=3)')
    assert (out, err) == ("", "hint.failed {'waiting': 3}\n")


def test_a_producers_own_logging_decides() -> None:
    out, err = said('logging.basicConfig(level="INFO"); telemetry.event("run.claimed", run_id="arun_1")')
    assert (out, err) == ("", "INFO:cortex_workers:run.claimed {'run_id': 'arun_1'}\n")


def test_a_worker_logs_one_object_a_line_on_standard_error() -> None:
    out, err = said('telemetry.configure_logging("json"); telemetry.event("run.claimed", run_id="arun_1")')
    assert out == ""
    assert '"event": "run.claimed"' in err
    assert err.count("\n") == 1


def test_what_is_not_in_the_catalogue_is_not_said() -> None:
    with pytest.raises(KeyError):
        telemetry.event("run.exploded")
    with pytest.raises(KeyError):
        telemetry.span("run.exploded")


def test_structlog_users_hear_through_structlog() -> None:
    try:
        with structlog.testing.capture_logs() as logs:
            telemetry.event("run.claimed", run_id="arun_1")
    finally:
        structlog.reset_defaults()
    assert logs == [{"run_id": "arun_1", "event": "run.claimed", "log_level": "info"}]

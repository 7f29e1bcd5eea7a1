"""What every task of the fleet has in common: a tolerant body, and one table from error family to outcome.

A task is a hint; whatever happens here, the row decides and the sweep repeats. So nothing is retried, nothing is
redelivered, and no error of ours travels through Celery.
Source: house.md 3.6; celery.md 14, 26; bug case C38.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from celery import Task
from pydantic import ValidationError

from cortex_workers import telemetry
from cortex_workers.errors import (
    CortexError,
    Interruption,
    Misconfiguration,
    Refusal,
    RunFailure,
    Unavailable,
)
from cortex_workers.schemas.outcomes import Continued, HandedOff, Outcome, Refused
from cortex_workers.tasks.messages import Message

OUTCOMES: tuple[tuple[type[CortexError], str, Callable[[str | None, str], Outcome]], ...] = (
    (Refusal, "info", lambda run_id, code: Refused(run_id=run_id, code=code)),
    (Interruption, "info", lambda run_id, code: HandedOff(run_id=run_id or "", code=code)),
    (RunFailure, "info", lambda run_id, _: Continued(run_id=run_id, last_state="failed")),
    (Unavailable, "warning", lambda run_id, code: Refused(run_id=run_id, code=code)),
    (Misconfiguration, "error", lambda run_id, code: Refused(run_id=run_id, code=code)),
)
"""Error family, how loud it is logged, and what the task returns. A new error needs no line here."""

NEWER_VERSION = "newer_version"
INVALID_MESSAGE = "invalid_message"


class TaskBroken(Exception):
    """A task met an error that is none of ours; the log has the place, the run has its lease."""


class FleetTask(Task):  # type: ignore[misc]  # Celery ships no types
    """The base of our tasks; ``run`` gets one checked message and returns an outcome."""

    abstract = True
    ignore_result = True
    # A body is checked by its model, which forgives what Celery's own check of arguments would refuse.
    typing = False
    message: ClassVar[type[Message]] = Message

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Check the body, do the work, and return the outcome as ids, codes and counts."""
        return work_off(self.message, self.run, args, kwargs).model_dump()


def work_off(
    model: type[Message], body: Callable[[Any], Outcome], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Outcome:
    """Do one message's work; every error of ours becomes an outcome.

    Raises: TaskBroken for any other error, without its text, so that Flower shows a failure and no content.
    """
    message = _read(model, args, kwargs)
    if isinstance(message, Refused):
        return message
    run_id = getattr(message, "run_id", None)
    try:
        return body(message)
    except CortexError as error:
        return _outcome(error, run_id)
    except Exception as error:  # noqa: BLE001  the edge: Celery would put the text of it into events and Flower
        telemetry.event(
            "run.broken", level="error", run_id=run_id, error=type(error).__name__, at=telemetry.places(error)
        )
        raise TaskBroken(type(error).__name__) from None


def _read(model: type[Message], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Message | Refused:
    version = kwargs.get("v", 1)
    if isinstance(version, int) and version > model.READS:
        return _dropped(kwargs, NEWER_VERSION, "version")
    try:
        if args:
            raise TypeError("bodies are keyword arguments")
        return model.model_validate(kwargs)
    except (ValidationError, TypeError):
        return _dropped(kwargs, INVALID_MESSAGE, "form")


def _dropped(kwargs: dict[str, Any], code: str, why: str) -> Refused:
    telemetry.UNKNOWN_MESSAGES.labels(why).inc()
    telemetry.event("hint.dropped", level="warning", code=code)
    run_id = kwargs.get("run_id")
    return Refused(run_id=run_id[:64] if isinstance(run_id, str) else None, code=code)


def _outcome(error: CortexError, run_id: str | None) -> Outcome:
    for family, level, make in OUTCOMES:
        if isinstance(error, family):
            outcome = make(run_id, error.code)
            name = "run.handed_off" if isinstance(outcome, HandedOff) else "run.refused"
            telemetry.event(name, level=level, run_id=run_id, code=error.code)
            if isinstance(outcome, Refused):
                telemetry.REFUSED_HINTS.labels(error.code).inc()
            return outcome
    raise TaskBroken(type(error).__name__) from error

"""What a process logs and counts, from the catalogue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import Counter, Gauge, Histogram

from cortex_workers import telemetry
from cortex_workers.docs.blocks import code, table
from cortex_workers.probes import PROBES


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric as a dashboard asks for it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    what: str


def events() -> str:
    """The log events."""
    return table(["event", "what happened"], [[code(name), text] for name, text in telemetry.EVENTS.items()])


def spans() -> str:
    """The spans of OpenTelemetry."""
    return table(["span", "around what"], [[code(name), text] for name, text in telemetry.SPANS.items()])


def metrics() -> str:
    """The Prometheus metrics."""
    rows = [
        [code(item.name), item.kind, ", ".join(code(label) for label in item.labels), item.what]
        for item in catalogue()
    ]
    return table(["metric", "kind", "labels", "what it counts"], rows)


def probes() -> str:
    """The named points at which a test can stop or kill a process."""
    return table(["probe", "where the run stands"], [[code(name), text] for name, text in PROBES.items()])


def catalogue() -> Iterator[Metric]:
    """Every metric that the telemetry module declares, in its order."""
    for value in vars(telemetry).values():
        if isinstance(value, Counter | Gauge | Histogram):
            (described,) = value.describe()
            name = f"{described.name}_total" if isinstance(value, Counter) else described.name
            labels = tuple(vars(value)["_labelnames"])
            yield Metric(name, described.type, labels, described.documentation)

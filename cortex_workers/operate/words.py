"""Spans and times as people say them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


def span(seconds: float | timedelta) -> str:
    """A length of time in at most two units: 0.4 s, 12 s, 3 min 5 s, 2 h 10 min, 3 d 4 h."""
    value = seconds.total_seconds() if isinstance(seconds, timedelta) else float(seconds)
    sign, value = ("-", -value) if value < -0.0005 else ("", abs(value))
    if value < 0.9995:
        return f"{sign}{value * 1000:.0f} ms"
    if value < 9.95:
        return f"{sign}{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{sign}{whole} s"
    for size, unit, below, smaller in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = (whole % size) // below
            return f"{sign}{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    raise AssertionError(whole)


def many(count: int, what: str) -> str:
    """A number of things, in words: 1 step, 2 steps."""
    return f"{count} {what}" + ("" if count == 1 else "s")


def clock_time(at: datetime) -> str:
    """A time of the day in UTC, to the second."""
    return f"{at.astimezone(UTC):%H:%M:%S}"


def moment(at: datetime, now: datetime) -> str:
    """A time and how far it is from now: 2026-05-04 10:00:00 UTC (in 3 h), or (5 min ago)."""
    left = (at - now).total_seconds()
    away = f"in {span(left)}" if left >= 0 else f"{span(-left)} ago"
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC ({away})"


def iso(at: datetime) -> str:
    """A time for machines, always in the same form: UTC, microseconds, Z."""
    return at.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def cut(text: str, most: int | None) -> str:
    """A text on one line, not longer than ``most`` characters (None: as long as it is)."""
    flat = " ".join(str(text).split())
    return flat if most is None or len(flat) <= most else flat[: most - 1] + "…"

"""What every table is made of: the one metadata, the types of ids and times, the states of a machine as a CHECK."""

from __future__ import annotations

from sqlalchemy import Column, DateTime, MetaData, Text, func

from cortex_workers.schemas.lifecycle import STATES

metadata = MetaData(
    naming_convention={
        "pk": "%(table_name)s_pk",
        "uq": "%(table_name)s_%(column_0_N_name)s_key",
        "ck": "%(table_name)s_%(constraint_name)s_check",
    }
)

EVENT_ID = (
    "'evt_' || lpad(to_hex((extract(epoch from clock_timestamp()) * 1000000)::bigint), 14, '0')"
    " || substr(md5(random()::text), 1, 12)"
)
"""Made by the database, because one statement may write many events: microseconds first, so ids sort by time."""
Id = Text(collation="C")
Time = DateTime(timezone=True)


def states_of(machine: str) -> str:
    """The constraint that a state column holds a state of its machine."""
    names = ", ".join(f"'{state.value}'" for state in STATES[machine])
    return f"state in ({names})"


def made() -> Column[object]:
    """When a row was written."""
    return Column("created_at", Time, nullable=False, server_default=func.clock_timestamp())

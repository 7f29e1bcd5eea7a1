"""Runs and terms for contract tests, made through the store's own doors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from cortex_workers.schemas.ids import RUN, SESSION, new_id
from cortex_workers.schemas.lease import Term
from cortex_workers.schemas.notifications import Notification
from cortex_workers.settings import Settings, load_settings
from cortex_workers.store import claims, runs, sessions, turns
from cortex_workers.store.claims import Claimer
from cortex_workers.store.database import Database
from cortex_workers.store.transitions import Guard, Move, Row
from cortex_workers.store.unit import Unit

SCOPE, AGENT, DIGEST = "tenant=acme", "support", "digest-1"


def quiet_settings(url: str, **values: object) -> Settings:
    """Settings of a keeper that makes no pass by itself after its first."""
    quiet = {"lease_ttl_s": 3600.0, "lease_renew_s": 1200.0, "lease_trust_s": 3000.0}
    return load_settings(database_url=url, **{**quiet, **values})


class Rows:
    """A database of one test, with runs in it."""

    def __init__(self, url: str, settings: Settings | None = None) -> None:
        self.settings = settings or quiet_settings(url)
        self.told: list[Notification] = []
        self.database = Database(self.settings, self.told.append)
        self._ranks = itertools.count(1)

    def close(self) -> None:
        self.database.dispose()

    def ready(self, count: int = 1) -> list[str]:
        """Store runs that each have a session of their own."""
        rows = [self._row(new_id(SESSION), 1) for _ in range(count)]
        own = [{"id": row["session_id"], "scope": SCOPE, "agent": AGENT} for row in rows]

        def work(unit: Unit) -> None:
            sessions.create_own(unit, own)
            self._insert(unit, rows)

        self.database.run(work)
        return [str(row["id"]) for row in rows]

    def ready_in_session(self, count: int) -> list[str]:
        """Store runs that take turns in one session."""

        def work(unit: Unit) -> list[str]:
            session_id = sessions.find_or_create_key(unit, SCOPE, AGENT, new_id(SESSION))
            rows = [self._row(session_id, turn, shared=True, serial=True) for turn in range(1, count + 1)]
            self._insert(unit, rows)
            turns.recompute(unit, session_id)
            return [str(row["id"]) for row in rows]

        return self.database.run(work)

    def claim(self, owner: str, run_ids: Sequence[str], ttl_s: float = 60.0) -> list[Term]:
        """Claim these runs; a lease of 0 s is over at once, and nobody has taken the run yet."""
        claimer = Claimer(owner, ttl_s, "main", [DIGEST])
        found = [
            self.database.run(lambda unit, run_id=run_id: claims.claim_named(unit, claimer, run_id))
            for run_id in run_ids
        ]
        return [Term(run_id=row["id"], owner=owner, revision=row["revision"]) for (row,) in found]

    def claimed(self, owner: str, count: int = 1, ttl_s: float = 60.0) -> list[Term]:
        """Store runs and claim them."""
        return self.claim(owner, self.ready(count), ttl_s)

    def move(self, name: str, run_id: str, guard: Guard | None = None, move: Move | None = None) -> Row:
        """Apply one transition that has to succeed."""
        moved = self.database.run(
            lambda unit: turns.move(unit, name, self.run(run_id), guard or Guard(), move or Move())
        )
        assert moved is not None, f"{name} did not move {run_id}"
        return moved

    def run(self, run_id: str) -> Row:
        """The row as it is now."""
        row = self.database.run(lambda unit: runs.get(unit, run_id))
        assert row is not None
        return row

    def _row(self, session_id: str, turn: int, **more: object) -> dict[str, object]:
        return {
            "id": new_id(RUN),
            "scope": SCOPE,
            "agent": AGENT,
            "agent_digest": DIGEST,
            "session_id": session_id,
            "session_seq": turn,
            "rank": next(self._ranks),
            **more,
        }

    def _insert(self, unit: Unit, rows: Sequence[dict[str, object]]) -> None:
        specs = [{"run_id": row["id"], "input": "hello", "request_digest": "d", "config": {}} for row in rows]
        assert len(runs.insert_runs(unit, rows, specs, Move())) == len(rows)

"""Each index is used by the query it is for, and what a query reads does not grow with what it does not look for."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from cortex_workers.schemas.lease import Term
from cortex_workers.settings import load_settings
from cortex_workers.store import (
    admissions,
    agents,
    checkpoints,
    claims,
    demand,
    due,
    events,
    hints,
    history,
    leases,
    overview,
    runs,
    sessions,
    suspensions,
    tables,
    transcript,
    turns,
    waits,
    workers,
)
from cortex_workers.store.claims import Claimer
from cortex_workers.store.database import Database
from cortex_workers.store.unit import Unit
from cortex_workers.testing import factory
from tests.contract import messages, plans
from tests.contract.seeds import Seeds
from tests.servers import Addresses, fresh_database

CLAIMER = Claimer("worker-1", 60.0, "main", [factory.AGENT.digest()])
SCOPE, OLD_RUN, OLD_SESSION = "tenant=t1", "arun_h00000101", "ses_h00000010"
BUSY_SESSION, WAITING_RUN = "ses_w00000010", "arun_w00000201"
PAUSED_RUN, PAUSE = "arun_p00000101", "sus_p00000101"
OLD_PAUSE = f"sus_{OLD_RUN}"

# By index, what it is for; the work is done for real and undone.
USED: Mapping[str, Mapping[str, Callable[[Unit], Any]]] = {
    "agent_versions_name": {"current version": lambda unit: agents.recompute_current(unit, ["support"])},
    "sessions_key": {"find by key": lambda unit: sessions.find_key(unit, SCOPE, "support", BUSY_SESSION)},
    "sessions_recent": {"list": lambda unit: sessions.page(unit, SCOPE)},
    "runs_claim": {
        "claim the best": lambda unit: claims.claim_next(unit, CLAIMER, starts=True),
        "claim the best begun": lambda unit: claims.claim_next(unit, CLAIMER, starts=False),
        "claim a few": lambda unit: claims.claim_next(unit, CLAIMER, starts=True, batch=8),
        "does anything begun wait": lambda unit: claims.begun_waits(unit, CLAIMER),
        "pools with work": hints.pools_across_scopes,
        "hints to repeat": lambda unit: hints.unheard_across_scopes(unit, "main", "start", 3.0, 100),
        "hints to repeat, counted": lambda unit: hints.count_unheard_across_scopes(
            unit, "main", "start", 3.0, 100
        ),
        "announce again": lambda unit: hints.renotify(unit, "main", "start", 3.0, None, 100),
        "how many hints": lambda unit: demand.hint_target(unit, "main"),
        "nobody serves it": lambda unit: waits.mark_unserved(unit, 10.0, 100),
        "oldest": overview.oldest_ready_s_across_scopes,
    },
    "runs_one_turn": {"is its turn taken": lambda unit: claims.claim_next(unit, CLAIMER, starts=True)},
    "runs_session": {"any run ever": lambda unit: sessions.has_runs(unit, OLD_SESSION)},
    "runs_completion": {"history": lambda unit: history.load(unit, OLD_SESSION, 10, 0, 100)},
    "runs_later": {
        "a time has come": lambda unit: waits.end_later(unit, 100),
        "a time has come in a session": lambda unit: due.sessions_with_a_wait_over_across_scopes(
            unit, None, 100
        ),
    },
    "runs_waiting": {
        "waits for a turn that is free": lambda unit: due.sessions_without_a_turn_across_scopes(
            unit, 60, None, 100
        ),
        "somebody serves it again": lambda unit: waits.end_unserved(unit, 100),
        "the same in sessions": lambda unit: waits.sessions_served_again_across_scopes(unit, None, 100),
    },
    "runs_fenced": {
        "a holder may not act any more": lambda unit: due.cut_off_across_scopes(unit, None, 100),
        "the same without a session": lambda unit: waits.end_fences(unit, 100),
    },
    "runs_turn": {
        "whose turn": lambda unit: turns.recompute(unit, BUSY_SESSION),
        "how many wait": lambda unit: turns.waiting_in(unit, BUSY_SESSION),
    },
    "runs_paused": {"list of the paused": lambda unit: runs.page(unit, SCOPE, state="paused")},
    "runs_scope": {"list": lambda unit: runs.page(unit, SCOPE)},
    "runs_lapsed": {
        "leases that are over": lambda unit: due.lapsed_across_scopes(unit, None, 100),
        "too long over": lambda unit: overview.overdue_across_scopes(unit, 60.0),
    },
    "runs_owner": {
        "what a worker holds": lambda unit: leases.hand_back_strays(unit, "worker-1", [], "worker-1")
    },
    "runs_start_by": {"not started in time": lambda unit: due.overdue_starts_across_scopes(unit, None, 100)},
    "tool_calls_uncertain": {"uncertain effects": overview.uncertain_across_scopes},
    "suspensions_run": {"a run's story": lambda unit: overview.traces(unit, OLD_RUN, SCOPE)},
    "suspensions_due": {
        "past the deadline": lambda unit: due.overdue_pauses_across_scopes(unit, None, 100),
        "long past it": lambda unit: overview.overdue_across_scopes(unit, 60.0),
    },
    "checkpoints_pause": {"what a pause asks": lambda unit: checkpoints.of_pause(unit, PAUSE)},
    "checkpoints_pending": {"list": lambda unit: checkpoints.page(unit, SCOPE)},
    "checkpoints_open": {"questions": lambda unit: due.open_questions_across_scopes(unit, None, 100)},
    "checkpoints_run": {
        "list of a run": lambda unit: checkpoints.page(unit, SCOPE, run_id=PAUSED_RUN, pending_only=False),
        "close all of a run": lambda unit: checkpoints.close_of_run(
            unit, PAUSED_RUN, "cancelled", 1, "ended"
        ),
    },
    "adjudications_run_id_call_id_attempt_key": {
        "verdicts": lambda unit: checkpoints.verdicts(unit, OLD_RUN, ["call_0"]),
        "rounds": lambda unit: checkpoints.rounds(unit, OLD_RUN, ["call_0"]),
    },
    "events_run": {
        "a run's story": lambda unit: overview.traces(unit, OLD_RUN, SCOPE),
        "what it was before": lambda unit: leases.hand_back_strays(unit, "worker-1", [], "worker-1"),
    },
    "events_scope": {"the journal": lambda unit: events.of_scope(unit, SCOPE)},
    "workers_live": {
        "who is there": workers.list_all,
        "free slots": lambda unit: workers.free_slots(unit, "main"),
        "who fell silent": lambda unit: workers.end_silent(unit, 60.0),
    },
    "tool_calls_run_id_call_id_key": {"a pause's calls": lambda unit: suspensions.pending(unit, PAUSE)},
    "tool_calls_run_id_step_index_call_id_key": {
        "a run's calls": lambda unit: transcript.load_calls(unit, OLD_RUN)
    },
    "runs_pk": {
        "claim by name": lambda unit: claims.claim_named(unit, CLAIMER, "arun_c00000001"),
        "renew": lambda unit: leases.renew(
            unit, "worker-1", [Term(run_id=OLD_RUN, owner="a", revision=1)], 60.0
        ),
        "requests": lambda unit: runs.requests(unit, [OLD_RUN]),
    },
    "messages_pk": {"a run's messages": lambda unit: transcript.load_messages(unit, OLD_RUN)},
    "steps_pk": {"a run's steps": lambda unit: transcript.load_steps(unit, OLD_RUN)},
    "run_specs_pk": {"a run's input": lambda unit: runs.spec(unit, OLD_RUN)},
    "suspensions_pk": {"a pause": lambda unit: suspensions.get(unit, PAUSE)},
    "pending_calls_pk": {"a pause's calls": lambda unit: suspensions.pending(unit, PAUSE)},
    "pending_calls_call": {
        "which pause a call waits in": lambda unit: suspensions.of_calls(unit, OLD_RUN, ["call_0"]),
        "what came in": lambda unit: admissions.answers(unit, OLD_RUN, ["call_0"]),
    },
    "suspensions_poll": {"ask again": lambda unit: due.overdue_polls_across_scopes(unit, None, 100)},
    "resume_admissions_pk": {
        "an answer": lambda unit: admissions.get(unit, OLD_RUN, OLD_PAUSE),
        "the newest": lambda unit: admissions.latest(unit, OLD_RUN),
        "a page": lambda unit: admissions.page(unit, SCOPE, OLD_RUN, None, 50),
    },
    "resume_receipts_once": {
        "a start": lambda unit: admissions.receipt(unit, OLD_RUN, OLD_PAUSE, "start"),
        "a start taken back": lambda unit: admissions.undo_start(unit, OLD_RUN, OLD_PAUSE, 3),
    },
    "sessions_pk": {"lock": lambda unit: sessions.lock(unit, BUSY_SESSION)},
    **messages.USED,
}

JUDGES = {"suspensions_live", "a2a_messages_answers", "a2a_messages_reply_with"}
"""No query reads by these: they are there to refuse the second of two."""

LATER = {
    "sessions_gated": "operators",
    "sessions_aborted": "operators",
    "pending_calls_reply": "operators",
    "pending_calls_open": "operators",
    "resume_admissions_scope": "operators",
    "adjudications_session": "operators",
    "adjudications_export": "operators",
    "events_session": "operators",
}
"""The indexes whose queries come with a later room."""

SMALL = {"agents", "tenants", "workers", "sweeps", "agent_versions"}
"""Tables that may be read from end to end: they do not grow with the runs."""


@pytest.fixture(scope="module")
def seeded(addresses: Addresses, template_database: str) -> Iterator[Database]:
    """A fleet that has been at work for a while."""
    with fresh_database(addresses, template_database) as url:
        database = Database(load_settings(database_url=url), lambda _: None)
        seeds = Seeds(database)
        seeds.history(20_000)
        seeds.claimable(200, start_by="1 day")
        seeds.claimable(100, "begun")
        seeds.waiting_turns(200, 20)
        seeds.gated(500)
        seeds.later(5_000)
        seeds.paused(5_000)
        seeds.cut_off(500)
        seeds.answers(20_000)
        seeds.deferred(2_000)
        seeds.workers(10, 3_000)
        seeds.versions(2_000)
        seeds.verdicts(20_000)
        messages.seed(database)
        seeds.settled()
        yield database
        database.dispose()


CASES = [
    pytest.param(name, work, id=f"{name}-{what}")
    for name, works in USED.items()
    for what, work in works.items()
]


@pytest.mark.parametrize(("index", "work"), CASES)
def test_an_index_is_used_by_the_query_it_is_for(
    seeded: Database, index: str, work: Callable[[Unit], Any]
) -> None:
    assert index in plans.indexes(seeded, work)


GROWING_READS = [
    pytest.param(case.values[1], id=case.id)
    for case in CASES
    # A person's look at all that is uncertain joins what a fleet should not have many of.
    if case.values[1] is not overview.uncertain_across_scopes
]


@pytest.mark.parametrize("work", GROWING_READS)
def test_no_query_reads_a_growing_table_from_end_to_end(
    seeded: Database, work: Callable[[Unit], Any]
) -> None:
    assert plans.sequential(seeded, work) <= SMALL


def test_every_index_has_a_query_here_or_a_reason() -> None:
    declared = {str(index.name) for table in tables.metadata.tables.values() for index in table.indexes}
    assert declared - set(USED) == JUDGES | set(LATER)
    assert not set(USED) & (JUDGES | set(LATER))


# --- What a query reads does not grow with what it does not look for ----------------------------------------------


@pytest.fixture
def growing(database: Database) -> Iterator[tuple[Database, Seeds]]:
    seeds = Seeds(database)
    seeds.history(22_000)
    seeds.claimable(100)
    seeds.workers(10, 10)
    yield database, seeds


def claim_next(unit: Unit) -> Any:
    found = claims.claim_next(unit, CLAIMER, starts=True)
    assert len(found) == 1
    return found


def test_the_next_claim_reads_as_much_with_twenty_thousand_waiting_turns_as_with_none(
    growing: tuple[Database, Seeds],
) -> None:
    database, seeds = growing
    seeds.settled()
    few = plans.buffers(database, claim_next)
    seeds.waiting_turns(1_000, 21)
    seeds.gated(1_000)
    seeds.settled()
    with database.read() as unit:
        counts = overview.counts_across_scopes(unit)
    assert (counts["wait:turn"], counts["wait:gate"], counts["running"]) == (20_000, 1_000, 1_000)
    many = plans.buffers(database, claim_next)
    assert many <= few * 1.2, f"{few} buffers without, {many} with them"


FINDERS: Mapping[str, Callable[[Unit], Any]] = {
    "lapsed": lambda unit: due.lapsed_across_scopes(unit, None, 100),
    "overdue starts": lambda unit: due.overdue_starts_across_scopes(unit, None, 100),
    "overdue pauses": lambda unit: due.overdue_pauses_across_scopes(unit, None, 100),
    "cut off": lambda unit: due.cut_off_across_scopes(unit, None, 100),
    "wait over": lambda unit: due.sessions_with_a_wait_over_across_scopes(unit, None, 100),
    "no turn": lambda unit: due.sessions_without_a_turn_across_scopes(unit, 60.0, None, 100),
    "later": lambda unit: waits.end_later(unit, 100),
    "fences": lambda unit: waits.end_fences(unit, 100),
    "unserved": lambda unit: waits.mark_unserved(unit, 10.0, 100),
    "served again": lambda unit: waits.end_unserved(unit, 100),
    "served again in sessions": lambda unit: waits.sessions_served_again_across_scopes(unit, None, 100),
    "pools": hints.pools_across_scopes,
    "unheard": lambda unit: hints.unheard_across_scopes(unit, "main", "begun", 3.0, 100),
    "renotify": lambda unit: hints.renotify(unit, "main", "begun", 3.0, None, 100),
    "demand": lambda unit: demand.hint_target(unit, "main"),
    "begun": lambda unit: claims.begun_waits(unit, CLAIMER),
}


def test_a_sweep_that_finds_nothing_reads_as_much_with_twenty_thousand_paused_runs_as_with_none(
    growing: tuple[Database, Seeds],
) -> None:
    database, seeds = growing
    seeds.settled()
    few = {name: plans.buffers(database, finder) for name, finder in FINDERS.items()}
    seeds.paused(20_000)
    seeds.later(5_000)
    seeds.settled()
    many = {name: plans.buffers(database, finder) for name, finder in FINDERS.items()}
    # One more level of an index is two pages more, in a statement that uses a few.
    assert {name: (few[name], many[name]) for name in few if many[name] > few[name] * 1.2 + 4} == {}


def test_a_page_of_questions_costs_a_page(growing: tuple[Database, Seeds]) -> None:
    database, seeds = growing
    seeds.paused(5_000)
    seeds.settled()
    read = plans.buffers(database, lambda unit: due.open_questions_across_scopes(unit, None, 100))
    assert read < 100 * 4


def test_the_newest_runs_of_a_scope_are_read_without_the_older_ones(growing: tuple[Database, Seeds]) -> None:
    database, seeds = growing
    seeds.settled()
    page = plans.buffers(database, lambda unit: runs.page(unit, SCOPE, limit=20))
    later = plans.buffers(database, lambda unit: runs.page(unit, SCOPE, limit=20, before="arun_h00000101"))
    # 440 runs of the scope on as many pages; the second list begins deep among them.
    assert page < 20 * 3
    assert later < 20 * 4


def test_a_list_shows_the_scope_and_what_is_below_it_newest_first(database: Database) -> None:
    made = [
        factory.a_run(database, scope=scope)["id"]
        for scope in (
            "tenant=acme",
            "tenant=acme/user=1",
            "tenant=acme2",
            "tenant=acme/user=2",
            "tenant=acme",
        )
    ]
    with database.read() as unit:
        first = runs.page(unit, "tenant=acme", limit=3)
        rest = runs.page(unit, "tenant=acme", limit=3, before=first[-1]["id"])
        sessions_of = sessions.page(unit, "tenant=acme")
    assert [row["id"] for row in (*first, *rest)] == [made[4], made[3], made[1], made[0]]
    assert {row["id"] for row in sessions_of} == {row["session_id"] for row in (*first, *rest)}

"""Many rows at once, as no door would write them: only their number and their shape matter to a plan."""

from sqlalchemy import text
from sqlalchemy.engine import Connection

from cortex_workers.store.database import Database
from cortex_workers.testing import factory

_RUN = """
    insert into runs (id, scope, agent, agent_digest, session_id, session_seq, state, instruction, queue_class, pool,
                      rank, wait_reason, shared, serial, lease_owner, lease_expires_at, suspension_id, completion_seq,
                      completed_at, not_before, start_by, fenced_until)
    select 'arun_' || :kind || lpad(n::text, 8, '0'), 'tenant=t' || n % 50, 'support', :digest,
           'ses_' || :kind || lpad((n / :turns)::text, 8, '0'), n % :turns + 1, :state, 'start', :queue, 'main',
           n, :wait, :shared, :shared, :owner, now() + cast(:lease as interval), {suspension}, {completion},
           {completed}, now() + cast(:later as interval), now() + cast(:start_by as interval),
           now() + cast(:fenced as interval)
    from generate_series(1, :count) n
"""
_SESSIONS = """
    insert into sessions (id, scope, agent, key, gated_at, turn_seq, completion_seq)
    select distinct session_id, scope_of, 'support', case when :shared then session_id end,
           case when :gated then now() end, 100, 1
    from (select session_id, min(scope) as scope_of from runs where id like 'arun\\_' || :kind || '%'
          group by session_id) found
"""
_SPECS = """
    insert into run_specs (run_id, input, request_digest, config)
    select id, 'hello', id, '{}' from runs where id like 'arun\\_' || :kind || '%'
"""
_PAUSES = """
    insert into suspensions (id, run_id, session_id, scope, run_revision, reason, step_index, next_step,
                             messages_upto, usage, digest, on_expiry, expires_at)
    select suspension_id, id, session_id, scope, 1, 'approval', 0, 1, 1, '{}', id, 'fail', now() + interval '7 days'
    from runs where id like 'arun\\_' || :kind || '%'
"""
_PENDING = """
    insert into pending_calls (suspension_id, call_id, run_id, session_id, ordinal, kind, answerable_by)
    select suspension_id, 'call_0', id, session_id, 0, 'approval', 'person'
    from runs where id like 'arun\\_' || :kind || '%'
"""
_CHECKPOINTS = """
    insert into checkpoints (id, scope, run_id, agent, suspension_id, kind, reason, step_index, state)
    select 'acp_' || id, scope, id, agent, suspension_id, 'tool_approval', 'asked', 0, 'pending'
    from runs where id like 'arun\\_' || :kind || '%'
"""
_CALLS = """
    insert into tool_calls (id, run_id, step_index, call_id, ordinal, session_id, tool, class, effects, state, seq,
                            message_seq)
    select 'tcall_' || id, id, 0, 'call_0', 0, session_id, 'refund', 'mutating', 'mutating', :state, 3, 2
    from runs where id like 'arun\\_' || :kind || '%'
"""
_TRACES = """
    insert into messages (run_id, seq, step_index, role, content)
    select id, seq, 0, 'assistant', 'hello' from runs, generate_series(1, 3) seq
    where id like 'arun\\_' || :kind || '%';
    insert into steps (run_id, step_index, id, model, usage, finish_reason, term_revision, seq, started_at)
    select id, 0, 'astp_' || id, 'scripted', '{}', 'stop', 2, 1, now() from runs
    where id like 'arun\\_' || :kind || '%';
    insert into events (scope, session_id, run_id, run_seq, kind, revision)
    select scope, session_id, id, seq, 'run.claim', seq + 1 from runs, generate_series(0, 2) seq
    where id like 'arun\\_' || :kind || '%'
"""
_ANSWERS = """
    insert into pending_calls (suspension_id, call_id, run_id, session_id, ordinal, kind, answerable_by)
    select 'sus_' || id, 'call_0', id, session_id, 0, 'external', 'machine'
    from runs where id like 'arun\\_h%' order by id desc limit :count;
    insert into suspensions (id, run_id, session_id, scope, run_revision, reason, step_index, next_step,
                             messages_upto, usage, digest, on_expiry, ended_at, ended_as)
    select 'sus_' || id, id, session_id, scope, 1, 'external_tool', 0, 1, 1, '{}', id, 'fail', now(), 'answered'
    from runs where id like 'arun\\_h%' order by id desc limit :count;
    insert into resume_admissions (run_id, suspension_id, scope, input, request_digest, suspension_digest,
                                   run_revision, claimed_revision, door)
    select id, 'sus_' || id, scope, '{"tool_results":[]}', id, id, 1, 2, 'provide_results'
    from runs where id like 'arun\\_h%' order by id desc limit :count;
    insert into resume_receipts (run_id, suspension_id, kind, digest, run_revision)
    select id, 'sus_' || id, 'start', id, 3
    from runs where id like 'arun\\_h%' order by id desc limit :count
"""


class Seeds:
    """Fills a database; each kind of row is named by one letter in its ids."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def history(self, count: int) -> None:
        """Completed runs with their traces, ten in a conversation."""
        self._runs(
            "h", count, state="completed", turns=10, completion="n % 10 + 1", completed="now()", shared=True
        )
        self._more("h", _SPECS, _TRACES, _CALLS.replace(":state", "'completed'"))

    def claimable(self, count: int, queue: str = "start", start_by: str | None = None) -> None:
        """Runs that may be claimed; ``start_by`` is how long from now they have to be started."""
        kind = {"start": "c", "begun": "b"}[queue]
        self._runs(kind, count, queue=queue, start_by=start_by)
        self._more(kind, _SPECS)

    def waiting_turns(self, conversations: int, each: int) -> None:
        """Conversations in which one run runs and the others wait."""
        self._runs("w", conversations * each, turns=each, wait="turn", shared=True)
        self._more("w", _SPECS)
        first = "arun\\_w%"
        with self._database.transaction() as unit:
            unit.execute(
                text(
                    "update runs set state = 'running', wait_reason = null, lease_owner = 'worker-' || rank % 20,"
                    " lease_expires_at = now() + interval '1 day'"
                    f" where id like '{first}' and session_seq = 1"
                )
            )

    def gated(self, count: int) -> None:
        """Sessions that an operator paused, each with a run that waits for it."""
        self._runs("g", count, wait="gate", shared=True, gated=True)
        self._more("g", _SPECS)

    def later(self, count: int) -> None:
        """Runs that wait for a time."""
        self._runs("l", count, wait="later", later="1 day")

    def paused(self, count: int) -> None:
        """Runs that wait for a person."""
        self._runs("p", count, state="paused", suspension="'sus_p' || lpad(n::text, 8, '0')")
        self._more("p", _SPECS, _PAUSES, _PENDING, _CHECKPOINTS, _CALLS.replace(":state", "'pending'"))

    def cut_off(self, count: int) -> None:
        """Cancelled runs whose holder may still act, with a call that was under way."""
        self._runs("f", count, state="cancelled", fenced="1 day", completed="now()", shared=True)
        self._more("f", _CALLS.replace(":state", "'started'"))

    def workers(self, live: int, ended: int) -> None:
        """Worker rows."""
        with self._database.transaction() as unit:
            unit.execute(
                text(
                    "insert into workers (id, version, reader_version, slots, agents, own_agents, ended_at)"
                    " select 'worker-' || n, '1', 1, 200, array[:digest], array[:digest],"
                    " case when n > :live then now() end from generate_series(1, :count) n"
                ),
                {"digest": factory.AGENT.digest(), "live": live, "count": live + ended},
            )

    def versions(self, count: int) -> None:
        """Versions of as many agents."""
        with self._database.transaction() as unit:
            unit.execute(
                text(
                    "insert into agent_versions (digest, name, definition)"
                    " select 'digest' || n, 'agent' || n, '{}' from generate_series(1, :count) n"
                ),
                {"count": count},
            )

    def verdicts(self, count: int) -> None:
        """What people decided on the calls of the newest completed runs."""
        with self._database.transaction() as unit:
            unit.execute(
                text(
                    "insert into adjudications (run_id, session_id, scope, call_id, attempt, checkpoint_id,"
                    " suspension_id, workload, specialist, outcome, scope_of_verdict, authority)"
                    " select id, session_id, scope, 'call_0', 1, 'acp_' || id, 'sus_' || id, agent, agent, 'granted',"
                    " 'pause', 'person' from runs where id like 'arun\\_h%' order by id desc limit :count"
                ),
                {"count": count},
            )

    def answers(self, count: int) -> None:
        """Answers from outside to as many of the completed runs, each begun with."""
        with self._database.transaction() as unit:
            for statement in _ANSWERS.split(";"):
                unit.execute(text(statement), {"count": count})

    def deferred(self, count: int) -> None:
        """Runs whose model call is made again later."""
        self._runs("d", count, state="paused", suspension="'sus_d' || lpad(n::text, 8, '0')")
        poll = "update suspensions set next_poll_at = now() + interval '1 day' where id like 'sus\\_d%'"
        self._more("d", _SPECS, _PAUSES, poll)

    def settled(self) -> None:
        """Let Postgres learn what is there, and clean up behind us."""
        with self._database.read() as unit:
            unit.execute(text("vacuum analyze"))

    def _runs(
        self,
        kind: str,
        count: int,
        *,
        state: str = "ready",
        queue: str = "start",
        turns: int = 1,
        wait: str | None = None,
        shared: bool = False,
        gated: bool = False,
        suspension: str = "null",
        completion: str = "null",
        completed: str = "null",
        later: str = "-1 minute",
        start_by: str | None = None,
        fenced: str | None = None,
    ) -> None:
        statement = _RUN.format(suspension=suspension, completion=completion, completed=completed)
        values = {
            "kind": kind,
            "count": count,
            "state": state,
            "queue": queue,
            "turns": turns,
            "wait": wait,
            "shared": shared,
            "later": later,
            "start_by": start_by,
            "fenced": fenced,
            "owner": None,
            "lease": None,
            "digest": factory.AGENT.digest(),
        }
        with self._database.transaction() as unit:
            unit.execute(text(statement), values)
            unit.execute(text(_SESSIONS), {"kind": kind, "shared": shared, "gated": gated})

    def _more(self, kind: str, *statements: str) -> None:
        with self._database.transaction() as unit:
            for statement in statements:
                self._each(unit.connection, statement, kind)

    @staticmethod
    def _each(connection: Connection, statement: str, kind: str) -> None:
        for part in statement.split(";"):
            connection.execute(text(part), {"kind": kind})

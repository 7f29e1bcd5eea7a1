"""Tables and timelines for a terminal of a hundred columns; ids are never cut."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cortex_workers.client import Client
from cortex_workers.operate.doctor import Check
from cortex_workers.operate.inspect import Timeline
from cortex_workers.operate.story import Entry
from cortex_workers.operate.words import cut, many, moment, span
from cortex_workers.schemas.a2a import Conversation, Delivery
from cortex_workers.schemas.admission import ResumeAdmission
from cortex_workers.schemas.checkpoint import Checkpoint
from cortex_workers.schemas.lease import WorkerInfo
from cortex_workers.schemas.run import Run
from cortex_workers.store import overview

_STATES = {
    "ready": "blue", "running": "cyan", "paused": "magenta", "reclaimable": "yellow", "completed": "green",
    "failed": "red", "cancelled": "yellow", "incomplete": "red", "pending": "magenta", "resolved": "green",
}  # fmt: skip
_MARKS = {"start": "bold", "good": "green", "bad": "red", "warn": "yellow", "wait": "magenta", "plain": ""}
_CHECKS = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_ARGUMENT_CHARS = 60
_COMMAND = "cortex-workers "


def database_now(client: Client) -> datetime:
    """The database's time, which ages are counted from."""
    with client.runtime.database.read() as unit:
        return overview.now(unit)


def runs(found: Sequence[Run], now: datetime) -> RenderableType:
    """A page of runs."""
    table = _table("run", "state", "agent", "steps", "age", "note")
    for run in found:
        age = span(now - run.created_at)
        table.add_row(run.id, _state(run.state), run.agent, str(run.step_count), age, _note(run, now))
    return table if found else Text("no runs", style="dim")


def _note(run: Run, now: datetime) -> Text:
    if run.error_code and run.error_code != run.state:
        return Text(run.error_code, style="red" if run.state != "cancelled" else "yellow")
    if run.state == "paused":
        return Text("asks somebody")
    if run.state == "running":
        return Text(f"on {_worker(run.lease_owner)}")
    if run.wait_reason is not None:
        return Text(f"waits: {run.wait_reason}")
    if run.not_before > now:
        return Text(f"waits {span(run.not_before - now)}")
    return Text(f"reclaimed {run.reclaim_total}×" if run.reclaim_total and not run.is_terminal else "")


def _worker(owner: str | None) -> str:
    """A worker's id without the part that only machines compare."""
    return (owner or "?").rpartition(":")[0] or str(owner)


def checkpoints(found: Sequence[Checkpoint], now: datetime) -> RenderableType:
    """A page of questions; each takes two lines, for its arguments."""
    table = _table("checkpoint", "state", "asks", "until", "age")
    for each in found:
        table.add_row(each.id, _answer(each), _asks(each), _until(each, now), span(now - each.created_at))
    return table if found else Text("nothing waits for a decision", style="dim")


def admissions(found: Sequence[ResumeAdmission]) -> RenderableType:
    """The answers of a run, in order of their pauses."""
    table = _table("pause", "admitted", "by", "door", "bytes")
    for each in found:
        when = f"{each.admitted_at:%Y-%m-%d %H:%M:%S} UTC"
        size = str(len(each.request.input))
        table.add_row(each.request.version.suspension_id, when, each.admitted_by or "", each.door, size)
    return table if found else Text("no answer was admitted", style="dim")


def conversations(found: Sequence[Conversation]) -> RenderableType:
    """Conversations between agents, the newest first."""
    table = _table("conversation", "status", "messages", "who")
    for each in found:
        used = f"{each.hops_used} of {each.hop_ceiling}"
        table.add_row(each.id, each.status, used, ", ".join(each.participants))
    return table if found else Text("no conversations", style="dim")


def deliveries(found: Sequence[Delivery]) -> RenderableType:
    """Messages on their way, the newest first."""
    table = _table("delivery", "to", "state", "run or reason")
    for each in found:
        why = f"{each.fail_code}: {each.error}" if each.fail_code else each.run_id or ""
        table.add_row(each.id, each.receiver, each.state, why)
    return table if found else Text("no deliveries", style="dim")


def _answer(each: Checkpoint) -> Text:
    if each.state == "pending":
        return Text("pending", style="magenta")
    decision = each.decision
    if each.closed_as == "decided" and decision is not None:
        return Text("approved", style="green") if decision.approved else Text("rejected", style="red")
    if each.closed_as == "settled" and decision is not None:
        return Text(str(decision.outcome).replace("_", " "), style="green")
    return Text(str(each.closed_as), style="yellow")


def _asks(each: Checkpoint) -> Text:
    text = Text("")
    if each.kind == "uncertain_effect":
        text.append("outcome unknown: ", style="yellow")
    for index, call in enumerate(each.pending):
        text.append("\n" if index else "")
        text.append(call.tool, style="bold")
        text.append(f"({cut(call.arguments, _ARGUMENT_CHARS)})", style="dim")
    return text if each.pending else Text(each.reason)


def _until(each: Checkpoint, now: datetime) -> str:
    if each.state != "pending":
        return ""
    if each.expires_at is None:
        return "no deadline"
    left = (each.expires_at - now).total_seconds()
    return f"in {span(left)}" if left > 0 else "passed"


def checkpoint(each: Checkpoint, known: Sequence[Mapping[str, Any]], now: datetime) -> RenderableType:
    """One question with everything that helps to answer it."""
    head = _head(each.id, each.state, [f"agent {each.agent}", f"scope {each.scope}", f"run {each.run_id}"])
    lines: list[RenderableType] = [head, Text(each.reason)]
    if each.state == "pending":
        until = "no deadline" if each.expires_at is None else f"until {moment(each.expires_at, now)}"
        lines.append(Text(f"asked {span(now - each.created_at)} ago, {until}"))
    for call in each.pending:
        lines += [Text(""), _call(call.tool, call.arguments, call.call_id)]
        lines += [_known(row, now) for row in known if row["call_id"] == call.call_id and row["started_at"]]
    lines.append(Text(""))
    lines.append(_decided(each) if each.decision is not None else _how(each))
    return Group(*lines)


def _call(tool: str, arguments: str, call_id: str) -> Text:
    try:
        shown = json.dumps(json.loads(arguments), indent=2, ensure_ascii=False)
    except ValueError:
        shown = arguments
    return Text.assemble((tool, "bold"), (f"  {call_id}\n", "dim"), shown)


def _known(row: Mapping[str, Any], now: datetime) -> Text:
    text = Text(
        f"began {span(now - row['started_at'])} ago on worker {row['term_owner']}, attempt {row['attempt']}"
    )
    if row["late_result"] is not None:
        text.append(
            f"\nlate word of that worker: {row['late_result'] or 'it never entered the tool'}", style="yellow"
        )
    return text


def _decided(each: Checkpoint) -> Text:
    decision = each.decision
    assert decision is not None
    by = decision.decided_by or decision.actor or "unknown"
    at = f" at {each.decided_at:%Y-%m-%d %H:%M:%S} UTC" if each.decided_at else ""
    text = Text.assemble(_answer(each), f" by {by}{at}")
    if decision.reason:
        text.append(f": {decision.reason}")
    if decision.amended_arguments is not None:
        text.append(f"\namended arguments: {json.dumps(decision.amended_arguments, ensure_ascii=False)}")
    return text


def _how(each: Checkpoint) -> Text:
    if each.kind == "uncertain_effect":
        return Text(
            f"cortex-workers checkpoints settle {each.id} --happened --result JSON | --did-not-happen | --stop",
            style="dim",
        )
    return Text(f"cortex-workers checkpoints approve {each.id}   (or reject)", style="dim")


def sessions(found: Sequence[Mapping[str, Any]], now: datetime) -> RenderableType:
    """A page of conversations."""
    table = _table("session", "agent", "key", "turns", "messages", "active", "note")
    for row in found:
        table.add_row(
            row["id"], row["agent"], Text(cut(row["key"] or "", 24)), str(row["turn_seq"]), str(row["message_count"]),
            f"{span(now - row['last_event_at'])} ago", _session_note(row),
        )  # fmt: skip
    return table if found else Text("no sessions", style="dim")


def _session_note(row: Mapping[str, Any]) -> Text:
    if row["aborted_at"] is not None:
        return Text("aborted", style="red")
    return Text("paused", style="magenta") if row["gated_at"] is not None else Text("")


def session(row: Mapping[str, Any], turns: Sequence[Run], now: datetime) -> RenderableType:
    """One conversation and its turns."""
    key = [f"key {row['key']}"] if row["key"] else []
    head = _head(row["id"], "", [f"agent {row['agent']}", f"scope {row['scope']}", *key])
    facts = f"{many(row['turn_seq'], 'turn')}, {many(row['message_count'], 'message')} in the conversation"
    if row["history_floor"]:
        facts += f", cleared after {many(row['history_floor'], 'turn')}"
    return Group(head, Text(facts), Text(""), runs(turns, now))


def workers(found: Sequence[WorkerInfo], now: datetime) -> RenderableType:
    """Worker processes."""
    table = _table("worker", "pool", "slots", "agents", "version", "up", "heard", "note")
    for each in found:
        slots = f"{each.slots_used}/{each.slots}" if each.slots else "own runs"
        table.add_row(
            each.id, each.pool, slots, str(len(each.agents)), each.version, span(now - each.started_at),
            f"{span(now - each.heartbeat_at)} ago", _worker_note(each),
        )  # fmt: skip
    return table if found else Text("no workers", style="dim")


def _worker_note(each: WorkerInfo) -> Text:
    if each.ended_at is not None:
        return Text(f"ended: {each.ended_as}", style="dim")
    if not each.alive:
        return Text("silent", style="red")
    if each.draining_at is not None:
        return Text("draining", style="yellow")
    if each.drain_requested_at is not None:
        return Text(f"asked to drain by {each.drain_requested_by}", style="yellow")
    return Text("alive", style="green")


def checks(found: Sequence[Check]) -> RenderableType:
    """What the doctor found, each with what to do about it."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for check in found:
        text = Text(check.says)
        if check.do:
            text.append(f"\n→ {check.do}", style="bold")
        table.add_row(Text(check.status, style=_CHECKS[check.status]), Text(check.name, style="bold"), text)
    return table


def timeline(found: Timeline) -> RenderableType:
    """A run's story, a line an event, with the time since the one before."""
    run = found.run
    head = _head(run.id, run.state, [f"agent {run.agent}", f"scope {run.scope}", f"session {run.session_id}"])
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(no_wrap=True, style="dim", justify="right")
    table.add_column(overflow="fold")
    before: datetime | None = None
    for entry in found.entries:
        if before is None or before.astimezone(UTC).date() != entry.at.astimezone(UTC).date():
            table.add_row(f"{entry.at.astimezone(UTC):%Y-%m-%d}", "", "")
        # Rows of one commit are stamped a moment apart, not in its order.
        since = f"+{span(max((entry.at - before).total_seconds(), 0.0))}" if before is not None else ""
        table.add_row(f"{entry.at.astimezone(UTC):%H:%M:%S.%f}"[:-3], since, _entry(entry))
        before = max(entry.at, before or entry.at)
    return Group(head, _facts(run), Text(""), table, Text(""), _next(found.next))


def _entry(entry: Entry) -> RenderableType:
    lines: list[RenderableType] = [Text(entry.what, style=_MARKS[entry.mark])]
    lines += [Padding(Text(line, style="dim"), (0, 0, 0, 2)) for line in entry.details]
    return Group(*lines)


def _next(hint: str) -> RenderableType:
    """What comes next; a command to type stands on a line of its own."""
    says, found, command = hint.partition(f"; {_COMMAND}")
    lines: list[RenderableType] = [Text.assemble(("next  ", "bold"), says)]
    if found:
        lines.append(Padding(Text(_COMMAND + command, style="bold"), (0, 0, 0, 6)))
    return Group(*lines)


def _facts(run: Run) -> Text:
    took = span((run.completed_at or run.state_since) - run.created_at)
    facts = [f"enqueued {run.created_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"]
    facts.append(f"ended {took} later" if run.is_terminal else f"{run.state} since {took} later")
    facts += [many(run.step_count, "step"), f"held by workers for {span(run.leased_time_s)}"]
    facts.append(f"{run.usage.input_tokens} tokens in, {run.usage.output_tokens} out")
    if run.reclaim_total:
        facts.append(f"reclaimed {run.reclaim_total}×")
    return Text(", ".join(facts), style="dim")


def _head(name: str, state: str, facts: Sequence[str]) -> Text:
    text = Text.assemble((name, "bold"), "  ", _state(state))
    text.append("\n" + "  ".join(facts), style="dim")
    return text


def _state(state: str) -> Text:
    return Text(str(state), style=_STATES.get(str(state), ""))


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold dim", pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, no_wrap=index == 0 or name in ("state", "age", "until"), overflow="fold")
    return table

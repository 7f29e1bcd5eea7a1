"""The error tree of the fleet.

::

    CortexError
    ├─ Refusal              nothing was written; expected; logged at info; a task returns Refused(code)
    │  ├─ NotFound          RunNotFound · CheckpointNotFound · SessionNotFound · AgentNotFound · AdmissionNotFound
    │  ├─ Conflict          AlreadyExists · RunIdTaken · RunIdReused · InvalidState
    │  ├─ ClosureRefused    a guard of the closer refused
    │  ├─ NotContinuable    RunLeased · RunAlreadyDone
    │  ├─ NotSuspended      SuspensionExpired
    │  ├─ WrongAnswer       RequiresApproval · InvalidDecision
    │  ├─ InvalidInput      NoScope · InvalidScope · InvalidId · InputTooLarge · UnstorableText · InvalidArgument
    │  ├─ SessionClosed     the session is gated or aborted
    │  ├─ NoHost            an in-process verb without Client(host=…)
    │  └─ Stopping          this process drains
    ├─ Interruption         the run goes on elsewhere: RunInterrupted · LeaseLost · RefusedForNow
    ├─ RunFailure           the run ends and the row says why: ReclaimLimit · RunNotRecoverable · EffectUncertain
    │                       · PrincipalRevoked · MaxSteps · BudgetExhausted · ModelFailed · CheckpointRejected
    │                       · PauseExpired · InvalidContinuation
    ├─ Unavailable          infrastructure: StoreUnavailable · ModelUnavailable · WaitTimeout · ToolTimeout
    └─ Misconfiguration     at start, never later: PrincipalCodecRequired · UnknownTool · DuplicateTool · InvalidTool
                            · UnknownModel · HostNotLoadable · InvalidSettings · SchemaBehind · UnsupportedCelery

A class docstring is its default message; ``code`` is the stable string that rows, logs and Flower show. Data
travels as keyword attributes. No message ever holds a prompt, an argument or a result.
"""

from __future__ import annotations

from typing import Any, ClassVar


class CortexError(Exception):
    """Something went wrong in cortex-workers."""

    code: ClassVar[str] = "cortex_error"

    def __init__(self, message: str | None = None, **data: Any) -> None:
        self.message = message or (type(self).__doc__ or "").strip().splitlines()[0]
        self.data = data
        for name, value in data.items():
            setattr(self, name, value)
        super().__init__(self.message)


# --- Refusals: nothing was written -----------------------------------------------------------------------------


class Refusal(CortexError):
    """The request was refused; nothing was written."""

    code = "refused"


class NotFound(Refusal):
    """No such thing in this scope."""

    code = "not_found"


class RunNotFound(NotFound):
    """No such run in this scope."""

    code = "run_not_found"


class CheckpointNotFound(NotFound):
    """No such checkpoint in this scope."""

    code = "checkpoint_not_found"


class SessionNotFound(NotFound):
    """No such session for this agent in this scope."""

    code = "session_not_found"


class AgentNotFound(NotFound):
    """No worker has registered an agent of that name."""

    code = "agent_not_found"


class WorkerNotFound(NotFound):
    """No such worker."""

    code = "worker_not_found"


class Conflict(Refusal):
    """The request contradicts what is already there."""

    code = "conflict"


class AlreadyExists(Conflict):
    """It already exists."""

    code = "already_exists"


class RunIdTaken(Conflict):
    """The run id is taken."""

    code = "run_id_taken"


class RunIdReused(Conflict):
    """The run id was used before with different content; choose another id, or send the same content."""

    code = "run_id_reused"


class InvalidState(Conflict):
    """It is not in a state that allows this; ``recorded`` carries the first decision where there is one."""

    code = "invalid_state"
    recorded: Any = None


class AdmissionConflict(Conflict):
    """Another answer was admitted for this pause; the first one stands."""

    code = "admission_conflict"


class AdmissionNotFound(NotFound):
    """No answer was admitted for that pause in this scope."""

    code = "admission_not_found"


class ResumeAlreadyStarted(Conflict):
    """A worker has begun to go on with this answer."""

    code = "resume_already_started"


class ClosureRefused(Refusal):
    """The run may not be closed as incomplete: who asks, or what proves it, was not accepted."""

    code = "closure_refused"


class NotContinuable(Refusal):
    """The run cannot be continued now."""

    code = "run_not_continuable"


class RunLeased(NotContinuable):
    """Another worker holds the run under a live lease."""

    code = "run_leased"


class RunAlreadyDone(NotContinuable):
    """The run has ended; ``run`` carries it."""

    code = "run_already_done"
    run: Any = None


class NotSuspended(Refusal):
    """The run is not paused, or the pause was answered by somebody else."""

    code = "not_suspended"


class SuspensionExpired(NotSuspended):
    """The deadline of this pause has passed."""

    code = "suspension_expired"


class WrongAnswer(Refusal):
    """The answer does not fit what the run waits for."""

    code = "wrong_answer"


class RequiresApproval(WrongAnswer):
    """This call waits for an approval; decide its checkpoint. Raised by an authorizer, it escalates a call.

    ``ttl`` (timedelta, optional) is the deadline of the approval.
    """

    code = "requires_approval"
    ttl: Any = None


class ResultsMismatch(WrongAnswer):
    """The results do not fit the pending calls one to one."""

    code = "results_mismatch"


class NotAgentReplyResumable(WrongAnswer):
    """The run waits for another agent; only the bus may answer it."""

    code = "not_agent_reply_resumable"


class InvalidDecision(WrongAnswer):
    """The decision does not fit the pause."""

    code = "invalid_decision"


class InvalidInput(Refusal):
    """The input is not acceptable."""

    code = "invalid_input"


class NoScope(InvalidInput):
    """A scope is required, like scope="tenant=acme"."""

    code = "no_scope"


class InvalidScope(InvalidInput):
    """The scope is malformed; it is one to three key=value levels joined by '/'."""

    code = "invalid_scope"


class InvalidId(InvalidInput):
    """The id is malformed."""

    code = "invalid_id"


class InputTooLarge(InvalidInput):
    """The input is larger than the limit."""

    code = "input_too_large"


class UnstorableText(InvalidInput):
    """Text with a NUL character or a lone surrogate cannot be stored."""

    code = "unstorable_text"


class InvalidArgument(InvalidInput):
    """An argument has a value that is not allowed."""

    code = "invalid_argument"


class SessionClosed(Refusal):
    """The session is paused by an operator or aborted."""

    code = "session_closed"


class NoHost(Refusal):
    """This runs an agent in process and needs Client(host=…); use enqueue, decide and wait instead."""

    code = "no_host"


class Stopping(Refusal):
    """This process is draining and takes no new work."""

    code = "stopping"


# --- Interruptions: the run goes on elsewhere --------------------------------------------------------------------


class Interruption(CortexError):
    """The run was interrupted and goes on elsewhere."""

    code = "interrupted"


class RunInterrupted(Interruption):
    """The run was handed off and will be continued by another worker."""

    code = "run_interrupted"


class LeaseLost(Interruption):
    """Somebody else moved the run; this worker stops and writes nothing more."""

    code = "lease_lost"


class DeferredModelCall(Interruption):
    """The model call waits for somebody; a model client raises this instead of answering.

    ``kind`` names what is waited for, ``reason`` is shown to a person, ``ttl`` (timedelta) is the deadline. With
    ``poll_after`` (timedelta) nobody is asked: the same call is made again then, and gets ``ref`` back.
    Source: runs.md 6.9; ruling 50.
    """

    code = "deferred_model_call"
    kind: str = "deferred"
    reason: str | None = None
    ttl: Any = None
    ref: str | None = None
    poll_after: Any = None


class RefusedForNow(Interruption):
    """The run cannot go on right now and was handed back; ``retry_in_s`` says when to look again."""

    code = "refused_for_now"
    retry_in_s: float = 1.0
    reason: str = "later"


# --- Failures: the run ends, and the row says why ----------------------------------------------------------------


class RunFailure(CortexError):
    """The run failed."""

    code = "run_failed"


class ReclaimLimit(RunFailure):
    """The run lost its worker more often than the reclaim limit allows."""

    code = "reclaim_limit"


class RunNotRecoverable(RunFailure):
    """Nothing is left to continue this run from."""

    code = "run_not_recoverable"


class EffectUncertain(RunFailure):
    """A call may have taken effect and its outcome is unknown. A tool may raise this for its own network timeouts."""

    code = "effect_uncertain"


class PrincipalRevoked(RunFailure):
    """The principal this run started under is no longer valid. A codec raises this while decoding."""

    code = "principal_revoked"


class MaxSteps(RunFailure):
    """The run used all of its steps without reaching an answer."""

    code = "max_steps"


class BudgetExhausted(RunFailure):
    """The run used up its wall-clock budget of leased time."""

    code = "budget_exhausted"


class ModelFailed(RunFailure):
    """The model provider refused or failed for good."""

    code = "model_failed"


class CheckpointRejected(RunFailure):
    """The checkpoint was rejected."""

    code = "checkpoint_rejected"


class PauseExpired(RunFailure):
    """Nobody answered the pause before its deadline."""

    code = "suspension_expired"


class InvalidContinuation(RunFailure):
    """The stored continuation cannot be run."""

    code = "invalid_continuation"


# --- Infrastructure ----------------------------------------------------------------------------------------------


class Unavailable(CortexError):
    """Something this process depends on is not available; try again."""

    code = "unavailable"


class StoreUnavailable(Unavailable):
    """Postgres is not available."""

    code = "store_unavailable"


class ModelUnavailable(Unavailable):
    """The model provider is not available; ``retry_after_s`` is what it asked for, where it said so."""

    code = "model_unavailable"
    retry_after_s: float | None = None


class PrincipalUndecodable(Unavailable):
    """The principal cannot be decoded right now. A codec raises this while decoding."""

    code = "principal_undecodable"


class NotPausedYet(Unavailable):
    """The run does not wait for this call yet; send the answer again in a moment."""

    code = "not_paused_yet"


class WaitTimeout(Unavailable):
    """What was waited for did not happen in time."""

    code = "wait_timeout"


class ToolTimeout(Unavailable, TimeoutError):
    """The tool did not return in time and was left behind; whether it took effect is not known."""

    code = "tool_timeout"


# --- Misconfiguration: at start, never later ---------------------------------------------------------------------


class Misconfiguration(CortexError):
    """The configuration is wrong."""

    code = "misconfiguration"


class InvalidSettings(Misconfiguration):
    """A setting has a value that is not allowed."""

    code = "invalid_settings"


class PrincipalCodecRequired(Misconfiguration):
    """A tool authorizer needs a principal codec: pass Host(codec=…)."""

    code = "principal_codec_required"


class UnknownTool(Misconfiguration):
    """An agent names a tool that the host has not registered."""

    code = "unknown_tool"


class DuplicateTool(Misconfiguration):
    """A tool of that name is registered already."""

    code = "duplicate_tool"


class InvalidTool(Misconfiguration):
    """A tool cannot be registered as it is."""

    code = "invalid_tool"


class UnknownModel(Misconfiguration):
    """The model name is not known."""

    code = "unknown_model"


class HostNotLoadable(Misconfiguration):
    """The host module cannot be loaded."""

    code = "host_not_loadable"


class SchemaBehind(Misconfiguration):
    """The database schema is behind this code; run `cortex-workers migrate`."""

    code = "schema_behind"


class UnsupportedCelery(Misconfiguration):
    """This Celery is too old; 5.7 or newer is needed."""

    code = "unsupported_celery"


def all_errors(root: type[CortexError] = CortexError) -> list[type[CortexError]]:
    """Every class of the tree, depth first; docs and tests read it."""
    return [root, *(found for sub in root.__subclasses__() for found in all_errors(sub))]

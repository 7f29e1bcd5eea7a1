"""Batch pricing for runs that can wait: a call is submitted to the provider's batch API, and the run pauses meanwhile.

Nobody holds anything until the result is in: the sweep makes the run ready again, the client is given its handle back
and looks. One call is one batch; what a provider charges less for is the latency, not the size.
Source: decision S6; ruling 50; issue: the provider batch path where pydantic-ai offers it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, cast

from pydantic import ValidationError
from pydantic_ai.models import Model, infer_model
from pydantic_ai.models.batch import Batch, BatchRequest, BatchResult
from pydantic_ai.settings import ModelSettings

from cortex_workers.errors import (
    DeferredModelCall,
    Misconfiguration,
    ModelFailed,
    ModelUnavailable,
    RefusedForNow,
)
from cortex_workers.llm.pydantic_ai import (
    PydanticAIClient,
    sorted_errors,
    to_messages,
    to_parameters,
    to_reply,
    to_settings,
)
from cortex_workers.llm.resolve import resolve
from cortex_workers.schemas.base import Document
from cortex_workers.schemas.llm import ModelDelta, ModelReply, ModelRequest

KIND = "batch"
VERSION = 1
MOST_FAILED_READS = 5
"""So often an ended batch is asked for results that do not come before its call is submitted again."""
_NOT_IN_A_BATCH = ("timeout", "request_timeout", "max_retries")


class Handle(Document):
    """What is kept of a submitted call while the run waits, as text: a document of our own, without secrets."""

    v: int = VERSION
    id: str
    model: str
    provider: str
    group: str
    created_at: datetime
    custom_id: str
    details: dict[str, Any] | None = None
    submitted_at: datetime
    submissions: int = 1
    failed_reads: int = 0

    @property
    def batch(self) -> Batch:
        """The job, as the library wants it named."""
        return Batch(
            id=self.id,
            model_name=self.model,
            provider_name=self.provider,
            group=self.group,
            status="in_progress",
            created_at=self.created_at,
            request_count=1,
            provider_details=self.details,
        )


class BatchModel(PydanticAIClient):
    """Answers by the batch API of ``model`` (``openai:…``, ``anthropic:…``, ``google:…``: those that have one).

    The first look comes after ``poll_after``, later ones in growing steps up to ``poll_at_most``. After
    ``give_up_after`` without a result the run fails. A call that the provider let expire, or failed at as it would at
    any busy moment, is submitted again up to ``resubmissions`` times. A worker that dies between submitting and pausing
    has the call submitted twice. Cancelling a run leaves its batch to the provider.

    Raises: UnknownModel, Misconfiguration for a model without a batch API (OpenAI has it for ``openai:``, the Responses
    protocol, and not for ``openai-chat:``).
    """

    def __init__(
        self,
        model: str,
        *,
        poll_after: timedelta = timedelta(minutes=1),
        poll_at_most: timedelta = timedelta(minutes=10),
        give_up_after: timedelta = timedelta(hours=48),
        resubmissions: int = 2,
    ) -> None:
        if not timedelta(0) < poll_after <= poll_at_most <= give_up_after or resubmissions < 0:
            raise Misconfiguration(
                "a batch needs 0 < poll_after <= poll_at_most <= give_up_after and resubmissions >= 0"
            )
        self._name = model
        self._poll_after = poll_after
        self._poll_at_most = poll_at_most
        self._give_up_after = give_up_after
        self._resubmissions = resubmissions
        # Names what is missing: a package, a key, a provider of that name.
        if not isinstance(resolve(model), PydanticAIClient):
            raise Misconfiguration(f"model {model!r} is no provider's model: it has no batch API")
        super().__init__(partial(_build, model), model.partition(":")[0])

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Submit the request, or look what became of it.

        Raises: DeferredModelCall (kind ``batch``, to be asked again), ModelFailed, ModelUnavailable when it could not
        be submitted.
        """
        handle = _handle_of(request)
        if handle is None:
            raise await self._submit(request, submissions=1)
        return await self._collect(request, handle)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """As ``complete``: a result of a batch comes in one piece.

        Raises: as ``complete``.
        """
        yield ModelDelta(reply=await self.complete(request))

    async def _submit(self, request: ModelRequest, submissions: int) -> DeferredModelCall:
        model, item = self._model(), _item(request, self._provider)
        with sorted_errors():
            batch = await model.batch_create([await model.batch_encode(item)])
        handle = Handle(
            id=batch.id,
            model=batch.model_name,
            provider=batch.provider_name,
            group=batch.group,
            created_at=batch.created_at,
            custom_id=item.custom_id,
            details=batch.provider_details,
            submitted_at=datetime.now(UTC),
            submissions=submissions,
        )
        return self._later(handle)

    async def _collect(self, request: ModelRequest, handle: Handle) -> ModelReply:
        model = self._model()
        try:
            with sorted_errors():
                batch = await model.batch_status(handle.batch)
        except ModelUnavailable as error:
            # A look that failed says nothing about the batch.
            raise self._later(handle, error.retry_after_s) from error
        if batch.status != "ended":
            raise self._later(handle)
        try:
            with sorted_errors():
                results = await model.batch_results(batch)
        except ModelUnavailable as error:
            if handle.failed_reads + 1 >= MOST_FAILED_READS:
                raise await self._again(request, handle, "its results cannot be had") from error
            failed = handle.model_copy(update={"failed_reads": handle.failed_reads + 1})
            raise self._later(failed, error.retry_after_s) from error
        return await self._read(model, request, handle, results)

    async def _read(
        self, model: Model, request: ModelRequest, handle: Handle, results: Sequence[BatchResult]
    ) -> ModelReply:
        result = next((each for each in results if each.custom_id == handle.custom_id), None)
        if result is None:
            raise await self._again(request, handle, "it ended without a result")
        if result.status == "canceled":
            raise ModelFailed("the batch was cancelled at the provider")
        if result.status == "expired":
            raise await self._again(request, handle, "it expired at the provider")
        try:
            with sorted_errors():
                response = model.batch_decode(result, _item(request, self._provider))
            return to_reply(response, self._provider)
        except ModelUnavailable as error:
            raise await self._again(request, handle, error.message) from error

    async def _again(self, request: ModelRequest, handle: Handle, why: str) -> DeferredModelCall:
        """Submit the call once more.

        Raises: ModelFailed when that was done often enough.
        """
        if handle.submissions > self._resubmissions:
            raise ModelFailed(f"the batch failed {handle.submissions} times: {why}")
        return await self._submit(request, handle.submissions + 1)

    def _later(self, handle: Handle, retry_after_s: float | None = None) -> DeferredModelCall:
        """The deferral until the next look; its deadline is ours, not that of people's answers.

        Raises: ModelFailed when the batch had its time.
        """
        waited = datetime.now(UTC) - handle.submitted_at
        if waited >= self._give_up_after:
            raise ModelFailed(f"the batch gave no result within {self._give_up_after}")
        pause = min(max(self._poll_after, waited / 4), self._poll_at_most)
        if retry_after_s is not None:
            pause = max(pause, timedelta(seconds=retry_after_s))
        return DeferredModelCall(
            "the model call waits for its batch",
            kind=KIND,
            reason=f"batch {handle.id} of {self._name}"[:200],
            ref=handle.model_dump_json(),
            poll_after=pause,
            ttl=self._give_up_after + self._poll_at_most,
        )


def _build(name: str) -> Model:
    model = infer_model(name)
    if model.batch_max_requests is None:
        raise Misconfiguration(f"model {name!r} has no batch API")
    client: Any = getattr(model, "client", None)
    if hasattr(client, "max_retries"):
        # The run owns retrying: a look that fails is made again later, without a worker that sleeps meanwhile.
        client.max_retries = 0
    return model


def _handle_of(request: ModelRequest) -> Handle | None:
    """The handle that the run was paused with; None when this call was not submitted yet.

    Raises: RefusedForNow for one of a newer version, ModelFailed for one that cannot be read.
    """
    deferral = request.deferral
    if deferral is None or deferral.kind != KIND or deferral.ref is None:
        return None
    try:
        handle = Handle.model_validate_json(deferral.ref)
    except ValidationError as error:
        raise ModelFailed("the handle of the batch cannot be read") from error
    if handle.v > VERSION:
        raise RefusedForNow("a newer worker submitted this batch", retry_in_s=30.0, reason="newer")
    return handle


def _item(request: ModelRequest, provider: str) -> BatchRequest:
    settings = {key: value for key, value in to_settings(request).items() if key not in _NOT_IN_A_BATCH}
    return BatchRequest(
        custom_id=f"{request.run_id or 'call'}-{request.step}",
        messages=to_messages(request, provider),
        model_settings=cast(ModelSettings, settings),
        model_request_parameters=to_parameters(request.tools),
    )

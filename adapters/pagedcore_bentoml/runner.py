"""The service: one engine in a BentoML worker, its four endpoints, its start, its end and its health.

Owns the engine's life inside the worker and the turning of calls into engine requests; what is read and written is in
``wire.py``, how a client that leaves is noticed in ``responses.py``, what a caller is told in ``refusals.py``.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, ClassVar, TypeVar

import bentoml
from starlette.responses import Response

from pagedcore import AsyncEngine, Delta, SamplingParams, TokenLogprobs, Usage
from pagedcore.errors import InvalidConfig, InvalidPrompt, PagedcoreError
from pagedcore.metrics.recorder import engine_metrics, engine_metrics_text
from pagedcore_bentoml.body import MAX_BODY_BYTES
from pagedcore_bentoml.calls import Call, complete, complete_all, deltas_of
from pagedcore_bentoml.doorkeeper import Doorkeeper
from pagedcore_bentoml.events import encode, frame_text
from pagedcore_bentoml.farewell import Farewell
from pagedcore_bentoml.pieces import with_list
from pagedcore_bentoml.refusals import CLIENT_CLOSED_REQUEST, NotServing, refusal_of
from pagedcore_bentoml.responses import ClientGone, EventText, run_until_disconnect
from pagedcore_bentoml.wire import (
    REFUSAL_KEY,
    BatchCompletion,
    BatchInput,
    ChatInput,
    Completion,
    PromptInput,
    json_of,
    prompt_logprobs_of,
)

T = TypeVar("T")

#: What BentoML hands to an endpoint that it serves; a direct call in Python has none.
_NO_CONTEXT: Any = None


class PagedCoreRunner:
    """Owns one engine. Subclass it under ``@bentoml.service``, with one worker.

        @bentoml.service(traffic={"timeout": 300})
        class LLM(PagedCoreRunner):
            model = "demo"
            settings = {"num_kv_blocks": 512}

    Called in Python, endpoints return models and raise pagedcore's errors; over HTTP errors have statuses.

    Invariant: a request that was handed to the engine is aborted as soon as its client has left.
    Invariant: between the first call and ``pagedcore_stop`` there is exactly one engine.
    """

    model: ClassVar[Any] = None
    """What ``AsyncEngine.from_pretrained`` takes, or an ``AsyncEngine`` that somebody else closes."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Keywords of ``AsyncEngine.from_pretrained``."""
    drain_s: ClassVar[float] = 25.0
    """Longest wait for calls in flight when the service ends, in seconds; ``bentoml serve`` kills a worker that is
    still there 30 seconds after it was told to end."""
    max_body_bytes: ClassVar[int] = MAX_BODY_BYTES
    """Largest request body."""
    degraded_after_s: ClassVar[float] = 10.0
    """Seconds without progress after which the service is not ready; longer than the longest step."""
    dead_after_s: ClassVar[float] = 60.0
    """Seconds without progress after which the service is not alive."""

    def __init__(self) -> None:
        self._engine: AsyncEngine | None = None
        self._starting = threading.Lock()
        self._door = Doorkeeper()
        self._farewell = Farewell(lambda: self._door.drain(self.drain_s))

    @property
    def engine(self) -> AsyncEngine:
        """The engine, built at the first look if the start-up hook did not run.

        Raises:
            InvalidConfig: the model or a setting is refused.
        """
        with self._starting:
            if self._engine is None:
                self._engine = self._build()
            return self._engine

    def _build(self) -> AsyncEngine:
        if self.model is None:
            raise InvalidConfig("model: got None, needed is a model; set it on the class or use create_service.")
        if isinstance(self.model, AsyncEngine):
            return self.model
        return AsyncEngine.from_pretrained(self.model, **self.settings)

    @bentoml.on_startup
    async def pagedcore_start(self) -> None:
        """Load the model and answer one token, so that nothing is compiled in front of a caller.

        Raises:
            InvalidConfig: as from ``AsyncEngine.from_pretrained``.
            RequestFailed: the model fails on its first token.
        """
        engine = await asyncio.to_thread(lambda: self.engine)
        output = await asyncio.wrap_future(engine.submit([0], SamplingParams(max_tokens=1)))
        if output.outputs[0].error is not None:
            raise output.outputs[0].error
        engine_metrics(engine)
        self._farewell.install()
        # Why: what is there by now stays; searching all of it for garbage now and then stalls every stream for 0.2 s.
        gc.collect()
        gc.freeze()

    @bentoml.on_shutdown
    async def pagedcore_stop(self) -> None:
        """Refuse new calls, wait up to ``drain_s`` seconds for those in flight, then close the engine.

        Where a signal ends the process, all of that but the last has happened by then, before the listener was closed.
        """
        self._farewell.remove()
        await self._door.drain(self.drain_s)
        if self._engine is not None and self._engine is not self.model:
            await self._engine.aclose()
        gc.unfreeze()

    async def __is_alive__(self) -> bool:
        """Whether waiting for this process makes sense: its engine exists and gets on."""
        return self._health() != "dead"

    async def __is_ready__(self) -> bool:
        """Whether to send calls here: the engine gets on, its model works and the service does not drain."""
        return self._health() == "ready" and not self._door.is_draining

    async def __metrics__(self, text: str) -> str:
        """Append the engine's metrics to BentoML's own."""
        if self._engine is None:
            return text
        # Why: on a thread, because the numbers are taken between two steps, which may be long.
        return text + await asyncio.to_thread(engine_metrics_text, self._engine)

    def _health(self) -> str:
        if self._engine is None:
            return "degraded"
        return self._engine.health(degraded_after_s=self.degraded_after_s, dead_after_s=self.dead_after_s).status

    @bentoml.api(input_spec=PromptInput, output_spec=Completion)
    async def generate(self, prompt: Any, sampling: Any = None, priority: Any = 0, timeout_s: Any = None,
                       ctx: bentoml.Context = _NO_CONTEXT) -> Completion:
        """Answer one prompt, whole.

        Args:
            prompt: text, token ids, or chat messages.
            sampling: fields of ``SamplingParams``.
            priority: higher runs first under the "priority" policy.
            timeout_s: longest time to the end of the answer, in seconds.
            ctx: BentoML's; leave it out.
        """
        call = Call(sampling, priority, timeout_s)
        return await self._answer(ctx, lambda engine: complete(engine, prompt, call))

    @bentoml.api(input_spec=ChatInput, output_spec=Completion)
    async def chat(self, messages: Any, sampling: Any = None, priority: Any = 0, timeout_s: Any = None,
                   ctx: bentoml.Context = _NO_CONTEXT) -> Completion:
        """Answer a list of chat messages, each with "role" and "content"; otherwise as ``generate``."""
        call = Call(sampling, priority, timeout_s)
        return await self._answer(ctx, lambda engine: complete(engine, _require_chat(messages), call))

    @bentoml.api(input_spec=BatchInput, output_spec=BatchCompletion)
    async def batch(self, prompts: Any, sampling: Any = None, priority: Any = 0, timeout_s: Any = None,
                    ctx: bentoml.Context = _NO_CONTEXT) -> BatchCompletion:
        """Answer several prompts, in order; ``sampling`` is for all of them, or a list with one for each.

        A prompt that is refused refuses the batch, and a full queue refuses it as a whole; later failures are told in
        the answers they concern.
        """
        call = Call(sampling, priority, timeout_s)
        return await self._answer(ctx, lambda engine: complete_all(engine, prompts, call))

    @bentoml.api(input_spec=PromptInput, output_spec=EventText)
    async def stream(self, prompt: Any, sampling: Any = None, priority: Any = 0, timeout_s: Any = None,
                     ctx: bentoml.Context = _NO_CONTEXT) -> AsyncGenerator[str, None]:
        """Answer one prompt as server-sent events: deltas as they come, then "done" with the usage, or "error"."""
        _raise_what_was_refused(ctx)
        with self._door.call():
            async with aclosing(deltas_of(self._live_engine(), prompt, Call(sampling, priority, timeout_s))) as deltas:
                async for delta in deltas:
                    yield await _events_of(delta)
                    if delta.error is not None:
                        raise delta.error

    async def _answer(self, ctx: bentoml.Context | None, work: Callable[[AsyncEngine], Coroutine[Any, Any, T]]) -> T:
        if ctx is None:
            return await self._work(work)
        try:
            _raise_what_was_refused(ctx)
            return await run_until_disconnect(ctx.request.receive, self._work(work))
        except ClientGone:
            response = Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:  # whatever went wrong, the caller is told
            response = refusal_of(error).response()
        ctx.response.status_code = response.status_code
        return response  # type: ignore[return-value]  # Why: BentoML sends a response as it is

    async def _work(self, work: Callable[[AsyncEngine], Coroutine[Any, Any, T]]) -> T:
        with self._door.call():
            return await work(self._live_engine())

    def _live_engine(self) -> AsyncEngine:
        engine = self.engine
        if self._health() == "dead":
            raise NotServing("the engine of this process makes no progress; ask another one.")
        return engine


def _raise_what_was_refused(ctx: bentoml.Context | None) -> None:
    refused: PagedcoreError | None = None if ctx is None else ctx.request.scope.get(REFUSAL_KEY)
    if refused is not None:
        raise refused


def _require_chat(messages: Any) -> Any:
    if not isinstance(messages, list) or not messages or not isinstance(messages[0], dict):
        raise InvalidPrompt("messages", messages, "a list of objects with role and content")
    return messages


async def _events_of(delta: Delta) -> str:
    text = frame_text(await _delta_json(delta))
    if delta.usage is None or delta.error is not None:
        return text
    # Why: in one piece, because every piece passes through all that BentoML puts around an answer.
    return text + frame_text(await _end_json(delta.usage, delta.prompt_logprobs), "done")


async def _delta_json(delta: Delta) -> str:
    data: dict[str, Any] = {"index": delta.index, "text": delta.text, "token_ids": delta.token_ids}
    if delta.finish_reason is not None:
        data["finish_reason"] = delta.finish_reason
    text = encode(data)
    return text if delta.logprobs is None else await with_list(text, "logprobs", delta.logprobs, _entry_json)


async def _end_json(usage: Usage, prompt_logprobs: Sequence[TokenLogprobs | None] | None) -> str:
    text = encode({"usage": asdict(usage)})
    if prompt_logprobs is None:
        return text
    return await with_list(text, "prompt_logprobs", prompt_logprobs, _entry_json)


def _entry_json(entry: TokenLogprobs | None) -> str:
    return json_of(prompt_logprobs_of(entry))

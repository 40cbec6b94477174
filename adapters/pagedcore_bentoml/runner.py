"""The service: one engine in a BentoML worker, its four endpoints, start, shutdown and health.

Owns the engine's life inside the worker and turns calls into engine requests. Inputs and outputs are in ``wire.py``,
disconnects, drain and error responses in ``pagedcore_http``.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any, ClassVar, Final, TypeVar

import bentoml
from bentoml.exceptions import BentoMLException
from starlette.exceptions import HTTPException
from starlette.responses import Response

from pagedcore import AsyncEngine, Delta, SamplingParams, TokenLogprobs, Usage
from pagedcore.errors import InvalidPrompt, PagedcoreError, PromptEmpty
from pagedcore.metrics.recorder import engine_metrics, engine_metrics_text
from pagedcore_bentoml.calls import Call, ChatTools, complete, complete_all, complete_chat, deltas_of
from pagedcore_bentoml.checks import (
    before_any_worker,
    end_on_failed_start,
    end_supervisor,
    keep_idle_connections,
    require_model,
    require_one_worker,
    require_valid_settings,
)
from pagedcore_bentoml.packing import packed_model
from pagedcore_bentoml.wire import (
    REFUSAL_KEY,
    BatchCompletion,
    BatchInput,
    ChatInput,
    Completion,
    EventText,
    PromptInput,
    json_of,
    prompt_logprobs_of,
)
from pagedcore_http.body import MAX_BODY_BYTES, body_limit
from pagedcore_http.drain import DrainSignal, OpenCalls
from pagedcore_http.event_stream import ClientGone, run_until_disconnect
from pagedcore_http.events import encode, frame_text
from pagedcore_http.json_pieces import with_list
from pagedcore_http.present_objects import PresentObjects
from pagedcore_http.refusals import CLIENT_CLOSED_REQUEST, NotServing, refusal_of
from pagedcore_http.salts import Caller, Salt, derive_salt

T = TypeVar("T")

MAX_NUM_WAITING: Final = 1024
"""Requests that may wait in a service whose settings have no ``max_num_waiting``: a batch engine's own default, four
times ``max_num_seqs``, refuses some of 200 clients that come at once."""
CLOSE_LIMIT_S: Final = 5.0
"""Longest wait for a step in flight when the engine is closed, in seconds."""

#: BentoML passes a context to an endpoint that it serves; a direct call in Python has none.
_NO_CONTEXT: Any = None


class PagedCoreRunner:
    """Owns one engine. Subclass it under ``@bentoml.service``, with one worker.

        @bentoml.service(traffic={"timeout": 300})
        class LLM(PagedCoreRunner):
            model = "demo"
            settings = {"num_kv_blocks": 512}

    Called in Python, endpoints return models and raise pagedcore's errors; over HTTP errors have statuses.

    Invariant: a request of the engine is aborted as soon as its client has disconnected.
    Invariant: no request reaches the engine before ``salt_of`` has returned the salt of its tenant.
    Invariant: between the first call and ``pagedcore_stop`` there is exactly one engine.
    """

    model: ClassVar[Any] = None
    """What ``AsyncEngine.from_pretrained`` takes, or an ``AsyncEngine`` that its owner closes."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Keywords of ``AsyncEngine.from_pretrained``, validated when the class is made; without ``max_num_waiting`` it is
    1,024 here."""
    drain_s: ClassVar[float] = 25.0
    """Longest wait for calls in flight when the service ends, in seconds. Those that are left get the error
    ``EngineClosed``, connections are cut 5 seconds later, and the process ends. ``bentoml serve`` itself waits a day
    for it, other supervisors often 30 seconds."""
    max_body_bytes: ClassVar[int | None] = None
    """Largest request body; ``None``: 16 bytes for each token of the context, at most 4 MiB, and 256 KiB besides. It
    may have one number or object for every 16 of these bytes, 8,192 strings, as many lists and as many of ``null``,
    ``true`` and ``false``, and 262,144 escapes."""
    degraded_after_s: ClassVar[float] = 10.0
    """Seconds without progress after which the service is not ready; longer than the longest step."""
    max_priority: ClassVar[int | None] = None
    """The highest ``priority`` that a call may ask for; ``None``: any."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Validate the settings, so that a wrong one fails where it is written and not in a worker.

        Raises:
            InvalidConfig: a setting is unknown or out of range.
        """
        super().__init_subclass__(**keywords)
        require_valid_settings(cls.settings)

    @classmethod
    @before_any_worker
    def pagedcore_check(cls) -> None:
        """Refuse more than one worker before any is started: each would have a model and a KV pool of its own.

        Raises:
            InvalidConfig: the service of this class has ``workers`` other than 1, or its model is a path to nothing.
        """
        # Why so: BentoML tells this hook nothing of the service, which is the class's holder.
        services = [holder for holder in gc.get_referrers(cls) if isinstance(holder, bentoml.Service)]
        for service in services:
            require_one_worker(service.config)
        # Why: what a bento has packed lies where its workers are, and not here.
        if cls.model is None or not any(service.bento for service in services):
            require_model(cls.model)
        end_on_failed_start()

    def __init__(self) -> None:
        self._engine: AsyncEngine | None = None
        self._starting = threading.Lock()
        self.open_calls = OpenCalls()
        """The calls in flight, those of a mounted ``OpenAIMount`` among them."""
        self._drain_signal = DrainSignal(self._drain_or_end)
        self._present_objects = PresentObjects()
        self.body_limit = MAX_BODY_BYTES if self.max_body_bytes is None else self.max_body_bytes
        """Bytes of a request body that are accepted."""

    @property
    def engine(self) -> AsyncEngine:
        """The engine, built at the first use if the start-up hook did not run.

        Raises:
            InvalidConfig: the model or a setting is refused.
        """
        with self._starting:
            if self._engine is None:
                self._engine = self._build()
            return self._engine

    def _build(self) -> AsyncEngine:
        model = packed_model(self.model)
        require_model(model)
        if isinstance(model, AsyncEngine):
            return model
        return AsyncEngine.from_pretrained(model, **{"max_num_waiting": MAX_NUM_WAITING, **self.settings})

    @bentoml.on_startup
    async def pagedcore_start(self) -> None:
        """Load the model and generate one token, so that no caller waits for compilation.

        ``bentoml serve`` ends if that fails, instead of starting one worker after another.

        Raises:
            InvalidConfig: as from ``AsyncEngine.from_pretrained``.
            RequestFailed: the model fails on its first token.
        """
        try:
            await self._start()
        except Exception as error:
            end_supervisor(error)
            raise

    async def _start(self) -> None:
        engine = await asyncio.to_thread(lambda: self.engine)
        output = await asyncio.wrap_future(engine.submit([0], SamplingParams(max_tokens=1)))
        output.raise_for_error()
        if self.max_body_bytes is None:
            self.body_limit = body_limit((await asyncio.to_thread(engine.stats)).max_model_len)
        engine_metrics(engine)
        keep_idle_connections()
        self._drain_signal.install()
        self._present_objects.keep()

    @bentoml.on_shutdown
    async def pagedcore_stop(self) -> None:
        """Refuse new calls, wait up to ``drain_s`` seconds for those in flight, then close the engine.

        Where a signal ends the process, the drain has happened by then, before the listener was closed.
        """
        self._drain_signal.remove()
        await self.open_calls.drain(0.0 if self.open_calls.is_draining else self.drain_s)
        await self._close_engine()
        self._present_objects.release()

    async def _drain_or_end(self) -> None:
        if await self.open_calls.drain(self.drain_s):
            # Why: whatever still runs then would keep the server, and BentoML's supervisor, for as long as it takes.
            await self._close_engine()

    async def _close_engine(self) -> None:
        if self._engine is not None and self._engine is not self.model:
            await self._engine.aclose(CLOSE_LIMIT_S)

    async def __is_alive__(self) -> bool:
        """Whether this process may recover: its engine takes calls, which it does until it hangs for ``dead_after_s``.
        """
        return self._health() != "dead"

    async def __is_ready__(self) -> bool:
        """Whether to send calls here: the engine makes progress, its model works and the service does not drain."""
        return self._health() == "ready" and not self.open_calls.is_draining

    async def __metrics__(self, text: str) -> str:
        """Append the engine's metrics to BentoML's own."""
        if self._engine is None:
            return text
        # Why: on a thread, because the numbers are taken between two steps, which may be long.
        return text + await asyncio.to_thread(engine_metrics_text, self._engine)

    def _health(self) -> str:
        if self._engine is None:
            return "degraded"
        return self._engine.health(degraded_after_s=self.degraded_after_s).status

    def salt_of(self, ctx: bentoml.Context | None) -> Salt | Awaitable[Salt]:
        """Return the cache salt of a call's tenant, text or bytes of any length above 0; ``None``: all tenants share.

        Override this, as a plain or an ``async`` method, to derive the salt from the caller's credentials. A body's
        ``cache_salt`` divides a tenant's own cache further and never replaces this salt.

        Args:
            ctx: ``ctx.request`` has headers and state of the call; ``None`` for a call in Python without one.

        Raises:
            HTTPException: Starlette's, or a ``BentoMLException``: the call is refused with its status. After any other
                exception, except those of pagedcore, and after any other result the call is refused with 500.
        """
        return None

    def weight_of(self, ctx: bentoml.Context | None) -> float:
        """Return the weight of a call's tenant, for ``scheduling_policy="fair"``; ``salt_of`` says which tenant it is.

        Override this to tell tenants apart; ``ctx`` is as for ``salt_of``.
        """
        return 1.0

    @bentoml.api(input_spec=PromptInput, output_spec=Completion)
    async def generate(self, prompt: Any, sampling: Any = None, priority: Any = 0, timeout_s: Any = None,
                       cache_salt: Any = None, request_id: Any = None, deadline_s: Any = None, ttft_ms: Any = None,
                       tpot_ms: Any = None, ctx: bentoml.Context = _NO_CONTEXT) -> Completion:
        """Complete one prompt, whole.

        Args:
            prompt: text, token ids, or chat messages.
            sampling: fields of ``SamplingParams``.
            priority: higher runs first under the "priority" policy; others refuse any but 0.
            timeout_s: longest time to the end of the completion, in seconds.
            cache_salt: calls with different salts share no cached prompts; combined with ``salt_of``.
            request_id: the caller's own label, for hooks and logs.
            deadline_s: when it should end, in seconds, under the "deadline" policy; others refuse it.
            ttft_ms: the longest time to the first token, in milliseconds, likewise.
            tpot_ms: the longest mean time from token to token, in milliseconds, likewise.
            ctx: BentoML's; an endpoint of your own that calls this one passes its own on, for ``salt_of``.
        """
        call = Call(sampling, priority, timeout_s, cache_salt, request_id, deadline_s, ttft_ms, tpot_ms)
        return await self._respond(ctx, call, lambda engine, call: complete(engine, prompt, call))

    @bentoml.api(input_spec=ChatInput, output_spec=Completion)
    async def chat(self, messages: Any, sampling: Any = None, priority: Any = 0, timeout_s: Any = None,
                   cache_salt: Any = None, request_id: Any = None, deadline_s: Any = None, ttft_ms: Any = None,
                   tpot_ms: Any = None, tools: Any = None, tool_choice: Any = None, parallel_tool_calls: Any = True,
                   ctx: bentoml.Context = _NO_CONTEXT) -> Completion:
        """Complete a list of chat messages, each with "role" and "content"; otherwise as ``generate``.

        With ``tools``, in OpenAI's form, the model may call them as ``tool_choice`` says; its calls and its reasoning
        are beside the text.
        """
        call = Call(sampling, priority, timeout_s, cache_salt, request_id, deadline_s, ttft_ms, tpot_ms)
        of_chat = ChatTools(tools, tool_choice, parallel_tool_calls)
        return await self._respond(
            ctx, call, lambda engine, call: complete_chat(engine, _require_chat(messages), of_chat, call))

    @bentoml.api(input_spec=BatchInput, output_spec=BatchCompletion)
    async def batch(self, prompts: Any, sampling: Any = None, priority: Any = 0, timeout_s: Any = None,
                    cache_salt: Any = None, request_id: Any = None, deadline_s: Any = None, ttft_ms: Any = None,
                    tpot_ms: Any = None, ctx: bentoml.Context = _NO_CONTEXT) -> BatchCompletion:
        """Complete several prompts, in order; ``sampling`` is for all of them, or a list with one for each.

        Labels are a list too. A prompt that is refused refuses the batch, and so does a full queue; later failures
        are in the completions that they concern.
        """
        call = Call(sampling, priority, timeout_s, cache_salt, request_id, deadline_s, ttft_ms, tpot_ms)
        return await self._respond(ctx, call, lambda engine, call: complete_all(engine, prompts, call))

    @bentoml.api(input_spec=PromptInput, output_spec=EventText)
    async def stream(self, prompt: Any, sampling: Any = None, priority: Any = 0, timeout_s: Any = None,
                     cache_salt: Any = None, request_id: Any = None, deadline_s: Any = None, ttft_ms: Any = None,
                     tpot_ms: Any = None, ctx: bentoml.Context = _NO_CONTEXT) -> AsyncGenerator[str, None]:
        """Complete one prompt as server-sent events: deltas, then "done" with the usage, or "error"."""
        _raise_refusal_of_body(ctx)
        call = Call(sampling, priority, timeout_s, cache_salt, request_id, deadline_s, ttft_ms, tpot_ms)
        with self.open_calls.call():
            engine = self._live_engine()
            call = replace(call, caller=await self.caller(ctx))
            async with aclosing(deltas_of(engine, prompt, call)) as deltas:
                async for delta in deltas:
                    yield await _events_of(delta)
                    if delta.error is not None:
                        raise delta.error

    async def _respond(
        self, ctx: bentoml.Context | None, call: Call, work: Callable[[AsyncEngine, Call], Coroutine[Any, Any, T]]
    ) -> T:
        if ctx is None:
            return await self._work(ctx, call, work)
        try:
            _raise_refusal_of_body(ctx)
            return await run_until_disconnect(ctx.request.receive, self._work(ctx, call, work))
        except ClientGone:
            response = Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:  # every error becomes a response
            response = refusal_of(error).response()
        ctx.response.status_code = response.status_code
        return response  # type: ignore[return-value]  # Why: BentoML sends a response as it is

    async def _work(
        self, ctx: bentoml.Context | None, call: Call, work: Callable[[AsyncEngine, Call], Coroutine[Any, Any, T]]
    ) -> T:
        with self.open_calls.call():
            engine = self._live_engine()
            return await work(engine, replace(call, caller=await self.caller(ctx)))

    async def caller(self, ctx: bentoml.Context | None) -> Caller:
        """Return who a call is from. Raises as ``derive_salt``, and ``HTTPException`` for what BentoML raises."""
        try:
            salt = await derive_salt(lambda: self.salt_of(ctx), (BentoMLException,))
            return Caller(salt, self.weight_of(ctx), self.max_priority)
        except BentoMLException as error:
            raise HTTPException(error.error_code, str(error)) from None

    def _live_engine(self) -> AsyncEngine:
        engine = self.engine
        if self._health() == "dead":
            raise NotServing("the engine of this process makes no progress; ask another one.")
        return engine


def _raise_refusal_of_body(ctx: bentoml.Context | None) -> None:
    refused: PagedcoreError | HTTPException | None = None if ctx is None else ctx.request.scope.get(REFUSAL_KEY)
    if refused is not None:
        raise refused


def _require_chat(messages: Any) -> Any:
    if messages == []:
        raise PromptEmpty("messages", 0, "at least 1 message")
    if not isinstance(messages, list) or not isinstance(messages[0], dict):
        raise InvalidPrompt("messages", messages, "a list of objects with role and content")
    return messages


async def _events_of(delta: Delta) -> str:
    text = frame_text(await _delta_json(delta))
    if delta.usage is None or delta.error is not None:
        return text
    # Why: in one piece, because every piece passes through all of BentoML's middleware.
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

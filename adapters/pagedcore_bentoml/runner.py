"""The service: six endpoints, and two verbs for those of a subclass.

Turns calls into requests of the engine, whose life is in ``lifetime.py``. Inputs and outputs are in ``wire.py``,
tenants in ``tenants.py``, disconnects, drain and error responses in ``pagedcore_http``. Next: ``own_endpoints.py``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar, Self, TypeVar, Unpack, cast

import bentoml
from bentoml.exceptions import BentoMLException
from starlette.exceptions import HTTPException
from starlette.responses import Response

from pagedcore import AsyncEngine, Delta, RequestOutput, SamplingParams
from pagedcore.errors import InvalidPrompt, PagedcoreError, PromptEmpty
from pagedcore.request_options import CallersKeywords
from pagedcore_bentoml.calls import (
    Call,
    ChatTools,
    around,
    complete,
    complete_all,
    complete_chat,
    deltas_of,
    output_of,
)
from pagedcore_bentoml.event_text import events_of
from pagedcore_bentoml.lifetime import EngineLifetime
from pagedcore_bentoml.own_endpoints import adapt_endpoints, counted, is_answered, is_batched
from pagedcore_bentoml.tenants import SaltedEngine, SelfCalls, current_request, no_tenant
from pagedcore_bentoml.texts import EmbedInput, Ranking, RerankInput, Vectors, embed, rerank
from pagedcore_bentoml.wire import (
    REFUSAL_KEY,
    BatchCompletion,
    BatchInput,
    ChatInput,
    Completion,
    EventText,
    PromptInput,
    arguments_of,
    takes,
)
from pagedcore_http.event_stream import ClientGone, run_until_disconnect
from pagedcore_http.refusals import CLIENT_CLOSED_REQUEST, NotServing, refusal_of
from pagedcore_http.salts import Caller, Salt, derive_salt

T = TypeVar("T")


class PagedCoreRunner(EngineLifetime):
    """Owns one engine. Subclass it under ``@bentoml.service``, with one worker.

        @bentoml.service(traffic={"timeout": 300})
        class LLM(PagedCoreRunner):
            model = "demo"
            settings = {"num_kv_blocks": 512}

    Called in Python, endpoints return models and raise pagedcore's errors; over HTTP errors have statuses.

    Invariant: a request of the engine is aborted as soon as its client has disconnected.
    Invariant: no request reaches the engine before ``salt_of`` has returned the salt of its tenant.
    """

    max_priority: ClassVar[int | None] = None
    """The highest ``priority`` that a call may ask for; ``None``: any."""
    _self_calls: SelfCalls

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Have the endpoints of a subclass answer as those of this class do. Raises ``InvalidConfig``."""
        super().__init_subclass__(**keywords)
        adapt_endpoints(cls, PagedCoreRunner)

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Set what endpoints need."""
        self = super().__new__(cls)
        self._self_calls = SelfCalls()
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; of BentoML's proxy to this service itself, have it say where its calls are from."""
        if name == "__self_proxy__":
            self._self_calls.mark(value)
        super().__setattr__(name, value)

    @property
    def engine(self) -> AsyncEngine:
        """The engine, for endpoints of a subclass; ``complete`` and ``deltas`` need less care.

        In a class that overrides ``salt_of``, what sends it a request (``submit``, ``generate``, ``session`` and so on)
        raises ``SaltNotDerived`` without a ``cache_salt``. ``shared_engine`` is the engine itself.

        Raises:
            InvalidConfig: the model or a setting is refused.
        """
        engine = self.shared_engine
        return cast(AsyncEngine, SaltedEngine(engine)) if self._has_tenants() else engine

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
    @takes(PromptInput)
    async def generate(self, *given: Any, **named: Any) -> Completion:
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
            speculate: whether tokens may be guessed ahead, in an engine with ``speculation``; the answer is the same.
            lora: the name of an adapter that the engine has loaded, to compute with.
            suffix: text behind the completion, which fills the gap, of a model with fill-in-the-middle tokens.
            ctx: BentoML's; an endpoint of your own that calls this one passes its own on, for ``salt_of``.
        """
        asked = arguments_of(PromptInput, given, named)
        return await self._respond(asked, lambda engine, call: complete(
            engine, around(asked["prompt"], asked["suffix"]), call))

    @bentoml.api(input_spec=ChatInput, output_spec=Completion)
    @takes(ChatInput)
    async def chat(self, *given: Any, **named: Any) -> Completion:
        """Complete a list of chat messages, each with "role" and "content"; otherwise as ``generate``.

        With ``tools``, in OpenAI's form, the model may call them as ``tool_choice`` says; its calls and its reasoning
        are beside the text. ``chat_template_kwargs`` has arguments that the model's chat template reads, such as
        ``enable_thinking``, and ``reasoning_effort`` becomes some of them. ``continue_final_message`` continues the
        last message, and without ``add_generation_prompt`` the prompt ends behind it, as for ``Chat``.
        """
        asked = arguments_of(ChatInput, given, named)
        return await self._respond(asked, lambda engine, call: complete_chat(
            engine, _require_chat(asked["messages"]), ChatTools.of(asked), call))

    @bentoml.api(input_spec=BatchInput, output_spec=BatchCompletion)
    @takes(BatchInput)
    async def batch(self, *given: Any, **named: Any) -> BatchCompletion:
        """Complete several prompts, in order; ``sampling`` is for all of them, or a list with one for each.

        Labels are a list too. A prompt that is refused refuses the batch, and so does a full queue; later failures
        are in the completions that they concern.
        """
        asked = arguments_of(BatchInput, given, named)
        return await self._respond(asked, lambda engine, call: complete_all(engine, asked["prompts"], call))

    @bentoml.api(input_spec=EmbedInput, output_spec=Vectors)
    @takes(EmbedInput)
    async def embed(self, *given: Any, **named: Any) -> Vectors:
        """Turn texts into vectors, in the steps of running completions; arguments as of ``AsyncEngine.embed``."""
        asked = arguments_of(EmbedInput, given, named)
        return await self._respond(asked, lambda engine, call: embed(engine, asked, call))

    @bentoml.api(input_spec=RerankInput, output_spec=Ranking)
    @takes(RerankInput)
    async def rerank(self, *given: Any, **named: Any) -> Ranking:
        """Order documents by their relevance to a query; arguments as of ``AsyncEngine.rerank``."""
        asked = arguments_of(RerankInput, given, named)
        return await self._respond(asked, lambda engine, call: rerank(engine, asked, call))

    @bentoml.api(input_spec=PromptInput, output_spec=EventText)
    @takes(PromptInput)
    async def stream(self, *given: Any, **named: Any) -> AsyncGenerator[str, None]:
        """Complete one prompt as server-sent events: deltas, then "done" with the usage, or "error"."""
        asked = arguments_of(PromptInput, given, named)
        _raise_refusal_of_body(asked["ctx"])
        prompt = around(asked["prompt"], asked["suffix"])
        async with aclosing(self._deltas(asked["ctx"], prompt, Call.of(asked))) as deltas:
            async for delta in deltas:
                yield await events_of(delta)
                if delta.error is not None:
                    raise delta.error

    async def complete(self, ctx: bentoml.Context | None, prompt: Any, params: SamplingParams | None = None, *,
                       timeout_s: float | None = None, **options: Unpack[CallersKeywords]) -> RequestOutput:
        """Complete one prompt for the caller of an endpoint of your own, as ``/generate`` does for its callers.

        Args:
            ctx: the endpoint's own; ``salt_of``, ``weight_of`` and ``max_priority`` hold for it as everywhere.
            prompt: as ``AsyncEngine.submit`` takes it: text, token ids, chat messages, a ``Chat`` or an ``Infill``.
            params: a ``SamplingParams``, or a mapping of its fields; ``None``: the model's own, or greedy.

        The other arguments, ``timeout_s`` and the options, are those of ``generate``.

        Raises:
            PagedcoreError: the call is refused, or fails; over HTTP with the status that ``/generate`` has for it.
            UnknownParameter: it is a ``TypeError`` too; there is no such option for callers.
        """
        call = Call.in_python(params, timeout_s, options)
        return await self._work(ctx, call, lambda engine, call: output_of(engine, prompt, call))

    async def deltas(self, ctx: bentoml.Context | None, prompt: Any, params: SamplingParams | None = None, *,
                     timeout_s: float | None = None, **options: Unpack[CallersKeywords]) -> AsyncGenerator[Delta, None]:
        """Complete one prompt delta by delta; otherwise as ``complete``. The error of a completion is raised."""
        call = Call.in_python(params, timeout_s, options)
        async with aclosing(self._deltas(ctx, prompt, call)) as deltas:
            async for delta in deltas:
                yield delta
                if delta.error is not None:
                    raise delta.error

    async def _deltas(self, ctx: bentoml.Context | None, prompt: Any, call: Call) -> AsyncGenerator[Delta, None]:
        with counted(self.open_calls, current_request()):
            engine = self._live_engine()
            call = replace(call, caller=await self.caller(ctx, call.cache_salt))
            async with aclosing(deltas_of(engine, prompt, call)) as deltas:
                async for delta in deltas:
                    yield delta

    async def _respond(
        self, asked: Mapping[str, Any], work: Callable[[AsyncEngine, Call], Coroutine[Any, Any, T]]
    ) -> T:
        ctx, call = asked["ctx"], Call.of(asked)
        if ctx is None or is_answered(ctx.request):
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
        with counted(self.open_calls, current_request()):
            engine = self._live_engine()
            return await work(engine, replace(call, caller=await self.caller(ctx, call.cache_salt)))

    async def caller(self, ctx: bentoml.Context | None, named: Any = None) -> Caller:
        """Return who a call is from; ``named`` is its ``cache_salt``.

        Where ``salt_of`` is overridden, a call of the service to itself and one of a service that depends on it, which
        bring no headers of a client, are for the tenant that they name.

        Raises:
            SaltNotDerived: they name none, or an endpoint has not passed its ``ctx`` on.
            HTTPException: what ``salt_of`` raises of BentoML's; otherwise as ``derive_salt``.
        """
        if self._has_tenants() and self._is_without_client(ctx):
            if named is None:
                raise no_tenant("this call has no headers of a client")
            return Caller(named, max_priority=self.max_priority)
        try:
            salt = await derive_salt(lambda: self.salt_of(ctx), (BentoMLException,))
            return Caller(salt, self.weight_of(ctx), self.max_priority)
        except BentoMLException as error:
            raise HTTPException(error.error_code, str(error)) from None

    def _has_tenants(self) -> bool:
        return type(self).salt_of is not PagedCoreRunner.salt_of

    def _is_without_client(self, ctx: bentoml.Context | None) -> bool:
        if ctx is None:
            return current_request() is not None
        return is_batched(ctx.request) or self._self_calls.is_without_client(ctx.request)

    def _live_engine(self) -> AsyncEngine:
        engine = self.shared_engine
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

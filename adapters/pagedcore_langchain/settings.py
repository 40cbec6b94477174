"""What both models have in common: the fields a user sets and the engine behind them.

Turns fields and call arguments into ``SamplingParams`` and options; pagedcore validates them and refuses names that it
does not know. Read ``chat.py`` and ``llm.py`` for the two models.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields, replace
from functools import partial
from typing import Any, Final, Self, cast

from pydantic import Field, PositiveFloat, model_validator

from pagedcore import AsyncEngine, Chat, Delta, Infill, RequestOutput, SamplingParams
from pagedcore.errors import InvalidRequest, TooManySequences, UnknownParameter, did_you_mean
from pagedcore.request_options import OPTIONS, TIMEOUT, OptionKeywords
from pagedcore_langchain.host import EngineHost, require_loop
from pagedcore_langchain.in_flight import in_flight, wait_for, wait_for_on_loop
from pagedcore_langchain.on_engine import OnEngine
from pagedcore_langchain.options import Call, hide_salt, mask_salt, require_single_label, reveal_secret

Prompt = str | list[dict[str, Any]] | Chat | Infill

OF_REMOTE_MODELS: Final = {"api_key", "max_retries", "stream_usage"}
"""What LangChain passes to every chat model, or many of them are asked for; left out, because nothing here is remote
and streams always have their usage."""
_RENAMED: Final = {"max_completion_tokens": "max_tokens", "model_name": "model", "stop_sequences": "stop"}
"""Names of other chat models for what has one here."""
_ELSEWHERE: Final = {
    "model_kwargs": "Give further sampling parameters as sampling={...}, the engine's settings "
                    "as engine_settings={...}.",
    "base_url": "The model runs in this process; for one that is served use langchain-openai's ChatOpenAI.",
    "openai_api_base": "The model runs in this process; for one that is served use langchain-openai's ChatOpenAI.",
}
"""Names of other chat models that mean nothing here, and what to do instead."""
_SAMPLING_FIELDS: Final = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "logprobs")

_CALL_NAMES: Final = frozenset({"top_logprobs", *(field.name for field in fields(SamplingParams))} - {"stop"})
"""What a call may say about its completion; a "stop" of its own is LangChain's keyword."""


class PagedCoreSettings(OnEngine):
    """Fields of a model. Every name of ``SamplingParams``, and ``timeout``, ``priority``, ``cache_salt``, ``lora``
    and ``request_id``, may also be given per call or by ``bind``, and wins there.

    A salt is a secret: ``repr``, callbacks, tracers and caches see a pseudonym of it. Where other objects of LangChain
    pass it on (``configurable``, ``bind`` of a chain), give a ``SecretStr``. ``request_id``, the caller's own label,
    is for one prompt: a batch with one is refused, and what is made of a binding has none.

    Invariant: copies, bindings and reconfigured variants of a model share its ``host``, so they share its engine.
    """

    max_tokens: int | None = None
    """Most tokens of a completion; ``None``: as many as the context has room for."""
    temperature: float | None = None
    """0 always takes the most likely token; ``None``: the model's own, or 0 if it has none."""
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    """Seed of the random numbers; the same seed gives the same completion."""
    stop: list[str] | None = None
    """A completion ends before the first of these texts."""
    logprobs: int | None = None
    """Report each token's log-probability and this many alternatives: ``response_metadata["logprobs"]["content"]`` of a
    message has them in OpenAI's format, and beside it are the ``prompt_logprobs`` that ``sampling`` may ask for."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Further fields of ``SamplingParams`` by name."""
    wait_for_room: bool = True
    """Whether a request waits while the engine's queue is full; otherwise ``EngineOverloaded``."""
    ttft_ms: PositiveFloat | None = None
    """The longest time to the first token, in milliseconds, under the engine's "deadline" policy; others refuse it."""
    tpot_ms: PositiveFloat | None = None
    """The longest mean time from token to token, likewise."""

    @model_validator(mode="before")
    @classmethod
    def _accept_standard_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kept = {_RENAMED.get(name, name): value for name, value in values.items() if name not in OF_REMOTE_MODELS}
        if isinstance(kept.get("stop"), str):
            kept["stop"] = [kept["stop"]]
        if "n" in kept:
            kept["sampling"] = {**kept.get("sampling", {}), "n": kept.pop("n")}
        for name in kept:
            if name in _ELSEWHERE:
                raise UnknownParameter.named("field", name, sorted(cls.model_fields), _ELSEWHERE[name])
            if name not in cls.model_fields and name != "engine" and did_you_mean(name, cls.model_fields):
                raise UnknownParameter.named("field", name, sorted(cls.model_fields))
        if isinstance(kept.get("engine"), AsyncEngine):
            kept["host"] = EngineHost(None, {}, kept.pop("engine"))
        return kept

    async def aclose(self) -> None:
        """Close without blocking the event loop."""
        require_loop()
        await asyncio.to_thread(self.host.close)

    def _settings(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        return {name: value for name, value in given.items() if value is not None} | self.sampling

    def _identity(self) -> dict[str, Any]:
        settings = self._settings()
        if "stop" in settings:
            # Why: LangChain puts a call's own "stop" here, also where it is None.
            settings["default_stop"] = settings.pop("stop")
        if self.lora is not None:
            settings["lora"] = self.lora
        engine = self.host.identity_of(self.lora)
        return mask_salt({"model": self.model, "engine": engine, **settings, "cache_salt": self.cache_salt})

    def _for_caller(self, keywords: dict[str, Any]) -> Self:
        """Move what a binding says of its caller from its keywords to a copy of this model."""
        # Safety: what LangChain makes of a binding (``with_structured_output``, ``bind_tools``, ``generate``) forgets
        # its keywords. Without the salt among them tenants would share cached prompts, and nobody would be told.
        names = [name for name in OPTIONS if name in type(self).model_fields and keywords.get(name) is not None]
        said = hide_salt({name: keywords.pop(name) for name in names})
        return self.model_copy(update=said) if said else self

    def _with_keywords(self, keywords: dict[str, Any]) -> Self:
        """Move a call's salt, adapter and sampling parameters from its keywords to a copy of this model: a completion
        model's callbacks see all keywords, and its response cache distinguishes calls by fields only."""
        salt, lora = hide_salt(keywords).get("cache_salt"), keywords.pop("lora", None)
        keywords.pop("cache_salt", None)
        names = [name for name in keywords if name in _CALL_NAMES]
        given = {name: value for name in names if (value := keywords.pop(name)) is not None}
        changes = {name: value for name, value in (("cache_salt", salt), ("lora", lora)) if value is not None}
        if given:
            changes["sampling"] = {**self.sampling, **given}
        return self.model_copy(update=changes) if changes else self

    def _resolve(self, stop: Sequence[str] | None, keywords: Mapping[str, Any], *, is_stream: bool = False) -> Call:
        """Combine the fields with the keywords of one call. Raises ``InvalidRequest``."""
        given = {_RENAMED.get(name, name): value for name, value in keywords.items() if value is not None}
        own = {name: getattr(self, name) for name in OPTIONS if name in type(self).model_fields}
        asked = own | {name: given.pop(name) for name in OPTIONS if name in given}
        options = cast(OptionKeywords, {name: reveal_secret(value) for name, value in asked.items()})
        values = self._settings() | given
        values.pop("stream", None)
        timeout_s = TIMEOUT.check("timeout", values.pop("timeout", self.timeout))
        if (model := values.pop("model", self.model)) != self.model:
            raise InvalidRequest("model", model, "this model's own name", "Build another model object for it.")
        if stop is not None:
            values["stop"] = stop
        # Why beside the mapping: it is code, which no mapping has.
        process = values.pop("logits_processor", None)
        params = SamplingParams.from_mapping(_with_logprobs(values))
        if process is not None:
            params = replace(params, logits_processor=process)
        if is_stream and params.n != 1:
            raise TooManySequences("n", params.n, "1 for a stream")
        return Call(params, timeout_s, options)

    def _deltas(self, prompt: Prompt, call: Call) -> Generator[Delta, None, None]:
        return self.host.engine.generate_sync(
            prompt, call.params, timeout_s=call.timeout_s, wait_for_room=self.wait_for_room, **call.options
        )

    def _deltas_on_loop(self, prompt: Prompt, call: Call) -> AsyncGenerator[Delta, None]:
        return self.host.engine.generate(
            prompt, call.params, timeout_s=call.timeout_s, wait_for_room=self.wait_for_room, **call.options
        )

    def _complete(self, prompts: Sequence[Prompt], call: Call) -> list[RequestOutput]:
        with in_flight(self._submit(self.host.engine, prompts, call), prompts) as futures:
            return wait_for(futures, call.timeout_s)

    async def _complete_on_loop(self, prompts: Sequence[Prompt], call: Call) -> list[RequestOutput]:
        with in_flight(self._submit(await self.host.ready(), prompts, call), prompts) as futures:
            return await wait_for_on_loop(futures, call.timeout_s)

    def _submit(
        self, engine: AsyncEngine, prompts: Sequence[Prompt], call: Call
    ) -> Callable[[Prompt], Future[RequestOutput]]:
        require_single_label(len(prompts), call.options)
        return partial(engine.submit, params=call.params, wait_for_room=self.wait_for_room, **call.options)


def _with_logprobs(values: dict[str, Any]) -> dict[str, Any]:
    """Understand ``logprobs=True, top_logprobs=n``, the way other chat models are asked."""
    num_top = values.pop("top_logprobs", 0)
    wanted = values.get("logprobs")
    if isinstance(wanted, bool):
        values["logprobs"] = num_top if wanted else None
    return values

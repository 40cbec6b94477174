"""What is deployed: replicas that each hold an engine, and an ingress that speaks OpenAI's HTTP interface."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from pagedcore import AsyncEngine, Delta, EngineConfig, RequestOutput
from pagedcore.errors import EngineClosed, InvalidConfig, PagedcoreError
from pagedcore_openai import openai_app
from pagedcore_ray.remote_engine import EngineCall, ModelFacts, RemoteEngine
from pagedcore_ray.router import PrefixAffinityRouter

DRAIN_S: Final = 30.0
"""How long a replica that is to go may finish its requests, in seconds."""
MAX_IMBALANCE: Final = 8
"""How many requests more than the least loaded replica another may have and still get those with its prefixes."""


class EngineReplica:
    """One engine, called through a Ray handle."""

    def __init__(self, model: Any, settings: Mapping[str, Any]) -> None:
        self._engine = AsyncEngine.from_pretrained(model, **settings)
        # Why: one token, so that no caller waits for compilation.
        self._engine.warm_up().result().raise_for_error()

    async def facts(self) -> ModelFacts:
        """Return what an ingress has to know."""
        return await self._engine.call(ModelFacts.of)

    async def stream(self, call: EngineCall) -> AsyncGenerator[Delta | PagedcoreError, None]:
        """Yield the deltas of a request; an error is the last item, because Ray would wrap a raised one."""
        stream = self._engine.generate(call.prompt, call.params, timeout_s=call.timeout_s,
                                       wait_for_room=call.wait_for_room, **call.options)
        async with aclosing(stream) as deltas:
            try:
                async for delta in deltas:
                    yield delta
            except PagedcoreError as error:
                yield error

    async def complete(self, call: EngineCall) -> RequestOutput | PagedcoreError:
        """Return all completions of a request, or the error that refuses it. Cancelling this aborts the request."""
        try:
            future = self._engine.submit(call.prompt, call.params, wait_for_room=call.wait_for_room, **call.options)
            return await asyncio.wrap_future(future)
        except PagedcoreError as error:
            return error

    async def stats(self) -> Any:
        """Return the engine's ``EngineStats``."""
        return await self._engine.call(lambda engine: engine.stats())

    async def pid(self) -> int:
        """Return the number of this replica's process, for operators and their logs."""
        return os.getpid()

    def check_health(self) -> None:
        """Tell Ray whether this replica makes progress; one that does not is replaced. Raises ``EngineClosed``."""
        if (health := self._engine.health()).status == "dead":
            raise EngineClosed(f"the engine makes no progress: {health.reason}")


@serve.ingress()
class Ingress:
    """The OpenAI app in front of the replicas; it tokenises, so that their engines only compute."""

    def __init__(self, replicas: DeploymentHandle, tokenizer: str, name: str, options: Mapping[str, Any]) -> None:
        self._replicas, self._tokenizer, self._name, self._options = replicas, tokenizer, name, options

    async def __serve_build_asgi_app__(self) -> Any:
        facts = await self._replicas.facts.remote()
        engine = await asyncio.to_thread(RemoteEngine, facts, self._tokenizer, self._replicas)
        return openai_app(engine, name=self._name, owned=[engine], **self._options)


def llm_app(
    model: str, *, name: str | None = None, num_replicas: int | None = None, max_replicas: int | None = None,
    num_ingresses: int = 1, num_cpus: float = 1.0, ray_actor_options: Mapping[str, Any] | None = None,
    max_imbalance: int = MAX_IMBALANCE, app_options: Mapping[str, Any] | None = None, **settings: Any,
) -> serve.Application:
    """Describe an application for ``serve.run``: replicas of an engine behind OpenAI's interface.

    Args:
        model: as for ``AsyncEngine.from_pretrained``, by a name or path that every node knows.
        name: what callers give as ``model``; ``None``: the same as ``model``.
        num_replicas: how many engines; with ``max_replicas`` the fewest. ``None``: 1.
        max_replicas: Ray adds replicas up to this number while more requests are open than the engines run at a time,
            ``max_num_seqs`` each, and removes idle ones; ``None``: the number is fixed.
        num_ingresses: how many processes take HTTP calls and tokenise.
        num_cpus: processors that Ray reserves for a replica; a whole number of them is its ``num_threads`` as well.
        ray_actor_options: more of what Ray takes for a replica, such as ``{"num_gpus": 1}``.
        max_imbalance: how many requests more than the least loaded replica another may have and still be preferred for
            prompts whose beginning it has computed; at least 0.
        app_options: keywords of ``openai_app`` such as ``api_keys``.
        settings: keywords of ``AsyncEngine.from_pretrained`` for each replica.

    Raises:
        InvalidConfig: a number is out of range.
    """
    for what, given, least in (("num_replicas", num_replicas, 1), ("max_replicas", max_replicas, num_replicas or 1),
                               ("num_ingresses", num_ingresses, 1), ("max_imbalance", max_imbalance, 0)):
        if given is not None and (type(given) is not int or given < least):
            raise InvalidConfig(f"{what}: got {given}, allowed is an integer from {least} up, or none.")
    settings.setdefault("num_threads", max(1, int(num_cpus)))
    max_num_seqs = settings.get("max_num_seqs") or EngineConfig(device=settings.get("device", "auto")).max_num_seqs
    scale: dict[str, Any] = {"num_replicas": num_replicas or 1}
    if max_replicas is not None:
        scale = {"autoscaling_config": {"min_replicas": num_replicas or 1, "max_replicas": max_replicas,
                                        "target_ongoing_requests": max_num_seqs}}
    replicas = serve.deployment(
        EngineReplica, name="EngineReplica", **scale,
        # Why: the engine queues and refuses by itself, and says so with its own errors.
        max_ongoing_requests=100_000, graceful_shutdown_timeout_s=DRAIN_S,
        ray_actor_options={"num_cpus": num_cpus, **(ray_actor_options or {})},
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixAffinityRouter,
            request_router_kwargs={"block_size": settings.get("block_size") or 16, "max_imbalance": max_imbalance},
        ),
    ).bind(model, settings)
    ingress = serve.deployment(Ingress, name="Ingress", num_replicas=num_ingresses, max_ongoing_requests=100_000,
                               ray_actor_options={"num_cpus": 0})
    return ingress.bind(replicas, str(settings.get("tokenizer") or model), name or model, dict(app_options or {}))


def create(model: Any, **settings: Any) -> serve.Application:
    """Describe the application, as ``expose("ray", model=...)`` does; arguments and errors as ``llm_app``."""
    return llm_app(model, **settings)

"""What the served tests serve: the demo model, and a second service that uses the first."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator
from typing import Any

import bentoml

from pagedcore import SamplingParams
from pagedcore.protocols import FloatArray, RaggedRows
from pagedcore_bentoml import PagedCoreRunner
from support.doubles import ToyBackend

ENDLESS: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}


@bentoml.service(traffic={"timeout": 300}, workers=1)
class LLM(PagedCoreRunner):
    """The demo model, and a look into its engine."""

    model = "demo"
    settings = {"num_kv_blocks": 512, "max_num_seqs": 32}  # noqa: RUF012

    @bentoml.api
    async def stats(self) -> dict[str, Any]:
        """The engine's counters."""
        return dataclasses.asdict(self.engine.stats())


class StepwiseBackend(ToyBackend):
    """A toy model that takes its time over each step."""

    def forward(self, batch: RaggedRows) -> FloatArray:
        """Sleep, and compute."""
        time.sleep(0.02)
        return super().forward(batch)


@bentoml.service(traffic={"timeout": 300}, workers=1)
class Slow(PagedCoreRunner):
    """A model whose long answers outlast the telling of the process to end, and whose longest outlast the drain."""

    drain_s = 4.0
    model = StepwiseBackend()
    settings = {"num_kv_blocks": 512}  # noqa: RUF012


@bentoml.service(traffic={"timeout": 300}, workers=1)
class Front:
    """A service that asks the other one."""

    llm = bentoml.depends(LLM)

    @bentoml.api
    async def ask(self, prompt: str) -> str:
        """Answer in one piece."""
        completion = await self.llm.generate(prompt=prompt, sampling={"max_tokens": 64})
        return str(completion.outputs[0].text)

    @bentoml.api
    async def relay(self, prompt: str) -> AsyncGenerator[str, None]:
        """Pass the events on."""
        async for chunk in self.llm.stream(prompt=prompt, sampling={"max_tokens": 64}):
            yield chunk

    @bentoml.api
    async def ask_badly(self) -> str:
        """Say how a refusal looks from here."""
        try:
            await self.llm.generate(prompt="What is 2 + 3?", sampling={"temperature": 99})
        except bentoml.exceptions.BentoMLException as error:
            return f"{error.error_code.value} {error}"
        return "not refused"


@bentoml.service(traffic={"timeout": 300}, workers=1)
class Tenants(PagedCoreRunner):
    """A toy model whose callers are told apart by a header, and every way in which an endpoint may ask it."""

    model = StepwiseBackend()
    settings = {"num_kv_blocks": 512, "block_size": 4}  # noqa: RUF012

    def __init__(self) -> None:
        self.params = SamplingParams(max_tokens=2, ignore_eos=True)

    def salt_of(self, ctx: bentoml.Context | None) -> str | None:
        """The tenant; a call without one shares with others of its kind."""
        return None if ctx is None else ctx.request.headers.get("x-tenant")

    @bentoml.api
    async def whole(self, prompt: list[int], ctx: bentoml.Context) -> int:
        """Complete for the caller; return the number of cached tokens, as all of these do."""
        return (await self.complete(ctx, prompt, self.params)).num_cached_tokens

    @bentoml.api
    async def deltas_of(self, prompt: list[int], ctx: bentoml.Context) -> AsyncGenerator[str, None]:
        """Do so in a stream."""
        async for delta in self.deltas(ctx, prompt, self.params):
            if delta.usage is not None:
                yield str(delta.usage.num_cached_tokens)

    @bentoml.task
    async def later(self, prompt: list[int], ctx: bentoml.Context) -> int:
        """Complete for a caller who comes back for it."""
        return await self.whole.local(prompt, ctx)  # type: ignore[attr-defined, no-any-return]

    @bentoml.api
    async def endless(self, ctx: bentoml.Context) -> int:
        """Complete for long."""
        return len((await self.complete(ctx, [1], SamplingParams(**ENDLESS))).outputs[0].token_ids)

    @bentoml.api
    async def broken(self, ctx: bentoml.Context) -> AsyncGenerator[str, None]:
        """Fail in the middle of a stream."""
        async for _ in self.deltas(ctx, [1], SamplingParams(**ENDLESS)):
            yield "text"
            raise KeyError

    @bentoml.api
    async def through_itself(self, prompt: list[int]) -> int:
        """Call another endpoint, which BentoML makes an HTTP call."""
        return (await self.generate(prompt=prompt, sampling={"max_tokens": 2})).usage.num_cached_tokens

    @bentoml.api
    def through_itself_in_a_thread(self, prompt: list[int]) -> int:
        """Do so without an event loop."""
        return int(self.to_sync.generate(prompt=prompt)["usage"]["num_cached_tokens"])  # type: ignore[attr-defined]

    @bentoml.api
    async def local(self, prompt: list[int]) -> int:
        """Call another endpoint in Python, and forget the context."""
        return (await self.generate.local(prompt=prompt)).usage.num_cached_tokens  # type: ignore[attr-defined]

    @bentoml.api
    async def local_with_ctx(self, prompt: list[int], ctx: bentoml.Context) -> int:
        """Do so and pass it on."""
        return (await self.generate.local(prompt=prompt, ctx=ctx)).usage.num_cached_tokens  # type: ignore[attr-defined]

    @bentoml.api
    async def engine_itself(self, prompt: list[int]) -> int:
        """Ask the engine, for nobody."""
        return (await asyncio.wrap_future(self.engine.submit(prompt, self.params))).num_cached_tokens

    @bentoml.api
    async def without_ctx(self, prompt: list[int]) -> int:
        """Complete for nobody."""
        return (await self.complete(None, prompt, self.params)).num_cached_tokens

    @bentoml.api(batchable=True)
    async def together(self, prompts: list[list[int]], ctx: bentoml.Context) -> list[int]:
        """Complete for several callers, in the context of one."""
        return [(await self.complete(ctx, prompt, self.params)).num_cached_tokens for prompt in prompts]

    @bentoml.api
    async def stats(self) -> dict[str, Any]:
        """The engine's counters."""
        return dataclasses.asdict(self.engine.stats())


@bentoml.service
class TenantsFront:
    """A service in front of it."""

    llm = bentoml.depends(Tenants)

    @bentoml.api
    async def ask(self, prompt: list[int], tenant: str | None = None) -> int:
        """Complete for the tenant; return the number of cached tokens."""
        completion = await self.llm.generate(prompt=prompt, sampling={"max_tokens": 2}, cache_salt=tenant)
        return completion.usage.num_cached_tokens

"""What the served tests serve: the demo model, and a second service that uses the first."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator
from typing import Any

import bentoml

from pagedcore.protocols import FloatArray, RaggedRows
from pagedcore_bentoml import PagedCoreRunner
from support.doubles import ToyBackend


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

    drain_s = 5.0
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

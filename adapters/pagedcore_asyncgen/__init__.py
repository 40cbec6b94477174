"""The plain async generator: an engine as one callable, for programs that have asyncio and want nothing else.

    generate = expose("async-generator", model="demo")
    async for delta in generate("What is AI?"):
        print(delta.text, end="")

Uses only public names of pagedcore.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from pagedcore import AsyncEngine, Delta, SamplingParams

__all__ = ["AsyncTextGenerator", "create"]


class AsyncTextGenerator:
    """A callable that answers prompts as async generators; all calls share one engine and are batched together."""

    def __init__(self, engine: AsyncEngine, *, owns_engine: bool = True) -> None:
        self.engine = engine
        self._owns_engine = owns_engine

    async def __call__(
        self, prompt: Any, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncGenerator[Delta, None]:
        """Answer one prompt, delta by delta; arguments and errors as ``AsyncEngine.generate``.

        Leaving the generator early aborts the request; after a plain ``break`` that happens when the generator is
        collected, with ``contextlib.aclosing`` at once.
        """
        async with aclosing(self.engine.generate(prompt, params, priority=priority)) as deltas:
            async for delta in deltas:
                yield delta

    def sync(self, prompt: Any, params: SamplingParams | None = None, *, priority: int = 0) -> Iterator[Delta]:
        """Answer one prompt without an event loop, as a plain generator."""
        return self.engine.generate_sync(prompt, params, priority=priority)

    async def aclose(self) -> None:
        """Close the engine if this generator made it."""
        if self._owns_engine:
            await self.engine.aclose()

    def close(self) -> None:
        """Close the engine if this generator made it, blocking until its thread has ended."""
        if self._owns_engine:
            self.engine.close()

    async def __aenter__(self) -> AsyncTextGenerator:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def create(model: Any, **settings: Any) -> AsyncTextGenerator:
    """Build the adapter around a model, or around an ``AsyncEngine`` that somebody else owns.

    Raises:
        InvalidConfig: as from ``AsyncEngine.from_pretrained``.
    """
    if isinstance(model, AsyncEngine):
        return AsyncTextGenerator(model, owns_engine=False)
    return AsyncTextGenerator(AsyncEngine.from_pretrained(model, **settings))

"""The plain async generator: an engine as one callable, for programs that have asyncio and want nothing else.

    generate = expose("async-generator", model="demo")
    async for delta in generate("What is AI?"):
        print(delta.text, end="")

Uses only public names of pagedcore. ``AsyncEngine`` defines what leaving a stream early does.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any

from pagedcore import AsyncEngine, Delta, RequestOutput, SamplingParams

__all__ = ["AsyncTextGenerator", "create"]


class AsyncTextGenerator:
    """A callable that completes prompts as async generators; all calls share one engine and are batched together.

    Every call is usable from any event loop, from several at once, or (``sync``) from none. Leaving a generator early,
    or cancelling the task that reads it, aborts its request, whose blocks are free after the step in flight.
    """

    def __init__(self, engine: AsyncEngine, *, owns_engine: bool = True) -> None:
        self.engine = engine
        self._owns_engine = owns_engine

    def __call__(
        self, prompt: Any, params: SamplingParams | None = None, *, timeout_s: float | None = None,
        wait_for_room: bool = False, **options: Any,
    ) -> AsyncGenerator[Delta, None]:
        """Complete one prompt, delta by delta; arguments and errors as ``AsyncEngine.generate``.

        A delta has ``text``, ``token_ids``, ``logprobs`` if ``params`` ask for them, at the end of a completion
        its ``finish_reason``, and at the end of the stream ``usage`` and, if asked for, ``prompt_logprobs``.
        After a plain ``break`` the request is aborted when the generator is collected, with
        ``contextlib.aclosing`` at once.
        """
        return self.engine.generate(
            prompt, params, timeout_s=timeout_s, wait_for_room=wait_for_room, **options
        )

    def sync(
        self, prompt: Any, params: SamplingParams | None = None, *, timeout_s: float | None = None,
        wait_for_room: bool = False, **options: Any,
    ) -> Iterator[Delta]:
        """Complete one prompt without an event loop, as a plain generator."""
        return self.engine.generate_sync(
            prompt, params, timeout_s=timeout_s, wait_for_room=wait_for_room, **options
        )

    async def complete(
        self, prompt: Any, params: SamplingParams | None = None, *, timeout_s: float | None = None,
        wait_for_room: bool = False, **options: Any,
    ) -> RequestOutput:
        """Return all completions of a prompt when the last has ended; arguments and errors as ``AsyncEngine.complete``.

        Cancelling this aborts the request.
        """
        return await self.engine.complete(
            prompt, params, timeout_s=timeout_s, wait_for_room=wait_for_room, **options
        )

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

    def __enter__(self) -> AsyncTextGenerator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def create(model: Any, **settings: Any) -> AsyncTextGenerator:
    """Build the adapter around a model, or around an ``AsyncEngine``, which its owner closes.

    Raises:
        InvalidConfig: as from ``AsyncEngine.from_pretrained``.
    """
    if isinstance(model, AsyncEngine):
        return AsyncTextGenerator(model, owns_engine=False)
    return AsyncTextGenerator(AsyncEngine.from_pretrained(model, **settings))

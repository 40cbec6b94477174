"""From the values of one call to the engine and back: whole answers, batches of them, and streams.

Every value goes to the engine's validator as it came; here only what the engine never sees is checked.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from pagedcore import AsyncEngine, Delta, RequestOutput, SamplingParams
from pagedcore.errors import InvalidPrompt, InvalidSampling, RequestTimeout
from pagedcore_bentoml.wire import BatchCompletion, Completion, completion_of

MAX_BATCH_PROMPTS: Final = 256
"""Prompts of one batch: they wait for room together, so that one caller cannot fill the process with waiting ones."""


@dataclass(frozen=True, slots=True)
class Call:
    """What comes with a prompt, as the caller wrote it."""

    sampling: Any
    priority: Any
    timeout_s: Any

    def params(self) -> SamplingParams:
        """Return the parameters of the one prompt. Raises ``InvalidRequest``."""
        return _params(self.sampling)

    def params_of_each(self, num_prompts: int) -> Sequence[SamplingParams]:
        """Return the parameters of each prompt of a batch. Raises ``InvalidRequest``."""
        if not isinstance(self.sampling, list):
            return [_params(self.sampling)] * num_prompts
        if len(self.sampling) != num_prompts:
            raise InvalidSampling("sampling", len(self.sampling), f"one for all, or {num_prompts}, one for each prompt")
        return [_params(sampling) for sampling in self.sampling]

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Cancel what runs inside when the caller's time is up.

        Raises:
            InvalidSampling: the time is not a number of seconds.
            RequestTimeout: it is up.
        """
        seconds = self.timeout_s
        if seconds is not None and (type(seconds) not in (int, float) or not 0 < seconds < math.inf):
            raise InvalidSampling("timeout_s", seconds, "a finite number above 0, in seconds")
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise RequestTimeout(seconds) from None


def _params(sampling: Any) -> SamplingParams:
    return SamplingParams.from_mapping({} if sampling is None else sampling)


async def complete(engine: AsyncEngine, prompt: Any, call: Call) -> Completion:
    """Answer one prompt; cancelling this aborts the request.

    Raises:
        PagedcoreError: as from ``AsyncEngine.submit``, or the error that an answer ended with.
    """
    params = call.params()
    async with call.in_time():
        output = await asyncio.wrap_future(engine.submit(prompt, params, priority=call.priority))
    for answer in output.outputs:
        if answer.error is not None:
            raise answer.error
    return await completion_of(output)


async def complete_all(engine: AsyncEngine, prompts: Any, call: Call) -> BatchCompletion:
    """Answer several prompts, in order; cancelling this aborts all of them.

    Raises:
        InvalidRequest: a prompt, its parameters or their number is refused; then none is answered.
        EngineOverloaded: the waiting queue is full.
    """
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= MAX_BATCH_PROMPTS:
        given = len(prompts) if isinstance(prompts, list) else prompts
        raise InvalidPrompt("prompts", given, f"a list of 1 to {MAX_BATCH_PROMPTS} prompts")
    params = call.params_of_each(len(prompts))
    futures: list[Future[RequestOutput]] = []
    try:
        async with call.in_time():
            for prompt, its_params in zip(prompts, params, strict=True):
                # Why: the first is refused if there is no room; the others, let in with it, wait for theirs.
                futures.append(engine.submit(prompt, its_params, priority=call.priority, wait_for_room=bool(futures)))
            outputs = await asyncio.gather(*map(asyncio.wrap_future, futures))
    finally:
        for future in futures:
            future.cancel()
    return BatchCompletion(completions=[await completion_of(output) for output in outputs])


def deltas_of(engine: AsyncEngine, prompt: Any, call: Call) -> AsyncGenerator[Delta, None]:
    """Answer one prompt delta by delta; closing the generator aborts the request. Raises as ``AsyncEngine.generate``,
    some of it at once."""
    return engine.generate(prompt, call.params(), priority=call.priority, timeout_s=call.timeout_s)

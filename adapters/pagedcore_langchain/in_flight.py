"""Several requests at once, awaited on a thread or on an event loop; a caller that stops waiting aborts them.

Owns the futures between their making and their end. Knows nothing of LangChain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from typing import TypeVar

from pagedcore import RequestOutput
from pagedcore.errors import RequestTimeout

Prompt = TypeVar("Prompt")


@contextmanager
def in_flight(
    submit: Callable[[Prompt], Future[RequestOutput]], prompts: Iterable[Prompt]
) -> Iterator[list[Future[RequestOutput]]]:
    """Submit all prompts; at the end of the block abort those that are not done. Raises as ``submit``."""
    futures: list[Future[RequestOutput]] = []
    try:
        futures.extend(map(submit, prompts))
        yield futures
    finally:
        for future in futures:
            future.cancel()


def wait_for(futures: list[Future[RequestOutput]], timeout_s: float | None) -> list[RequestOutput]:
    """Block until all are done and return their outputs in order.

    Raises:
        RequestTimeout: some were not done after ``timeout_s`` seconds.
        PagedcoreError: the first error among them.
    """
    done, waiting = wait(futures, timeout_s, return_when=FIRST_EXCEPTION)
    outputs = [_checked(future.result()) for future in futures if future in done]
    if waiting:
        raise RequestTimeout(timeout_s or 0.0)
    return outputs


async def wait_for_on_loop(futures: list[Future[RequestOutput]], timeout_s: float | None) -> list[RequestOutput]:
    """Do the same on the running event loop."""
    if timeout_s is None and len(futures) == 1:
        # Why: the calls of a batch arrive one by one, and gathering one costs as much as gathering many.
        return [_checked(await asyncio.wrap_future(futures[0]))]
    try:
        async with asyncio.timeout(timeout_s) as limit:
            await asyncio.gather(*map(asyncio.wrap_future, futures))
    except TimeoutError:
        if not limit.expired():
            raise
        raise RequestTimeout(timeout_s or 0.0) from None
    return [_checked(future.result()) for future in futures]


def _checked(output: RequestOutput) -> RequestOutput:
    output.raise_for_error()
    return output

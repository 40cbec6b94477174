"""Batches of a LangChain model with all inputs in flight together.

Owns the tasks of a batch: one that fails takes its siblings with it, unless exceptions are to be returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list

from pagedcore_langchain.host import require_loop

Configs = RunnableConfig | list[RunnableConfig] | None


async def invoke_all(
    model: Runnable[LanguageModelInput, Any], inputs: Sequence[LanguageModelInput], config: Configs,
    return_exceptions: bool, call: dict[str, Any],
) -> list[Any]:
    """Return the outputs of all inputs, in order; at most ``max_concurrency`` of the first config at once.

    Raises ``NoEventLoop`` outside of asyncio.
    """
    if not inputs:
        return []
    require_loop()
    configs = get_config_list(config, len(inputs))
    limit = configs[0].get("max_concurrency")
    gate: AbstractAsyncContextManager[Any] = nullcontext() if limit is None else asyncio.Semaphore(limit)

    async def invoke(one: LanguageModelInput, its: RunnableConfig) -> Any:
        async with gate:
            return await model.ainvoke(one, its, **call)

    tasks = [asyncio.create_task(invoke(*pair)) for pair in zip(inputs, configs, strict=True)]
    return await _gather(tasks, return_exceptions)


async def _gather(tasks: list[asyncio.Task[Any]], return_exceptions: bool) -> list[Any]:
    try:
        results = await asyncio.gather(*tasks, return_exceptions=return_exceptions)
    finally:
        # Why: after an error the other inputs would run on without a reader.
        for task in tasks:
            task.cancel()
    for result in results:
        # Why: the list holds errors of inputs; a cancellation is the caller's own.
        if isinstance(result, BaseException) and not isinstance(result, Exception):
            raise result
    return results

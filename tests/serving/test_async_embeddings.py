"""Vectors from an engine on its own thread: bulk jobs beside chats, and every way in which a call can end."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pagedcore import AsyncEngine
from pagedcore.errors import EngineClosed, InvalidRequest, PromptTooLong, RequestTimeout
from support.async_helpers import SlowBackend, complete
from support.doubles import ToyBackend, toy_answer
from support.engine_builders import make_engine

TEXTS = [[1 + (i * place) % 29 for place in range(1, 6 + i % 9)] for i in range(150)]


def test_a_bulk_is_embedded_beside_a_chat() -> None:
    """More texts than the queue has room for come in their order, the same bytes as one by one; the chat that runs
    beside them has its answer, and others are let into the queue meanwhile."""
    with make_engine() as engine:
        alone = np.array(engine.embed(TEXTS, pooling="mean", show_progress=False))

    async def main() -> None:
        async with AsyncEngine(make_engine(max_num_waiting=100)) as engine:
            bulk = asyncio.create_task(engine.embed(TEXTS, pooling="mean"))
            await asyncio.sleep(0)
            assert await complete(engine, [1, 2, 3], 20) == toy_answer([1, 2, 3], 20)
            assert np.array_equal(np.array(await bulk), alone)
            assert await engine.embed([]) == []
            stats = engine.stats()
            assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)

    asyncio.run(main())


def test_whatever_ends_a_call_aborts_its_texts() -> None:
    """A cancelled call, one whose time is over, one with a refused text, and one of an engine that is closed."""

    async def main() -> None:
        engine = AsyncEngine(make_engine(SlowBackend()))
        many = TEXTS * 40
        task = asyncio.create_task(engine.embed(many))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(RequestTimeout):
            await engine.embed(many, timeout_s=0.05)
        with pytest.raises(PromptTooLong, match="text: got"):
            await engine.embed([*TEXTS[:9], [1] * 5000])
        with pytest.raises(InvalidRequest, match="pooling"):
            await engine.embed(TEXTS, pooling="max")  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            while (stats := engine.stats()).num_running + stats.num_waiting or not stats.num_finished:
                await asyncio.sleep(0.01)
        assert stats.num_blocks_used == 0
        task = asyncio.create_task(engine.embed(many))
        await asyncio.sleep(0.02)
        await engine.aclose()
        with pytest.raises(EngineClosed):
            await task

    asyncio.run(main())


def test_a_text_has_the_options_of_a_request() -> None:
    """A label is one text's, and aborts it."""

    async def main() -> None:
        async with AsyncEngine(make_engine(ToyBackend())) as engine:
            (one,) = await engine.embed([[1, 2, 3]], request_id="mine", cache_salt="secret")
            assert (one.num_prompt_tokens, len(one)) == (3, 32)
            with pytest.raises(InvalidRequest, match="priority"):
                await engine.embed([[1, 2, 3]], priority=5)

    asyncio.run(main())

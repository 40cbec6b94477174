"""Weights that change under callers of an ``AsyncEngine``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pagedcore import AsyncEngine, Engine, MemoryBudget, SamplingParams
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.errors import EngineInUse, InvalidWeights
from pagedcore.models import new_weights
from pagedcore.outputs import WeightsVersion
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.requests.stats import StepStats
from support.async_helpers import wait_until

Tensors = dict[str, torch.Tensor]
PARAMS = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
START = WeightsVersion(0)


@pytest.fixture(scope="module")
def weights() -> Tensors:
    """Other ones for the demo model."""
    known = load_file(DEMO_MODEL_DIR / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    return {name: (one.float() + 0.05 * torch.randn(one.shape, generator=generator)).to(one.dtype)
            for name, one in known.items()}


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    """With the demo model's own."""
    with AsyncEngine.from_pretrained("demo", max_num_seqs=64) as one:
        yield one


async def swap(engine: AsyncEngine, weights: Any, version: str = "", **how: Any) -> None:
    """Give an engine other weights."""
    async with engine.new_weights(version, **how) as new:
        await new.load(weights)


@pytest.mark.parametrize("way", ["staged", "in_place"])
def test_a_new_version_comes_while_64_streams_run(way: Any, engine: AsyncEngine, weights: Tensors) -> None:
    """Kept ones go on: each token has its version, and those behind the change are the new weights' own."""
    prompts = [[20 + number, 30, 40 + number % 7] for number in range(64)]

    async def read(prompt: list[int]) -> tuple[list[int], list[WeightsVersion]]:
        tokens, versions = list[int](), list[WeightsVersion]()
        async for delta in engine.generate(prompt, PARAMS):
            tokens += delta.token_ids
            versions += delta.weights or [START] * len(delta.token_ids)
        return tokens, versions

    async def go() -> list[tuple[list[int], list[WeightsVersion]]]:
        async with engine.new_weights("7", running="keep", way=way) as new:
            if way == "staged":
                await new.load(weights)
            streams = [asyncio.create_task(read(prompt)) for prompt in prompts]
            while (await engine.call(lambda one: one.stats())).num_generated_tokens < 200:
                await asyncio.sleep(0.001)
            if way == "in_place":
                await new.load(weights)
        is_changed.set()
        return await asyncio.gather(*streams)

    class FromThenOn:
        """Lets no step begin between the 200th token and the change before somebody asks for something."""

        @hookimpl
        def pagedcore_step(self, stats: StepStats) -> None:
            nonlocal num_left
            num_left -= stats.num_decode_tokens
            wait_until(lambda: num_left > 0 or is_changed.is_set() or bool(engine._commands._queue._items))

    num_left, is_changed = 200, threading.Event()
    engine.observe(FromThenOn())
    results = asyncio.run(go())
    assert all(len(tokens) == len(versions) == 48 for tokens, versions in results)
    assert {one for _, versions in results for one in versions} == {START, engine.weights}
    with Engine.from_pretrained("demo", max_num_seqs=64) as oracle:
        with oracle.new_weights() as new:
            new.load(weights)
        for prompt, (tokens, versions) in list(zip(prompts, results, strict=True))[::16]:
            kept = versions.count(START)
            assert versions == sorted(versions)
            rest = SamplingParams(max_tokens=max(1, 48 - kept), temperature=0, ignore_eos=True)
            assert kept == 48 or list(
                oracle.generate([prompt + tokens[:kept]], rest)[0].outputs[0].token_ids) == tokens[kept:]


def test_callers_who_never_stop_keep_no_load_from_coming(engine: AsyncEngine, weights: Tensors) -> None:
    """Requests that come while others are waited for are held, not refused, and no completion has two versions."""
    short, seen, is_over = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), list[Any](), asyncio.Event()

    async def ask() -> None:
        while not is_over.is_set():
            seen.append(set((await engine.complete([5, 6, 7], short)).outputs[0].weights) or {START})

    async def go() -> None:
        callers = [asyncio.create_task(ask()) for _ in range(4)]
        await asyncio.wait_for(swap(engine, weights, "b"), 60)
        num_seen = len(seen)
        while len(seen) < num_seen + 8:
            await asyncio.sleep(0.001)
        is_over.set()
        await asyncio.gather(*callers)

    asyncio.run(go())
    assert all(len(one) == 1 for one in seen)
    assert set.union(*seen) == {START, engine.weights}


def test_one_load_at_a_time_and_a_cancelled_one_changes_nothing(engine: AsyncEngine, weights: Tensors) -> None:
    """Two callers that swap at once: the second is refused at once, and may come again."""
    async def go() -> None:
        before = (await engine.complete([5, 6], PARAMS)).outputs
        async with engine.new_weights():
            with pytest.raises(EngineInUse):
                await swap(engine, weights)
            raise asyncio.CancelledError
        assert before

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(go())
    assert engine.weights == START
    with pytest.raises(InvalidWeights):
        asyncio.run(swap(engine, {}))
    asyncio.run(swap(engine, weights, running="abort"))
    assert engine.weights.number


async def test_a_copy_whose_caller_has_left_is_given_back_when_its_thread_ends(
    weights: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before, because until then its memory is taken; nor does another load begin, or a sleep."""
    may_go, make = threading.Event(), new_weights.make_ready

    def wait(*given: Any) -> Any:
        may_go.wait(20)
        return make(*given)

    monkeypatch.setattr(new_weights, "make_ready", wait)
    budget = MemoryBudget("32MiB", counts_weights=True)
    with AsyncEngine.from_pretrained("demo", kv_cache_memory=budget.share("8MiB")) as engine:
        left = budget.left_bytes
        loading = asyncio.create_task(swap(engine, weights))
        while budget.left_bytes == left:
            await asyncio.sleep(0.001)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert budget.left_bytes < left
        for another in (swap(engine, weights), engine.sleep()):
            with pytest.raises(EngineInUse):
                await another
        may_go.set()
        await claimed(engine)
        engine._named.weights_holder.release()
        assert budget.left_bytes == left
        assert engine.weights == START
        await swap(engine, weights)
        assert (budget.left_bytes, engine.weights == START) == (left, False)


async def claimed(engine: AsyncEngine) -> None:
    """Wait until another load may begin, and keep others from it."""
    async with asyncio.timeout(60):
        while True:
            with suppress(EngineInUse):
                engine._named.weights_holder.claim()
                return
            await asyncio.sleep(0.001)


async def test_an_engine_closes_while_a_load_packs_that_nobody_awaits(
    weights: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for no thread but its own, and what that thread has made is dropped when it ends."""
    is_packing, may_go, make = threading.Event(), threading.Event(), new_weights.make_ready

    def wait(*given: Any) -> Any:
        is_packing.set()
        may_go.wait(20)
        return make(*given)

    monkeypatch.setattr(new_weights, "make_ready", wait)
    engine = AsyncEngine.from_pretrained("demo")
    loading = asyncio.create_task(swap(engine, weights))
    await asyncio.to_thread(is_packing.wait, 20)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    await asyncio.wait_for(engine.aclose(), 10)
    holder = engine._named.weights_holder
    with pytest.raises(EngineInUse):
        holder.claim()
    may_go.set()
    await claimed(engine)

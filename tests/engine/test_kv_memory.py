"""The memory of KV pools: the sum at the start, and engines that share one budget."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from typing import Any

import pytest

from pagedcore import AsyncEngine, Engine, MemoryBudget, SamplingParams
from pagedcore.demo_model.questions import demo_questions, is_correct
from pagedcore.errors import InvalidConfig, MemoryBudgetExceeded, ModelTakenOver
from support.doubles import ToyBackend, ToyStore, toy_answer
from support.engine_builders import make_engine, run

BLOCK = 4 * ToyBackend.kv_bytes_per_token
"""Bytes of one block of ``make_engine``."""


def toy(**settings: Any) -> Engine:
    """A small engine whose pool ``kv_cache_memory`` decides."""
    return make_engine(num_kv_blocks=None, **settings) if "num_kv_blocks" not in settings else make_engine(**settings)


class StubbornBackend(ToyBackend):
    """Has no memory for a pool."""

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Refuse."""
        raise InvalidConfig("num_kv_blocks: no memory")


@pytest.mark.parametrize(("given", "num_blocks"), [(BLOCK, 1), (10 * BLOCK + 63, 10), ("1KiB", 16), ("1.5 KiB", 24)])
def test_the_pool_is_as_many_whole_blocks_as_fit(given: Any, num_blocks: int) -> None:
    """Bytes and text become whole blocks, and the statistics say what they take."""
    stats = toy(kv_cache_memory=given).stats()
    assert (stats.num_blocks, stats.kv_bytes) == (num_blocks, num_blocks * BLOCK)


def test_a_share_is_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float refers to the memory that is free when the engine starts."""
    monkeypatch.setattr("pagedcore.engine.kv_memory.free_memory_bytes", lambda: 100 * BLOCK)
    assert toy(kv_cache_memory=0.25).stats().num_blocks == 25
    assert toy().stats().num_blocks == 30


def test_nothing_said_means_what_can_be_used() -> None:
    """Without a setting there is a block for every token of every slot, where memory allows."""
    assert toy(max_model_len=41, max_num_seqs=2).stats().num_blocks == 22


@pytest.mark.parametrize("given", [BLOCK - 1, "63B", 1e-300])
def test_less_than_a_block_is_refused(given: Any) -> None:
    """A pool without a block is refused with the size of a block."""
    with pytest.raises(InvalidConfig, match=rf"kv_cache_memory: got \d+ bytes, .* one block \({BLOCK} bytes"):
        toy(kv_cache_memory=given)


def test_the_start_says_the_sum(caplog: pytest.LogCaptureFixture) -> None:
    """The logger "pagedcore" says at INFO how many blocks, bytes, tokens and sequences the pool holds."""
    with caplog.at_level(logging.INFO, logger="pagedcore"):
        toy(kv_cache_memory="64KiB", max_model_len=100)
    [record] = [record for record in caplog.records if "KV pool" in record.getMessage()]
    assert (record.name, record.levelno) == ("pagedcore", logging.INFO)
    assert record.getMessage().startswith(
        "KV pool: 1024 blocks of 4 tokens, 64 bytes each: 64.0 KiB in all, for 4096 tokens or 40 sequences of 100 "
    )


def test_a_pool_larger_than_free_memory_is_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is only promised is refused by no system until it is touched, so the start says it."""
    monkeypatch.setattr("pagedcore.engine.kv_memory.free_memory_bytes", lambda: 1024)
    toy(kv_cache_memory=2048)
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("KV pool: its 2.0 KiB are more than the 1.0 KiB of memory that were free; lower ")


def test_two_models_share_a_budget_and_answer_right() -> None:
    """Two engines step in turn within one budget, every answer is right, a third is refused, and all comes back."""
    budget = MemoryBudget("2MiB")
    first = Engine.from_pretrained("demo", kv_cache_memory=budget.share(0.5), max_num_seqs=4)
    second = Engine.from_pretrained("demo", kv_cache_memory=budget, max_num_seqs=4)
    drawn = first.stats().kv_bytes + second.stats().kv_bytes
    assert 2**20 - budget.left_bytes <= drawn == budget.total_bytes - budget.left_bytes <= 2**21
    with pytest.raises(MemoryBudgetExceeded) as refusal:
        Engine.from_pretrained("demo", kv_cache_memory=budget.share("1MiB"))
    assert refusal.value.left == budget.left_bytes
    assert refusal.value.total == 2**21
    questions = demo_questions(12)
    requests = [
        (question, engine.add_request(question.prompt, SamplingParams(max_tokens=64)))
        for question, engine in zip(questions, [first, second] * 6, strict=True)
    ]
    while first.has_pending_requests() or second.has_pending_requests():
        first.step()
        second.step()
    assert all(is_correct(question, request.output().outputs[0].text) for question, request in requests)
    first.close()
    assert budget.left_bytes == 2**21 - second.stats().kv_bytes
    with Engine.from_pretrained("demo", kv_cache_memory=budget.share("1MiB")) as third:
        assert third.stats().kv_bytes <= 2**20
        assert is_correct(questions[0], third.generate([questions[0].prompt])[0].outputs[0].text)
    second.close()
    assert budget.left_bytes == budget.total_bytes


def test_a_closed_engine_frees_its_pool() -> None:
    """The memory itself goes, the host's too, although the caller still holds the closed engine."""
    from pagedcore.engine.builder import build_components

    parts = build_components("demo", kv_cache_memory="1MiB", host_kv_memory="1MiB")
    backend: Any = parts.runner.backend
    assert backend.cache_store.num_bytes == parts.kv_bytes
    memory = [weakref.ref(tensor) for tensor in (backend.cache_store.pool, backend.cache_store._host)]
    engine = Engine(parts)
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
    engine.close()
    assert [tensor() for tensor in memory] == [None, None]
    assert backend.cache_store is None
    backend.allocate_kv(1, 16)


def test_closing_again_frees_nothing_of_the_next_engine() -> None:
    """A backend of one's own may serve one engine after another; one that is refused or closed twice does no harm."""
    from pagedcore.engine.builder import build_components

    backend = build_components("demo", kv_cache_memory="1MiB").runner.backend
    with pytest.raises(ModelTakenOver, match="has its KV pool already"):
        Engine.from_pretrained(backend, kv_cache_memory="1MiB")
    backend.release_kv()  # type: ignore[attr-defined]
    first = build_components(backend, kv_cache_memory="1MiB")
    first.hooks.engine_stopped(first.info)
    second = Engine.from_pretrained(backend, kv_cache_memory="1MiB")
    first.hooks.engine_stopped(first.info)
    assert len(second.generate([[5, 6, 7]], SamplingParams(max_tokens=2))[0].outputs[0].token_ids) > 0


def test_a_refused_slab_of_the_host_frees_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose host memory cannot be had keeps no pool either: the same backend makes the next engine."""
    from pagedcore.engine.builder import build_components

    def refuse(*_: object) -> None:
        raise InvalidConfig("host_kv_memory: the driver did not pin it")

    first = build_components("demo", kv_cache_memory="1MiB")
    backend: Any = first.runner.backend
    first.hooks.engine_stopped(first.info)
    with monkeypatch.context() as patch:
        patch.setattr("pagedcore.execution.kv_pool.KVPool.allocate_host", refuse)
        with pytest.raises(InvalidConfig, match="did not pin"):
            Engine.from_pretrained(backend, kv_cache_memory="1MiB", host_kv_memory="1MiB")
    with Engine.from_pretrained(backend, kv_cache_memory="1MiB", host_kv_memory="1MiB") as engine:
        assert len(engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))[0].outputs[0].token_ids) > 0


class _BrokenStore(ToyStore):
    def start_swap_out(self, *_: Any) -> None:
        raise ZeroDivisionError

    def poll_transfers(self, *, wait: bool) -> Any:
        raise ZeroDivisionError


class _PoolBackend(ToyBackend):
    """Counts its pools; each has a store that fails, where a class of them is given."""

    num_pools, store_class, eos_token_ids = 0, ToyStore, ToyBackend.eos_token_ids

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        super().allocate_kv(num_blocks, block_size)
        self._store = self.store_class(self, block_size)
        self.num_pools += 1

    def free_kv_bytes(self) -> int:
        return 2**30

    def kv_block_bytes(self, block_size: int) -> int:
        return block_size * self.kv_bytes_per_token

    def release_kv(self) -> None:
        self.num_pools -= 1


@pytest.mark.parametrize(("broken", "kind"), [
    ({"store_class": _BrokenStore}, InvalidConfig),
    ({"store_class": type("Start", (_BrokenStore,), {"poll_transfers": ToyStore.poll_transfers})}, InvalidConfig),
    ({"eos_token_ids": None}, TypeError),
], ids=["poll", "start", "backend"])
def test_an_engine_that_fails_while_it_is_built_frees_its_pool(broken: dict[str, Any], kind: type[Exception]) -> None:
    """Whatever fails once the pool is made: the backend has none, the budget has its bytes, and both make the next
    engine. A store that fails is a setting that cannot be had."""
    budget, backend = MemoryBudget(100 * BLOCK), _PoolBackend()
    vars(backend).update(broken)
    with pytest.raises(kind):
        toy(backend=backend, kv_cache_memory=budget, host_kv_memory=8 * BLOCK)
    assert (backend.num_pools, budget.left_bytes) == (0, 100 * BLOCK)
    backend.store_class, backend.eos_token_ids = ToyStore, ToyBackend.eos_token_ids
    with toy(backend=backend, kv_cache_memory=budget, host_kv_memory=8 * BLOCK) as engine:
        assert list(engine.generate([[1]], SamplingParams(max_tokens=2))[0].outputs[0].token_ids) == toy_answer([1], 2)
    assert backend.num_pools == 0


def test_odd_blocks_are_counted_with_their_padding() -> None:
    """The bytes said are those of the layout also where a block is no multiple of its tokens."""
    from pagedcore.engine.builder import build_components

    parts = build_components(
        "demo", kv_cache_memory="1MiB", block_size=7, attention_backend="reference", dtype="float32"
    )
    assert parts.runner.backend.cache_store.num_bytes == parts.kv_bytes <= 2**20  # type: ignore[attr-defined]


def test_a_budget_gives_what_is_left_and_can_be_used() -> None:
    """The whole budget means: all that is left, but not more than every slot at full length."""
    budget = MemoryBudget(100 * BLOCK)
    useful = toy(kv_cache_memory=budget, max_model_len=40, max_num_seqs=2)
    rest = toy(kv_cache_memory=budget)
    assert (useful.stats().num_blocks, rest.stats().num_blocks, budget.left_bytes) == (20, 80, 0)
    with pytest.raises(MemoryBudgetExceeded, match=f"asked for {BLOCK} bytes, 0 of {100 * BLOCK} bytes are left"):
        toy(kv_cache_memory=budget)


def test_a_number_of_blocks_is_drawn_exactly() -> None:
    """num_kv_blocks still wins: the budget has so many or the engine is refused."""
    budget = MemoryBudget(100 * BLOCK)
    engine = toy(kv_cache_memory=budget, num_kv_blocks=60)
    assert (engine.stats().num_blocks, budget.left_bytes) == (60, 40 * BLOCK)
    with pytest.raises(MemoryBudgetExceeded, match=f"asked for {41 * BLOCK} bytes, {40 * BLOCK} of"):
        toy(kv_cache_memory=budget, num_kv_blocks=41)
    with pytest.raises(InvalidConfig, match=rf"num_kv_blocks: got 21 \({21 * BLOCK} bytes\), allowed is up to 20"):
        toy(kv_cache_memory=budget.share(20 * BLOCK), num_kv_blocks=21)
    assert budget.left_bytes == 40 * BLOCK


def test_an_engine_that_could_not_start_keeps_nothing() -> None:
    """A refusal after the bytes were drawn gives them back."""
    budget = MemoryBudget(100 * BLOCK)
    with pytest.raises(InvalidConfig, match="no memory") as refusal:
        toy(backend=StubbornBackend(), kv_cache_memory=budget)
    assert budget.left_bytes == budget.total_bytes
    assert refusal.value.__traceback__ is not None, "the frames that drew the bytes have to be alive until here"


def test_an_engine_that_was_lost_gives_its_bytes_back() -> None:
    """Closing is the rule; an engine without references frees its memory too."""
    budget = MemoryBudget(100 * BLOCK)
    engine = toy(kv_cache_memory=budget)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=4))
    engine.step()
    assert budget.left_bytes == 0
    del engine
    gc.collect()
    assert budget.left_bytes == budget.total_bytes


def test_engines_on_threads_share_a_budget() -> None:
    """Two AsyncEngines answer at once within one budget, and closing them gives all back."""
    budget = MemoryBudget(32 * BLOCK)

    async def answers() -> list[list[int]]:
        half = budget.share(0.5)
        async with AsyncEngine(toy(kv_cache_memory=half)) as first, AsyncEngine(toy(kv_cache_memory=half)) as second:
            assert budget.left_bytes == 0
            return await asyncio.gather(*(collect(engine) for engine in (first, second) * 3))

    async def collect(engine: AsyncEngine) -> list[int]:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        return [token async for delta in engine.generate([1, 2, 3], params) for token in delta.token_ids]

    assert asyncio.run(answers()) == [toy_answer([1, 2, 3], 6)] * 6
    assert budget.left_bytes == budget.total_bytes


def test_memory_pressure_inside_a_share_changes_no_answer() -> None:
    """An engine with a small share preempts and answers the same; the other's share is not touched."""
    budget = MemoryBudget(24 * BLOCK)
    small, other = toy(kv_cache_memory=budget.share(6 * BLOCK)), toy(kv_cache_memory=budget)
    prompts = [[1 + n, 2, 3] for n in range(4)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    requests = [engine.add_request(prompt, params) for prompt in prompts for engine in (small, other)]
    run(small)
    run(other)
    assert small.stats().num_preemptions > 0 == other.stats().num_preemptions
    expected = [toy_answer(prompt, 12) for prompt in prompts for _ in range(2)]
    assert [list(request.output().outputs[0].token_ids) for request in requests] == expected

"""Engines whose model keeps states: what is computed, what is kept, and that the answers are those of a dense model."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pagedcore.config.memory_budget import MemoryBudget
from pagedcore.engine.engine import Engine
from pagedcore.errors import InvalidConfig
from pagedcore.kv_cache.host_cache import Direction
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler.cost_model import Line
from pagedcore.scheduler.step_time import StepTimes
from support.doubles import ToyBackend, ToyHybrid, toy_answer
from support.engine_builders import assert_all_free, make_engine, run


class Recurrent(ToyHybrid):
    """A toy without attention, whose blocks have no bytes."""

    has_attention = False

    def free_kv_bytes(self) -> int:
        """More than is asked for."""
        return 2**30

    def kv_block_bytes(self, block_size: int) -> int:
        """None."""
        return 0

    def release_kv(self) -> None:
        """Nothing is to be freed."""


def params(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


def prompts_behind(num_shared: int, num_own: int, count: int) -> list[list[int]]:
    """Prompts with one beginning and ends of their own, the first tokens of which are all different."""
    rng = random.Random(f"{num_shared} {num_own}")
    shared = [rng.randrange(30) for _ in range(num_shared)]
    return [[*shared, number, *(rng.randrange(30) for _ in range(num_own - 1))] for number in range(count)]


def run_one(engine: Engine, prompt: list[int], how: SamplingParams) -> list[int]:
    """Run a prompt alone; return its completion."""
    request = engine.add_request(prompt, how)
    run(engine)
    return list(request.output().outputs[0].token_ids)


def computed_tokens(engine: Engine, prompts: list[list[int]], max_tokens: int = 4) -> int:
    """Run prompts, all of which come at once; return the tokens that were computed for them."""
    requests = [engine.add_request(prompt, params(max_tokens)) for prompt in prompts]
    run(engine)
    for prompt, request in zip(prompts, requests, strict=True):
        assert list(request.output().outputs[0].token_ids) == toy_answer(prompt, max_tokens)
    num_computed = engine.stats().num_computed_tokens
    assert_all_free(engine)
    return num_computed


SIZES = {"num_kv_blocks": 2000, "block_size": 16, "max_num_seqs": 32, "max_num_batched_tokens": 512,
         "check_invariants": False}


@pytest.mark.parametrize("block_size", [16, 32])
def test_a_shared_prefix_is_computed_once(block_size: int) -> None:
    """32 requests behind 2,000 shared tokens compute at most 1.05 times what a model without states computes."""
    sizes, prompts = {**SIZES, "block_size": block_size}, prompts_behind(2000, 300, 32)
    dense = computed_tokens(make_engine(ToyBackend(), **sizes), prompts)
    engine = make_engine(ToyHybrid(), **sizes)
    hybrid = computed_tokens(engine, prompts)
    assert dense == 2000 + 32 * (300 + 3)
    assert hybrid == dense + {16: 0, 32: 31 * 16}[block_size] <= 1.05 * dense
    assert engine.stats().num_states_kept == 1 + 7 + 2 * 32


class LargeStates(ToyHybrid):
    """A toy whose states take as much memory as the KV of 256 tokens."""

    state_bytes = 4096


@pytest.mark.parametrize(("kind", "counts"), [
    (LargeStates, [1003, 1003, 203, 203]), (ToyHybrid, [1003, 235, 235, 235]),
])
def test_requests_that_come_one_by_one_learn_where_they_part(kind: type[ToyHybrid], counts: list[int]) -> None:
    """A prefix that nobody knew to be one is computed for the second request and found by the third; small states are
    left every 256 tokens, so that the second one finds one of them.
    """
    engine, found = make_engine(kind(), **SIZES), []
    for prompt in prompts_behind(800, 200, 4):
        before = engine.stats().num_computed_tokens
        computed_tokens(engine, [prompt])
        found.append(engine.stats().num_computed_tokens - before)
    assert found == counts


def test_a_turn_begins_where_the_last_one_ended() -> None:
    """A session's next turn computes its own tokens and no others, also inside a block."""
    engine = make_engine(ToyHybrid(), **SIZES)
    request = engine.add_request([1, 2, 3] * 50, params(5))
    run(engine)
    before, known = engine.stats().num_computed_tokens, len(request.sequences[0].token_ids)
    request.extend([7, 8, 9], params(5))
    run(engine)
    assert engine.stats().num_computed_tokens - before == 1 + 3 + 4
    assert request.sequences[0].output_token_ids == toy_answer(request.sequences[0].token_ids[: known + 3], 5)


def test_running_sequences_follow_the_states_that_fit(caplog: pytest.LogCaptureFixture) -> None:
    """States take at most half of the budget, three for each running sequence, and the log says so."""
    backend = ToyHybrid()
    with caplog.at_level("WARNING"):
        engine = make_engine(backend, num_kv_blocks=None, kv_cache_memory=1024, max_num_seqs=32,
                             max_num_batched_tokens=32)
    assert (backend.num_states, engine.stats().max_num_seqs) == (32, 10)
    assert engine.stats().num_blocks == (1024 - 512) // (4 * 16)
    assert "10 sequences run at most, not 32" in caplog.text


def test_a_budget_without_room_for_one_sequence_is_refused() -> None:
    """Two states and as much for KV is the least."""
    with pytest.raises(InvalidConfig, match=r"kv_cache_memory: got 63 bytes, allowed is at least 64"):
        make_engine(ToyHybrid(), num_kv_blocks=None, kv_cache_memory=63)


def test_states_are_drawn_from_a_budget_and_go_back() -> None:
    """Of a budget, or a share of one, states take at most half, and all of it is there again when the engine ends."""
    budget = MemoryBudget(8192)
    shared = make_engine(ToyHybrid(), num_kv_blocks=None, kv_cache_memory=budget.share(1024))
    stats = shared.stats()
    assert (stats.state_bytes, stats.kv_bytes, budget.left_bytes) == (256, 768, 8192 - 1024)
    whole = make_engine(ToyHybrid(), num_kv_blocks=None, kv_cache_memory=budget, max_model_len=64)
    stats = whole.stats()
    assert (stats.state_bytes, stats.kv_bytes, budget.left_bytes) == (256, 4 * 1024, 8192 - 1024 - 256 - 4096)
    fixed = make_engine(ToyHybrid(), num_kv_blocks=4, kv_cache_memory=budget)
    assert (fixed.stats().kv_bytes, budget.left_bytes) == (256, 8192 - 1024 - 256 - 4096 - 256 - 256)
    for engine in (shared, whole, fixed):
        engine.close()
    assert budget.left_bytes == 8192


def test_a_model_without_attention_has_names_for_all_of_its_states() -> None:
    """Blocks without bytes are as many as the states can use, whatever the memory is; states may take all of it."""
    engine = make_engine(Recurrent(), num_kv_blocks=None, kv_cache_memory=160, max_model_len=64, max_num_seqs=2)
    stats = engine.stats()
    assert (stats.num_states, stats.max_num_seqs, stats.num_blocks, stats.kv_bytes) == (8, 2, 8 * 16, 0)
    assert computed_tokens(engine, [[1, 2, 3, 4, 5]] * 2) == 2 * (5 + 3)


TIGHT: dict[str, Any] = {"num_kv_blocks": 20, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32,
                         "preemption": "swap", "host_kv_memory": 2**14}


@pytest.mark.parametrize("model", [ToyHybrid, Recurrent])
def test_what_is_swapped_is_not_computed_again(model: type[ToyHybrid]) -> None:
    """A preempted sequence takes its state to the host with its KV, and goes on from it: as many tokens are computed as
    in a pool that has room for all."""
    prompts, counts = [[number, *range(9)] for number in range(6)], list[int]()
    # Why so little: without attention a host has a thousand blocks a KiB, and the laws look at each after every step.
    host = {"host_kv_memory": 2**9} if model is Recurrent else {}
    for num_blocks in (200, 20):
        engine = make_engine(model(), **{**TIGHT, "num_kv_blocks": num_blocks, **host})
        counts.append(computed_tokens(engine, prompts, 20))
        stats = engine.stats()
    assert counts[0] == counts[1] == 6 * (10 + 19)
    assert stats.num_preemptions_by_kind["swap"] > 0
    block_bytes = 0 if model is Recurrent else 4 * 16
    num_states = engine.scheduler.counters.num_states_swapped_in
    num_blocks = engine.scheduler.counters.num_blocks_swapped_in
    assert stats.swapped_in_bytes == num_blocks * block_bytes + num_states * 16 > 0
    assert num_states >= stats.num_preemptions


def test_the_host_keeps_beginnings_with_their_states() -> None:
    """What the device has evicted of a shared beginning comes back from the host, state and all."""
    shared, params_ = [*range(20)] * 8, params(2)
    engine = make_engine(ToyHybrid(), **{**TIGHT, "num_kv_blocks": 60, "host_kv_memory": 2**16})
    for number in range(3):
        run_one(engine, [*shared, 21 + number], params_)
    for number in range(4):
        run_one(engine, [25 + number] * 200, params_)
    before = engine.stats()
    assert before.num_host_states_kept > 0
    assert run_one(engine, [*shared, 29], params_) == toy_answer([*shared, 29], 2)
    after = engine.stats()
    assert after.num_computed_tokens - before.num_computed_tokens == 2
    assert after.swapped_in_bytes - before.swapped_in_bytes == 40 * 64 + 16


def test_a_host_tier_is_shared_by_both_kinds() -> None:
    """States have half of the host's bytes where they are large, and otherwise one for each block of KV; for a model
    without attention all is theirs, and what has room for neither is refused."""
    stats = make_engine(LargeStates(), **TIGHT).stats()
    assert (stats.num_host_states, stats.num_host_blocks) == (2, 2**13 // 64)
    stats = make_engine(ToyHybrid(), **TIGHT).stats()
    assert (stats.num_host_states, stats.num_host_blocks) == (2**14 // 80, (2**14 - 2**14 // 80 * 16) // 64)
    stats = make_engine(Recurrent(), max_model_len=64, **TIGHT).stats()
    assert (stats.num_host_states, stats.num_host_blocks) == (2**14 // 16, 2**14 // 16 * 16)
    with pytest.raises(InvalidConfig, match=r"host_kv_memory: got 127 bytes, allowed is at least 128 for this model"):
        make_engine(ToyHybrid(), **{**TIGHT, "host_kv_memory": 127})


@pytest.mark.parametrize(("copy_s", "is_kept"), [(0.0, True), (1e9, False)])
def test_a_state_goes_to_the_host_if_that_costs_less(copy_s: float, is_kept: bool) -> None:
    """The rule that compares a copy with computing again counts a state as the blocks that are as many bytes."""
    engine = make_engine(ToyHybrid(), **{**TIGHT, "num_kv_blocks": 60, "preemption": "auto"})
    costs = engine.scheduler.costs
    assert costs.units(3, 1) == 3 + 16 / 64
    costs.moves.update({way: Line(0.0, copy_s) for way in Direction})
    costs.steps.times = StepTimes(1.0, 1.0, 1.0, 0.0)
    for _ in range(2):
        run_one(engine, [*range(20)] * 8, params(2))
    assert (engine.stats().num_host_states_kept > 0) == is_kept

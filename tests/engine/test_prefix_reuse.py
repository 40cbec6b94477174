"""What requests find of each other's work: how much, who may, and what is never left to be found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedcore.engine.engine import Engine
from pagedcore.errors import InvalidConfig, InvalidLogits, InvalidSalt
from pagedcore.protocols import FloatArray, RaggedRows
from pagedcore.sampling_params import SamplingParams
from support.doubles import FlakyBackend, ToyBackend, toy_answer
from support.engine_builders import assert_all_free, make_engine, run
from support.session_builders import tiny_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def params(max_tokens: int = 3, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)


def ask(engine: Engine, prompt: list[int], max_tokens: int = 3, **more: Any) -> int:
    """Answer one prompt, compare with the oracle, and return how many of its tokens were found."""
    request = engine.add_request(prompt, params(max_tokens), **more)
    run(engine)
    output = request.output()
    assert list(output.outputs[0].token_ids) == toy_answer(prompt, max_tokens)
    return output.num_cached_tokens


def test_the_second_time_only_the_last_token_is_computed() -> None:
    """An equal prompt finds all but its last token, a longer one what it has in common, a stranger nothing."""
    engine = make_engine()
    assert [ask(engine, PROMPT), ask(engine, PROMPT)] == [0, 9]
    assert ask(engine, [*PROMPT[:7], 30, 30]) == 7
    assert ask(engine, [30, *PROMPT]) == 0
    assert engine.stats().num_cached_tokens == 16


def test_the_next_turn_finds_the_answer_too() -> None:
    """A new request that repeats a conversation finds prompt and answer, whose last token was never computed."""
    engine = make_engine()
    ask(engine, PROMPT, 4)
    assert ask(engine, [*PROMPT, *toy_answer(PROMPT, 4), 7]) == len(PROMPT) + 3


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_prompts_around_a_block_boundary(length: int) -> None:
    """Whatever the length of the prompt, the second answer is the first one and one token is computed for it."""
    engine = make_engine()
    prompt = PROMPT[:length]
    assert [ask(engine, prompt), ask(engine, prompt)] == [0, length - 1]


def test_two_salts_never_share_and_one_salt_does() -> None:
    """Another tenant's equal prompt is computed from nothing; text and bytes of the same salt are the same tenant."""
    engine = make_engine()
    assert ask(engine, PROMPT, cache_salt="one") == 0
    assert ask(engine, PROMPT, cache_salt="other") == 0
    assert ask(engine, PROMPT) == 0
    assert ask(engine, PROMPT, cache_salt=b"one") == 9


def test_tenants_cannot_tell_from_the_steps_what_others_asked() -> None:
    """With another salt a known prompt takes exactly the steps and tokens of an unknown one."""
    costs = []
    for first_salt in ("one", None):
        engine = make_engine(max_num_batched_tokens=4)
        if first_salt is not None:
            ask(engine, PROMPT, cache_salt=first_salt)
        before = engine.stats()
        ask(engine, PROMPT, cache_salt="other")
        after = engine.stats()
        costs.append((after.num_steps - before.num_steps, after.num_computed_tokens - before.num_computed_tokens))
    assert costs[0] == costs[1]


@pytest.mark.parametrize("salt", ["", b"", "x" * 65, 7, ["a"], 1.5])
def test_salts_out_of_range_are_refused_without_showing_them(salt: Any, engine: Engine) -> None:
    """Empty, longer than 64 bytes, or no text at all: a typed error with the size, not the secret."""
    with pytest.raises(InvalidSalt) as refused:
        engine.add_request(PROMPT, cache_salt=salt)
    assert "xxx" not in str(refused.value)
    assert not engine.has_pending_requests()


@pytest.mark.parametrize("salt", ["x", "\ud800", b"\x00\xff", "é" * 32, b"s" * 64])
def test_any_salt_within_the_size_is_only_bytes(salt: Any, engine: Engine) -> None:
    """Surrogates, zero bytes and all: a salt is hashed, never read."""
    assert [ask(engine, PROMPT, cache_salt=salt) for _ in range(2)] == [0, 9]


def test_without_prefix_caching_requests_share_nothing_and_turns_still_do() -> None:
    """Equal prompts are computed each time; a request that continues still has its own blocks."""
    engine = make_engine(enable_prefix_caching=False)
    assert [ask(engine, PROMPT), ask(engine, PROMPT)] == [0, 0]
    request = engine.add_request(PROMPT, params(3))
    run(engine)
    request.extend([7], params(2))
    run(engine)
    assert request.output().num_cached_tokens == len(PROMPT) + 2


def test_answers_of_one_request_compute_its_prompt_once() -> None:
    """With n = 3 the second and third answer wait for the first one's blocks and share them."""
    engine = make_engine(num_kv_blocks=32, max_num_batched_tokens=16)
    request = engine.add_request(PROMPT, params(4, n=3, temperature=1.0, seed=5))
    run(engine)
    assert engine.stats().num_cached_tokens >= 2 * 8
    assert request.sequences[0].num_cached_tokens == 0
    assert_all_free(engine)


def test_a_conversation_that_was_pushed_out_comes_back_from_the_host() -> None:
    """What the device had to give away is loaded instead of computed."""
    engine = make_engine(num_kv_blocks=5, host_kv_memory=64 * 40, preemption="swap")
    request = engine.add_request(PROMPT, params(3))
    run(engine)
    ask(engine, [8] * 15, 3)
    request.extend([7], params(2))
    run(engine)
    output = request.output()
    assert list(output.outputs[0].token_ids) == toy_answer([*PROMPT, *toy_answer(PROMPT, 3), 7], 2)
    assert output.num_cached_tokens == len(PROMPT) + 2
    assert engine.stats().swapped_in_bytes > 0
    assert_all_free(engine)


@pytest.mark.parametrize("given", [0, -1, "1B", 63, True, 1.5, "much", 2**60])
def test_host_memory_that_makes_no_sense_is_refused(given: Any) -> None:
    """Less than a block, more than the machine has, or no amount at all, is refused by the setting's name."""
    with pytest.raises(InvalidConfig, match="host_kv_memory"):
        make_engine(host_kv_memory=given)


class Bare(ToyBackend):
    """A model that brings nothing to move blocks with."""

    cache_store = None  # type: ignore[assignment]


def test_a_backend_without_a_store_has_no_host_and_shares_full_blocks() -> None:
    """Asking for a host tier names what is missing; without one, whole blocks are still shared."""
    with pytest.raises(InvalidConfig, match="host_kv_memory: this model backend has no cache_store"):
        make_engine(Bare(), host_kv_memory="1KiB")
    engine = make_engine(Bare())
    assert [ask(engine, PROMPT), ask(engine, PROMPT)] == [0, 8]


def test_a_row_without_usable_logits_leaves_nothing_to_be_found() -> None:
    """The blocks of a request that ended in NaN are computed anew by the next one with its prompt."""
    engine = make_engine(FlakyBackend(nan_on=(3, 0)), max_num_batched_tokens=16)
    request = engine.add_request(PROMPT, params(6))
    run(engine)
    assert isinstance(request.error, InvalidLogits)
    assert (engine.stats().num_blocks_cached, engine.stats().num_blocks_used) == (0, 0)
    assert ask(engine, PROMPT) == 0


def test_a_failed_step_leaves_nothing_of_its_batch_to_be_found() -> None:
    """A device that died half-way may have written anything: none of it is used again."""
    engine = make_engine(FlakyBackend(raise_on_step=3), max_num_batched_tokens=16)
    engine.add_request(PROMPT, params(6))
    run(engine)
    assert engine.stats().num_blocks_cached == 0
    assert ask(engine, PROMPT) == 0


class PoisonedChunk(ToyBackend):
    """Writes wrong tokens in its first forward, and says so with NaN as soon as logits of that sequence are wanted."""

    def forward(self, batch: RaggedRows) -> FloatArray:
        """Compute; everything that reads what the first step wrote is NaN."""
        logits = super().forward(batch)
        if self.num_steps == 1:
            self.poisoned = int(batch.seq_ids[0])
        for i, token in enumerate(batch.logits_rows):
            row = int(np.searchsorted(batch.query_start, token, side="right")) - 1
            if int(batch.seq_ids[row]) == self.poisoned:
                logits[i] = np.nan
        return logits


def test_a_poisoned_chunk_on_the_host_is_forgotten_with_its_request() -> None:
    """Blocks that were copied to the host before the NaN came to light cannot be found there either."""
    engine = make_engine(
        PoisonedChunk(), num_kv_blocks=6, host_kv_memory=64 * 40, preemption="swap", max_num_batched_tokens=4,
        scheduling_policy="priority", max_num_seqs=2,
    )
    request = engine.add_request([*PROMPT, *PROMPT], params(2))
    engine.step()
    engine.step()
    scheduler = engine.scheduler
    plan_of_a_crisis(engine, request)
    run(engine)
    assert isinstance(request.error, InvalidLogits)
    fresh = engine.add_request([*PROMPT, *PROMPT], params(2))
    match = scheduler.kv_cache.match(fresh.sequences[0])
    assert (match.num_tokens, match.host_blocks) == (0, ())


def plan_of_a_crisis(engine: Engine, request: Any) -> None:
    """Preempt a running request to the host, as a shortage would."""
    from pagedcore.scheduler.plan import Preemption, PreemptionKind, SchedulePlan

    (sequence,) = request.sequences
    plan = SchedulePlan(preempted=(Preemption(sequence, PreemptionKind.SWAP),))
    engine._transfers.start(engine.scheduler.make_room(plan))
    assert engine.scheduler.stats().num_swapped == 1


def test_blocks_that_a_small_pool_lost_are_counted_once_each(caplog: pytest.LogCaptureFixture) -> None:
    """A block counts when it is computed again after its eviction: not as new content, not for another salt, and not
    where the pool is large enough. The log says once that as many were lost as the pool has."""
    first, second = [value % 19 for value in range(41)], [(7 * value + 1) % 17 for value in range(41)]
    small, large = make_engine(), make_engine(num_kv_blocks=64)
    for engine in (small, large):
        assert [ask(engine, first, 1), ask(engine, second, 1)] == [0, 0]
        assert engine.stats().num_blocks_recomputed == 0
        assert ask(engine, first, 1, cache_salt="other") == 0
        assert engine.stats().num_blocks_recomputed == 0
    found = ask(small, first, 1)
    assert small.stats().num_blocks_recomputed == -(-(len(first) - found) // 4) > 0
    for _ in range(4):
        for prompt in (first, second):
            ask(small, prompt, 1)
            ask(large, prompt, 1)
    assert small.stats().num_blocks_recomputed > 2 * small.stats().num_blocks
    assert large.stats().num_blocks_recomputed == 0
    messages = [record.getMessage() for record in caplog.records if "computed again" in record.getMessage()]
    assert len(messages) == 1
    assert "16 blocks were computed again that had been evicted from the pool of 16 blocks" in messages[0]


def test_two_equally_good_beginnings_give_the_bits_of_none() -> None:
    """Where two blocks have equally many first tokens of a prompt, whichever is copied, the answer is the one without
    sharing, bit for bit.
    """
    common, prompts = [5, 9, 11, 14], [[3, 8, 50, 51], [3, 8, 40, 41]]
    found: list[Any] = []
    for order, is_shared in ((prompts, True), (prompts[::-1], True), (prompts, False)):
        with Engine.from_pretrained(
            tiny_model(), dtype="float32", num_kv_blocks=24, block_size=4, enable_prefix_caching=is_shared,
        ) as engine:
            for rest in order:
                engine.generate([[*common, *rest, 7]], SamplingParams(max_tokens=2, ignore_eos=True))
            output = engine.generate([[*common, 3, 8, 45, 46, 47]], SamplingParams(
                max_tokens=6, ignore_eos=True, logprobs=2))[0]
        assert output.num_cached_tokens == (6 if is_shared else 0)
        found.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert found[0] == found[1] == found[2]

"""Where prompts of a model that keeps states are cut, what waits for a state, and what looking for it costs."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from pagedcore.kv_cache.block_hash import BlockHasher
from pagedcore.kv_cache.hybrid_blocks import HybridBlocks
from pagedcore.scheduler.plan import SchedulePlan
from pagedcore.scheduler.scheduler import Scheduler
from support.doubles import make_scheduler, make_sequence, run_step

BLOCK = 16


def hybrid(**settings: Any) -> Scheduler:
    """A scheduler whose model keeps states, with room for everything."""
    return make_scheduler(**{"num_blocks": 4000, "block_size": BLOCK, "max_num_seqs": 8, "num_states": 32,
                             "max_num_batched_tokens": 1024, "max_num_waiting": 2000, **settings})


def prompt(num_shared: int, num_own: int, number: int) -> list[int]:
    """A prompt that parts from those of other numbers behind so many tokens."""
    return [*range(num_shared), *(10_000 * (number + 1) + place for place in range(num_own))]


def rows_of(plan: SchedulePlan) -> list[tuple[int, int, bool]]:
    """First and last position of each row, and whether its state is kept."""
    return [(row.start, row.end, row.keeps_state) for row in plan.rows]


def states_of(scheduler: Scheduler) -> HybridBlocks:
    blocks = scheduler.kv_cache.device
    assert isinstance(blocks, HybridBlocks)
    return blocks


def test_a_prompt_is_cut_at_its_last_full_block() -> None:
    """The state there is kept, if it saves 128 tokens; the rest comes in the next step."""
    scheduler = hybrid()
    scheduler.add_sequences(make_sequence(prompt(0, 300, 0), 4))
    assert [rows_of(run_step(scheduler)) for _ in range(2)] == [[(0, 288, True)], [(288, 300, False)]]
    short = hybrid()
    short.add_sequences(make_sequence(prompt(0, 140, 0), 4))
    assert rows_of(run_step(short)) == [(0, 128, True)]
    short = hybrid()
    short.add_sequences(make_sequence(prompt(0, 127, 0), 4))
    assert rows_of(run_step(short)) == [(0, 127, False)]


def test_prompts_are_cut_where_others_part_from_them() -> None:
    """What waits with the same beginning waits on, until the state is there, and then begins from it together."""
    scheduler = hybrid()
    for number in range(3):
        scheduler.add_sequences(make_sequence(prompt(200, 50, number), 4))
    plan = run_step(scheduler)
    assert rows_of(plan) == [(0, 192, True)]
    assert plan.num_deferred == 2
    assert rows_of(run_step(scheduler)) == [(192, 250, False)] * 3


def test_many_that_part_early_are_worth_a_cut_that_one_is_not() -> None:
    """Tokens count for each of those that would begin there."""
    for count, rows in ((2, [(0, 60, False)] * 2), (5, [(0, 32, True)])):
        scheduler = hybrid()
        for number in range(count):
            scheduler.add_sequences(make_sequence(prompt(40, 20, number), 4))
        assert rows_of(run_step(scheduler)) == rows


def test_completions_of_one_prompt_begin_from_its_last_block() -> None:
    """Equal prompts part nowhere before their last token, whose logits each of them needs."""
    scheduler = hybrid()
    for _ in range(4):
        scheduler.add_sequences(make_sequence(prompt(160, 0, 0), 4))
    assert rows_of(run_step(scheduler)) == [(0, 144, True)]
    assert rows_of(run_step(scheduler)) == [(144, 160, False)] * 4


def test_a_prompt_is_cut_where_the_cache_knows_it_no_further() -> None:
    """KV of another prompt, without a state behind it, shows where prompts part before a second one waits."""
    scheduler = hybrid()
    for number in range(3):
        scheduler.add_sequences(sequence := make_sequence(prompt(400, 200, number), 1))
        ends = []
        while sequence.finish_reason is None:
            ends += [row[:2] for row in rows_of(run_step(scheduler))]
        assert ends == [[(0, 592), (592, 600)], [(0, 400), (400, 592), (592, 600)], [(400, 592), (592, 600)]][number]


def test_who_only_reads_a_text_leaves_no_state_of_its_own() -> None:
    """An embedded text is cut nowhere for its own sake, and its end is kept for nobody."""
    scheduler = hybrid()
    sequence = make_sequence(prompt(0, 300, 0), 4)
    sequence.hidden_from = 299
    scheduler.add_sequences(sequence)
    assert rows_of(run_step(scheduler)) == [(0, 300, False)]
    assert states_of(scheduler).states.num_kept == 0


def test_the_state_that_saves_least_is_evicted_of_the_old_ones() -> None:
    """Among the least recently used, tokens to compute again decide."""
    scheduler = hybrid(num_states=4, max_num_seqs=1)
    for number, length in enumerate((600, 300, 300)):
        scheduler.add_sequences(sequence := make_sequence(prompt(0, length, number), 1))
        while sequence.finish_reason is None:
            run_step(scheduler)
    states = states_of(scheduler).states
    assert states.num_evictions > 0
    assert states.num_used == 0
    found = make_sequence(prompt(0, 600, 0), 1)
    assert scheduler.kv_cache.match(found).num_tokens == 592


def test_a_long_queue_behind_one_prefix_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with 1,000 prompts of 2,300 tokens that wait for one prefix hashes no block, and calls a bounded number of
    functions for each of them."""
    hashed, key = [0], BlockHasher.key

    def count_key(self: BlockHasher, *given: Any) -> bytes:
        hashed[0] += 1
        return key(self, *given)

    monkeypatch.setattr(BlockHasher, "key", count_key)
    scheduler, num_prompts = hybrid(num_blocks=20_000), 1000
    for number in range(num_prompts):
        scheduler.add_sequences(make_sequence(prompt(2000, 300, number), 8))
    assert hashed[0] == num_prompts * (2300 // BLOCK)
    run_step(scheduler)
    hashed[0] = 0
    calls = [0]

    def note(frame: FrameType, event: str, _: Any) -> None:
        calls[0] += event == "call"

    sys.setprofile(note)
    try:
        plan = scheduler.schedule()
    finally:
        sys.setprofile(None)
    assert plan.num_deferred == num_prompts - 1
    assert (plan.rows[0].end, hashed[0]) == (2000, 0)
    assert calls[0] < 40 * num_prompts

"""How many drafts are offered: as many as make the most tokens a second, as far as the latest ones tell."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise, product

from pagedcore.drafting.drafts import Drafts
from pagedcore.drafting.offers import Chances, Record, share_out


def costs(step_s: float, row_s: float) -> list[float]:
    """Seconds of a step with no draft, with one, and so on."""
    return [step_s + row_s * count for count in range(10_001)]


def rate(chances: list[Chances], counts: Sequence[int], sampled: int, step_s: float, row_s: float) -> float:
    """Tokens a second of a step with so many drafts."""
    kept = sum(one.first * one.further**place for one, count in zip(chances, counts, strict=True)
               for place in range(count))
    return (sampled + kept) / (step_s + row_s * sum(counts))


def test_no_other_shares_are_faster() -> None:
    """Among all shares of up to three drafts for three sequences none makes more tokens a second."""
    rng = random.Random(0)
    for _ in range(150):
        chances = [Chances(rng.random(), rng.random()) for _ in range(3)]
        rooms, room = [rng.randrange(4) for _ in range(3)], rng.randrange(8)
        sampled, step_s, row_s = rng.choice([3, 9]), 1.0, rng.choice([0.02, 0.05, 0.1, 0.4])
        counts = share_out(chances, rooms, room, num_sampled=sampled, seconds=costs(step_s, row_s))
        allowed = [one for one in product(*(range(most + 1) for most in rooms)) if sum(one) <= room]
        assert tuple(counts) in allowed
        best = max(rate(chances, one, sampled, step_s, row_s) for one in allowed)
        assert abs(rate(chances, counts, sampled, step_s, row_s) - best) < 1e-9


def test_what_is_computed_again_after_a_wrong_draft_is_part_of_its_cost() -> None:
    """Where a row with a wrong draft is computed again, the number of drafts of a sequence is the one with most tokens
    a second, counting over every place of the first wrong one."""
    rng, numbers = random.Random(1), set()
    for _ in range(300):
        one, row_s = Chances(rng.random(), rng.random()), rng.choice([0.01, 0.05])
        again_s = rng.choice([0.0, 0.05, 0.2])

        def rate_of(count: int, one: Chances = one, row_s: float = row_s, again_s: float = again_s) -> float:
            right = [1.0, *(one.first * one.further**place for place in range(count))]
            again = sum((right[wrong] - right[wrong + 1]) * (wrong + 1) for wrong in range(count))
            return sum(right) / (1.0 + row_s * count + again_s * again)

        [count] = share_out([one], [6], 6, num_sampled=1, seconds=costs(1.0, row_s), again_s=again_s)
        # Why: what is hardly likely is not looked at.
        looked_at = [0, *(most for most in range(1, 7) if one.first * one.further ** (most - 1) >= 0.02)]
        assert rate_of(count) == max(map(rate_of, looked_at))
        numbers.add((again_s, count))
    assert len(numbers) > 9


def test_a_full_batch_has_no_drafts() -> None:
    """As a step fills up, and a row costs what a token does, fewer drafts are worth it, and at last none."""
    sums = []
    for number in (1, 8, 32, 128, 512):
        chances = [Chances(0.8, 0.9)] * number
        step_s = 0.02 + 0.001 * number
        counts = share_out(chances, [16] * number, 10_000, num_sampled=number, seconds=costs(step_s, 0.001))
        sums.append(sum(counts) / number)
    assert sums == sorted(sums, reverse=True)
    assert sums[0] > 4
    assert sums[-1] == 0


def test_nothing_is_shared_where_nothing_may_be() -> None:
    """Sequences without room or chances have no drafts, whatever the others have."""
    chances = [Chances(0.0, 0.0), Chances(1.0, 1.0), Chances(1.0, 1.0)]
    assert share_out(chances, [4, 0, 4], 3, num_sampled=3, seconds=costs(1.0, 0.01)) == [0, 0, 3]
    assert share_out([], [], 9, num_sampled=0, seconds=costs(1.0, 0.01)) == []


def test_a_sequence_whose_drafts_are_wrong_has_fewer_and_is_tried_again() -> None:
    """Wrong drafts lower what is expected; after a while they are tried again, and ever more rarely."""
    record, tried, num_tokens = Record(), list[int](), 0
    for num_tokens in range(400):
        chances = [record.chances(num_tokens)]
        if share_out(chances, [16], 16, num_sampled=1, seconds=costs(1.0, 0.1))[0]:
            tried.append(num_tokens)
            record.observe(num_tokens + 1, 2, 0)
    pauses = [later - earlier for earlier, later in pairwise(tried)]
    assert pauses[0] == 1
    assert pauses[-1] >= 64
    assert len(tried) < 20
    assert record.chances(num_tokens) == record.chances(num_tokens)
    assert record.chances(num_tokens, is_long_match=True).first > 0.5


def test_right_drafts_raise_what_is_expected() -> None:
    """The first draft and those behind it are learned apart: what is behind a wrong one counts for nothing."""
    record = Record()
    for step in range(30):
        record.observe(10 * step, 8, 8 if step % 2 else 0)
    first, further, _ = record.chances(300 - 1)
    assert 0.3 < first < 0.7
    assert further > 0.95
    for step in range(60):
        record.observe(300 + step, 8, 1)
    first, further, _ = record.chances(0)
    assert first > 0.95
    assert further < 0.1


def test_few_searches_where_drafts_are_wrong() -> None:
    """A sequence whose drafts are never right is searched for a long match at one token of four."""
    drafts, tokens = Drafts(), [1, 2, 3, 4] * 20
    drafts.begin(0, b"", tokens)
    for _ in range(30):
        drafts.observe(0, len(tokens), 1, 0)
    found = []
    for _ in range(8):
        tokens.append(tokens[-4])
        found.append(drafts.chances(0, tokens).first > 0)
    assert sum(found) == 2

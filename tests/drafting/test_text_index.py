"""The index of a text: what it finds, and what it costs on texts that were made to be dear."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from pagedcore.drafting.text_index import LONGEST_MATCH, MOST_TOKENS, NO_MATCH, NUM_CANDIDATES, Match, TextIndex


def longest(text: list[int], tail: list[int], last: int) -> int:
    """Look at every place of a text up to ``last``, one by one."""
    best = 0
    for position in range(1, last + 1):
        length = 0
        while length < min(position, len(tail), LONGEST_MATCH) and text[position - 1 - length] == tail[-1 - length]:
            length += 1
        best = max(best, length)
    return best if best > 1 else 0


def is_match(text: list[int], match: Match, tail: list[int]) -> bool:
    return text[match.position - match.length : match.position] == tail[len(tail) - match.length :]


@pytest.mark.parametrize("seed", range(6))
def test_the_longest_match_is_found(seed: int) -> None:
    """A text in which each pair of tokens stands at few places is searched as if all of them were looked at, however
    it grew."""
    rng = random.Random(seed)
    index, text = TextIndex(), list[int]()
    pairs: Counter[tuple[int, int]] = Counter()
    while len(text) < 400:
        start = rng.randrange(len(text) + 1)
        new = text[start : start + rng.randrange(50)] if rng.random() < 0.3 else [rng.randrange(9999)]
        text += new
        index.extend(text)
        pairs = Counter(pairwise(text))
        match = index.find(text, text)
        if pairs[*text[-2:]] <= NUM_CANDIDATES // 2:
            assert match.length == longest(text, text, len(text) - 1)
        assert is_match(text, match, text)
    assert max(pairs.values()) > 2


def test_a_match_is_never_wrong() -> None:
    """On a text of few tokens, where all places collide, what is found is equal as far as it says, and no further."""
    rng = random.Random(0)
    index, text = TextIndex(), list[int]()
    for _ in range(300):
        text += [rng.randrange(3) for _ in range(rng.randrange(4))]
        index.extend(text)
        match = index.find(text, text, rng.randrange(400))
        assert is_match(text, match, text)
        assert match == NO_MATCH or (0 < match.position < len(text) and match.length >= 2)
        before = match.position - match.length
        assert match.length in (0, LONGEST_MATCH) or before == 0 or text[before - 1] != text[-1 - match.length]


def test_a_guess_is_preferred_to_places_that_are_no_better() -> None:
    """Of equally long matches the guess is taken, or else the latest; a longer one is taken before both."""
    text = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 5, 8, 1, 2]
    index = TextIndex()
    index.extend(text)
    assert index.find(text, text) == Match(10, 2)
    assert index.find(text, text, 2) == Match(2, 2)
    assert index.find([*text, 0], [9, 1, 2], 2).length == 3


class Counted(list[int]):
    """Counts how often one of its tokens is read."""

    num_read = 0

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, slice):
            self.num_read += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("period", [[7], [7, 8], [1, 2, 3, 4, 5], [*range(31)] * 2 + [0], [0, 1] * 20 + [2]])
def test_repetitive_texts_cost_no_more(period: list[int]) -> None:
    """A text of one token a hundred thousand times, or of a period, is held in bounded memory; adding to it and
    searching in it read a bounded number of tokens."""
    text = Counted((period * (100_000 // len(period) + 1))[:100_000])
    index = TextIndex()
    index.extend(text)
    for _ in range(200):
        text.append(period[len(text) % len(period)])
        text.num_read = 0
        index.extend(text)
        match = index.find(text, text)
        assert text.num_read <= 4 + 2 * LONGEST_MATCH * NUM_CANDIDATES
        assert index.num_bytes <= 12 * MOST_TOKENS + 512
        assert is_match(text, match, text)
        assert len(period) > 5 or text[match.position] == period[len(text) % len(period)]


def test_a_long_text_keeps_its_end() -> None:
    """Of a text beyond the bound the latest half is searched, and what grows behind it."""
    text = [*range(MOST_TOKENS + 5), 17, 18]
    index = TextIndex()
    index.extend(text)
    assert index.find(text, text) == NO_MATCH
    text += [MOST_TOKENS - 3, MOST_TOKENS - 2]
    index.extend(text)
    assert index.find(text, text) == Match(MOST_TOKENS - 1, 2)


def test_a_text_that_became_shorter_is_searched_as_it_is() -> None:
    """Tokens that were taken back are found no more, and those before them are."""
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    index = TextIndex()
    index.extend(text)
    del text[4:]
    text += [1, 2]
    index.extend(text[:4])
    index.extend(text)
    assert index.find(text, text) == Match(2, 2)
    assert index.find(text, [5, 6]) == NO_MATCH
    index.extend([])
    assert index.find([], []) == index.find([], [5, 6]) == NO_MATCH

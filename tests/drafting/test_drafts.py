"""Drafts of sequences: from their own text, and from earlier completions behind the same root."""

from __future__ import annotations

import random

import pytest

from pagedcore.drafting.completions import HALF_TOKENS, MOST_KEPT_TOKENS, MOST_ROOTS, Completions
from pagedcore.drafting.drafts import Drafts
from pagedcore.drafting.offers import NO_CHANCES

A, B = b"one salt", b"another"
SAID = [5, 6, 7, 8, 9, 10, 11, 12]


def test_text_goes_on_as_it_did() -> None:
    """What followed before is proposed, at most as much as is asked for; the same again for the same tokens."""
    drafts = Drafts()
    tokens = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    drafts.begin(0, A, tokens)
    assert drafts.propose(0, tokens, 3) == drafts.propose(0, tokens, 3) == (4, 5, 6)
    assert drafts.propose(0, tokens, 0) == ()
    assert drafts.chances(0, tokens) != NO_CHANCES
    assert drafts.propose(0, [*tokens, 4, 99, 100], 3) == ()
    assert drafts.chances(0, [*tokens, 4, 99, 100]) == NO_CHANCES


@pytest.mark.parametrize("period", [[4], [4, 5], [4, 5, 6, 7, 8]])
def test_a_period_is_continued_beyond_the_text(period: list[int]) -> None:
    """Drafts of a text that repeats itself go on as it would."""
    drafts, tokens = Drafts(), [1, 2, 3, *period * 3]
    drafts.begin(0, A, tokens)
    assert drafts.propose(0, tokens, 12) == tuple((period * 12)[:12])


def test_a_copy_with_a_change_goes_on_behind_the_change() -> None:
    """Where a text is repeated with another word, the same place is proposed, not the latest that looks alike."""
    drafts = Drafts()
    source = [10, 1, 2, 11, 12, 1, 2, 13, 14]
    tokens = [*source, 99, 10]
    drafts.begin(0, A, tokens)
    tokens += [1, 2]
    assert drafts.propose(0, tokens, 2) == (11, 12)
    tokens += [77, 12, 1, 2]
    assert drafts.propose(0, tokens, 2) == (13, 14)
    one = [*source, 99, 98, 97]
    drafts.begin(1, A, one)
    for token in (10, 1, 2, 11, 77, 1, 2):
        one.append(token)
        found = drafts.propose(1, one, 1)
    assert found == (13,)


def test_completions_are_repeated_behind_the_same_root_only() -> None:
    """What was answered under one salt is no draft under another, whatever is asked there."""
    drafts = Drafts()
    for number, root in enumerate((A, A, B)):
        tokens = [1, 2, 3]
        drafts.begin(number, root, tokens)
        expected = tuple(SAID[:4]) if number == 1 else ()
        assert drafts.propose(number, tokens, 4) == expected
        assert (drafts.chances(number, tokens) == NO_CHANCES) is (not expected)
        drafts.forget(number, tokens + SAID, keep=True)


def test_what_is_not_kept_is_not_repeated() -> None:
    """A completion that was aborted, a long prompt, and a source that is off are nobody's drafts; ids that nobody began
    are no fault."""
    drafts, prompt = Drafts(), [*range(40, 60)]
    for number, keep in ((0, False), (1, True)):
        drafts.begin(number, A, prompt)
        drafts.forget(number, [*prompt, *SAID[number:]], keep=keep)
    drafts.forget(77, SAID, keep=True)
    drafts.observe(77, 8, 1, 1)
    assert drafts.chances(77, SAID) == NO_CHANCES
    for number, (tokens, expected) in enumerate(
        [(SAID[:2], ()), (prompt[:9], ()), (prompt, (6, 7)), (SAID[1:3], (8, 9))], start=2
    ):
        drafts.begin(number, A, tokens)
        assert drafts.propose(number, tokens, 2) == expected
    without = Drafts(["text"])
    without.begin(0, A, [1, 2, 3])
    without.forget(0, [1, 2, 3, *SAID], keep=True)
    without.begin(1, A, [1, 2, 3])
    assert without.propose(1, [1, 2, 3], 4) == ()


def test_a_draft_ends_with_the_completion_that_it_is_of() -> None:
    """Two completions that were kept one after the other are not proposed as one."""
    drafts = Drafts()
    for number in range(2):
        drafts.begin(number, A, [1, 2])
        drafts.forget(number, [1, 2, *SAID], keep=True)
    tokens = [3, *SAID[-3:-1]]
    drafts.begin(2, A, tokens)
    assert drafts.propose(2, tokens, 9) == (SAID[-1],)
    assert drafts.propose(2, [*tokens, SAID[-1]], 9) == ()


def test_a_sequence_that_begins_again_has_the_same_drafts() -> None:
    """After a preemption the sequence begins again with more tokens: its prompt is still its prompt. A fork has its
    own drafts of the same tokens."""
    drafts, tokens = Drafts(), [1, 2, 3, *SAID, 1, 2, 3]
    drafts.begin(0, A, tokens)
    before = drafts.propose(0, tokens, 5)
    drafts.begin(0, A, [*tokens, 5, 6])
    drafts.begin(1, A, tokens)
    assert before == drafts.propose(0, tokens, 5) == drafts.propose(1, tokens, 5) == tuple(SAID[:5])
    drafts.forget(0, [*tokens, 90, 91, 92], keep=True)
    other = [70, 3, 90]
    drafts.begin(2, A, other)
    assert drafts.propose(2, other, 5) == (91, 92)


def test_the_memory_of_completions_is_bounded() -> None:
    """However many completions and roots there are, however long, the oldest go first and the bound holds."""
    rng, kept = random.Random(0), Completions()
    for number in range(400):
        length = rng.choice([1, 40, 3000, 30_000])
        kept.add(str(number % 60).encode(), [number] * length, rng.choice([0, length // 2]))
        texts = [text for one in range(60) for text in kept.texts(str(one).encode())]
        assert kept.num_tokens == sum(len(text.tokens) for text in texts) <= MOST_KEPT_TOKENS
        assert max(len(text.tokens) for text in texts) <= HALF_TOKENS
    assert kept.texts(str(399 % 60).encode())
    for number in range(MOST_ROOTS + 10):
        kept.add(b"%d of many" % number, [1, 2, 3], 1)
    assert not kept.texts(b"9 of many")
    assert kept.texts(b"10 of many")


def test_an_old_place_is_not_taken_for_one_in_a_new_text() -> None:
    """A sequence that repeats a completion which is dropped meanwhile has no drafts from what stands in its place."""
    drafts = Drafts(["completions"])
    drafts.begin(0, A, [1, 2])
    drafts.forget(0, [1, 2, *SAID], keep=True)
    tokens = [1, 2, 5, 6]
    drafts.begin(1, A, tokens)
    assert drafts.chances(1, tokens) != NO_CHANCES
    for number in range(2, 6):
        drafts.begin(number, A, [0])
        drafts.forget(number, [0, *[number] * HALF_TOKENS], keep=True)
    assert drafts.propose(1, tokens, 4) == ()
    assert drafts.propose(1, [*tokens, 7], 4) == ()

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagedcore.errors import InvalidStop
from pagedcore.tokenizer.incremental_text import StopMatcher
from support.text_builders import common_prefix, cut_at_stop, futures

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)
TEXTS = st.lists(st.text("abc", max_size=4), max_size=6)


def run(stop, pieces) -> tuple[str, bool]:
    matcher = StopMatcher(stop)
    text = "".join(matcher.push(piece) for piece in pieces)
    is_stopped = matcher.matched is not None
    return text + matcher.finish(), is_stopped


@given(STOPS, TEXTS)
@example(["abab", "ba"], ["aba", "b"])
@example(["aab", "ab"], ["a", "a", "a", "b"])
def test_matches_are_those_of_the_naive_definition(stop, pieces) -> None:
    """However the text is cut into pieces, the stop string that ends first ends it, the longest of those that tie."""
    assert run(stop, pieces) == cut_at_stop("".join(pieces), stop)


@given(STOPS, st.text("abc", max_size=6))
@example(["abcd", "bc"], "a")
@example(["abcab", "b"], "a")
def test_exactly_what_every_continuation_keeps_is_returned(stop, text) -> None:
    """Nothing is held back that could go out, and nothing goes out that a continuation could still remove."""
    matcher, returned = StopMatcher(stop), ""
    for end, char in enumerate(text, 1):
        returned += matcher.push(char)
        outcomes = (cut_at_stop(text[:end] + "".join(future), stop)[0] for future in futures("abc", 4))
        assert returned == common_prefix(outcomes)


@given(STOPS, TEXTS)
def test_no_more_than_a_live_partial_match_is_held_back(stop, pieces) -> None:
    """What is held is always a proper prefix of a stop string, however much text there was."""
    matcher, pushed, returned = StopMatcher(stop), "", ""
    for piece in pieces:
        pushed += piece
        returned += matcher.push(piece)
        if matcher.matched is None:
            assert any(word.startswith(pushed[len(returned) :]) and word != pushed[len(returned) :] for word in stop)


@pytest.mark.parametrize(
    ("stop", "pieces", "text", "matched"),
    [
        (["END"], ["E", "N", "D", "more"], "", "END"),
        (["END"], ["EN", "EN", "D"], "EN", "END"),
        (["🙂\n"], ["x🙂", "\ny"], "x", "🙂\n"),
        (["b", "ab"], ["a", "b"], "", "ab"),
        (["abcd", "bc"], ["abcd"], "a", "bc"),
        (["ab", "abc"], ["abc"], "", "ab"),
        (["a", "a"], ["xa"], "x", "a"),
    ],
)
def test_chosen_cases(stop, pieces, text, matched) -> None:
    """Stop strings at the start, across pieces, within each other, and given twice."""
    matcher = StopMatcher(stop)
    assert "".join(map(matcher.push, pieces)) + matcher.finish() == text
    assert matcher.matched == matched


def test_nothing_follows_a_match() -> None:
    """After a match neither push nor finish returns anything."""
    matcher = StopMatcher(["x"])
    assert [matcher.push("ax"), matcher.push("more"), matcher.finish()] == ["a", "", ""]


def test_an_unfinished_match_comes_out_at_the_end() -> None:
    """A partial match that was never completed is text."""
    matcher = StopMatcher(["END"])
    assert [matcher.push("the EN"), matcher.finish()] == ["the ", "EN"]


def test_an_empty_stop_string_is_refused() -> None:
    """An empty stop string would match everywhere; it is an error, not a silent end."""
    with pytest.raises(InvalidStop):
        StopMatcher(["ok", ""])

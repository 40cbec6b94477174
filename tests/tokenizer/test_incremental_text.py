from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcore.errors import InvalidStop
from pagedcore.tokenizer.byte_detokenizer import ByteLevelDetokenizer
from pagedcore.tokenizer.incremental_text import IncrementalText, TextDelta
from pagedcore.tokenizer.tokenizer import HFTokenizer
from support.text_builders import byte_answers, chunked, cut_at_stop, make_fast


def stream(table: dict[int, bytes], stop: tuple[str, ...] = (), min_tokens: int = 0) -> IncrementalText:
    return IncrementalText(ByteLevelDetokenizer(table), stop, min_tokens)


def run(text_stream: IncrementalText, chunks) -> tuple[str, bool]:
    """Push as an engine does: until stopped, then finish."""
    text = ""
    for chunk in chunks:
        delta = text_stream.push(chunk)
        text += delta.text
        assert delta.is_stopped == text_stream.is_stopped
        if delta.is_stopped:
            break
    return text + text_stream.finish(), text_stream.is_stopped


def stops_within(text: str) -> st.SearchStrategy[tuple[str, ...]]:
    """Stop strings that often occur: parts of the text itself."""
    part = st.tuples(st.integers(0, len(text)), st.integers(1, 4)).map(lambda at: text[at[0] : at[0] + at[1]])
    words = st.one_of(part, st.text("a ß🙂\ufffd", min_size=1, max_size=3)).filter(bool)
    return st.lists(words, min_size=1, max_size=3).map(tuple)


@given(byte_answers(), st.data())
def test_the_text_is_the_one_shot_decoding_up_to_the_first_stop_string(answer, data) -> None:
    """Stop strings across tokens and across the bytes of a character end the text where the naive search does."""
    table, token_ids, whole = answer
    text = whole.decode("utf-8", errors="replace")
    stop = data.draw(stops_within(text))
    assert run(stream(table, stop), data.draw(chunked(token_ids))) == cut_at_stop(text, stop)


@given(byte_answers(), st.data())
def test_min_tokens_exempts_the_text_of_the_first_tokens(answer, data) -> None:
    """What the first tokens make certain goes out unmatched; matching starts afresh behind it."""
    table, token_ids, whole = answer
    text = whole.decode("utf-8", errors="replace")
    min_tokens = data.draw(st.integers(0, len(token_ids) + 1))
    free = ByteLevelDetokenizer(table).push(token_ids[:min_tokens])
    stop = data.draw(stops_within(text))
    rest, is_stopped = (
        cut_at_stop(text[len(free) :], stop) if min_tokens <= len(token_ids) else (text[len(free) :], False)
    )
    chunks = data.draw(chunked(token_ids))
    assert run(stream(table, stop, min_tokens), chunks) == (free + rest, is_stopped)


def test_a_match_within_the_exempt_tokens_is_not_continued_behind_them() -> None:
    """A stop string that begins in exempt text cannot be completed by later text."""
    text_stream = stream({0: b"E", 1: b"ND", 2: b"END"}, ("END",), min_tokens=1)
    assert text_stream.push([0]) == TextDelta("E", False)
    assert text_stream.push([1]) == TextDelta("ND", False)
    assert text_stream.push([2]) == TextDelta("", True)


def test_a_stop_string_in_the_first_token_leaves_an_empty_answer() -> None:
    """The answer may be stopped before any text."""
    text_stream = stream({0: b"stop here"}, ("stop",))
    assert text_stream.push([0]) == TextDelta("", True)
    assert text_stream.matched_stop == "stop"
    assert text_stream.finish() == ""


def test_a_stop_string_cut_through_an_emoji_is_found() -> None:
    """Tokens that split the bytes of the stop string's character make no difference."""
    table = {0: b"hi \xf0\x9f", 1: b"\x99\x82", 2: b"!"}
    text_stream = stream(table, ("🙂!",))
    assert [text_stream.push([i]) for i in (0, 1, 2)] == [("hi ", False), ("", False), ("", True)]


def test_a_stop_string_completed_by_the_end_stops_the_answer() -> None:
    """Text held back by the detokenizer is matched too when the answer ends, and the stream says so."""
    tokenizer = HFTokenizer(make_fast("byte_fallback"))
    text_stream = IncrementalText(tokenizer.new_detokenizer(), ("\n",))
    a, newline = make_fast("byte_fallback").convert_tokens_to_ids(["a", "<0x0A>"])
    assert [text_stream.push([a]), text_stream.push([newline])] == [("a", False), ("", False)]
    assert text_stream.finish() == ""
    assert text_stream.is_stopped


def test_nothing_follows_a_stop() -> None:
    """After a stop every push returns nothing and repeats that the answer is stopped."""
    text_stream = stream({0: b"a.b"}, (".",))
    assert [text_stream.push([0]), text_stream.push([0]), text_stream.finish()] == [("a", True), ("", True), ""]


def test_without_stop_strings_text_passes_through() -> None:
    """No stop string: nothing is held back but an unfinished character, and the stream never stops."""
    text_stream = stream({0: b"EN\xc3", 1: b"\xa9"})
    assert [text_stream.push([0]), text_stream.push([1]), text_stream.finish()] == [("EN", False), ("é", False), ""]
    assert not text_stream.is_stopped
    assert text_stream.matched_stop is None


def test_an_empty_stop_string_is_refused() -> None:
    """A stream cannot be made with a stop string that is always there."""
    with pytest.raises(InvalidStop):
        stream({}, ("",))

from __future__ import annotations

import traceback
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcore.errors import InternalError
from pagedcore.tokenizer.stream_detokenizer import StreamDetokenizer, decode_at_end, decode_stream, decode_window
from support.text_builders import chunked, make_fast, push_all


def decoder(kind: str):
    return lambda ids: make_fast(kind).decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def window(decode) -> StreamDetokenizer:
    return StreamDetokenizer(decode, partial(decode_window, decode))


def library(kind: str) -> StreamDetokenizer:
    return StreamDetokenizer(decoder(kind), partial(decode_stream, make_fast(kind).backend_tokenizer))


def both(kind: str) -> list[StreamDetokenizer]:
    return [library(kind), window(decoder(kind))]


@settings(max_examples=40)
@given(st.data())
def test_pushed_text_is_the_one_shot_decoding_for_word_suffixes(data) -> None:
    """A decoder whose last token depends on the next gives its one-shot decoding, in any chunks and at any length."""
    decode = decoder("word_suffix")
    ids = sorted(make_fast("word_suffix").get_vocab().values())
    completion = data.draw(st.lists(st.sampled_from(ids), max_size=20)) * data.draw(st.integers(1, 8))
    chunks = data.draw(chunked(completion))
    for detokenizer in both("word_suffix"):
        assert push_all(detokenizer, chunks, decode) == decode(completion)


@settings(max_examples=40)
@given(st.data())
def test_the_window_in_python_returns_what_the_library_returns(data) -> None:
    """After every token of a byte-level vocabulary, broken characters included, both have returned the same."""
    ids = sorted(make_fast("byte_level").get_vocab().values())
    one, other = both("byte_level")
    for token_id in data.draw(st.lists(st.sampled_from(ids), max_size=20)):
        assert one.push([token_id]) == other.push([token_id])
    assert one.finish() == other.finish()


def test_text_streams_instead_of_waiting_for_the_end() -> None:
    """Each word is returned when it is complete, without the space that only a next word would bring."""
    completion = make_fast("word_suffix").encode("the quick fox")
    for detokenizer in both("word_suffix"):
        deltas = [detokenizer.push([token_id]) for token_id in completion]
        assert "".join(deltas) == decoder("word_suffix")(completion)
        assert detokenizer.finish() == ""


def test_a_replacement_character_waits_for_what_follows() -> None:
    """Bytes that may still become a character are not returned as U+FFFD."""
    euro = make_fast("byte_fallback").convert_tokens_to_ids(["<0xE2>", "<0x82>", "<0xAC>", "a"])
    for detokenizer in both("byte_fallback"):
        assert [detokenizer.push([token_id]) for token_id in euro] == ["", "", "€", "a"]


def test_the_cost_of_a_push_does_not_grow_with_the_completion() -> None:
    """The tokens decoded by one push stay bounded while text becomes certain."""
    tokenizer, longest = make_fast("word_suffix"), 0

    def decode(ids) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return tokenizer.decode(ids)

    detokenizer = window(decode)
    for token_id in tokenizer.encode("the quick brown fox") * 100:
        detokenizer.push([token_id])
    assert longest <= 70


def test_text_that_is_certain_only_at_the_end_comes_at_the_end() -> None:
    """For a decoder nothing is known about, nothing is certain before the end."""
    backwards = StreamDetokenizer(lambda ids: "".join(map(str, reversed(ids))), decode_at_end)
    assert [backwards.push([1]), backwards.push([2, 3]), backwards.finish()] == ["", "", "321"]


@pytest.mark.parametrize("later", ["two", "twofold"])
def test_text_that_changes_after_it_was_returned_is_an_error(later) -> None:
    """A decoder that changes returned text, at the same length or a greater one, is reported by push or finish."""
    texts = {(): "", (1,): "one", (1, 2): later}
    detokenizer = window(lambda ids: texts[tuple(ids)])
    assert detokenizer.push([1]) == "one"
    with pytest.raises(InternalError, match="already returned"):
        print(detokenizer.push([2]) + detokenizer.finish())


def test_the_librarys_own_error_is_not_passed_on() -> None:
    """The message of DecodeStream quotes the text; the error that callers see has neither it nor its chain."""
    tokenizer = make_fast("byte_fallback")
    detokenizer = library("byte_fallback")
    ids = tokenizer.convert_tokens_to_ids(["a", "<0x41>", "<0xFF>", "a"])
    with pytest.raises(InternalError, match="already returned") as refusal:
        print(detokenizer.push(ids) + detokenizer.finish())
    assert refusal.value.__context__ is None
    assert "prefix" not in "".join(traceback.format_exception_only(refusal.value))

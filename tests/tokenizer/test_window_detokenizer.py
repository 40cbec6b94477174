from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcore.errors import InternalError
from pagedcore.tokenizer.window_detokenizer import WindowDetokenizer
from support.text_builders import chunked, law, make_fast, push_all


def decoder(kind: str):
    return lambda ids: make_fast(kind).decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@settings(law, max_examples=40)
@given(st.data())
def test_pushed_text_is_the_one_shot_decoding_for_word_suffixes(data) -> None:
    """A decoder whose last token depends on the next gives its one-shot decoding, window cuts included."""
    decode = decoder("word_suffix")
    ids = sorted(make_fast("word_suffix").get_vocab().values())
    answer = data.draw(st.lists(st.sampled_from(ids), max_size=20)) * data.draw(st.integers(1, 8))
    chunks = data.draw(chunked(answer))
    assert push_all(WindowDetokenizer(decode, ids[:6]), chunks, decode) == decode(answer)


def test_text_streams_instead_of_waiting_for_the_end() -> None:
    """Each word is returned when it is complete, without the space that only a next word would bring."""
    decode, tokenizer = decoder("word_suffix"), make_fast("word_suffix")
    detokenizer = WindowDetokenizer(decode, tokenizer.encode("the dog"))
    answer = tokenizer.encode("the quick fox")
    deltas = [detokenizer.push([token_id]) for token_id in answer]
    assert "".join(deltas) == decode(answer)
    assert detokenizer.finish() == ""


def test_a_replacement_character_waits_for_what_follows() -> None:
    """Bytes that may still become a character are not returned as U+FFFD."""
    decode, tokenizer = decoder("byte_fallback"), make_fast("byte_fallback")
    euro = tokenizer.convert_tokens_to_ids(["<0xE2>", "<0x82>", "<0xAC>", "a"])
    probes = tokenizer.convert_tokens_to_ids(["a", "<0xFF>", "<0x80>"])
    detokenizer = WindowDetokenizer(decode, probes)
    assert [detokenizer.push([token_id]) for token_id in euro] == ["", "", "", "€a"]


def test_the_cost_of_a_push_does_not_grow_with_the_answer() -> None:
    """The tokens decoded by one push stay bounded while text becomes certain."""
    tokenizer, longest = make_fast("word_suffix"), 0

    def decode(ids) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return tokenizer.decode(ids)

    detokenizer = WindowDetokenizer(decode, tokenizer.encode("the dog"))
    for token_id in tokenizer.encode("the quick brown fox") * 100:
        detokenizer.push([token_id])
    assert longest <= 70


def test_without_probes_everything_comes_at_the_end() -> None:
    """For a decoder nothing is known about, nothing is certain before the end."""
    backwards = WindowDetokenizer(lambda ids: "".join(map(str, reversed(ids))), ())
    assert [backwards.push([1]), backwards.push([2, 3]), backwards.finish()] == ["", "", "321"]


def test_text_that_changes_after_it_was_returned_is_an_error() -> None:
    """A decoder that breaks the promise its probes made is reported, never papered over."""
    texts = {(): "", (1,): "one", (1, 0): "one", (1, 2): "two", (1, 2, 0): "twofold"}

    def decode(ids) -> str:
        return texts[tuple(ids)]

    detokenizer = WindowDetokenizer(decode, [0])
    assert detokenizer.push([1]) == "one"
    with pytest.raises(InternalError, match="already returned"):
        WindowDetokenizer.finish(pushed(detokenizer, 2))


def pushed(detokenizer: WindowDetokenizer, token_id: int) -> WindowDetokenizer:
    detokenizer.push([token_id])
    return detokenizer

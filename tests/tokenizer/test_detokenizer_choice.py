from __future__ import annotations

import random

import pytest

from pagedcore.tokenizer.byte_detokenizer import ByteLevelDetokenizer
from pagedcore.tokenizer.detokenizer_choice import choose_detokenizer
from pagedcore.tokenizer.piece_detokenizer import PieceDetokenizer
from pagedcore.tokenizer.stream_detokenizer import StreamDetokenizer, decode_stream, decode_window
from pagedcore.tokenizer.tokenizer import HFTokenizer
from support.text_builders import BUILDERS, make_fast, push_all

EXPECTED = {"byte_level": ByteLevelDetokenizer, "word_suffix": StreamDetokenizer}


@pytest.mark.parametrize("kind", BUILDERS)
def test_each_kind_of_tokenizer_gets_the_fastest_exact_detokenizer(kind) -> None:
    """Byte-level vocabularies get the byte table, known decoders pieces, others a stream."""
    detokenizer = HFTokenizer(make_fast(kind)).new_detokenizer()
    assert type(detokenizer) is EXPECTED.get(kind, PieceDetokenizer)


@pytest.mark.parametrize("kind", BUILDERS)
def test_the_chosen_detokenizer_keeps_the_laws_on_answers_it_was_not_tried_on(kind) -> None:
    """Fresh random answers of all tokens decode incrementally to their one-shot decoding."""
    tokenizer, rng = HFTokenizer(make_fast(kind)), random.Random(7)
    ids = sorted(make_fast(kind).get_vocab().values())
    for length in [*range(30), 150]:
        answer = [rng.choice(ids) for _ in range(length)]
        assert push_all(tokenizer.new_detokenizer(), [[i] for i in answer], tokenizer.decode) == tokenizer.decode(
            answer
        )


def test_a_decoder_that_cannot_stream_is_held_until_the_end() -> None:
    """When no candidate is exact, the answer's text comes at the end, and is right."""

    def backwards(ids) -> str:
        return "".join(chr(97 + i) for i in reversed(ids))

    factory = choose_detokenizer(backwards, {i: chr(97 + i) for i in range(20)})
    assert push_all(factory(), [[1], [2]], backwards) == "cb"


def test_a_vocabulary_that_only_looks_byte_level_is_not_taken_for_one() -> None:
    """ASCII tokens fit the byte alphabet, yet a decoder that joins them by spaces is noticed."""

    def spaced(ids) -> str:
        return " ".join(chr(97 + i) for i in ids)

    factory = choose_detokenizer(spaced, {i: chr(97 + i) for i in range(20)})
    assert push_all(factory(), [[1], [2, 3]], spaced) == "b c d"


def test_the_librarys_stream_serves_where_there_is_a_backend_and_a_window_elsewhere() -> None:
    """Both are exact for word suffixes; the library's is the first choice, and a slow tokenizer streams as well."""
    tokenizer = make_fast("word_suffix")
    vocabulary = {i: token for token, i in tokenizer.get_vocab().items()}
    decode = HFTokenizer(tokenizer).decode
    fast = choose_detokenizer(decode, vocabulary, (), tokenizer.backend_tokenizer)
    slow = choose_detokenizer(decode, vocabulary)
    assert [fast.args[1].func, slow.args[1].func] == [decode_stream, decode_window]


def test_a_backend_that_decodes_differently_is_not_chosen() -> None:
    """A tokenizer with a decoding of its own is served by a window over that decoding."""
    tokenizer = make_fast("word_suffix")
    vocabulary = {i: token for token, i in tokenizer.get_vocab().items()}

    def shouted(ids) -> str:
        return tokenizer.decode(ids).upper()

    factory = choose_detokenizer(shouted, vocabulary, (), tokenizer.backend_tokenizer)
    assert factory.args[1].func is decode_window


def test_the_choice_is_the_same_every_time() -> None:
    """Two starts with one tokenizer try the same completions and choose alike."""
    tokenizer = make_fast("word_suffix")
    vocabulary = {i: token for token, i in tokenizer.get_vocab().items()}

    def choose() -> tuple[list[list[int]], object]:
        asked: list[list[int]] = []

        def decode(ids) -> str:
            asked.append(list(ids))
            return tokenizer.decode(ids)

        return asked, choose_detokenizer(decode, vocabulary).args[1].func

    assert choose() == choose()

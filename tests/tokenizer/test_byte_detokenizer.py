from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagedcore.tokenizer.byte_detokenizer import ByteLevelDetokenizer, byte_table, token_bytes
from support.text_builders import byte_answers, chunked, common_prefix, futures, make_fast, push_all


def as_text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


def byte_tokenizer() -> Tokenizer:
    """All 256 bytes, each its own token, with the id of its value."""
    alphabet = {char: token_bytes(char)[0] for char in pre_tokenizers.ByteLevel.alphabet()}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@given(byte_answers(), st.data())
def test_pushed_text_is_the_one_shot_decoding_however_it_is_split(answer, data) -> None:
    """Any splitting into tokens and any chunking of pushes gives the one-shot decoding, and never retreats."""
    table, token_ids, whole = answer
    chunks = data.draw(chunked(token_ids))
    assert push_all(ByteLevelDetokenizer(table), chunks, lambda ids: as_text(whole)) == as_text(whole)


@given(byte_answers())
def test_exactly_what_every_continuation_keeps_is_returned(answer) -> None:
    """After each token the returned text is the longest that all continuations share: no more and no less."""
    table, token_ids, _ = answer
    detokenizer, text, data = ByteLevelDetokenizer(table), "", b""
    endings = [bytes(future) for future in futures([0x41, 0x80, 0x90, 0xA0, 0xBF], 3)]
    for token_id in token_ids:
        text += detokenizer.push([token_id])
        data += table.get(token_id, b"")
        assert text == common_prefix(as_text(data + ending) for ending in endings)


def test_broken_utf8_decodes_as_tokenizers_does() -> None:
    """Every sequence of up to three boundary bytes gives the replacement characters that tokenizers gives."""
    tokenizer = byte_tokenizer()
    table = {byte: bytes((byte,)) for byte in range(256)}
    bounds = [0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xED, 0xEE, 0xEF,
              0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF]  # fmt: skip
    for data in product(bounds, repeat=3):
        detokenizer = ByteLevelDetokenizer(table)
        text = "".join([*(detokenizer.push([byte]) for byte in data), detokenizer.finish()])
        assert text == tokenizer.decode(list(data)) == as_text(bytes(data))


def test_every_token_of_a_real_vocabulary_has_the_bytes_the_decoder_gives_it() -> None:
    """The byte alphabet is the decoder's own, and entries outside it stand for their own text."""
    decoder = decoders.ByteLevel()
    tokens = [chr(code) for code in range(0x21, 0x200)] + ["two words é", " ", "<|x|>", "ĠĊé", "日", "a日Ġ"]
    for token in tokens:
        assert as_text(token_bytes(token)) == decoder.decode([token])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert {token_bytes(char) for char in alphabet} == {bytes((byte,)) for byte in range(256)}


def test_special_and_unknown_tokens_give_nothing_even_inside_a_character() -> None:
    """A skipped token between the bytes of a character leaves the character whole."""
    table = byte_table({0: "<eos>", 1: "âĤ", 2: "¬"}, skipped_ids={0})
    assert push_all(ByteLevelDetokenizer(table), [[1], [0], [99, -1], [2]], lambda ids: "€") == "€"


def test_a_prompt_that_ends_within_a_character_is_not_completed() -> None:
    """The answer's text is that of the answer's tokens alone: what the prompt left open stays the prompt's."""
    table = byte_table({1: "âĤ", 2: "¬", 3: "a"}, skipped_ids=())
    answer = [2, 3]
    assert push_all(ByteLevelDetokenizer(table), [answer], lambda ids: as_text(b"\xaca")) == "\ufffda"


def test_an_unfinished_character_comes_out_at_the_end_only() -> None:
    """A character without its last byte is held until finish, then replaced."""
    detokenizer = ByteLevelDetokenizer({0: b"a\xf0\x9f", 1: b"\x99"})
    assert [detokenizer.push([0]), detokenizer.push([1]), detokenizer.finish()] == ["a", "", "\ufffd"]


def test_an_encoded_text_comes_back() -> None:
    """Text of many scripts survives encoding and incremental decoding with a trained vocabulary."""
    tokenizer = make_fast("byte_level")
    text = "Größe: 日本語 👩‍👩‍👧 \r\n\t two words é!"
    table = byte_table({i: token for token, i in tokenizer.get_vocab().items()}, {0, 1, 2})
    answer = tokenizer.encode(text)
    assert push_all(ByteLevelDetokenizer(table), [[i] for i in answer], tokenizer.decode) == text

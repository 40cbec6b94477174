from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from pagedcore.errors import InternalError
from pagedcore.tokenizer.piece_detokenizer import PieceDetokenizer, PieceTable, byte_of_token
from support.text_builders import chunked, common_prefix, futures, make_fast, push_all

KINDS = ("byte_fallback", "byte_fallback_unstripped", "word_piece", "unigram", "no_decoder")


class Counted:
    """One-shot decoding that counts its calls."""

    def __init__(self, kind: str) -> None:
        self.tokenizer = make_fast(kind)
        self.vocabulary = {token_id: token for token, token_id in self.tokenizer.get_vocab().items()}
        self.num_calls = 0

    def __call__(self, token_ids) -> str:
        self.num_calls += 1
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def id_of(self, token: str) -> int:
        return self.tokenizer.convert_tokens_to_ids(token)

    def pieces(self) -> PieceTable:
        return PieceTable(self, self.vocabulary, self.id_of("a"))


TABLES = {kind: Counted(kind).pieces() for kind in KINDS}


def answers(kind: str) -> st.SearchStrategy[list[int]]:
    """Random tokens of a vocabulary, mostly bytes, spaces and specials, and ids that no token has."""
    decode = Counted(kind)
    awkward = [i for i, token in decode.vocabulary.items() if len(token) <= 2 or byte_of_token(token) is not None]
    named = [i for token in ("<s>", "</s>", "<think>", "▁", "##s", "[SEP]") if (i := decode.id_of(token)) is not None]
    token_id = st.one_of(st.sampled_from(sorted(decode.vocabulary)), st.sampled_from(awkward), st.just(9999))
    return st.lists(st.one_of(token_id, st.sampled_from(named or awkward)), max_size=12)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_pushed_text_is_the_one_shot_decoding(kind, data) -> None:
    """Any answer in any chunks gives the tokenizer's own one-shot decoding, and never retreats."""
    chunks = data.draw(chunked(data.draw(answers(kind))))
    decode = TABLES[kind].decode
    expected = decode([token_id for chunk in chunks for token_id in chunk])
    assert push_all(PieceDetokenizer(TABLES[kind]), chunks, decode) == expected


@pytest.mark.parametrize("kind", ["byte_fallback", "byte_fallback_unstripped"])
@given(data=st.data())
def test_exactly_what_every_continuation_keeps_is_returned(kind, data) -> None:
    """After each token the returned text is the longest that all continuations by bytes share."""
    table = TABLES[kind]
    bytes_of = [f"<0x{byte:02X}>" for byte in (0x41, 0x80, 0xA9, 0xC3, 0xED, 0xFF)]
    byte_ids = [table.decode.id_of(token) for token in bytes_of]
    other_ids = [table.decode.id_of(token) for token in ("▁", "a", "</s>", "<think>")]
    answer = data.draw(st.lists(st.sampled_from(byte_ids + other_ids), min_size=1, max_size=7))
    detokenizer, text = PieceDetokenizer(table), ""
    for end, token_id in enumerate(answer, 1):
        text += detokenizer.push([token_id])
        seen = answer[:end]
        assert text == common_prefix(table.decode([*seen, *future]) for future in futures(byte_ids, 2))


def test_a_byte_run_that_breaks_late_replaces_its_whole_text() -> None:
    """A newline written as a byte token is returned only when the run of bytes has ended well."""
    decode = Counted("byte_fallback")
    a, newline, ff = (decode.id_of(token) for token in ("a", "<0x0A>", "<0xFF>"))
    well, badly = PieceDetokenizer(decode.pieces()), PieceDetokenizer(decode.pieces())
    assert [well.push([a]), well.push([newline]), well.push([a]), well.finish()] == ["a", "", "\na", ""]
    assert [badly.push([a]), badly.push([newline]), badly.push([ff]), badly.push([ff])] == [
        "a",
        "",
        "\ufffd" * 2,
        "\ufffd",
    ]


def test_the_leading_space_of_the_answer_follows_the_one_shot_decoding() -> None:
    """Only the first text of an answer loses its space, and only if the tokenizer's decoder strips it."""
    for kind, first in (("byte_fallback", ""), ("byte_fallback_unstripped", " ")):
        decode = Counted(kind)
        space, eos = decode.id_of("▁"), decode.id_of("</s>")
        detokenizer = PieceDetokenizer(decode.pieces())
        assert [detokenizer.push([eos]), detokenizer.push([space]), detokenizer.push([space])] == ["", first, " "]


def test_a_special_token_does_not_break_a_byte_run_but_an_added_one_does() -> None:
    """Skipped tokens are dropped before bytes are joined; tokens with text end the run."""
    decode = Counted("byte_fallback")
    lead, trail, eos, think = (decode.id_of(token) for token in ("<0xC3>", "<0xA9>", "</s>", "<think>"))
    assert push_all(PieceDetokenizer(decode.pieces()), [[lead], [eos], [trail]], decode) == "é"
    assert push_all(PieceDetokenizer(decode.pieces()), [[lead], [think], [trail]], decode) == "\ufffd<think>\ufffd"


def test_a_token_without_text_ends_a_byte_run_and_is_no_opening() -> None:
    """An entry that decodes to nothing parts the bytes around it, and the leading space is stripped behind it."""
    vocabulary = ["a", "▁a", "", "<0x41>", "<0xC3>", "<0xA9>"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="a"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    table = PieceTable(tokenizer.decode, dict(enumerate(vocabulary)), 0)
    for answer, text in (([2, 1], "a"), ([2, 2], ""), ([4, 5], "é"), ([4, 2, 5], "\ufffd\ufffd")):
        assert push_all(PieceDetokenizer(table), [[i] for i in answer], tokenizer.decode) == text
        assert tokenizer.decode(answer) == text


def test_the_tokenizer_is_asked_once_per_token_id() -> None:
    """A long answer costs a bounded number of one-shot decodings per distinct token: O(1) per token."""
    decode = Counted("byte_fallback")
    detokenizer = PieceDetokenizer(decode.pieces())
    few = list(decode.vocabulary)[-20:]
    for token_id in few * 50:
        detokenizer.push([token_id])
    assert decode.num_calls <= 3 * len(few) + 5


def test_a_token_that_changes_what_precedes_it_is_refused() -> None:
    """A decoder that is not made of pieces is found out, not misread."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "BACK": 1}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("aBACK", "b")])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    table = PieceTable(tokenizer.decode, {0: "a", 1: "BACK"}, 0)
    with pytest.raises(InternalError, match="token 1"):
        PieceDetokenizer(table).push([1])

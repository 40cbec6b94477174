"""Small real tokenizers of every kind, random byte vocabularies, and plain oracles for text tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import product
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pagedcore.protocols import Detokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "Größe und Straße, naïve café",
    "日本語のテキスト 🙂👩‍👩‍👧 emoji",
    "a b  c   d\n\ttabs and\r\nlines",
    "don't stop . ok , yes ? no !",
] * 8


def byte_level() -> Tokenizer:
    """A byte-level BPE with a special, and a plain added token that holds a space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _train(
        tokenizer,
        trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<eos>", "<|im_start|>", "<|im_end|>"],
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken("two words é", special=False)])
    return tokenizer


def byte_fallback(*, strips: bool = True) -> Tokenizer:
    """A SentencePiece-like BPE with byte fallback; with ``strips`` the answer loses one leading space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    _train(
        tokenizer,
        trainers.BpeTrainer(vocab_size=330, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False),
    )
    state = json.loads(tokenizer.to_str())
    state["model"] |= {"byte_fallback": True, "unk_token": "<unk>"}
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in byte_tokens]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strips else [])])
    return tokenizer


def word_piece() -> Tokenizer:
    """A WordPiece that cleans up the spaces before punctuation."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    _train(tokenizer, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"], show_progress=False))
    return tokenizer


def unigram() -> Tokenizer:
    """A Unigram model with Metaspace."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<unk>", "</s>"]
    _train(
        tokenizer,
        trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False),
    )
    return tokenizer


def word_suffix() -> Tokenizer:
    """A BPE whose words end in ``</w>``: the last token's text depends on whether one follows."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=300, end_of_word_suffix="</w>", special_tokens=["<eos>"], show_progress=False
    )
    _train(tokenizer, trainer)
    return tokenizer


def no_decoder() -> Tokenizer:
    """A Unigram model without a decoder: tokens are joined by spaces."""
    tokenizer = unigram()
    tokenizer.decoder = None
    return tokenizer


def _train(tokenizer: Tokenizer, trainer: Any) -> None:
    tokenizer.train_from_iterator(CORPUS, trainer)


def byte_fallback_unstripped() -> Tokenizer:
    """As ``byte_fallback``, but leading spaces stay."""
    return byte_fallback(strips=False)


BUILDERS = {
    builder.__name__: builder
    for builder in (
        byte_level, byte_fallback, byte_fallback_unstripped, word_piece, unigram, word_suffix, no_decoder
    )
}  # fmt: skip


@cache
def make_fast(kind: str) -> PreTrainedTokenizerFast:
    """One of ``BUILDERS`` as a tokenizer of transformers; shared, do not change it."""
    return PreTrainedTokenizerFast(tokenizer_object=BUILDERS[kind](), eos_token=_EOS.get(kind))


_EOS = {"byte_level": "<eos>", "byte_fallback": "</s>", "byte_fallback_unstripped": "</s>", "unigram": "</s>"}


def random_bytes() -> st.SearchStrategy[bytes]:
    """Bytes with many whole, broken and unfinished UTF-8 characters."""
    whole = st.text(alphabet="aZ ß€🙂\n\ufffd", max_size=4).map(str.encode)
    awkward = [0x41, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC3, 0xE0, 0xE2, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF]
    broken = st.lists(st.sampled_from(awkward), max_size=5).map(bytes)
    return st.lists(st.one_of(whole, broken), max_size=6).map(b"".join)


@st.composite
def byte_answers(draw: Any) -> tuple[dict[int, bytes], list[int], bytes]:
    """A random byte-level vocabulary, an answer of its tokens, and the answer's bytes.

    Tokens are the pieces of a random splitting, so characters and stop strings are cut anywhere; some answers also
    hold ids that give no text.
    """
    data = draw(random_bytes())
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=len(data))))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    table = {index: piece for index, piece in enumerate(dict.fromkeys(pieces)) if piece}
    id_of = {piece: index for index, piece in table.items()}
    special = 10_000
    answer = [id_of.get(piece, special) for piece in pieces]
    return table, answer, data


@st.composite
def chunked(draw: Any, items: Sequence[int]) -> list[list[int]]:
    """Any way of pushing the items: chunks in order, some of them empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(items)), max_size=len(items) + 1)))
    return [list(items[a:b]) for a, b in zip([0, *cuts], [*cuts, len(items)], strict=True)]


def common_prefix(texts: Iterable[str]) -> str:
    """The longest text that all texts start with."""
    low, high = min(texts := list(texts)), max(texts)
    return low[: next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))]


def futures(items: Sequence[Any], longest: int) -> list[tuple[Any, ...]]:
    """Every continuation of at most ``longest`` items, the empty one included."""
    return [future for length in range(longest + 1) for future in product(items, repeat=length)]


def push_all(detokenizer: Detokenizer, chunks: Iterable[Sequence[int]], decode: Callable[[list[int]], str]) -> str:
    """Push the chunks and check after each that what was returned begins the one-shot decoding of all of them."""
    chunks = [list(chunk) for chunk in chunks]
    final = decode([token_id for chunk in chunks for token_id in chunk])
    text = ""
    for chunk in chunks:
        text += detokenizer.push(chunk)
        assert final.startswith(text)
    return text + detokenizer.finish()


def cut_at_stop(text: str, stop: Iterable[str]) -> tuple[str, bool]:
    """The naive definition: the stop string that ends first, the longest if several end there, ends the text."""
    for end in range(1, len(text) + 1):
        ending = [word for word in stop if text[:end].endswith(word)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False

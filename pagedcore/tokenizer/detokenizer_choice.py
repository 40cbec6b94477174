"""Chooses the incremental detokenizer that is exact for a tokenizer, by comparing with its one-shot decoding.

The candidates, fastest first: byte table, pieces, ``DecodeStream``, a window in Python. If none of them is exact, all
text is returned at the end. The names and classes of tokenizers play no part.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from pagedcore.errors import InternalError
from pagedcore.protocols import Detokenizer
from pagedcore.tokenizer.byte_detokenizer import ByteLevelDetokenizer, Decode, byte_table
from pagedcore.tokenizer.piece_detokenizer import PieceDetokenizer, PieceTable, byte_of_token
from pagedcore.tokenizer.stream_detokenizer import StreamDetokenizer, decode_at_end, decode_stream, decode_window

AnyDetokenizer = ByteLevelDetokenizer | PieceDetokenizer | StreamDetokenizer
DetokenizerFactory = Callable[[], AnyDetokenizer]

_MAX_ADDED: Final = 256
"""Most added tokens that are tried; some models have thousands of reserved ones."""


def choose_detokenizer(
    decode: Decode, vocabulary: Mapping[int, str], added_ids: Sequence[int] = (), backend: Any = None
) -> DetokenizerFactory:
    """Return the fastest kind of detokenizer that decodes some hundred random completions exactly.

    Args:
        decode: the tokenizer's one-shot decoding, special tokens left out.
        vocabulary: token id to token, added tokens included.
        added_ids: ids of special and other added tokens.
        backend: the ``tokenizers.Tokenizer`` behind it, if there is one.
    """
    # Why: what depends on its neighbours is short: single bytes and characters, byte fallbacks, and added tokens.
    short = [token_id for token_id, token in vocabulary.items() if len(token) <= 2 or byte_of_token(token) is not None]
    ids = list(vocabulary)
    # Why: a fixed seed, so that two starts with one tokenizer choose alike.
    rng = random.Random(len(vocabulary))
    samples = list(_random_completions(rng, ids, [*short, *added_ids[:_MAX_ADDED]] or ids))
    expected = [decode(sample) for sample in samples]
    for factory in _candidates(decode, vocabulary, added_ids, backend):
        if all(_decode_stepwise(factory(), sample) == text for sample, text in zip(samples, expected, strict=True)):
            return factory
    return partial(StreamDetokenizer, decode, decode_at_end)


def _candidates(
    decode: Decode, vocabulary: Mapping[int, str], added_ids: Sequence[int], backend: Any
) -> Iterator[DetokenizerFactory]:
    skipped = {token_id for token_id in added_ids if not decode([token_id])}
    yield partial(ByteLevelDetokenizer, byte_table(vocabulary, skipped))
    anchors = (token_id for token_id, token in vocabulary.items() if token.isalpha() and token_id not in added_ids)
    anchor_id = next(anchors, None)
    if anchor_id is not None:
        yield partial(PieceDetokenizer, PieceTable(decode, vocabulary, anchor_id))
    if backend is not None:
        yield partial(StreamDetokenizer, decode, partial(decode_stream, backend))
    yield partial(StreamDetokenizer, decode, partial(decode_window, decode))


def _random_completions(rng: random.Random, ids: list[int], awkward: list[int]) -> Iterator[list[int]]:
    lengths = [rng.randint(1, 12) for _ in range(384)] + [160] * 4
    for length in lengths if ids else ():
        share = rng.choice((0.0, 0.3, 0.7, 1.0))
        yield [rng.choice(awkward if rng.random() < share else ids) for _ in range(length)]


def _decode_stepwise(detokenizer: Detokenizer, token_ids: list[int]) -> str | None:
    """Decode a completion token by token; ``None`` if the detokenizer finds that it is not exact."""
    try:
        return "".join([*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.finish()])
    except InternalError:
        return None

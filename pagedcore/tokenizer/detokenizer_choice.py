"""Decides which incremental detokenizer is exact for a tokenizer, by trying them against its one-shot decoding.

The candidates, fastest first: byte table, pieces, window, and at last a window that returns everything at the end.
It never trusts a name or a class: a tokenizer is what it decodes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from pagedcore.errors import InternalError
from pagedcore.protocols import Detokenizer
from pagedcore.tokenizer.byte_detokenizer import ByteLevelDetokenizer, Decode, byte_table
from pagedcore.tokenizer.piece_detokenizer import PieceDetokenizer, PieceTable, byte_of_token
from pagedcore.tokenizer.window_detokenizer import WindowDetokenizer

AnyDetokenizer = ByteLevelDetokenizer | PieceDetokenizer | WindowDetokenizer
DetokenizerFactory = Callable[[], AnyDetokenizer]

_NUM_SHORT: Final = 384
_SHORT: Final = 12
_NUM_LONG: Final = 4
#: Longer than a window, so that its cut is tried as well.
_LONG: Final = 160
_NUM_PROBES: Final = 6
#: Most added tokens that are tried; some models have thousands of reserved ones.
_MAX_ADDED: Final = 256


def choose_detokenizer(
    decode: Decode, vocabulary: Mapping[int, str], added_ids: Sequence[int] = ()
) -> DetokenizerFactory:
    """Return the fastest kind of detokenizer that decodes some hundred random answers exactly.

    Args:
        decode: the tokenizer's one-shot decoding, special tokens left out.
        vocabulary: token id to token, added tokens included.
        added_ids: ids of special and other added tokens.
    """
    # Why: a fixed seed; two starts with one tokenizer must not choose differently.
    rng = random.Random(len(vocabulary))
    awkward = _awkward_ids(vocabulary, added_ids)
    answers = list(_random_answers(rng, list(vocabulary), awkward))
    expected = [decode(answer) for answer in answers]
    for factory in _candidates(rng, decode, vocabulary, added_ids, awkward):
        if _is_exact(factory, answers, expected):
            return factory
    return partial(WindowDetokenizer, decode, ())


def _candidates(
    rng: random.Random, decode: Decode, vocabulary: Mapping[int, str], added_ids: Sequence[int], awkward: list[int]
) -> Iterator[DetokenizerFactory]:
    skipped = {token_id for token_id in added_ids if not decode([token_id])}
    yield partial(ByteLevelDetokenizer, byte_table(vocabulary, skipped))
    anchors = (token_id for token_id, token in vocabulary.items() if token.isalpha() and token_id not in added_ids)
    anchor_id = next(anchors, None)
    if anchor_id is not None:
        yield partial(PieceDetokenizer, PieceTable(decode, vocabulary, anchor_id))
    ids = list(vocabulary)
    probes = rng.sample(ids, min(_NUM_PROBES, len(ids))) + rng.sample(awkward, min(_NUM_PROBES, len(awkward)))
    yield partial(WindowDetokenizer, decode, tuple(dict.fromkeys(probes)))


def _awkward_ids(vocabulary: Mapping[int, str], added_ids: Sequence[int]) -> list[int]:
    """Ids of tokens that meet their neighbours: single bytes and characters, byte fallbacks, and added tokens."""
    short = [token_id for token_id, token in vocabulary.items() if len(token) <= 2 or byte_of_token(token) is not None]
    return [*short, *added_ids[:_MAX_ADDED]] or list(vocabulary)


def _random_answers(rng: random.Random, ids: list[int], awkward: list[int]) -> Iterator[list[int]]:
    lengths = [rng.randint(1, _SHORT) for _ in range(_NUM_SHORT)] + [_LONG] * _NUM_LONG
    for length in lengths if ids else ():
        share = rng.choice((0.0, 0.3, 0.7, 1.0))
        yield [rng.choice(awkward if rng.random() < share else ids) for _ in range(length)]


def _is_exact(factory: DetokenizerFactory, answers: list[list[int]], expected: list[str]) -> bool:
    try:
        return all(_decode_stepwise(factory(), answer) == text for answer, text in zip(answers, expected, strict=True))
    except InternalError:
        return False


def _decode_stepwise(detokenizer: Detokenizer, answer: list[int]) -> str:
    return "".join([*(detokenizer.push([token_id]) for token_id in answer), detokenizer.finish()])

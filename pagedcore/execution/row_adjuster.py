"""What a request's parameters do to its row of logits before a token is drawn: bias, penalties, masks.

It touches the few tokens that they concern. Nothing here keeps what could not be counted again from the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedcore.execution.sequence_ahead import SequenceAhead, origin
from pagedcore.protocols import FloatArray, Int64Array
from pagedcore.sequence import Sequence

LARGEST_FINITE: Final = float(np.finfo(np.float32).max)


def bars_tokens(sequence: Sequence | SequenceAhead) -> bool:
    """Whether tokens may not come next because of what they are."""
    params = sequence.params
    if params.suppress_tokens:
        return True
    if not (params.min_tokens or params.begin_suppress_tokens):
        return False
    num_tokens = sequence.num_output_tokens
    return num_tokens < params.min_tokens or (num_tokens == 0 and bool(params.begin_suppress_tokens))


def barred_of(sequence: Sequence | SequenceAhead) -> set[int]:
    """Return those tokens: ends before the minimum length, and what the request suppresses."""
    params, num_tokens = sequence.params, sequence.num_output_tokens
    ends = sequence.stop_token_ids if num_tokens < params.min_tokens else ()
    return {*ends, *params.suppress_tokens, *(() if num_tokens else params.begin_suppress_tokens)}


class RowEdits(NamedTuple):
    """What is to be done to one row of logits, part after part; each touches the tokens that it names and no others.

    Logits that are NaN or plus infinity stay as they are.
    """

    biased: Int64Array
    bias: FloatArray
    """Added to the logits of ``biased``, each once, in float32."""
    seen: Int64Array
    """Tokens, each once, whose logits are divided by ``penalty`` if they are positive and multiplied if not, in
    float64, and lose ``taken_off``; finite ones stay within what float32 has."""
    penalty: float
    taken_off: npt.NDArray[np.float64]
    others: npt.NDArray[np.bool_] | None
    """Of shape [vocab_size], tokens that may not come; ``None``: all may."""
    barred: Int64Array
    """Further tokens that may not come, some perhaps twice."""
    forced: Int64Array | None
    """If there are any, only these may come, equally likely, whatever was said of them before."""


_NO_TOKENS: Final = np.empty(0, np.int64)
_NOTHING: Final = np.empty(0)


class RowAdjuster:
    """What one turn of one sequence does to its logits before they are sampled: bias, penalties, masks.

    Values that are NaN or plus infinity are left as they are, so that a broken row stays recognisable, and no finite
    logit becomes infinite except by the mask.

    Invariant: the tokens counted are the first ones of the sequence, and token ids are only ever appended.
    """

    __slots__ = ("_bad_words", "_bias", "_num_prompt_tokens", "_num_tokens", "_others", "_params", "_runs", "_seen",
                 "_sequence", "_vocab_size")

    def __init__(self, sequence: Sequence | SequenceAhead, vocab_size: int) -> None:
        params = sequence.params
        self._sequence, self._params, self._num_prompt_tokens = origin(sequence), params, sequence.num_prompt_tokens
        self._num_tokens = 0
        bias = params.logit_bias or {}
        self._bias = np.fromiter(bias.keys(), np.int64), np.fromiter(bias.values(), np.float32)
        self._vocab_size = vocab_size
        self._runs = _Runs(params.no_repeat_ngram_size) if params.no_repeat_ngram_size else None
        self._bad_words = _BadWords(params.bad_words_ids) if params.bad_words_ids else None
        self._others = None
        if params.allowed_token_ids is not None:
            self._others = np.ones(vocab_size, np.bool_)
            self._others[list(params.allowed_token_ids)] = False
        is_penalised = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        self._seen = _SeenTokens(sequence) if is_penalised else None

    def is_for(self, sequence: Sequence | SequenceAhead) -> bool:
        """Whether this is still the turn it was made for, with no fewer tokens than were counted."""
        return (
            self._sequence is origin(sequence)
            and self._params is sequence.params
            and self._num_prompt_tokens == sequence.num_prompt_tokens
            and self._num_tokens <= len(sequence.token_ids)
        )

    def edits(self, sequence: Sequence | SequenceAhead) -> RowEdits:
        """Return what is done to the row that follows the tokens of the sequence that it is for."""
        params, self._num_tokens = self._params, len(sequence.token_ids)
        seen, taken_off = _NO_TOKENS, _NOTHING
        if self._seen is not None:
            seen, counts = self._seen.count(sequence)
            taken_off = params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
        barred = [part.barred_after(sequence) for part in (self._bad_words, self._runs) if part is not None]
        if bars_tokens(sequence):
            known = [token_id for token_id in barred_of(sequence) if token_id < self._vocab_size]
            barred.append(np.array(known, np.int64))
        forced = None
        if params.forced_eos_token_id is not None and sequence.num_output_tokens == sequence.max_tokens - 1:
            forced = np.array(params.forced_eos_token_id, np.int64)
        return RowEdits(
            *self._bias, seen, params.repetition_penalty, taken_off, self._others,
            np.concatenate(barred) if barred else _NO_TOKENS, forced,
        )

    def adjust(self, row: FloatArray, sequence: Sequence | SequenceAhead) -> None:
        """Change the row [vocab_size] in place that follows the tokens of the sequence that it is for."""
        edits = self.edits(sequence)
        if len(edits.biased):
            row[edits.biased] += edits.bias
        if len(edits.seen):
            _penalise(row, edits)
        if edits.others is not None:
            bar(row, edits.others)
        if len(edits.barred):
            bar(row, edits.barred)
        if edits.forced is not None:
            _force(row, edits.forced)


def _penalise(row: FloatArray, edits: RowEdits) -> None:
    logits, penalty = row[edits.seen], edits.penalty
    # Why: float64 holds any quotient of a float32 and a normal penalty; what does not fit is clipped below.
    penalised = logits.astype(np.float64)
    if penalty != 1.0:
        with np.errstate(over="ignore", invalid="ignore"):
            penalised = np.where(penalised > 0, penalised / penalty, penalised * penalty)
    penalised -= edits.taken_off
    # Why not ``np.clip``, which takes twice as long for few tokens.
    penalised = np.minimum(np.maximum(penalised, -LARGEST_FINITE), LARGEST_FINITE)
    row[edits.seen] = np.where(np.isfinite(logits), penalised, logits)


def bar(row: FloatArray, places: npt.NDArray[Any]) -> None:
    """Mask tokens of a row in place."""
    logits = row[places]
    row[places] = np.where(logits < np.inf, -np.inf, logits)


def _force(row: FloatArray, places: Int64Array) -> None:
    """Leave these tokens alone, equally likely, as transformers does."""
    logits = row[places]
    bar(row, np.arange(len(row)))
    row[places] = np.where(logits < np.inf, np.float32(0.0), logits)


class _Runs:
    """The runs of so many tokens in a sequence, prompt included: which tokens would repeat one."""

    __slots__ = ("_followers", "_num_before", "_num_read")

    def __init__(self, size: int) -> None:
        self._num_before = self._num_read = size - 1
        self._followers: dict[tuple[int, ...], list[int]] = {}

    def barred_after(self, sequence: Sequence | SequenceAhead) -> Int64Array:
        """Read what was appended; return the tokens that have followed the last ones before."""
        tokens, num_before = sequence.token_ids, self._num_before
        for place in range(self._num_read, len(tokens)):
            before = tuple(tokens[place - num_before : place])
            self._followers.setdefault(before, []).append(tokens[place])
        self._num_read = max(self._num_read, len(tokens))
        last = tuple(tokens[len(tokens) - num_before :])
        return np.array(self._followers.get(last, ()), np.int64)


class _BadWords:
    """Sequences of tokens that may not come: which tokens would complete one."""

    __slots__ = ("_by_last", "_single")

    def __init__(self, sequences: ListOf[tuple[int, ...]]) -> None:
        self._single = np.array([one[0] for one in sequences if len(one) == 1], np.int64)
        self._by_last: dict[int, list[tuple[int, ...]]] = {}
        for one in sequences:
            if len(one) > 1:
                self._by_last.setdefault(one[-2], []).append(one)

    def barred_after(self, sequence: Sequence | SequenceAhead) -> Int64Array:
        """Return the tokens that may not follow the completion of a sequence."""
        tokens = sequence.token_ids
        begun = self._by_last.get(tokens[-1], ()) if sequence.num_output_tokens else ()
        ends = [one[-1] for one in begun if len(one) <= sequence.num_output_tokens + 1
                and tuple(tokens[1 - len(one) :]) == one[:-1]]
        return np.concatenate((self._single, np.array(ends, np.int64))) if ends else self._single


class _SeenTokens:
    """The distinct tokens of a sequence and how often its completion has each, updated as it grows."""

    __slots__ = ("_counts", "_num_counted", "_places", "_token_ids")

    def __init__(self, sequence: Sequence | SequenceAhead) -> None:
        distinct, places = np.unique(np.array(sequence.token_ids, np.int64), return_inverse=True)
        generated = places[sequence.num_prompt_tokens :]
        self._token_ids = distinct
        self._counts = np.bincount(generated, minlength=len(distinct))
        self._places = {token_id: place for place, token_id in enumerate(distinct.tolist())}
        self._num_counted = len(sequence.token_ids)

    def count(self, sequence: Sequence | SequenceAhead) -> tuple[Int64Array, Int64Array]:
        """Count what was appended; return [D] distinct token ids and [D] how often the completion has them."""
        for token_id in sequence.token_ids[self._num_counted :]:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._token_ids):
                room = np.zeros(place, np.int64)
                self._token_ids = np.concatenate((self._token_ids, room))
                self._counts = np.concatenate((self._counts, room))
            self._token_ids[place] = token_id
            self._counts[place] += 1
        self._num_counted = len(sequence.token_ids)
        return self._token_ids[: len(self._places)], self._counts[: len(self._places)]

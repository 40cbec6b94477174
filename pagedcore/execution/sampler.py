"""From logits to tokens: what each request's parameters do to its row, in the field's order, and the draw itself.

Once a step, after the model: a request's own code changes its row (``logits_processor``), biases, penalties and masks
touch the few tokens they concern (``RowAdjuster``), the rest happens in ``pagedcore_kernels/cpu/sampling``, which says
how temperature, top-k, top-p and min-p choose.
Nothing here changes a sequence or keeps what could not be computed again from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from pagedcore.errors import ProcessorFailed, StepFailed
from pagedcore.execution.logits_processor import process_row
from pagedcore.outputs import TokenLogprobs
from pagedcore.protocols import FloatArray, Int64Array, MaskRows
from pagedcore.scheduler.plan import ScheduledRow
from pagedcore.sequence import Sequence
from pagedcore_kernels.cpu.runtime.float_state import use_default_floats
from pagedcore_kernels.cpu.sampling.samplers import (
    GreedyPicker,
    LogitWidener,
    LogprobReporter,
    TokenSampler,
    sampling_rows,
)

_LARGEST_FINITE: Final = float(np.finfo(np.float32).max)
_INFINITY, _MINUS_INFINITY = np.int16(0x7F80), np.int16(0x7F80 - 2**15)
"""Infinities in bfloat16; what has a larger magnitude is NaN."""
Int16Array = npt.NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The next token of each row, in the order of the rows."""

    token_ids: Int64Array
    """Shape [S]; -1 where the model returned NaN, plus infinity or nothing finite, or a mask left nothing."""
    logprobs: list[TokenLogprobs | None]
    """One entry per row; ``None`` where none were requested or there is no token."""
    prompts: Mapping[int, list[TokenLogprobs] | None] = field(default_factory=dict)
    """Log-probabilities of prompts that are reported, by sequence id; ``None`` where a row of logits is not valid."""
    hidden: Mapping[int, FloatArray] = field(default_factory=dict)
    """Hidden states of ``hidden_positions`` by sequence id, float32 [positions, hidden_size]; of sequences that have
    some."""
    failures: Mapping[int, Exception] = field(default_factory=dict)
    """Why a row of the step could not be computed, by sequence id; if it was to be sampled, its token is -1."""


class Sampler:
    """Chooses the next token of every sequence of a step.

    A row's token is a function of its logits, its sequence's parameters, tokens and seed, and the position alone.

    Invariant: an adjuster is kept from a step to the next only for the very sequence, turn and parameters it is for.
    """

    def __init__(self, vocab_size: int, mask_rows: MaskRows | None = None) -> None:
        """Sample from a vocabulary; ``mask_rows`` is used if a sequence has a constraint."""
        self._vocab_size, self._mask_rows = vocab_size, mask_rows
        self._pick_greedily = GreedyPicker(vocab_size)
        self._sample = TokenSampler(vocab_size)
        self._report = LogprobReporter(vocab_size)
        self._adjusters: dict[int, RowAdjuster] = {}
        self._widen = LogitWidener(vocab_size)

    def sample(self, logits: FloatArray | torch.Tensor, sequences: ListOf[Sequence]) -> SampledTokens:
        """Choose one token per row.

        Args:
            logits: float32 or bfloat16 [S, vocab_size] on the CPU; may be overwritten.
            sequences: [S]; row ``i`` is the distribution of what follows ``sequences[i].token_ids``.
        """
        if isinstance(logits, torch.Tensor) and logits.dtype == torch.bfloat16 and self.wants_largest(sequences):
            # Why: float32 would be twice as many bytes, written to be read once.
            self.forget()
            bits = _bits(logits)
            _mask(bits, self.barred_tokens(sequences))
            return SampledTokens(self._pick_greedily(bits), [None] * len(sequences))
        rows = self._as_array(logits)
        wanted = {i: count for i, one in enumerate(sequences) if (count := one.num_logprobs) is not None}
        kept = {i: _read_only(rows[i]) for i in wanted if sequences[i].params.return_logits}
        drawable = {i: wanted.pop(i) for i in tuple(wanted) if sequences[i].params.logprobs_mode == "processed"}
        reports = self._make_reports(rows, wanted)
        for i in kept.keys() & reports.keys():
            reports[i].raw = kept[i]
        failures = self._adjust(rows, sequences, reports)
        token_ids = self._choose(rows, sequences, list(drawable))
        reports.update(self._make_reports(rows, drawable))
        logprobs: list[TokenLogprobs | None] = [None] * len(sequences)
        for i, report in reports.items():
            if token_ids[i] >= 0:
                logprobs[i] = report.describe(int(token_ids[i]), rows[i], kept.get(i))
        return SampledTokens(token_ids, logprobs, failures=failures)

    @staticmethod
    def wants_largest(sequences: ListOf[Sequence]) -> bool:
        """Whether all that is wanted of each row is its most likely token, of those that may come yet."""
        return all(map(_is_plainly_greedy, sequences))

    def barred_tokens(self, sequences: ListOf[Sequence]) -> Int64Array:
        """Return the tokens that may not come, or not yet, whatever their logits: [B, 2] rows and ids."""
        places = [(i, token_id) for i, one in enumerate(sequences) if _bars_tokens(one)
                  for token_id in _barred(one) if token_id < self._vocab_size]  # fmt: skip
        return np.array(places, np.int64).reshape(-1, 2)

    def take(self, token_ids: Int64Array, count: int) -> SampledTokens:
        """Return tokens [count] that were chosen for rows which ``wants_largest``; -1 for rows that are not valid.

        Raises:
            StepFailed: they are not tokens of so many rows.
        """
        _require_token_ids(token_ids, count, self._vocab_size)
        self.forget()
        return SampledTokens(token_ids, [None] * count)

    def forget(self) -> None:
        """Forget the adjusters; they are made again from their sequences."""
        self._adjusters = {}

    def score(
        self, logits: FloatArray | torch.Tensor, rows: ListOf[ScheduledRow]
    ) -> tuple[dict[int, list[TokenLogprobs] | None], dict[int, Exception]]:
        """Compute the log-probabilities of prompt tokens, each after those before it: the model's own, or those of what
        the token would have been drawn from in the turn that the sequence is ``scored_as``.

        Memory: the planner bounds the positions that are scored in a step, so that their logits stay within some tens
        of megabytes however large the vocabulary is. A prompt that is reported is computed in shorter chunks for it.

        Args:
            logits: float32 or bfloat16 [P, vocab_size] on the CPU, of the ``scored_positions`` of all rows one after
                the other; may be overwritten.
            rows: those that have any.

        Returns:
            The entries of each sequence by its id, ``None`` where a row of its logits is not valid; and why a sequence
            could not be scored.
        """
        array, place = self._as_array(logits), 0
        positions, impossible = list[tuple[Sequence, int]](), set[int]()
        failures = dict[int, Exception]()
        for row in rows:
            positions += [(row.sequence, position) for position in row.scored_positions]
            if row.sequence.scored_as is not None:
                num_drawn, error = self._draw_again(array[place : len(positions)], row.sequence.scored_as, row)
                impossible.update(range(place + num_drawn, len(positions)))
                if error is not None:
                    failures[row.sequence.sequence_id] = error
            place = len(positions)
        counts = {i: one.params.prompt_logprobs or 0 for i, (one, _) in enumerate(positions)}
        reports, scores = self._make_reports(array, counts), dict[int, list[TokenLogprobs] | None]()
        for i, (sequence, position) in enumerate(positions):
            token_id = sequence.token_ids[position + 1]
            scored = reports[i].describe(token_id, array[i]) if i not in impossible else TokenLogprobs(
                token_id, -math.inf)
            known = scores.setdefault(sequence.sequence_id, [])
            if math.isnan(scored.logprob):
                scores[sequence.sequence_id] = None
            elif known is not None:
                known.append(scored)
        return scores, failures

    def _draw_again(self, rows: FloatArray, turn: Sequence, scored: ScheduledRow) -> tuple[int, Exception | None]:
        """Leave in rows [P, vocab_size] what the tokens behind the ``scored_positions`` would have been drawn from.

        Returns:
            How many positions could have been reached: behind a token that the grammar of the turn refuses, none. And
            the error of the turn's processor.
        """
        token_ids, positions = scored.sequence.token_ids, scored.scored_positions
        turn = turn.branch(turn.sequence_id, seed=turn.seed)
        adjuster, count = RowAdjuster(turn, self._vocab_size), len(rows)
        for place, position in enumerate(positions):
            turn.token_ids.extend(token_ids[len(turn.token_ids) : position + 1])
            if turn.is_adjusted or _bars_tokens(turn):
                if (failure := _adjust_row(rows[place], turn, adjuster)) is not None:
                    return place, failure
                if turn.constraint is not None and self._mask(rows[place : place + 1], [(0, turn)]):
                    count = place
                    break
        if count:
            self._choose(rows[:count], [turn] * count, list(range(count)))
        return count, None

    def _as_array(self, logits: FloatArray | torch.Tensor) -> FloatArray:
        """Return them in float32, to be written; the next call may write over what this one returned."""
        if isinstance(logits, np.ndarray):
            array: Any = logits
        elif logits.dtype == torch.bfloat16:
            return self._widen(_bits(logits))
        else:
            array = logits.detach().numpy()
        return np.require(array, np.float32, ["C", "W"])

    def _choose(self, rows: FloatArray, sequences: ListOf[Sequence], drawable: list[int]) -> Int64Array:
        """Choose a token of each row; leave in the ``drawable`` ones what was drawn from."""
        params = [sequence.params for sequence in sequences]
        temperatures = [one.temperature for one in params]
        if not any(temperatures):
            return self._pick_greedily(rows)
        seeds, positions = [one.seed for one in sequences], [len(one.token_ids) for one in sequences]
        top_k, top_p, min_p = zip(*[(one.top_k, one.top_p, one.min_p) for one in params], strict=True)
        draws = sampling_rows(temperatures, top_k, top_p, min_p, seeds, positions)
        draws["leaves_drawable"][drawable] = True
        return self._sample(rows, draws)

    def _adjust(
        self, rows: FloatArray, sequences: ListOf[Sequence], reports: dict[int, _Report]
    ) -> dict[int, Exception]:
        """Change the rows in place; return why a sequence cannot be sampled, by its id."""
        adjusters, constrained = dict[int, RowAdjuster](), list[tuple[int, Sequence]]()
        failures = dict[int, Exception]()
        for i, sequence in enumerate(sequences):
            if not (sequence.is_adjusted or _bars_tokens(sequence)):
                continue
            adjuster = self._adjusters.get(sequence.sequence_id)
            if adjuster is None or not adjuster.is_for(sequence):
                adjuster = RowAdjuster(sequence, self._vocab_size)
            adjusters[sequence.sequence_id] = adjuster
            if i in reports and reports[i].raw is None:
                reports[i].raw = rows[i].copy()
            if (failure := _adjust_row(rows[i], sequence, adjuster)) is not None:
                failures[sequence.sequence_id] = failure
            if sequence.constraint is not None:
                constrained.append((i, sequence))
        # Why: a sequence outside this step may never come back; if it does, its tokens are counted again.
        self._adjusters = adjusters
        if not constrained:
            return failures
        masked = self._mask(rows, constrained)
        return {sequences[i].sequence_id: error for i, error in masked.items()} | failures

    def _mask(self, rows: FloatArray, constrained: ListOf[tuple[int, Sequence]]) -> dict[int, Exception]:
        """Mask rows by the constraints of their sequences. As ``MaskRows``."""
        assert self._mask_rows is not None  # Invariant: an engine that compiles constraints gives it
        return self._mask_rows(rows, [(i, one.constraint, one.output_token_ids) for i, one in constrained
                                      if one.constraint is not None])

    def _make_reports(self, rows: FloatArray, wanted: dict[int, int]) -> dict[int, _Report]:
        if not wanted:
            return {}
        normalisers, ids, values = self._report(rows, np.fromiter(wanted, np.int64), max(wanted.values()))
        return {
            i: _Report(float(normalisers[place]), ids[place, :count], values[place, :count])
            for place, (i, count) in enumerate(wanted.items())
        }


def _require_token_ids(token_ids: object, count: int, vocab_size: int) -> None:
    # Why: users bring their own models.
    wanted = f"expected int64 token ids of shape ({count},), each from -1 to {vocab_size - 1}"
    if not isinstance(token_ids, np.ndarray):
        raise StepFailed(f"model: forward_greedily returned a {type(token_ids).__name__}, {wanted}")
    if token_ids.shape != (count,) or token_ids.dtype != np.int64:
        raise StepFailed(f"model: forward_greedily returned {token_ids.dtype} of shape {token_ids.shape}, {wanted}")
    if count and not -1 <= token_ids.min() <= token_ids.max() < vocab_size:
        raise StepFailed(f"model: forward_greedily returned ids from {token_ids.min()} to {token_ids.max()}, {wanted}")


def _adjust_row(row: FloatArray, sequence: Sequence, adjuster: RowAdjuster) -> ProcessorFailed | None:
    """Change a row by the code and the parameters of its request; return why that code failed, if it did."""
    failure = None
    if (process := sequence.params.logits_processor) is not None:
        failure = process_row(process, row, sequence.output_token_ids)
        # Why: it is code of the host's, and other rows come after it.
        use_default_floats()
    adjuster.adjust(row)
    return failure


def _read_only(row: FloatArray) -> FloatArray:
    copied = row.copy()
    copied.setflags(write=False)
    return copied


def _bits(logits: torch.Tensor) -> Int16Array:
    bits: Int16Array = logits.detach().contiguous().view(torch.int16).numpy()
    return bits


def _is_plainly_greedy(sequence: Sequence) -> bool:
    """Whether all that is wanted of a row is its most likely token, of those that may come yet."""
    return not sequence.params.temperature and sequence.num_logprobs is None and not sequence.is_adjusted


def _mask(bits: Int16Array, barred: Int64Array) -> None:
    """Mask tokens in rows of bfloat16, as ``RowAdjuster`` does in float32."""
    if len(barred):
        rows, columns = barred.T
        logits = bits[rows, columns]
        is_broken = (logits == _INFINITY) | (logits & 0x7FFF > _INFINITY)
        bits[rows, columns] = np.where(is_broken, logits, _MINUS_INFINITY)


def _bars_tokens(sequence: Sequence) -> bool:
    """Whether tokens may not come next because of what they are."""
    params = sequence.params
    if params.suppress_tokens:
        return True
    if not (params.min_tokens or params.begin_suppress_tokens):
        return False
    num_tokens = sequence.num_output_tokens
    return num_tokens < params.min_tokens or (num_tokens == 0 and bool(params.begin_suppress_tokens))


def _barred(sequence: Sequence) -> set[int]:
    """Return those tokens: ends before the minimum length, and what the request suppresses."""
    params, num_tokens = sequence.params, sequence.num_output_tokens
    ends = sequence.stop_token_ids if num_tokens < params.min_tokens else ()
    return {*ends, *params.suppress_tokens, *(() if num_tokens else params.begin_suppress_tokens)}


@dataclass(slots=True)
class _Report:
    """Log-probabilities of one row, as it was when this was made."""

    normaliser: float
    ids: Int64Array
    values: FloatArray
    raw: FloatArray | None = None
    """A copy of a row that is adjusted afterwards."""

    def describe(self, token_id: int, row: FloatArray, kept: FloatArray | None = None) -> TokenLogprobs:
        """Return the log-probabilities of the chosen token and of the best ones; ``row`` is used if not adjusted.

        ``kept`` is what a request gets that wants the model's logits.
        """
        logit = float((row if self.raw is None else self.raw)[token_id])
        best = [(int(i), float(value) - self.normaliser) for i, value in zip(self.ids, self.values, strict=True)]
        top = tuple(pair for pair in best if pair[0] >= 0)
        return TokenLogprobs(token_id, logit - self.normaliser, top, kept)


class RowAdjuster:
    """What one turn of one sequence does to its logits before they are sampled: bias, penalties, masks.

    Values that are NaN or plus infinity are left as they are, so that a broken row stays recognisable, and no finite
    logit becomes infinite except by the mask.

    Invariant: the tokens counted are the first ones of the sequence, and token ids are only ever appended.
    """

    __slots__ = ("_bad_words", "_bias", "_num_prompt_tokens", "_others", "_params", "_runs", "_seen", "_sequence",
                 "_vocab_size")

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        params = sequence.params
        self._sequence, self._params, self._num_prompt_tokens = sequence, params, sequence.num_prompt_tokens
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

    def is_for(self, sequence: Sequence) -> bool:
        """Whether this is still the turn it was made for."""
        return (
            self._sequence is sequence
            and self._params is sequence.params
            and self._num_prompt_tokens == sequence.num_prompt_tokens
        )

    def adjust(self, row: FloatArray) -> None:
        """Change the row [vocab_size] in place."""
        token_ids, bias = self._bias
        if len(token_ids):
            row[token_ids] += bias
        if self._seen is not None:
            self._penalise(row, self._seen)
        if self._others is not None:
            _bar(row, self._others)
        if self._bad_words is not None:
            _bar(row, self._bad_words.barred_after(self._sequence))
        if self._runs is not None:
            _bar(row, self._runs.barred_after(self._sequence))
        if _bars_tokens(self._sequence):
            known = [token_id for token_id in _barred(self._sequence) if token_id < self._vocab_size]
            _bar(row, np.array(known, np.int64))
        forced, sequence = self._params.forced_eos_token_id, self._sequence
        if forced is not None and sequence.num_output_tokens == sequence.max_tokens - 1:
            _force(row, np.array(forced, np.int64))

    def _penalise(self, row: FloatArray, seen: _SeenTokens) -> None:
        token_ids, counts = seen.count(self._sequence)
        params, logits = self._params, row[token_ids]
        # Why: float64 holds any quotient of a float32 and a normal penalty; what does not fit is clipped below.
        penalised = logits.astype(np.float64)
        if (penalty := params.repetition_penalty) != 1.0:
            with np.errstate(over="ignore", invalid="ignore"):
                penalised = np.where(penalised > 0, penalised / penalty, penalised * penalty)
        penalised -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
        row[token_ids] = np.where(np.isfinite(logits), np.clip(penalised, -_LARGEST_FINITE, _LARGEST_FINITE), logits)


def _bar(row: FloatArray, places: npt.NDArray[Any]) -> None:
    logits = row[places]
    row[places] = np.where(logits < np.inf, -np.inf, logits)


def _force(row: FloatArray, places: Int64Array) -> None:
    """Leave these tokens alone, equally likely, as transformers does."""
    logits = row[places]
    _bar(row, np.arange(len(row)))
    row[places] = np.where(logits < np.inf, np.float32(0.0), logits)


class _Runs:
    """The runs of so many tokens in a sequence, prompt included: which tokens would repeat one."""

    __slots__ = ("_followers", "_num_before", "_num_read")

    def __init__(self, size: int) -> None:
        self._num_before = self._num_read = size - 1
        self._followers: dict[tuple[int, ...], list[int]] = {}

    def barred_after(self, sequence: Sequence) -> Int64Array:
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

    def barred_after(self, sequence: Sequence) -> Int64Array:
        """Return the tokens that may not follow the completion of a sequence."""
        tokens = sequence.token_ids
        begun = self._by_last.get(tokens[-1], ()) if sequence.num_output_tokens else ()
        ends = [one[-1] for one in begun if len(one) <= sequence.num_output_tokens + 1
                and tuple(tokens[1 - len(one) :]) == one[:-1]]
        return np.concatenate((self._single, np.array(ends, np.int64))) if ends else self._single


class _SeenTokens:
    """The distinct tokens of a sequence and how often its completion has each, updated as it grows."""

    __slots__ = ("_counts", "_num_counted", "_places", "_token_ids")

    def __init__(self, sequence: Sequence) -> None:
        distinct, places = np.unique(np.array(sequence.token_ids, np.int64), return_inverse=True)
        generated = places[sequence.num_prompt_tokens :]
        self._token_ids = distinct
        self._counts = np.bincount(generated, minlength=len(distinct))
        self._places = {token_id: place for place, token_id in enumerate(distinct.tolist())}
        self._num_counted = len(sequence.token_ids)

    def count(self, sequence: Sequence) -> tuple[Int64Array, Int64Array]:
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

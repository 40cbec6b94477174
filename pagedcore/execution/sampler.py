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
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pagedcore.errors import ProcessorFailed, StepFailed
from pagedcore.execution.logits_processor import process_row
from pagedcore.execution.row_adjuster import RowAdjuster, bar, barred_of, bars_tokens
from pagedcore.execution.sequence_ahead import SequenceAhead
from pagedcore.outputs import TokenLogprobs
from pagedcore.protocols import FloatArray, Int64Array, MasksTokens
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
    further: Mapping[int, ListOf[DrawnToken]] = field(default_factory=dict)
    """What follows the first tokens of rows that had drafts, by sequence id: a token behind each draft that was right.
    """
    draft_failure: Exception | None = None
    """Why the step was computed without its drafts."""


class DrawnToken(NamedTuple):
    """A token that was drawn behind a draft that was right."""

    token_id: int
    """-1 as in ``SampledTokens``; nothing follows it then."""
    logprobs: TokenLogprobs | None = None
    failure: Exception | None = None
    """Why it could not be drawn, where that is no matter of its logits."""


class Sampler:
    """Chooses the next token of every sequence of a step.

    A row's token is a function of its logits, its sequence's parameters, tokens and seed, and the position alone.

    Invariant: an adjuster is kept from a step to the next only for the very sequence, turn and parameters it is for.
    """

    def __init__(self, vocab_size: int, masks: MasksTokens | None = None) -> None:
        """Sample from a vocabulary; ``masks`` is used if a sequence has a constraint."""
        self.vocab_size, self.masks = vocab_size, masks
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
        self._adjusters, before = {}, self._adjusters
        return self._draw(self._as_array(logits), sequences, before)

    def _draw(
        self, rows: FloatArray, sequences: ListOf[Sequence | SequenceAhead], adjusters: Mapping[int, RowAdjuster]
    ) -> SampledTokens:
        """Choose one token per row; adjusters that are there for it may be used, and are kept with the new ones."""
        wanted = {i: count for i, one in enumerate(sequences) if (count := one.num_logprobs) is not None}
        kept = {i: _read_only(rows[i]) for i in wanted if sequences[i].params.return_logits}
        drawable = {i: wanted.pop(i) for i in tuple(wanted) if sequences[i].params.logprobs_mode == "processed"}
        reports = self._make_reports(rows, wanted)
        for i in kept.keys() & reports.keys():
            reports[i].raw = kept[i]
        failures = self._adjust(rows, sequences, reports, adjusters)
        token_ids = self._choose(rows, sequences, list(drawable))
        reports.update(self._make_reports(rows, drawable))
        logprobs: list[TokenLogprobs | None] = [None] * len(sequences)
        for i, report in reports.items():
            if token_ids[i] >= 0:
                logprobs[i] = report.describe(int(token_ids[i]), rows[i], kept.get(i))
        return SampledTokens(token_ids, logprobs, failures=failures)

    def sample_drafted(self, logits: FloatArray | torch.Tensor, rows: ListOf[ScheduledRow]) -> SampledTokens:
        """Choose one token per row and, as long as it is the draft of its place, the one behind it.

        Nothing is adjusted, masked, processed or looked at behind a draft that is not what was drawn, nor behind the
        end of a turn; so what a row has is what it would have had in so many steps.

        Args:
            logits: float32 or bfloat16 [S, vocab_size] on the CPU, in the order of ``build_batch``; may be overwritten.
            rows: those that are sampled.
        """
        if self.wants_largest([row.sequence for row in rows]):
            return self.take_drafted(self._largest(logits, self.barred_behind(rows)), rows)
        array, rounds = self._as_array(logits), _rounds(rows)
        self._adjusters, before = {}, self._adjusters
        result = self._draw(array[: len(rows)], [row.sequence for row in rows], before)
        drawn = [[DrawnToken(token_id)] for token_id in result.token_ids.tolist()]
        end = len(rows)
        for depth, members in enumerate(rounds[1:], 1):
            begin, end = end, end + len(members)
            places = [place for place, i in enumerate(members) if _goes_on(rows[i], drawn[i], depth)]
            if not places:
                break
            ahead = [SequenceAhead(rows[i].sequence, rows[i].drafts[:depth]) for i in map(members.__getitem__, places)]
            part = array[begin:end] if len(places) == len(members) else array[begin:end][places]
            one = self._draw(part, ahead, self._adjusters)
            for place, token_id, logprobs in zip(places, one.token_ids.tolist(), one.logprobs, strict=True):
                i = members[place]
                failure = one.failures.get(rows[i].sequence.sequence_id)
                drawn[i].append(DrawnToken(token_id, logprobs, failure))
        further = {row.sequence.sequence_id: tokens[1:] for row, tokens in zip(rows, drawn, strict=True) if tokens[1:]}
        return replace(result, further=further)

    def take_drafted(self, token_ids: Int64Array, rows: ListOf[ScheduledRow]) -> SampledTokens:
        """Return tokens [S] that were chosen for rows which ``wants_largest``, in the order of ``build_batch``, as far
        as the drafts before them are right; -1 for rows that are not valid.

        Raises:
            StepFailed: they are not tokens of so many rows.
        """
        rounds = _rounds(rows)
        _require_token_ids(token_ids, sum(map(len, rounds)), self.vocab_size)
        self.forget()
        of_row: list[list[int]] = [[] for _ in rows]
        for i, token_id in zip(chain.from_iterable(rounds), token_ids.tolist(), strict=True):
            of_row[i].append(token_id)
        further = dict[int, ListOf[DrawnToken]]()
        for row, chosen in zip(rows, of_row, strict=True):
            pairs = zip(row.drafts, chosen, strict=False)
            num_right = next((place for place, (one, other) in enumerate(pairs) if one != other), len(row.drafts))
            if num_right:
                further[row.sequence.sequence_id] = [DrawnToken(one) for one in chosen[1 : 1 + num_right]]
        return SampledTokens(token_ids[: len(rows)], [None] * len(rows), further=further)

    def barred_behind(self, rows: ListOf[ScheduledRow]) -> Int64Array:
        """Return the same as ``barred_tokens`` for rows with drafts, in the order of ``build_batch``."""
        if not any(_may_bar_tokens(row.sequence) for row in rows):
            return self.barred_tokens(())
        ahead = [
            SequenceAhead(rows[i].sequence, rows[i].drafts[:depth])
            for depth, places in enumerate(_rounds(rows)) for i in places
        ]
        return self.barred_tokens(ahead)

    def _largest(self, logits: FloatArray | torch.Tensor, barred: Int64Array) -> Int64Array:
        """Return the most likely token of each row of those that are not barred."""
        if isinstance(logits, torch.Tensor) and logits.dtype == torch.bfloat16:
            bits = _bits(logits)
            _mask(bits, barred)
            return self._pick_greedily(bits)
        array = self._as_array(logits)
        for row, token_id in barred.tolist():
            bar(array[row], np.array([token_id]))
        return self._pick_greedily(array)

    @staticmethod
    def wants_largest(sequences: ListOf[Sequence]) -> bool:
        """Whether all that is wanted of each row is its most likely token, of those that may come yet."""
        return all(map(_is_plainly_greedy, sequences))

    def barred_tokens(self, sequences: ListOf[Sequence | SequenceAhead]) -> Int64Array:
        """Return the tokens that may not come, or not yet, whatever their logits: [B, 2] rows and ids."""
        places = [(i, token_id) for i, one in enumerate(sequences) if _bars_tokens(one)
                  for token_id in barred_of(one) if token_id < self.vocab_size]  # fmt: skip
        return np.array(places, np.int64).reshape(-1, 2)

    def take(self, token_ids: Int64Array, count: int) -> SampledTokens:
        """Return tokens [count] that were chosen for rows which ``wants_largest``; -1 for rows that are not valid.

        Raises:
            StepFailed: they are not tokens of so many rows.
        """
        _require_token_ids(token_ids, count, self.vocab_size)
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
        adjuster, count = RowAdjuster(turn, self.vocab_size), len(rows)
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
        # Why asked: it is so for most, and a call that finds out takes longer.
        is_right = array.dtype == np.float32 and array.flags.carray
        return array if is_right else np.require(array, np.float32, ["C", "W"])

    def _choose(
        self, rows: FloatArray, sequences: ListOf[Sequence | SequenceAhead], drawable: list[int]
    ) -> Int64Array:
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
        self, rows: FloatArray, sequences: ListOf[Sequence | SequenceAhead], reports: dict[int, _Report],
        adjusters: Mapping[int, RowAdjuster],
    ) -> dict[int, Exception]:
        """Change the rows in place; return why a sequence cannot be sampled, by its id."""
        constrained = list[tuple[int, Sequence | SequenceAhead]]()
        failures = dict[int, Exception]()
        for i, sequence in enumerate(sequences):
            if not (sequence.is_adjusted or _bars_tokens(sequence)):
                continue
            adjuster = adjusters.get(sequence.sequence_id)
            if adjuster is None or not adjuster.is_for(sequence):
                adjuster = RowAdjuster(sequence, self.vocab_size)
            # Why: a sequence outside this step may never come back; if it does, its tokens are counted again.
            self._adjusters[sequence.sequence_id] = adjuster
            if i in reports and reports[i].raw is None:
                reports[i].raw = rows[i].copy()
            if (failure := _adjust_row(rows[i], sequence, adjuster)) is not None:
                failures[sequence.sequence_id] = failure
            if sequence.constraint is not None:
                constrained.append((i, sequence))
        if not constrained:
            return failures
        masked = self._mask(rows, constrained)
        return {sequences[i].sequence_id: error for i, error in masked.items()} | failures

    def _mask(
        self, rows: FloatArray, constrained: ListOf[tuple[int, Sequence | SequenceAhead]]
    ) -> dict[int, Exception]:
        """Mask rows by the constraints of their sequences. As ``MasksTokens``."""
        assert self.masks is not None  # Invariant: an engine that compiles constraints gives it
        return self.masks.mask_rows(rows, [(i, one.constraint, one.output_token_ids) for i, one in constrained
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


def _adjust_row(
    row: FloatArray, sequence: Sequence | SequenceAhead, adjuster: RowAdjuster
) -> ProcessorFailed | None:
    """Change a row by the code and the parameters of its request; return why that code failed, if it did."""
    failure = None
    if (process := sequence.params.logits_processor) is not None:
        failure = process_row(process, row, sequence.output_token_ids)
        # Why: it is code of the host's, and other rows come after it.
        use_default_floats()
    adjuster.adjust(row, sequence)
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


def _bars_tokens(sequence: Sequence | SequenceAhead) -> bool:
    # Why: most requests bar nothing, and are asked in every step.
    return _may_bar_tokens(sequence) and bars_tokens(sequence)


def _may_bar_tokens(sequence: Sequence | SequenceAhead) -> bool:
    params = sequence.params
    return bool(params.suppress_tokens or params.min_tokens or params.begin_suppress_tokens)


def _goes_on(row: ScheduledRow, drawn: ListOf[DrawnToken], depth: int) -> bool:
    """Whether a row has a token behind its draft number ``depth``, from 1: all drafts so far were drawn, and the last
    one does not end the turn."""
    if len(drawn) < depth or drawn[-1].token_id != row.drafts[depth - 1]:
        return False
    return row.sequence.end_at(drawn[-1].token_id, row.sequence.num_output_tokens + depth) is None


def _rounds(rows: ListOf[ScheduledRow]) -> list[list[int]]:
    """Return which rows have a first token, which a first draft, which a second one, and so on."""
    most = max(len(row.drafts) for row in rows)
    return [[i for i, row in enumerate(rows) if len(row.drafts) >= depth] for depth in range(most + 1)]


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

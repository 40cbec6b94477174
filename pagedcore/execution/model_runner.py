"""Carries out one step's rows: build the batch, run the model, sample the next tokens.

Owns the check that a model returned what its protocol promises, because users bring their own models. It never changes
a sequence or a block; the engine commits what this returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import replace
from math import log2

import numpy as np
import torch

from pagedcore.errors import InternalError, StepFailed
from pagedcore.execution.compute_threads import ComputeThreads
from pagedcore.execution.device_sampler import DeviceSampler, KeepsLogits, is_seen_on_host
from pagedcore.execution.failures import concerns_all_rows
from pagedcore.execution.ragged_batch import NO_SLOTS, RaggedBatch, TableStack, build_batch
from pagedcore.execution.sampler import SampledTokens, Sampler
from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.outputs import TokenLogprobs
from pagedcore.protocols import DecodesGreedily, FloatArray, Int64Array, MayLoseDevice, ModelBackend, ReturnsHidden
from pagedcore.scheduler.plan import ScheduledRow
from pagedcore_kernels.cpu.runtime.float_state import DefaultFloatState
from pagedcore_kernels.cpu.runtime.openmp import end_openmp_helpers

_Part = tuple[ListOf[ScheduledRow], SampledTokens]
"""Rows that were computed together, and their tokens."""


class ModelRunner:
    """One model and its sampler."""

    def __init__(self, backend: ModelBackend, sampler: Sampler, threads: ComputeThreads) -> None:
        self.backend, self._sampler, self._threads = backend, sampler, threads
        self.slot_of: Mapping[int, int] = NO_SLOTS
        """The slots of adapters, by the numbers that sequences have; the scheduler's."""
        self._device_sampler: DeviceSampler | None = None
        self._stack = TableStack()
        self.floats = DefaultFloatState()
        """A context for the thread that makes a step, all of it."""

    @property
    def backend(self) -> ModelBackend:
        """The model."""
        return self._backend

    @backend.setter
    def backend(self, backend: ModelBackend) -> None:
        self._backend, self._greedy = backend, backend if isinstance(backend, DecodesGreedily) else None
        self._keeper = backend if isinstance(backend, KeepsLogits) else None

    @property
    def has_lost_device(self) -> bool:
        """Whether the model's device has failed for good; for use after a forward that raised."""
        return isinstance(self._backend, MayLoseDevice) and self._backend.has_lost_device

    def idle(self) -> None:
        """End the helper threads that torch keeps for the calling thread; another engine's helpers run faster then."""
        end_openmp_helpers()

    def forget(self) -> None:
        """Forget what is kept from a step to the next, after one that broke off."""
        self._sampler.forget()
        if self._device_sampler is not None:
            self._device_sampler.forget()

    def execute(self, rows: ListOf[ScheduledRow], block_manager: BlockManager) -> SampledTokens:
        """Compute ``rows``, sample one token for each row that asks for one, in their order, and further ones behind
        drafts, score the tokens of prompts that are reported, and return the hidden states that are wanted.

        If the model raises, or returns logits of another shape or type than its protocol says, the rows are computed
        without drafts, and then in parts, so that those which make it do so are in ``failures`` and the others have
        their tokens.

        Raises:
            StepFailed: what it returned for each row that was computed alone is of another shape or type.
            InternalError: a sequence has too few blocks.
            Exception: what the model raised, if no row could be computed, or if it is not about single rows.
        """
        try:
            return self._compute(rows, block_manager)
        except Exception as error:
            self.forget()
            if concerns_all_rows(error):
                raise
            if any(row.drafts for row in rows):
                # Why: a request fails only where it would have failed alone, without tokens that it may never have.
                bare = [row.without_drafts() for row in rows]
                return replace(self.execute(bare, block_manager), draft_failure=error)
            if len(rows) == 1:
                raise
            return self._compute_in_parts(rows, block_manager, error)

    @property
    def can_launch(self) -> bool:
        """Whether ``launch`` can compute rows whose last tokens are not known on the host."""
        return (there := self._sampler_there()) is not None and there.tokens.latest is not None

    def launch(self, rows: ListOf[ScheduledRow], block_manager: BlockManager) -> torch.Tensor:
        """Begin to compute rows whose tokens ``choose`` chooses, and wait for nothing; return their logits.

        No row has drafts or wants hidden states. Raises what the model raises, ``InternalError`` as ``execute``.
        """
        assert self._keeper is not None  # Invariant: ``can_launch`` was asked
        batch = build_batch(rows, block_manager, self.slot_of, self._stack)
        with self._threads.step(len(batch.token_ids)), self._threads.floats:
            return self._keeper.forward_there(batch)

    @staticmethod
    def chosen_on_host(rows: ListOf[ScheduledRow]) -> set[int]:
        """Return the ids of sequences whose tokens ``choose`` leaves to the host, so that none can follow unread."""
        return {row.sequence.sequence_id for row in rows if row.num_sampled and is_seen_on_host(row.sequence)}

    def choose(self, logits: torch.Tensor, rows: ListOf[ScheduledRow]) -> Callable[[], SampledTokens]:
        """Begin to choose the tokens of launched rows, all tokens before which are known now; return what waits for
        them. Rows of sequences that have finished meanwhile get any.
        """
        there = self._sampler_there()
        assert there is not None  # Invariant: as in ``launch``
        with self._threads.floats:
            return there.begin(logits, [row.sequence for row in rows if row.num_sampled], _scored(rows))

    def _compute_in_parts(
        self, rows: ListOf[ScheduledRow], block_manager: BlockManager, error: Exception
    ) -> SampledTokens:
        """Compute halves of the rows, then halves of those that fail, down to single rows.

        One row that fails costs 2 * ceil(log2(rows)) forwards at most; there are never more than 4 * log2(rows), which
        suffice for two. What is not computed by then fails too. A row's keys, values and token are functions of the
        row, so computing it a second time changes nothing.
        """
        num_left, parts, failures = int(4 * log2(len(rows))), list[_Part](), dict[int, Exception]()
        failed: list[tuple[ListOf[ScheduledRow], Exception]] = [(rows, error)]
        while failed:
            # Why the largest first: that saves most rows when the forwards do not suffice.
            failed.sort(key=lambda one: len(one[0]))
            group, cause = failed.pop()
            if len(group) == 1 or num_left < 2:
                failures.update((row.sequence.sequence_id, cause) for row in group)
                continue
            num_left -= 2
            # Why the largest power of two below: with equal halves, two failing rows of 11 may need more forwards.
            middle = 1 << (len(group) - 1).bit_length() - 1
            for half in (group[:middle], group[middle:]):
                try:
                    parts.append((half, self._compute(half, block_manager)))
                except Exception as half_error:
                    self.forget()
                    if concerns_all_rows(half_error):
                        raise
                    failed.append((half, half_error))
        if not parts:
            raise error
        return _join(rows, parts, failures)

    def _compute(self, rows: ListOf[ScheduledRow], block_manager: BlockManager) -> SampledTokens:
        sequences = [row.sequence for row in rows if row.num_sampled]
        batch, greedy = build_batch(rows, block_manager, self.slot_of, self._stack), self._greedy
        is_plain = batch.hidden_rows is None and len(batch.logits_rows) == len(sequences)
        if not is_plain and any(row.drafts for row in rows):
            return self._compute_drafts(batch, rows)
        with self._threads.step(len(batch.token_ids)), self._threads.floats:
            if (
                greedy is not None and sequences and is_plain and self._sampler.wants_largest(sequences)
                and greedy.decodes_greedily
            ):  # fmt: skip
                barred = self._sampler.barred_tokens(sequences)
                return self._sampler.take(greedy.forward_greedily(batch, barred), len(sequences))
            if self._keeper and batch.hidden_rows is None and (there := self._sampler_there()) is not None:
                scored = _scored(rows)
                return there.sample(self._keeper.forward_there(batch), sequences, scored)
            logits, hidden = (self._backend.forward(batch), {}) if batch.hidden_rows is None else (
                self._forward_hidden(batch, batch.hidden_rows, rows))
            _require_logits(logits, (len(batch.logits_rows), self._backend.vocab_size))
            if is_plain:
                return self._sampler.sample(logits, sequences)
            scored = _scored(rows)
            prompts, failures = self._sampler.score(logits[len(sequences) :], scored)
            sampled = self._sampler.sample(logits[: len(sequences)], sequences)
            return replace(sampled, prompts=prompts, hidden=hidden, failures={**sampled.failures, **failures})

    def _sampler_there(self) -> DeviceSampler | None:
        """Return what chooses tokens where the logits are; ``None``: logits come to the CPU."""
        tokens = None if self._keeper is None else self._keeper.device_tokens
        if tokens is None:
            self._device_sampler = None
        elif self._device_sampler is None or self._device_sampler.tokens is not tokens:
            self._device_sampler = DeviceSampler(self._sampler, tokens)
        return self._device_sampler

    def _compute_drafts(self, batch: RaggedBatch, rows: ListOf[ScheduledRow]) -> SampledTokens:
        """Do the same for rows of which some have drafts."""
        sampled, sampler, greedy = [row for row in rows if row.num_sampled], self._sampler, self._greedy
        num_sampled = sum(row.num_sampled for row in sampled)
        is_plain = batch.hidden_rows is None and len(batch.logits_rows) == num_sampled
        with self._threads.step(len(batch.token_ids)), self._threads.floats:
            if (
                greedy is not None and is_plain and sampler.wants_largest([row.sequence for row in sampled])
                and greedy.decodes_greedily
            ):  # fmt: skip
                return sampler.take_drafted(greedy.forward_greedily(batch, sampler.barred_behind(sampled)), sampled)
            logits, hidden = (self._backend.forward(batch), {}) if batch.hidden_rows is None else (
                self._forward_hidden(batch, batch.hidden_rows, rows))
            _require_logits(logits, (len(batch.logits_rows), self._backend.vocab_size))
            prompts, failures = sampler.score(logits[num_sampled:], _scored(rows))
            drawn = sampler.sample_drafted(logits[:num_sampled], sampled)
            return replace(drawn, prompts=prompts, hidden=hidden, failures={**drawn.failures, **failures})

    def _forward_hidden(
        self, batch: RaggedBatch, hidden_rows: Int64Array, rows: ListOf[ScheduledRow]
    ) -> tuple[FloatArray | torch.Tensor, dict[int, FloatArray]]:
        """Compute a batch; return its logits, and the hidden states of each sequence that wants some."""
        backend = self._backend
        if not isinstance(backend, ReturnsHidden):
            raise InternalError("a row wants hidden states of a model that returns none")
        logits, hidden = backend.forward_hidden(batch, hidden_rows)
        _require_hidden(hidden, (len(hidden_rows), backend.hidden_size))
        readers = [row for row in rows if row.hidden_positions]
        borders = np.cumsum([len(row.hidden_positions) for row in readers])[:-1]
        parts = np.split(hidden, borders)
        return logits, {row.sequence.sequence_id: part for row, part in zip(readers, parts, strict=True)}


def _scored(rows: ListOf[ScheduledRow]) -> list[ScheduledRow]:
    """Return the rows that score tokens of prompts, which few do."""
    return [row for row in rows if row.sequence.prompt_logprobs is not None and row.scored_positions]


def _join(rows: ListOf[ScheduledRow], parts: ListOf[_Part], failures: dict[int, Exception]) -> SampledTokens:
    """Put the results of parts in the order of all rows."""
    chosen, prompts = dict[int, tuple[int, TokenLogprobs | None]](), dict[int, list[TokenLogprobs] | None]()
    hidden = dict[int, FloatArray]()
    for part, sampled in parts:
        sequence_ids = [row.sequence.sequence_id for row in part if row.num_sampled]
        chosen.update(zip(sequence_ids, zip(sampled.token_ids.tolist(), sampled.logprobs, strict=True), strict=True))
        prompts.update(sampled.prompts)
        hidden.update(sampled.hidden)
        failures.update(sampled.failures)
    in_order = [chosen.get(row.sequence.sequence_id, (-1, None)) for row in rows if row.num_sampled]
    token_ids = np.array([token_id for token_id, _ in in_order], np.int64)
    return SampledTokens(token_ids, [logprobs for _, logprobs in in_order], prompts, hidden, failures)


def _require_logits(logits: object, shape: tuple[int, int]) -> None:
    wanted = f"expected float32 or bfloat16 logits of shape {shape}"
    if not isinstance(logits, np.ndarray | torch.Tensor):
        raise StepFailed(f"model: forward returned a {type(logits).__name__}, {wanted}")
    if tuple(logits.shape) != shape or logits.dtype not in (np.float32, torch.float32, torch.bfloat16):
        raise StepFailed(f"model: forward returned {logits.dtype} of shape {tuple(logits.shape)}, {wanted}")


def _require_hidden(hidden: object, shape: tuple[int, int]) -> None:
    # Why: as above; the numbers are looked at where they are pooled.
    wanted = f"expected a float32 array of shape {shape}"
    if not isinstance(hidden, np.ndarray):
        raise StepFailed(f"model: forward_hidden returned a {type(hidden).__name__}, {wanted}")
    if hidden.shape != shape or hidden.dtype != np.float32:
        raise StepFailed(f"model: forward_hidden returned {hidden.dtype} of shape {hidden.shape}, {wanted}")

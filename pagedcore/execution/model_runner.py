"""Carries out one step's rows: build the batch, run the model, sample the next tokens.

Owns the check that a model returned what its protocol promises, because users bring their own models. It never changes
a sequence or a block; the engine commits what this returns.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch

from pagedcore.errors import StepFailed
from pagedcore.execution.compute_threads import ComputeThreads
from pagedcore.execution.ragged_batch import BlockTables, build_batch
from pagedcore.execution.sampler import SampledTokens, Sampler
from pagedcore.protocols import ModelBackend, RaggedRows
from pagedcore.scheduler.plan import ScheduledRow


class ModelRunner:
    """One model and its sampler."""

    __slots__ = ("_backend", "_sampler", "_threads")

    def __init__(self, backend: ModelBackend, sampler: Sampler, threads: ComputeThreads) -> None:
        self._backend = backend
        self._sampler = sampler
        self._threads = threads

    @property
    def backend(self) -> ModelBackend:
        """The model."""
        return self._backend

    def idle(self) -> None:
        """Free what only steps need; the next step may come at any time."""
        self._threads.idle()

    def execute(self, rows: Seq[ScheduledRow], block_manager: BlockTables) -> SampledTokens:
        """Compute ``rows``, sample one token for each row that reaches its last known token, in their order, and score
        the tokens of prompts that are reported.

        Raises:
            StepFailed: the model returned logits of another shape or type than its protocol says.
            InternalError: a sequence has too few blocks.
        """
        batch = build_batch(rows, block_manager)
        with self._threads.step(len(batch.token_ids)):
            return self._execute(rows, batch)

    def _execute(self, rows: Seq[ScheduledRow], batch: RaggedRows) -> SampledTokens:
        logits = self._backend.forward(batch)
        sequences = [row.sequence for row in rows if row.is_sampled]
        _require_logits(logits, (len(batch.logits_rows), self._backend.vocab_size))
        if len(batch.logits_rows) == len(sequences):
            return self._sampler.sample(logits, sequences)
        prompts = self._sampler.score(logits[len(sequences) :], [row for row in rows if row.scored_positions])
        return replace(self._sampler.sample(logits[: len(sequences)], sequences), prompts=prompts)


def _require_logits(logits: object, shape: tuple[int, int]) -> None:
    if not isinstance(logits, np.ndarray | torch.Tensor):
        raise StepFailed(f"model: forward returned a {type(logits).__name__}, expected float32 logits of shape {shape}")
    if tuple(logits.shape) != shape or logits.dtype not in (np.float32, torch.float32):
        raise StepFailed(
            f"model: forward returned {logits.dtype} of shape {tuple(logits.shape)}, expected float32 of shape {shape}"
        )

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
from pagedcore.execution.ragged_batch import build_batch
from pagedcore.execution.sampler import SampledTokens, Sampler
from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.protocols import ModelBackend
from pagedcore.scheduler.plan import ScheduledRow
from pagedcore_kernels.cpu.runtime.openmp import end_openmp_helpers


class ModelRunner:
    """One model and its sampler."""

    def __init__(self, backend: ModelBackend, sampler: Sampler, threads: ComputeThreads) -> None:
        self.backend, self._sampler, self._threads = backend, sampler, threads

    def idle(self) -> None:
        """End the helper threads that torch keeps for the calling thread; another engine's helpers run faster then."""
        end_openmp_helpers()

    def execute(self, rows: Seq[ScheduledRow], block_manager: BlockManager) -> SampledTokens:
        """Compute ``rows``, sample one token for each row that reaches its last known token, in their order, and score
        the tokens of prompts that are reported.

        Raises:
            StepFailed: the model returned logits of another shape or type than its protocol says.
            InternalError: a sequence has too few blocks.
        """
        batch = build_batch(rows, block_manager)
        with self._threads.step(len(batch.token_ids)):
            logits = self.backend.forward(batch)
            sequences = [row.sequence for row in rows if row.is_sampled]
            _require_logits(logits, (len(batch.logits_rows), self.backend.vocab_size))
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

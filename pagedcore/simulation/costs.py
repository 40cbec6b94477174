"""What steps and requests of a load cost: the four costs that an engine learns online, and three of prompts.

An engine's online model has no use for these three: its policies compare steps, and a load needs their sum. A prompt's
attention grows with its square, its first chunk has an overhead of its own, and its acceptance delays the next step.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass

import numpy as np

from pagedcore.scheduler.plan import SchedulePlan
from pagedcore.scheduler.step_time import StepTimes, non_negative

Step = tuple[int, int, int, int, int, float]
"""Prefill tokens, decode rows, KV tokens, chunks and pairs of a step, and its seconds."""
_ROUNDS = 8
_FAR = 3.0
"""An error of more than so many medians counts as one of so many."""


@dataclass(frozen=True, slots=True)
class LoadTimes(StepTimes):
    """The costs of a load in seconds.

    Raises:
        InvalidConfig: a cost is not a finite number, or is negative.
    """

    chunk_s: float = 0.0
    """For each row of a step that computes tokens of a prompt."""
    pair_s: float = 0.0
    """For each pair of a prompt's token and a position that it attends to, on top of ``kv_token_s``."""
    request_s: float = 0.0
    """For each request, between two steps: to take it, on the engine's thread."""

    def prompt_seconds(self, chunks: float, pairs: float) -> float:
        """Return what chunks of prompts add to ``seconds``."""
        return self.chunk_s * chunks + self.pair_s * pairs


def prompt_work_of(plan: SchedulePlan) -> tuple[int, int]:
    """Return a step's chunks of prompts, and the pairs of their tokens and the positions these attend to."""
    chunks = [row for row in plan.rows if not row.is_decode]
    return len(chunks), sum([row.num_tokens * (row.start + row.end + 1) // 2 for row in chunks])


def fit_costs(steps: ListOf[Step]) -> LoadTimes:
    """Fit costs to measured steps: non-negative least squares of relative errors, of which large ones count less.

    They are scaled so that all steps together take as long as they did, slow ones that fitted no cost among them.
    """
    work = np.array([(1, *one[:5]) for one in steps], np.float64)
    seconds = np.array([one[5] for one in steps])
    weights = 1.0 / seconds
    for _ in range(_ROUNDS):
        rows = work * weights[:, None]
        scale = np.sqrt(np.maximum((rows * rows).sum(0), 1e-300))
        products = (rows / scale).T @ (rows / scale) + 1e-9 * np.eye(6)
        costs = non_negative(products, (rows / scale).T @ (seconds * weights)) / scale
        expected = np.maximum(work @ costs, 1e-9)
        errors = np.abs(seconds / expected - 1.0)
        weights = 1.0 / expected / np.sqrt(np.maximum(1.0, errors / max(_FAR * float(np.median(errors)), 1e-9)))
    fixed, prefill, decode, kv, chunk, pair = (costs * (seconds.sum() / (work @ costs).sum())).tolist()
    return LoadTimes(fixed, prefill, decode, kv, chunk, pair)

"""What steps and requests of a load cost: the four costs that an engine learns online, and four of prompts.

An engine's online model has no use for these four: its policies compare steps, and a load needs their sum. A prompt's
attention grows with its square, each chunk has an overhead of its own, the first step after prompts takes longer than
others that decode, and to accept, end and remove a request delays the next step.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.scheduler.plan import SchedulePlan
from pagedcore.scheduler.step_time import StepTimes, non_negative

if TYPE_CHECKING:
    from pagedcore.requests.stats import StepStats

StepWork = tuple[int, int, int, int, int, bool]
"""Prefill tokens, decode rows, KV tokens, chunks and pairs of a step, and whether the one before had chunks."""
Step = tuple[StepWork, int, float]
"""The work of a step, the requests that ended in it, and its seconds."""
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
    """For each request, between two steps: to take, end and remove it, on the engine's thread."""
    after_prompts_s: float = 0.0
    """For each step without chunks whose step before had some."""

    def prompt_seconds(self, chunks: float, pairs: float, is_after_prompts: bool) -> float:
        """Return what chunks of prompts, of this step or the one before, add to ``seconds``."""
        return self.chunk_s * chunks + self.pair_s * pairs + self.after_prompts_s * (is_after_prompts and not chunks)

    def load_seconds(self, work: StepWork) -> float:
        """Predict the seconds of a step of a load."""
        return self.seconds(*work[:3]) + self.prompt_seconds(*work[3:])


def prompt_work_of(plan: SchedulePlan) -> tuple[int, int]:
    """Return a step's chunks of prompts, and the pairs of their tokens and the positions these attend to."""
    chunks = [row for row in plan.rows if not row.is_decode]
    return len(chunks), sum([row.num_tokens * (row.start + row.end + 1) // 2 for row in chunks])


class WorkObserver:
    """Notes what each step of an engine computes; a plugin."""

    def __init__(self) -> None:
        self._work: StepWork | None = None
        self._is_after_prompts = False

    @hookimpl
    def pagedcore_step(self, stats: StepStats) -> None:
        """Note the work of a step."""
        prompts = prompt_work_of(stats.plan)
        self._work = (stats.num_prefill_tokens, stats.num_decode_tokens, stats.num_kv_tokens, *prompts,
                      self._is_after_prompts)
        self._is_after_prompts = prompts[0] > 0

    def take(self) -> StepWork | None:
        """Return the work of the latest step, once; ``None`` if nothing was computed since."""
        work, self._work = self._work, None
        return work


def fit_costs(steps: ListOf[Step]) -> LoadTimes:
    """Fit costs to measured steps: non-negative least squares, with large relative errors counting less.

    They are scaled so that all steps together take as long as they did, slow ones that fitted no cost among them.
    ``request_s`` is only what ending a request adds to a step.
    """
    work = np.array([(1, *one[:5], num_ended, one[5] and not one[3]) for one, num_ended, _ in steps], np.float64)
    seconds = np.array([one[2] for one in steps])
    # Why square roots: a step counts as much as the time that it takes, and yet the short ones do not vanish.
    weights = seconds ** -0.5
    for _ in range(_ROUNDS):
        rows = work * weights[:, None]
        scale = np.sqrt(np.maximum((rows * rows).sum(0), 1e-300))
        products = (rows / scale).T @ (rows / scale) + 1e-9 * np.eye(work.shape[1])
        right = (rows / scale).T @ (seconds * weights)
        costs = np.array(non_negative(products.tolist(), right.tolist())) / scale
        expected = np.maximum(work @ costs, 1e-9)
        errors = np.abs(seconds / expected - 1.0)
        weights = expected ** -0.5 / np.sqrt(np.maximum(1.0, errors / max(_FAR * float(np.median(errors)), 1e-9)))
    return LoadTimes(*(costs * (seconds.sum() / (work @ costs).sum())).tolist())

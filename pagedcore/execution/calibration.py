"""Measures what a step costs before the first request: a few short prefills whose results nobody uses.

They write to blocks that hold nothing yet and that nobody can find; no sequence, cache or counter knows of them. From
the first step on the engine's own measurements correct what was learned here. Next: ``scheduling.cost_model``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from pagedcore.clock import Clock
from pagedcore.execution.ragged_batch import RaggedBatch, assemble
from pagedcore.ports import ModelBackend
from pagedcore.scheduling.cost_model import Line

_MOST_S: Final = 0.2
"""Seconds after which no further forward begins, nor one that is expected to end later."""
_NUM_TOKENS: Final = (2, 16, 64)
_NUM_RUNS: Final = 4
"""Forwards of each size; the first one prepares memory and is not learned from."""


def measure_steps(backend: ModelBackend, clock: Clock, block_size: int, most_tokens: int) -> Line | None:
    """Measure forwards of up to ``most_tokens`` tokens; call it while the pool holds nothing.

    Returns:
        Seconds by tokens; ``None`` if the model is too slow to be measured at two sizes, the clock stands still, or the
        model fails. It will fail in its first step then, where somebody is told.
    """
    seconds_of: dict[int, float] = {}
    try:
        for size, seconds in _timed_forwards(backend, clock, block_size, most_tokens):
            seconds_of[size] = min(seconds, seconds_of.get(size, seconds))
    except Exception:
        return None
    if len(seconds_of) < 2 or max(seconds_of.values()) <= 0:
        return None
    smallest, largest = min(seconds_of), max(seconds_of)
    per_token_s = max(0.0, (seconds_of[largest] - seconds_of[smallest]) / (largest - smallest))
    return Line(max(0.0, seconds_of[smallest] - smallest * per_token_s), per_token_s)


def _timed_forwards(
    backend: ModelBackend, clock: Clock, block_size: int, most_tokens: int
) -> Iterator[tuple[int, float]]:
    """Yield (tokens, seconds) of forwards, small ones first, as long as there is time."""
    start_s, expected_s = clock.now(), 0.0
    sizes = sorted({min(size, most_tokens) for size in _NUM_TOKENS})
    for size, following in zip(sizes, [*sizes[1:], sizes[-1]], strict=True):
        batch = _one_prompt(size, block_size)
        for run in range(_NUM_RUNS):
            before_s = clock.now()
            if before_s - start_s + expected_s > _MOST_S:
                return
            # Why: a device may still compute when forward returns; a number that is read has been computed.
            float(backend.forward(batch)[0, 0])
            expected_s = clock.now() - before_s
            if run:
                yield size, expected_s
        expected_s *= following / size


def _one_prompt(num_tokens: int, block_size: int) -> RaggedBatch:
    """Build the first chunk of one sequence, in the first blocks of the pool."""
    one = np.ones(1, dtype=np.int64)
    return assemble(
        np.zeros(num_tokens, dtype=np.int64), 0 * one, num_tokens * one, seq_ids=0 * one,
        tables=[np.arange(-(-num_tokens // block_size), dtype=np.int32)], block_size=block_size,
        is_sampled=np.ones(1, dtype=np.bool_),
    )

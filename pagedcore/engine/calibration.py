"""Measures what a step costs before the first request: a few short prefills whose results are discarded.

They write to blocks that hold nothing yet and are in no cache; no sequence and no counter knows of them. From
the first step on the engine's own measurements correct what was learned here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from pagedcore.execution.kv_transfers import KVTransfers
from pagedcore.execution.ragged_batch import assemble
from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.protocols import Clock, ModelBackend
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.scheduler.step_time import StepTimes

_MOST_S: Final = 0.2
"""Seconds after which no further forward begins, nor one that is expected to end later; the very first one aside."""
_SIZES: Final = (2, 4, 8, 16, 32, 64)
"""Tokens of a forward; of the first one above what a step may have, only as many as it may."""
_NUM_REPEATS: Final = 3


def calibrate(
    backend: ModelBackend, scheduler: Scheduler, transfers: KVTransfers, clock: Clock, most_tokens: int
) -> None:
    """Measure what moving blocks and computing cost here, before anything is in the pool; needs a host cache.

    What a step costs stays as estimated if the model is too slow to be measured at two sizes, the clock stands still,
    or the model fails. It then fails in its first step, whose requests report it.

    Args:
        backend: computes a few prompts, of ``most_tokens`` at most.
        scheduler: says how much fits, and has the costs that are corrected.
        transfers: move a few blocks.
    """
    blocks, host, costs = scheduler.kv_cache.device, scheduler.kv_cache.host, scheduler.costs
    transfers.calibrate(costs, min(blocks.num_blocks, host.num_blocks), host.states.num_states)
    most_tokens = min(blocks.num_blocks * blocks.block_size, most_tokens)
    seconds_of: dict[int, float] = {}
    try:
        for size, seconds in _timed_forwards(backend, clock, blocks, most_tokens):
            # Why: whatever else the machine does makes a forward longer, never shorter.
            seconds_of[size] = min(seconds, seconds_of.get(size, seconds))
    except Exception:
        return
    if len(seconds_of) < 2 or max(seconds_of.values()) <= 0:
        return
    smallest, largest = min(seconds_of), max(seconds_of)
    per_token_s = max(0.0, (seconds_of[largest] - seconds_of[smallest]) / (largest - smallest))
    fixed_s = max(0.0, seconds_of[smallest] - smallest * per_token_s)
    # Why: what a decode row costs is not measured here; until a step has shown it, it is any token.
    costs.steps.times = StepTimes(fixed_s, per_token_s, per_token_s, 0.0)


def _timed_forwards(
    backend: ModelBackend, clock: Clock, blocks: BlockManager, most_tokens: int
) -> Iterator[tuple[int, float]]:
    """Yield (tokens, seconds) of forwards as long as there is time: ever larger ones, then the ends of these again."""
    # Why: the first one prepares memory and kernels, so it says nothing about the next.
    _time_forward(backend, clock, blocks, 1)
    deadline_s, latest, expected_s = clock.now() + _MOST_S, dict[int, float](), 0.0
    most_tokens = min(_SIZES[-1], most_tokens)
    for size in (*(size for size in _SIZES if size < most_tokens), most_tokens):
        if clock.now() + expected_s > deadline_s:
            break
        latest[size] = _time_forward(backend, clock, blocks, size)
        yield size, latest[size]
        # Why: whatever a token costs, the next size is at most twice this one.
        expected_s = 2 * latest[size]
    for size in (min(latest), max(latest)) * _NUM_REPEATS if len(latest) > 1 else ():
        if clock.now() + latest[size] > deadline_s:
            return
        latest[size] = _time_forward(backend, clock, blocks, size)
        yield size, latest[size]


def _time_forward(backend: ModelBackend, clock: Clock, blocks: BlockManager, num_tokens: int) -> float:
    """Time the first chunk of one sequence, in the first blocks of the pool, and in its first state if there are some.
    """
    from pagedcore_kernels.cpu.runtime.float_state import DefaultFloatState
    from pagedcore_kernels.cpu.runtime.threads import num_threads_of_torch

    one, state = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int32) if blocks.keeps_states else None
    batch = assemble(
        np.zeros(num_tokens, dtype=np.int64), 0 * one, num_tokens * one, seq_ids=0 * one,
        tables=[np.arange(blocks.blocks_for(num_tokens), dtype=np.int32)], block_size=blocks.block_size,
        state_reads=state - 1 if state is not None else None, state_writes=state,
    )
    with DefaultFloatState(num_threads_of_torch()):
        before_s = clock.now()
        # Why: a device may still compute when forward returns; a number that is read has been computed.
        float(backend.forward(batch)[0, 0])
        return clock.now() - before_s

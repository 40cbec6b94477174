"""One row that makes the model raise is found by halving, within a bound of forwards; the others are computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore.errors import StepFailed
from pagedcore.execution.compute_threads import ComputeThreads
from pagedcore.execution.model_runner import ModelRunner
from pagedcore.execution.sampler import SampledTokens, Sampler
from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler.plan import ScheduledRow
from pagedcore.sequence import Sequence
from support.doubles import ToyBackend, make_sequence


class PoisonedBackend(ToyBackend):
    """Raises after a batch was written that holds one of the poisoned sequences, and counts its forwards."""

    def __init__(self, poisoned: Collection[int] = (), error: Exception | None = None) -> None:
        super().__init__()
        self.poisoned, self.error = set(poisoned), error or ValueError("a bad row")

    def forward(self, batch: Any) -> Any:
        """Compute, then raise."""
        logits = super().forward(batch)
        return self.spoil(logits) if self.poisoned & set(batch.seq_ids.tolist()) else logits

    def spoil(self, logits: Any) -> Any:
        """What becomes of the logits of such a batch."""
        raise self.error


class MisshapenBackend(PoisonedBackend):
    """Returns something else for such a batch, as ``change`` makes it of the logits."""

    def __init__(self, poisoned: Collection[int], change: Callable[[Any], Any]) -> None:
        super().__init__(poisoned)
        self.change = change

    def spoil(self, logits: Any) -> Any:
        """Change them."""
        return self.change(logits)


def execute(num_rows: int, backend: ToyBackend) -> SampledTokens:
    """Compute so many prompts in one step; every third one is a chunk that is not sampled, the others are drawn."""
    manager = BlockManager(4 * num_rows, 4)
    backend.allocate_kv(4 * num_rows, 4)
    params = SamplingParams(max_tokens=4, temperature=1.0, logprobs=1, presence_penalty=0.5)
    rows = []
    for i in range(num_rows):
        sequence = Sequence(i, [1 + i % 20, 2 + i % 7, 3], params, max_tokens=4, seed=i)
        rows.append(ScheduledRow(sequence, 0, 2 if i % 3 == 2 else 3))
    assert manager.reserve([row.demand for row in rows]) is not None
    return ModelRunner(backend, Sampler(backend.vocab_size), ComputeThreads(1)).execute(rows, manager)


def tokens_of(sampled: SampledTokens, num_rows: int) -> dict[int, tuple[int, Any]]:
    """Tokens and log-probabilities by row."""
    return dict(zip([i for i in range(num_rows) if i % 3 != 2],
                    zip(np.asarray(sampled.token_ids).tolist(), sampled.logprobs, strict=True), strict=True))


class CountingRunner(ModelRunner):
    """Computes nothing: a row's token is its number, unless one of the rows is poisoned."""

    def __init__(self, poisoned: Collection[int]) -> None:
        super().__init__(ToyBackend(), Sampler(ToyBackend.vocab_size), ComputeThreads(1))
        self.poisoned, self.num_forwards = set(poisoned), 0

    def _compute(self, rows: Any, block_manager: Any) -> SampledTokens:
        self.num_forwards += 1
        sequence_ids = [row.sequence.sequence_id for row in rows]
        if self.poisoned & set(sequence_ids):
            raise ValueError("a bad row")
        return SampledTokens(np.array(sequence_ids, np.int64), [None] * len(rows))


ROWS = [ScheduledRow(make_sequence(1, sequence_id=i), 0, 1) for i in range(64)]


@pytest.mark.parametrize("num_culprits", [1, 2, 3])
def test_the_number_of_forwards_is_bounded(num_culprits: int) -> None:
    """For every number of rows up to 64 and every place of the first culprit: at most 2 * ceil(log2(rows)) further
    forwards for one, 4 * log2(rows) for several. One culprit or two fail alone; the others have their own tokens."""
    for num_rows in range(num_culprits + 1, 65):
        for first in range(0, num_rows, 1 if num_culprits == 1 else 5):
            culprits = {(first + step * num_rows // num_culprits) % num_rows for step in range(num_culprits)}
            runner = CountingRunner(culprits)
            sampled = runner.execute(ROWS[:num_rows], BlockManager(1, 1))
            bound = 2 * math.ceil(math.log2(num_rows)) if num_culprits == 1 else 4 * math.log2(num_rows)
            assert runner.num_forwards - 1 <= bound
            assert culprits <= sampled.failures.keys()
            assert len(sampled.failures) <= {1: 1, 2: 2, 3: num_rows - 1}[num_culprits]
            assert sampled.token_ids.tolist() == [-1 if i in sampled.failures else i for i in range(num_rows)]


def test_two_culprits_fail_alone_wherever_they_are() -> None:
    """Every two rows of up to 24, and of 43: the bound suffices, also where the number is no power of two."""
    for num_rows in (*range(3, 25), 43):
        for culprits in itertools.combinations(range(num_rows), 2):
            runner = CountingRunner(culprits)
            assert runner.execute(ROWS[:num_rows], BlockManager(1, 1)).failures.keys() == set(culprits)
            assert runner.num_forwards - 1 <= 4 * math.log2(num_rows)


@pytest.mark.parametrize("num_rows", [2, 5, 16, 33])
def test_the_others_have_the_tokens_of_a_step_without_the_culprit(num_rows: int) -> None:
    """Drawn tokens, penalties and log-probabilities, bit for bit; chunks of prompts may be the culprit too."""
    undisturbed = tokens_of(execute(num_rows, ToyBackend()), num_rows)
    for culprit in {0, 1, num_rows // 2, num_rows - 1}:
        backend = PoisonedBackend([culprit])
        sampled = execute(num_rows, backend)
        assert sampled.failures == {culprit: backend.error}
        expected = {row: (-1, None) if row == culprit else token for row, token in undisturbed.items()}
        assert tokens_of(sampled, num_rows) == expected


CHANGES: list[Callable[[Any], Any]] = [
    lambda logits: logits[1:], lambda logits: logits[:, :-1], lambda logits: np.vstack([logits, logits]),
    lambda logits: np.asarray(logits, np.float64), lambda logits: None, lambda logits: logits.ravel(), list,
]


@pytest.mark.parametrize("change", CHANGES, ids=["lost", "narrow", "twice", "float64", "None", "flat", "list"])
def test_logits_of_another_shape_or_kind_are_those_of_their_row(change: Callable[[Any], Any]) -> None:
    """As with a row that makes the model raise: the others have the tokens that they have without it."""
    undisturbed = tokens_of(execute(8, ToyBackend()), 8)
    for culprit in (0, 3, 7):
        sampled = execute(8, MisshapenBackend([culprit], change))
        assert [(row, type(error)) for row, error in sampled.failures.items()] == [(culprit, StepFailed)]
        assert "expected float32" in str(sampled.failures[culprit])
        expected = {row: (-1, None) if row == culprit else token for row, token in undisturbed.items()}
        assert tokens_of(sampled, 8) == expected


@pytest.mark.parametrize("change", CHANGES[3:])
def test_a_model_of_another_kind_fails_every_row(change: Callable[[Any], Any]) -> None:
    """With a typed error, within the bound of forwards."""
    backend = MisshapenBackend(range(64), change)
    with pytest.raises(StepFailed, match="expected float32"):
        execute(64, backend)
    assert backend.num_steps - 1 <= 4 * math.log2(64)


@pytest.mark.parametrize("num_rows", [1, 2, 5, 64])
def test_where_every_row_fails_the_step_fails(num_rows: int) -> None:
    """Within the same bound, with what the model raised; one row alone is not tried again."""
    backend = PoisonedBackend(range(num_rows))
    with pytest.raises(ValueError, match="a bad row"):
        execute(num_rows, backend)
    assert backend.num_steps - 1 <= 4 * math.log2(num_rows)


@pytest.mark.parametrize("error", [
    MemoryError(), torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
], ids=str)
def test_memory_and_device_are_no_rows_fault(error: Exception) -> None:
    """Nothing is tried again in halves, also when it comes in one of the halves."""
    backend = PoisonedBackend([3], error)
    with pytest.raises(type(error)):
        execute(8, backend)
    assert backend.num_steps == 1


def test_a_fault_that_does_not_come_again_costs_no_row() -> None:
    """Every row has its token if the halves can be computed."""
    backend = PoisonedBackend([3])
    forward = backend.forward

    def once(batch: Any) -> Any:
        try:
            return forward(batch)
        finally:
            backend.poisoned.clear()

    backend.forward = once  # type: ignore[method-assign]
    sampled = execute(8, backend)
    assert (sampled.failures, backend.num_steps) == ({}, 3)
    assert tokens_of(sampled, 8) == tokens_of(execute(8, ToyBackend()), 8)

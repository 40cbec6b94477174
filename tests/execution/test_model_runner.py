from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagedcore.errors import StepFailed
from pagedcore.execution.compute_threads import ComputeThreads
from pagedcore.execution.model_runner import ModelRunner
from pagedcore.execution.sampler import Sampler
from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.scheduler.plan import ScheduledRow
from support.doubles import FlakyBackend, ToyBackend, make_sequence, toy_logits


def prepared(backend: Any, prompts: list[int]) -> tuple[ModelRunner, BlockManager, list[ScheduledRow]]:
    """A runner with rows that compute whole prompts."""
    manager = BlockManager(32, 4)
    backend.allocate_kv(32, 4)
    rows = [ScheduledRow(make_sequence(n, sequence_id=i), 0, n) for i, n in enumerate(prompts)]
    reservation = manager.reserve([row.demand for row in rows])
    assert reservation is not None
    reservation.commit()
    return ModelRunner(backend, Sampler(ToyBackend.vocab_size), ComputeThreads(1)), manager, rows


def test_one_token_per_sampled_row_in_order() -> None:
    """Rows that reach their last token get the most likely next one; chunks get none."""
    runner, manager, rows = prepared(ToyBackend(), [5, 9, 2])
    rows[1] = ScheduledRow(rows[1].sequence, 0, 4)
    sampled = runner.execute(rows, manager)
    expected = [int(toy_logits(np.array(row.sequence.token_ids)).argmax()) for row in (rows[0], rows[2])]
    assert np.asarray(sampled.token_ids).tolist() == expected


def test_nothing_is_sampled_of_chunks() -> None:
    """A step of prompt chunks alone computes and returns no token."""
    runner, manager, rows = prepared(ToyBackend(), [9])
    assert len(runner.execute([ScheduledRow(rows[0].sequence, 0, 4)], manager).token_ids) == 0


def test_logits_of_another_shape_fail_the_step() -> None:
    """A model that loses a row is named with both shapes; no row gets another row's token."""
    runner, manager, rows = prepared(FlakyBackend(wrong_shape_on=1), [5, 2])
    with pytest.raises(StepFailed, match=r"\(1, 32\), expected float32 or bfloat16 logits of shape \(2, 32\)"):
        runner.execute(rows, manager)


@pytest.mark.parametrize("logits", [
    None, [[0.0] * 32], np.zeros((1, 32)), torch.zeros(1, 32, dtype=torch.float16), np.zeros((1, 31), np.float32),
], ids=["None", "list", "float64", "float16", "narrow"])
def test_logits_of_another_kind_fail_the_step(logits: object) -> None:
    """Only float32 arrays and tensors of the vocabulary's width are logits."""
    backend = ToyBackend()
    runner, manager, rows = prepared(backend, [5])
    backend.forward = lambda batch: logits  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(StepFailed, match="expected float32"):
        runner.execute(rows, manager)

"""What the self-test of a loaded model sees, and what it costs: forwards, each of which reads all weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pagedcore.models.transformers_model import TransformersModel
from pagedcore.protocols import RaggedRows
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from support.families import tiny_model


def rows_of(batch: RaggedRows) -> list[int]:
    return [int(end - start) for start, end in zip(batch.query_start[:-1], batch.query_start[1:], strict=True)]


def backend_of(
    monkeypatch: pytest.MonkeyPatch, is_bent: Callable[[list[list[int]]], bool], row: int = -1
) -> tuple[TransformersModel, list[list[int]]]:
    """A backend that bends the last bit of a row of logits in some steps, and the rows of its self-test's steps."""
    compute, steps = TransformersModel._compute, list[list[int]]()

    def bent(self: TransformersModel, attention: Any, batch: RaggedRows) -> torch.Tensor:
        steps.append(rows_of(batch))
        logits = compute(self, attention, batch)
        if is_bent(steps):
            logits[row, 0] = torch.nextafter(logits[row, 0], torch.tensor(torch.inf))
        return logits

    monkeypatch.setattr(TransformersModel, "_compute", bent)
    return TransformersModel(tiny_model("llama"), NumbaCpuAttention, block_size=4), steps


SCHEDULES: dict[str, tuple[Callable[[list[list[int]]], bool], int]] = {
    "the first of many rows": (lambda steps: sum(steps[-1]) > 16, 0),
    "a whole prompt among many rows": (lambda steps: sum(steps[-1]) > 16, 8),
    "the last of many rows": (lambda steps: sum(steps[-1]) > 16, -1),
    "a chunk beside a decoded token": (lambda steps: 1 in steps[-1] and max(steps[-1]) > 1, 0),
    "a decoded token beside a chunk": (lambda steps: 1 in steps[-1] and max(steps[-1]) > 1, -1),
    "decoded tokens alone": (lambda steps: steps.count([1, 1]) == 1 and steps[-1] == [1, 1], -1),
    "a step of a shape that was there": (lambda steps: steps.index(steps[-1]) < len(steps) - 1, -1),
}


@pytest.mark.parametrize("where", SCHEDULES)
def test_a_last_bit_that_depends_on_the_schedule_is_seen(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each kind of step that an engine makes; four of them are made, for twelve tokens."""
    backend, steps = backend_of(monkeypatch, *SCHEDULES[where])
    assert not backend.is_schedule_invariant
    assert len(steps) == 4


def test_without_such_a_bit_there_is_nothing_to_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits under every schedule that was tried."""
    assert backend_of(monkeypatch, lambda steps: False)[0].is_schedule_invariant

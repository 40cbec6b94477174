"""Recorded kernel calls: what they compute when they are made again, and what is not recorded."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from pagedcore_kernels.cpu.layers.elementwise import GatedActivation, RmsNorm
from pagedcore_kernels.cpu.runtime import recorded_calls, threads
from pagedcore_kernels.cpu.runtime.recorded_calls import RecordedCalls, StepShape, present_recording
from pagedcore_kernels.cpu.runtime.threads import Computing
from pagedcore_kernels.cpu.runtime.workspace import Workspace

NUM_ROWS, HIDDEN = 60, 1024


class Chain:
    """A norm of rows and, by one object with one parameter block, the activations of two other tensors."""

    def __init__(self) -> None:
        self.rows, self.normed = torch.zeros(NUM_ROWS, HIDDEN), torch.zeros(NUM_ROWS, HIDDEN)
        self.halves = [torch.zeros(NUM_ROWS, HIDDEN // 2), torch.zeros(NUM_ROWS, HIDDEN // 2)]
        self._norm, self._gate = RmsNorm(torch.rand(HIDDEN), 1e-5), GatedActivation("silu", torch.float32)

    def compute(self, num_rows: int) -> None:
        """Make three calls, the second of which reads what the first has written."""
        self._norm(self.rows[:num_rows], None, self.normed[:num_rows])
        self._gate(self.normed[:num_rows], self.halves[0][:num_rows])
        self._gate(self.rows[:num_rows], self.halves[1][:num_rows])

    def results(self) -> list[torch.Tensor]:
        """Return a copy of everything that was written."""
        return [one.clone() for one in (self.normed, *self.halves)]


@pytest.mark.parametrize("context", [
    lambda: Computing(1), lambda: Computing(2), lambda: Computing(3, slot=2),
    lambda: Computing(2, uses_openmp=True), nullcontext,
], ids=["one thread", "two", "three", "OpenMP", "torch's setting"])  # fmt: skip
def test_calls_made_again_are_those_of_python(context: object) -> None:
    """The calls are made in order, each with the parameters that it had, on numbers that are new at its addresses, for
    any number of rows.
    """
    chain = Chain()
    with context(), RecordedCalls() as recorded:  # type: ignore[operator]
        chain.compute(NUM_ROWS)
    for seed, num_rows in enumerate((NUM_ROWS, 1, 7, 59, NUM_ROWS)):
        chain.rows[:] = torch.randn(NUM_ROWS, HIDDEN, generator=torch.Generator().manual_seed(seed))
        for one in (chain.normed, *chain.halves):
            one.fill_(-7.0)
        with context():  # type: ignore[operator]
            recorded.run(StepShape(num_rows))
            again = chain.results()
            chain.compute(num_rows)
        assert all(map(torch.equal, again, chain.results()))
        assert all((one[:num_rows] != -7.0).any() and (one[num_rows:] == -7.0).all() for one in again)


def test_threads_depend_on_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little work has one thread, and more has all."""
    rows = torch.randn(NUM_ROWS, HIDDEN)
    with Computing(2), RecordedCalls() as recorded:
        RmsNorm(torch.ones(HIDDEN), 1e-5)(rows, None, torch.empty_like(rows))
        GatedActivation("silu", torch.float32)(rows, torch.empty(NUM_ROWS, HIDDEN // 2))
    most = []
    monkeypatch.setattr(threads, "launch", lambda entry, parameters, most_threads: most.append(most_threads))
    for num_rows in (2, NUM_ROWS):
        recorded.run(StepShape(num_rows))
    assert most == [1, recorded_calls._ALL, recorded_calls._ALL, recorded_calls._ALL]


def test_a_kernel_that_cannot_be_resized_is_not_recorded() -> None:
    """It would compute as many rows as it had, whatever memory they are in now: nothing of the recording is left, and
    nothing is recorded from there on.
    """
    chain = Chain()
    with RecordedCalls() as recorded:
        chain.compute(NUM_ROWS)
        recorded.add(0, np.zeros(3, np.int64), None)
        assert present_recording() is None
        chain.compute(NUM_ROWS)
    assert recorded.is_empty


def test_a_recording_that_fails_is_empty() -> None:
    """An exception ends the recording of this thread, and what it has begun is not made again."""
    chain = Chain()
    chain.rows += 1
    recorded = RecordedCalls()

    def fail() -> None:
        with recorded:
            chain.compute(NUM_ROWS)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert present_recording() is None
    chain.normed.zero_()
    recorded.run(StepShape(NUM_ROWS))
    assert not chain.normed.any()


def test_a_workspace_keeps_its_addresses() -> None:
    """The same purpose, size and format are the same memory, until more rows than ever are taken, which it tells."""
    space = Workspace()
    first = space.take("a", 5, 16, torch.float32)
    before = space.version
    for num_rows in (3, 8, 1):
        assert space.take("a", num_rows, 16, torch.float32).data_ptr() == first.data_ptr()
    assert space.version == before
    others = [space.take("b", 5, 16, torch.float32), space.take("a", 5, 8, torch.float32),
              space.take("a", 5, 16, torch.int8)]  # fmt: skip
    assert first.data_ptr() not in [one.data_ptr() for one in others]
    before = space.version
    assert space.take("a", 9, 16, torch.float32).shape == (9, 16)
    assert space.version > before

"""Recurrences over states, against float64 over whole sequences, and their bits under any cut and company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernels.state_cases import Case, Convolution, DecayingAttention, DeltaRule, Mamba1, Mamba2, Recurrence
from pagedcore_kernels.cpu.recurrence.states import RecurrentStates
from pagedcore_kernels.reference_states import ReferenceStates

F32, BF16 = torch.float32, torch.bfloat16
SMALL = [
    Convolution(F32), Convolution(BF16, 20, 3, "none"), DeltaRule(F32), DeltaRule(BF16, per_channel=True),
    Mamba2(F32), Mamba1(BF16), DecayingAttention(F32),
]  # fmt: skip
LENGTHS = 21, 1, 4, 9


@pytest.mark.parametrize("kind", [RecurrentStates, ReferenceStates])
@pytest.mark.parametrize("recurrence", SMALL, ids=str)
def test_against_float64(kind: Any, recurrence: Recurrence) -> None:
    """Outputs and states are those of the formulas, from zeros on, in sequences that share nothing but the step."""
    case = Case(recurrence, LENGTHS, kind)
    for one, out in enumerate(case.whole()):
        expected, state = case.expected(one)
        limit = 2.0**-7 if recurrence.dtype == BF16 else 2e-6
        assert np.abs(out.double().numpy() - expected).max() < limit * np.abs(expected).max()
        assert np.abs(case.states()[one].double().numpy() - state).max() < 2e-6 * np.abs(state).max()

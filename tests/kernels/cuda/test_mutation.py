"""Broken kernels are noticed: without a barrier or a wait, the checks of the execute gate object."""

from __future__ import annotations

import pytest
import torch

from kernels.attention_cases import Shape
from kernels.cuda import simulated_driver
from kernels.cuda.cuda_cases import Case, relative_error
from pagedcore_kernels.cuda.toolchain import missing_compiler_parts
from pagedcore_kernels.ptxsim import PtxFault, mutants

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(bool(missing_compiler_parts()), reason="needs pagedcore[cuda] to compile kernels"),
]
KINDS = ("barrier", "wait", "relaxed wait")
CASE_LENGTHS = {"prefill": [(20, 600)], "decode": [(1, 1100), (2, 90)]}
MISSED_BARRIERS = {"prefill": 0, "decode": 1}
"""The one before decode's counter orders global memory between CTAs, which the interpreter does not model."""


@pytest.mark.parametrize("family", ["prefill", "decode"])
def test_a_kernel_without_a_barrier_or_a_wait_is_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate notices each barrier and wait that is gone, but for the last wait, which has nothing to wait for."""
    name = f"{family}-bf16-bf16-64-64"
    source, ptx = simulated_driver.compiled(name, "sm_90")
    case = Case(Shape(4, 2, 64, 64, 16, torch.bfloat16), lengths=CASE_LENGTHS[family])
    exact = case.expected(case.rows())
    missed = []
    for mutant in mutants(ptx, KINDS):
        monkeypatch.setattr(simulated_driver, "compiled", lambda *_, text=mutant.ptx: (source, text))
        try:
            output = case.attend(case.backend(num_sms=64, check_races=True), case.rows())
            if relative_error(output, exact) < 4e-3:
                missed.append(mutant)
        except PtxFault:
            pass
    last_wait = max(mutant.line for mutant in mutants(ptx, ["wait"]))
    assert {mutant.line for mutant in missed if mutant.kind != "barrier"} <= {last_wait}
    assert sum(mutant.kind == "barrier" for mutant in missed) == MISSED_BARRIERS[family]

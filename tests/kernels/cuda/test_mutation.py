"""Broken kernels are noticed: without a barrier or a wait, the checks of the execute gate object."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.attention_cases import Shape
from kernels.cuda import simulated_driver
from kernels.cuda.cuda_cases import Case, relative_error
from pagedcore_kernels.cpu.sampling.samplers import sampling_rows
from pagedcore_kernels.cuda.build.toolchain import missing_compiler_parts
from pagedcore_kernels.cuda.elementwise import RmsNorm, RowQuantizer
from pagedcore_kernels.cuda.sampling import TokenSampler
from pagedcore_ptxsim import PtxFault, mutants

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(bool(missing_compiler_parts()), reason="needs pagedcore[cuda] to compile kernels"),
]
KINDS = ("barrier", "wait", "relaxed wait")
CASE_LENGTHS = {"prefill": [(20, 600)], "decode": [(1, 1100), (2, 90)]}


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
    assert [mutant for mutant in missed if mutant.kind == "barrier"] == []


def norm_of_rows(driver: simulated_driver.SimulatedDriver) -> torch.Tensor:
    """What the norm makes of a few rows."""
    rows = torch.randn(3, 896, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.zeros_like(rows)
    RmsNorm(torch.ones(896).bfloat16(), 1e-6, driver)(rows, None, out)
    return out


def codes_of_rows(driver: simulated_driver.SimulatedDriver) -> torch.Tensor:
    """Codes of rows whose largest number is in another warp each."""
    rows = torch.randn(3, 2048, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    rows[0, 100], rows[1, 900], rows[2, 2000] = 50, 60, 70
    return RowQuantizer(torch.bfloat16, driver)(rows)[0].view(torch.uint8)


def sampled_tokens(driver: simulated_driver.SimulatedDriver) -> torch.Tensor:
    """Tokens of rows that take every path: gathered and not, many equal logits, one level of narrowing and two."""
    logits = np.random.default_rng(0).standard_normal((6, 9000)).astype(np.float32)
    logits[4:] = logits[4:].round()
    limits = [(1.0, 0, 1.0, 0.0), (1.0, 50, 0.9, 0.0), (3.0, 0, 0.99, 0.0), (1.0, 5000, 0.8, 0.01), (1.0, 30, 0.5, 0.0),
              (9.0, 8000, 0.9, 0.0)]
    rows = sampling_rows(*zip(*limits, strict=True), seeds=range(6), positions=range(6))
    return TokenSampler(9000, driver)(torch.from_numpy(logits), rows)


@pytest.mark.parametrize(("name", "run", "num_barriers"), [
    ("norm-bf16-1", norm_of_rows, 1), ("quantize-bf16", codes_of_rows, 1), ("sample", sampled_tokens, 6),
])
def test_a_kernel_of_rows_without_a_barrier_is_noticed(name, run, num_barriers, monkeypatch):
    """The race detector or the result notices each barrier that is gone."""
    source, ptx = simulated_driver.compiled(name, "sm_90")
    whole = run(simulated_driver.SimulatedDriver(check_races=True))
    found = mutants(ptx, ["barrier"])
    assert len(found) >= num_barriers
    missed = []
    for mutant in found:
        monkeypatch.setattr(simulated_driver, "compiled", lambda *_, text=mutant.ptx: (source, text))
        try:
            if torch.equal(run(simulated_driver.SimulatedDriver(check_races=True)), whole):
                missed.append(mutant)
        except PtxFault:
            pass
    assert missed == []

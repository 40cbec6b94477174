"""What the compiler makes of the kernels: no spill, registers within bounds, the instructions that they are for."""

from __future__ import annotations

import re

import pytest

from kernels.cuda.simulated_driver import compiled
from pagedcore_kernels.cuda.compiler import link, parse_arch
from pagedcore_kernels.cuda.toolchain import missing_compiler_parts
from pagedcore_kernels.cuda.variants import shipped_names

pytestmark = pytest.mark.skipif(bool(missing_compiler_parts()), reason="needs pagedcore[cuda] to compile kernels")

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
REGISTERS_PER_SM = 65536
FAST = [("decode-bf16-bf16-64-64", "sm_90"), ("prefill-bf16-bf16-64-64", "sm_90"), ("write-bf16-bf16-64-64", "sm_90"),
        ("copy", "sm_80")]
EVERYTHING = [
    pytest.param(name, arch, marks=pytest.mark.kernels)
    for arch in ARCHITECTURES for name in shipped_names(parse_arch(arch)) if (name, arch) not in FAST
]
WANTED = {
    "decode": ("mma.sync", "ldmatrix.sync", "cp.async.cg", "atom.acq_rel.gpu.global.inc", "ex2.approx"),
    "prefill": ("mma.sync", "ldmatrix.sync", "cp.async.cg", "ex2.approx"),
    "write": ("ld.global.nc.v4.u32",),
    "copy": ("ld.global.v4.u32", "st.global.v4.u32"),
}


@pytest.mark.parametrize(("name", "arch"), [*FAST, *EVERYTHING])
def test_a_shipped_kernel_fits_the_card(name: str, arch: str) -> None:
    """It links, spills nothing, has no stack, and so few registers that as many CTAs run at once as was asked for."""
    source, ptx = compiled(name, arch)
    cubin, resources = link(ptx, arch)
    assert cubin[:4] == b"\x7fELF"
    assert (resources.stack_bytes, resources.spill_bytes) == (0, 0)
    assert resources.registers <= REGISTERS_PER_SM // (source.threads * source.ctas_per_sm)
    missing = [text for text in WANTED[name.partition("-")[0]] if text not in ptx]
    assert not missing
    assert ".local" not in ptx
    assert ".f64" not in ptx


@pytest.mark.parametrize("name", ["decode-bf16-bf16-64-64", "prefill-bf16-bf16-64-64"])
def test_sums_are_not_left_to_the_compiler(name: str) -> None:
    """Every float32 addition, product and fused product names its rounding, so that no tool may reorder or fuse it."""
    _, ptx = compiled(name, "sm_90")
    assert re.findall(r"\b(?:add|mul|sub|fma|mad)(?!\.rn)\S*\.f32", ptx) == []
    assert "add.rn.f32" in ptx

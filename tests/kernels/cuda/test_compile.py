"""What the compiler makes of the kernels: no spill, registers within bounds, the instructions that they are for."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from kernels.cuda.simulated_driver import compiled
from pagedcore_kernels.cuda.build.compiler import compile_ptx, entry_of, link, parse_arch
from pagedcore_kernels.cuda.build.resources import KernelResources, read_resource_table
from pagedcore_kernels.cuda.build.toolchain import missing_compiler_parts
from pagedcore_kernels.cuda.build.variants import make_source, shipped_names
from pagedcore_ptxsim import divided_operations

pytestmark = pytest.mark.skipif(bool(missing_compiler_parts()), reason="needs pagedcore[cuda] to compile kernels")

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
SHARED_BYTES = {"sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376}
"""What a CTA can have on GPUs of each architecture, by NVIDIA's tables of compute capabilities."""
REGISTERS_PER_SM = 65536
FAST = [("decode-bf16-bf16-32-32", "sm_90"), ("prefill-bf16-bf16-32-32", "sm_90"), ("rotate-bf16-bf16-halves", "sm_90"),
        ("decode-bf16-int8-32-32", "sm_90"), ("prefill-bf16-int8-32-32", "sm_90"),
        ("rotate-f16-e4m3-interleaved", "sm_90"), ("norm-bf16-1", "sm_90"), ("gated-bf16-silu", "sm_90"),
        ("quantize-bf16", "sm_90"), ("sample", "sm_90")]
"""Attention with the demo model's head size, which is compiled where it is needed: other tests need it too."""
EVERYTHING = [
    pytest.param(name, arch, marks=pytest.mark.kernels)
    for arch in ARCHITECTURES for name in shipped_names(parse_arch(arch)) if (name, arch) not in FAST
]
ELSEWHERE = [
    (name, arch) for arch in SHARED_BYTES if arch not in ARCHITECTURES for name in shipped_names(parse_arch(arch))
    if name == "quantize-bf16" or (
        name.startswith(("decode-bf16", "prefill")) and ("-bf16-bf16-" in name or name.endswith("-256")))
]
"""Kernels that take most of a GPU, or are for some, for GPUs that the table of registers does not have."""
WANTED = {
    "decode": ("mma.sync", "ldmatrix.sync", "cp.async.cg", "atom.acq_rel.gpu.global.inc", "ex2.approx"),
    "prefill": ("mma.sync", "ldmatrix.sync", "cp.async.cg", "ex2.approx"),
    "rotate": ("ld.global.v4.u32", "ld.global.nc.v4.u32", "st.global.v4.u32"),
    "norm": ("ld.global.v4.u32", "ld.global.nc.v4.u32", "st.global.v4.u32", "sqrt.rn.f32"),
    "gated": ("ld.global.nc.v4.u32", "st.global.v4.u32", "ex2.approx"),
    "quantize": ("ld.global.nc.v4.u32", "st.global.v2.u32", "redux.sync.max.u32", "cvt.rn.satfinite.e4m3x2.f32"),
    "sample": ("ld.global.nc.v4.u32", "ld.shared.v4.u32", "redux.sync", "mul.hi.u64", "ex2.approx"),
}
LINKER_OF_THE_TABLE = (13, 5)
MORE_REGISTERS = 8
"""Than in the table may a kernel have, of this linker or a newer one: older ones differ by up to 59, both ways."""
DOCUMENT = Path(__file__).parents[3] / "docs" / "cuda-kernels.md"


@cache
def documented() -> dict[tuple[str, str], KernelResources]:
    """The table of docs/cuda-kernels.md."""
    return read_resource_table(DOCUMENT.read_text(encoding="utf-8"))


def linker_version() -> tuple[int, int]:
    """The release of nvJitLink that links here."""
    from cuda.bindings import nvjitlink

    major, minor = nvjitlink.version()
    return int(major), int(minor)


def test_every_shipped_kernel_is_in_the_table() -> None:
    """The table has what is shipped and nothing else, and nothing that spills."""
    assert set(documented()) == {(name, arch) for arch in ARCHITECTURES for name in shipped_names(parse_arch(arch))}
    for resources in documented().values():
        assert resources.spilled_bytes == 0
        assert resources.registers * resources.threads <= REGISTERS_PER_SM


@pytest.mark.parametrize(("name", "arch"), [*FAST, *EVERYTHING])
def test_a_kernel_fits_the_gpu(name: str, arch: str) -> None:
    """It links, spills nothing, has no stack, and so few registers that as many CTAs run at once as was asked for."""
    source, ptx = compiled(name, arch)
    cubin, resources = link(ptx, arch)
    assert cubin[:4] == b"\x7fELF"
    assert resources.stack_bytes + resources.spill_bytes == 0
    assert resources.registers <= REGISTERS_PER_SM // (source.threads * source.ctas_per_sm)
    if name in shipped_names(parse_arch(arch)):
        limits = documented()[name, arch]
        assert (source.threads, source.shared_bytes) == (limits.threads, limits.shared_bytes)
        if linker_version() >= LINKER_OF_THE_TABLE:
            assert resources.registers <= limits.registers + MORE_REGISTERS
    missing = [text for text in WANTED[name.partition("-")[0]] if text not in ptx]
    assert not missing
    assert ".local" not in ptx
    assert ".f64" not in ptx


@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_shipped_kernels_have_the_shared_memory_of_their_gpu(arch: str) -> None:
    """Heads of 256 too, of which prefill takes less where there is little."""
    taken = {name: make_source(name).shared_bytes for name in shipped_names(parse_arch(arch))}
    assert {name: size for name, size in taken.items() if size > SHARED_BYTES[arch]} == {}
    assert any(name.startswith("prefill32") for name in taken) == (SHARED_BYTES[arch] < 110_000)


@pytest.mark.kernels
@pytest.mark.parametrize(("name", "arch"), ELSEWHERE)
def test_kernels_fit_gpus_that_nobody_has_tried(name: str, arch: str) -> None:
    """It links and spills nothing; every warp is whole wherever it has to be."""
    source, ptx = compiled(name, arch)
    resources = link(ptx, arch)[1]
    assert resources.stack_bytes + resources.spill_bytes == 0
    assert resources.registers <= REGISTERS_PER_SM // (source.threads * source.ctas_per_sm)
    assert divided_operations(ptx) == []


@pytest.mark.parametrize(("name", "arch"), [*FAST, *EVERYTHING])
def test_a_warp_is_whole_wherever_it_has_to_be(name: str, arch: str) -> None:
    """Votes, shuffles, tensor-core products and barriers lie where no branch, whatever the arguments, keeps lanes."""
    assert [str(each) for each in divided_operations(compiled(name, arch)[1])] == []


@pytest.mark.kernels
@pytest.mark.parametrize(("name", "arch"), [
    *(("norm-bf16-1", arch) for arch in ARCHITECTURES), ("decode-bf16-bf16-64-64", "sm_100")])
def test_gates_have_the_ptx_that_ships(name: str, arch: str) -> None:
    """What is made of Numba's half of another architecture is what the compiler makes, but for names."""
    source, ptx = compiled(name, arch)
    whole, own = (re.sub(r"smem_\d+", "smem", text.replace(entry_of(text)[3:], ""))
                  for text in (compile_ptx(source, arch), ptx))
    assert own == whole


@pytest.mark.parametrize("name", ["decode-bf16-bf16-32-32", "prefill-bf16-bf16-32-32"])
def test_sums_are_not_left_to_the_compiler(name: str) -> None:
    """Every float32 addition, product and fused product names its rounding, so that no tool may reorder or fuse it."""
    _, ptx = compiled(name, "sm_90")
    assert re.findall(r"\b(?:add|mul|sub|fma|mad)(?!\.rn)\S*\.f32", ptx) == []
    assert "add.rn.f32" in ptx

"""Our matrix products against float64, and their bits against themselves under every arrangement of the work."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import llvmlite.binding
import numpy as np
import pytest
import torch
from numba import cfunc, types

from kernels import edge_of_memory
from pagedcore.errors import InternalError
from pagedcore_kernels.cpu import features
from pagedcore_kernels.cpu.matmul import amx, packed, packed_grouped
from pagedcore_kernels.cpu.matmul.packed import CHUNK_STEPS, MATRIX_UNIT_CHUNK_STEPS, PackedMatmul, can_multiply
from pagedcore_kernels.cpu.runtime.threads import Computing
from support.apart import Apart

#: Inputs of a chunk in bfloat16, of two in float32.
CHUNK = 2 * CHUNK_STEPS

DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(not can_multiply(dtype, 2), reason="no such vectors"), id=str(dtype))
    for dtype in (torch.float32, torch.bfloat16)
]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)

#: The same with matrix units, which take inputs by 32.
UNIT_CHUNK = 2 * MATRIX_UNIT_CHUNK_STEPS

#: Outputs and inputs: one and several panels, whole or not; less than a chunk, whole chunks, a chunk and a rest.
SHAPES = [(1, 2), (64, 2), (63, 40), (65, CHUNK), (200, CHUNK + 2), (128, 2 * CHUNK), (320, 3 * CHUNK - 6)]
SHAPES += [(1, 32), (130, UNIT_CHUNK), (63, UNIT_CHUNK + 32), (70, 3 * UNIT_CHUNK - 64)]
#: Inputs for vectors and, in bfloat16, for matrix units.
each_number_of_inputs = pytest.mark.parametrize("num_inputs", [2 * CHUNK + 6, 3 * UNIT_CHUNK + 32])


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cancelling_product(
    num_outputs: int, num_rows: int, num_inputs: int, dtype: torch.dtype
) -> tuple[PackedMatmul, torch.Tensor, torch.Tensor]:
    """Return a product, rows, and their outputs: nothing but errors of float32, in any order of additions others.

    Why: a bfloat16 would hide such errors in larger numbers, and nearly all orders would have the same bits.
    """
    order = torch.from_numpy(np.random.default_rng(0).permutation(num_inputs))
    half_weight, half_rows = (numbers(seed, n, num_inputs // 2) for seed, n in ((1, num_outputs), (2, num_rows)))
    weight, rows = torch.cat([half_weight, -half_weight], 1), torch.cat([half_rows, half_rows], 1)
    product, rows = PackedMatmul(weight[:, order].to(dtype), None), rows[:, order].to(dtype)
    return product, rows, product(rows)


@pytest.fixture
def many_threads() -> Iterator[None]:
    """Let torch use more threads than there are panels, and set the number back."""
    before = torch.get_num_threads()
    torch.set_num_threads(7)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_biased", [False, True])
@each_dtype
def test_products(dtype: torch.dtype, shape: tuple[int, int], is_biased: bool) -> None:
    """Each output is the float64 product within float32's error of the sum and one rounding to bfloat16."""
    weight, bias = numbers(1, *shape, dtype=dtype), numbers(3, shape[0], dtype=dtype) if is_biased else None
    product, wide_weight = PackedMatmul(weight, bias), weight.double()
    for num_rows in (0, 1, 2, 3, 4, 5, 6, 13, 16, 17, 33, 64, 65, 131):
        rows = numbers(2, num_rows, shape[1], dtype=dtype)
        actual, wide_rows = product(rows), rows.double()
        expected = wide_rows @ wide_weight.T + (0 if bias is None else bias.double())
        magnitude = wide_rows.abs() @ wide_weight.abs().T + 4
        assert actual.shape == expected.shape
        bound = (2**-8 if dtype == torch.bfloat16 else 0) * expected.abs() + 2**-20 * magnitude
        assert ((actual.double() - expected).abs() <= bound).all(), f"{num_rows} rows"


@each_number_of_inputs
@each_dtype
def test_exact_sums_are_exact(dtype: torch.dtype, num_inputs: int) -> None:
    """Of small integers nothing is lost: every weight meets its own input, in every panel and chunk."""
    generator = np.random.default_rng(0)
    weight = torch.from_numpy(generator.integers(-1, 2, (130, num_inputs))).to(dtype)
    rows = torch.from_numpy((generator.random((39, num_inputs)) < 0.1).astype(np.float32)).to(dtype)
    assert torch.equal(PackedMatmul(weight, None)(rows).double(), rows.double() @ weight.double().T)


@pytest.mark.parametrize("num_inputs", [1, 127, 129, CHUNK_STEPS, CHUNK_STEPS + 1, 2 * CHUNK_STEPS - 1, 700])
@pytest.mark.skipif(not can_multiply(torch.float32, 1), reason="no such vectors")
def test_the_order_of_additions(num_inputs: int) -> None:
    """One after the other within a chunk, then the chunks: float64 holds each sum before it is rounded."""
    generator = np.random.default_rng(0)
    weight, rows = (generator.integers(-2047, 2048, (size, num_inputs)).astype(np.float32) for size in (70, 37))
    total = np.zeros((37, 70), np.float32)
    for start in range(0, num_inputs, CHUNK_STEPS):
        chunk = np.zeros_like(total)
        for i in range(start, min(start + CHUNK_STEPS, num_inputs)):
            chunk = (chunk + np.multiply.outer(rows[:, i], weight[:, i]).astype(np.float64)).astype(np.float32)
        total += chunk
    actual = PackedMatmul(torch.from_numpy(weight), None)(torch.from_numpy(rows))
    np.testing.assert_array_equal(actual.numpy(), total)


@each_number_of_inputs
@each_dtype
def test_a_row_has_its_bits_in_any_company(dtype: torch.dtype, num_inputs: int) -> None:
    """Alone, at any place among up to 600 rows, and whatever rows those are."""
    product, rows, expected = cancelling_product(100, 600, num_inputs, dtype)
    for begin, end in [(7, 8), (3, 5), (60, 69), (199, 200), (1, 130), (0, 512), (88, 600), (40, 585)]:
        assert torch.equal(product(rows[begin:end]), expected[begin:end])
    assert torch.equal(product(rows.flip(0)), expected.flip(0))


@each_number_of_inputs
@each_dtype
def test_no_number_of_rows_changes_bits(dtype: torch.dtype, num_inputs: int) -> None:
    """Every number up to 70: tiles and blocks of all sizes, whole and not."""
    product, rows, expected = cancelling_product(65, 70, num_inputs, dtype)
    for count in range(1, 70):
        assert torch.equal(product(rows[:count]), expected[:count])
        assert torch.equal(product(rows[70 - count :]), expected[70 - count :])


@pytest.mark.usefixtures("many_threads")
@each_number_of_inputs
@each_dtype
def test_threads_do_not_change_bits(dtype: torch.dtype, num_inputs: int) -> None:
    """With fewer panels than threads the rows are shared out too, and nothing else changes."""
    product, rows, shared = cancelling_product(70, 300, num_inputs, dtype)
    torch.set_num_threads(1)
    assert torch.equal(product(rows), shared)


@each_dtype
def test_a_broken_row_breaks_no_other(dtype: torch.dtype) -> None:
    """NaN and infinity stay in their row; all others have the bits they have without it."""
    product, rows = PackedMatmul(numbers(1, 100, 64, dtype=dtype), None), numbers(2, 6, 64, dtype=dtype)
    expected = product(rows)
    rows[2, 5], rows[4, 63] = torch.nan, torch.inf
    actual = product(rows)
    assert actual[2].isnan().all()
    assert not actual[4].isfinite().any()
    assert torch.equal(actual[[0, 1, 3, 5]], expected[[0, 1, 3, 5]])


@pytest.mark.parametrize("num_inputs", [8, 32])
@each_dtype
def test_nothing_is_written_beside_the_outputs(
    dtype: torch.dtype, num_inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last panel is not whole; memory around the outputs stays as it was."""
    room = torch.full((5, 100), 7.0, dtype=dtype)
    product = PackedMatmul(numbers(1, 100, num_inputs, dtype=dtype), None)
    rows = numbers(2, 3, num_inputs, dtype=dtype)
    expected = product(rows)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda tensor, *shape: room[1:4])
    assert torch.equal(product(rows), expected)
    assert (room[0] == 7).all()
    assert (room[4] == 7).all()


@pytest.mark.parametrize("shift", [0, 1, 16])
@pytest.mark.parametrize("num_rows", [7, 8, 70])
@each_dtype
def test_outputs_may_begin_anywhere(dtype: torch.dtype, num_rows: int, shift: int) -> None:
    """At the beginning of a cache line, where whole lines may be streamed, or not; nothing is written beside them."""
    product, rows = PackedMatmul(numbers(1, 130, 64, dtype=dtype), None), numbers(2, num_rows, 64, dtype=dtype)
    whole = PackedMatmul(numbers(1, 130, 64, dtype=dtype)[:128], None)
    memory = torch.full((130 * num_rows + 256,), 7.0, dtype=dtype)
    start = -memory.data_ptr() % 64 // dtype.itemsize + shift
    expected = product(rows)
    for one, size in ((product, 130), (whole, 128)):
        memory.fill_(7.0)
        out = memory[start : start + num_rows * size].view(num_rows, size)
        one.multiply_to(out, rows)
        assert torch.equal(out, expected[:, :size])
        assert (memory[:start] == 7).all()
        assert (memory[start + num_rows * size :] == 7).all()


@pytest.mark.parametrize(("module", "make"), [
    (packed, lambda: packed.matmul_kernel.__wrapped__(packed.SINGLES, torch.float32)),
    (packed_grouped, lambda: packed_grouped._kernel.__wrapped__(packed.SINGLES, 4, 0, 0, torch.float32)),
], ids=["packed", "grouped"])
@pytest.mark.skipif(not features.may_stream(), reason="nothing is streamed here")
def test_what_is_streamed_is_in_memory_when_a_kernel_ends(
    monkeypatch: pytest.MonkeyPatch, module: Any, make: Callable[[], object]
) -> None:
    """No run can show that a thread saw the work as done before the outputs: the code is looked at."""
    functions: list[Callable[[Any], None]] = []
    monkeypatch.setattr(module, "compile_kernel", functions.append)
    make()
    code = cfunc(types.void(types.voidptr), error_model="numpy")(functions[0]).inspect_llvm()
    assert "!nontemporal" in code
    assert "call void @llvm.x86.sse.sfence" in code


def chain() -> tuple[list[PackedMatmul], torch.Tensor]:
    """Return products that read each other's outputs, each part of which another thread may have written, and rows."""
    weights = [numbers(seed, 512, 512) / 16 for seed in range(4)]
    return [PackedMatmul(weight, None) for weight in weights], numbers(9, 70, 512)


def through(products: list[PackedMatmul], rows: torch.Tensor) -> torch.Tensor:
    for product in products:
        rows = product(rows)
    return rows


@pytest.mark.skipif(not can_multiply(torch.float32, 2), reason="no such vectors")
def test_busy_neighbours_change_no_bit() -> None:
    """A thread that loses its core in the middle has its outputs in memory before others read them."""
    products, rows = chain()
    expected = through(products, rows)
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        with Computing(3):
            assert all(torch.equal(through(products, rows), expected) for _ in range(200))
    finally:
        for process in spinning:
            process.kill()
            process.wait()


#: A forked child multiplies with the weights and kernels of its parent, which goes on meanwhile.
FORKED_CHILD = """
import os, torch
from kernels.test_matmul import chain, through
from pagedcore_kernels.cpu.runtime.threads import Computing
products, rows = chain()
with Computing(2):
    expected = through(products, rows)
child = os.fork()
with Computing(2):
    is_same = all(torch.equal(through(products, rows), expected) for _ in range(50))
if child == 0:
    os._exit(0 if is_same else 1)
assert os.waitpid(child, 0)[1] == 0 and is_same
print("the same")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.skipif(not can_multiply(torch.float32, 2), reason="no such vectors")
def test_a_forked_child_multiplies_with_the_same_bits(apart: Apart) -> None:
    """Parent and child at once, each with helpers of its own."""
    assert apart.run(FORKED_CHILD) == "the same\n"


@pytest.mark.skipif(not can_multiply(torch.bfloat16, 2), reason="no such vectors")
def test_nothing_is_read_beyond_its_end(apart: Apart) -> None:
    """Rows, weight, bias and outputs may end where memory ends, also while memory is asked for ahead."""
    out = apart.run("from kernels import edge_of_memory; edge_of_memory.main('products')")
    assert out.count("torch.Size") == len(edge_of_memory.PRODUCTS)


@each_dtype
def test_the_original_may_change(dtype: torch.dtype) -> None:
    """Weight and bias are copied."""
    weight, bias, rows = numbers(1, 64, 8, dtype=dtype), numbers(2, 64, dtype=dtype), numbers(3, 2, 8, dtype=dtype)
    product = PackedMatmul(weight, bias)
    expected = product(rows)
    weight.zero_()
    bias.zero_()
    assert torch.equal(product(rows), expected)


@pytest.mark.parametrize(
    "change",
    [lambda rows: rows[:, :6], lambda rows: rows.T, lambda rows: rows[:, ::2], lambda rows: rows.double()],
    ids=["size", "order", "gaps", "format"],
)
@each_dtype
def test_other_rows_are_refused(dtype: torch.dtype, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The kernel reads raw memory: another size, order or number format is an error."""
    rows = numbers(1, 8, 16, dtype=dtype)[:, :8].contiguous()
    product = PackedMatmul(numbers(1, 64, 8, dtype=dtype), None)
    assert product(rows).shape == (8, 64)
    with pytest.raises(InternalError, match="expected"):
        product(change(rows))


@pytest.mark.parametrize(("dtype", "num_inputs"), [(torch.float64, 8), (torch.float16, 8), (torch.bfloat16, 7)])
def test_other_weights_are_refused(dtype: torch.dtype, num_inputs: int) -> None:
    """What cannot be multiplied here is known before, and an error if tried."""
    assert not can_multiply(dtype, num_inputs)
    with pytest.raises(InternalError, match="cannot be packed"):
        PackedMatmul(torch.zeros(4, num_inputs, dtype=dtype), None)


@pytest.mark.parametrize("given", ["", "+sse2,-avx512f"], ids=["none", "others"])
def test_code_for_another_processor_is_not_tried(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """Numba configured to compile for less than this processor would not know the instructions.

    ``NUMBA_CPU_NAME=generic`` makes it none; with any other name Numba still names all instructions of this processor.
    """
    monkeypatch.setattr(features.config, "CPU_FEATURES", given)
    assert not can_multiply(torch.bfloat16, 8)
    assert not can_multiply(torch.float32, 8)


def digest_of_products() -> str:
    """A checksum over outputs, each within the error of float32 and of the same bits in any company."""
    digest = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        for num_outputs, num_inputs in ((1, 2), (65, 512), (200, 1030), (100, 1088)):
            weight, rows = (torch.randn(n, num_inputs, generator=torch.Generator().manual_seed(n)).to(dtype)
                            for n in (num_outputs, 70))
            bias = torch.arange(num_outputs).to(dtype)
            product = PackedMatmul(weight, bias)
            actual, magnitude = product(rows), rows.double().abs() @ weight.double().abs().T + bias.double()
            expected = rows.double() @ weight.double().T + bias.double()
            rounding = 2**-8 * expected.abs() if dtype == torch.bfloat16 else 0
            assert ((actual.double() - expected).abs() <= rounding + 2**-20 * magnitude).all()
            for count in range(1, 70):
                assert torch.equal(product(rows[:count]), actual[:count])
            digest.update(actual.float().numpy().tobytes())
    return digest.hexdigest()


def on_another_processor(
    cpu_name: str, *missing: str, program: str, added: Sequence[str] = ()
) -> str:  # fmt: skip
    """Run a program as if instruction sets whose names begin so were missing, and return what it prints.

    For those that are added, it may compile, and run nothing that it compiled.
    """
    host = llvmlite.binding.get_host_cpu_features()
    names = [name for name, is_there in host.items() if is_there and not name.startswith(missing)]
    names += added
    processor = {"NUMBA_CPU_NAME": cpu_name, "NUMBA_CPU_FEATURES": ",".join("+" + name for name in sorted(names))}
    processor["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=os.environ | processor, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def no_system_call(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the system refuse everything."""

    def refused(*arguments: object) -> int:
        return -1

    amx._is_permitted.cache_clear()
    monkeypatch.setattr(amx.ctypes, "CDLL", lambda name: SimpleNamespace(syscall=refused, madvise=refused))
    yield
    amx._is_permitted.cache_clear()


@pytest.mark.usefixtures("no_system_call")
@pytest.mark.skipif(not can_multiply(torch.bfloat16, 2), reason="no such vectors")
def test_without_the_systems_leave_vectors_multiply() -> None:
    """Matrix units that the process may not use are not used: the same numbers come from the other kernel."""
    weight, rows = numbers(1, 70, 64, dtype=torch.bfloat16), numbers(2, 40, 64, dtype=torch.bfloat16)
    product = PackedMatmul(weight, None)
    expected = packed.PAIRS if features.has_instructions("avx512bf16") else packed.WIDENED_PAIRS
    assert product._kernel is packed.matmul_kernel(expected, torch.bfloat16)
    torch.testing.assert_close(product(rows), rows @ weight.T)


@pytest.mark.skipif(not amx.may_use_tiles(amx.MATRIX_UNITS), reason="no matrix units")
def test_matrix_units_multiply_whole_tiles_of_inputs() -> None:
    """The number of inputs alone decides, and float32 has no such unit."""
    units, pairs, singles = packed.MATRIX_UNITS, packed.PAIRS, packed.SINGLES
    cases = [(torch.bfloat16, 64, units), (torch.bfloat16, 48, pairs), (torch.float32, 64, singles)]
    for dtype, num_inputs, form in cases:
        product = PackedMatmul(torch.zeros(8, num_inputs, dtype=dtype), None)
        assert product._kernel is packed.matmul_kernel(form, dtype)

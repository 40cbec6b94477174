"""The largest outputs that products find without storing them, against the outputs that the same products store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pagedcore.protocols import PicksLargest
from pagedcore_kernels.cpu.matmul.largest import keep_candidate, largest_outputs
from pagedcore_kernels.cpu.matmul.packed import PackedMatmul, can_multiply
from pagedcore_kernels.cpu.matmul.packed_grouped import PackedGroupedMatmul
from pagedcore_kernels.cpu.matmul.packed_int8 import PackedInt8Matmul
from pagedcore_kernels.cpu.matmul.product import PackedProduct
from pagedcore_kernels.cpu.matmul.tiles import PANEL
from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock, compile_kernel
from pagedcore_kernels.cpu.runtime.threads import Computing
from pagedcore_kernels.cpu.simd import address_of, load_int64
from pagedcore_kernels.errors import InternalError

pytestmark = pytest.mark.skipif(not can_multiply(torch.float32, 2), reason="no such vectors")
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

NAN, INF = np.nan, np.inf
DENORMAL = 1e-40


def floats_product(values: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None) -> PackedProduct:
    """Multiply whole numbers as they are."""
    return PackedMatmul(values.to(dtype), None if bias is None else bias.to(dtype))


def int8_product(values: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None) -> PackedProduct:
    """Multiply int8 by rows in int8."""
    return PackedInt8Matmul(values, torch.full((len(values),), 0.01), bias, dtype)


def int4_product(values: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None) -> PackedProduct:
    """Multiply groups of int4."""
    scales = torch.full((len(values), values.shape[1] // 16), 0.125)
    return PackedGroupedMatmul(values.clamp(-8, 7), scales, None, 4, bias, dtype)


def int4_by_int8_product(values: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None) -> PackedProduct:
    """Multiply groups of int4 with rows in int8."""
    scales = torch.full((len(values), values.shape[1] // 16), 0.125)
    return PackedGroupedMatmul(values.clamp(-8, 7), scales, None, 4, bias, dtype, quantizes_rows=True)


PRODUCTS = [floats_product, int8_product, int4_product, int4_by_int8_product]
each_product = pytest.mark.parametrize("make", PRODUCTS, ids=["floats", "w8a8", "w4a16", "w4a8"])


def whole_numbers(num_outputs: int, num_inputs: int, seed: int = 0) -> torch.Tensor:
    """Return int8, few of them different."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, (num_outputs, num_inputs), generator=generator, dtype=torch.int8)


NOTHING_BARRED = torch.zeros(1, dtype=torch.int64)


def picked(
    product: PackedProduct, rows: torch.Tensor, num_outputs: int, barred: torch.Tensor = NOTHING_BARRED
) -> npt.NDArray[np.int64]:
    """Return the numbers that a product finds, in memory that held others."""
    candidates = torch.full((-(-num_outputs // PANEL), len(rows)), 2**62, dtype=torch.int64)
    product.pick_to(candidates, rows, barred)
    return largest_outputs(candidates.numpy())


def first_largest(outputs: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Say the same by NumPy, whose argmax takes the first of equal numbers."""
    is_valid = ~np.isnan(outputs).any(1) & (outputs.max(1) < INF) & np.isfinite(outputs).any(1)
    return np.where(is_valid, outputs.argmax(1), -1)


@each_dtype
@each_product
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 16), (64, 48), (130, 64), (1000, 128)])
def test_it_is_the_largest_of_what_would_be_stored(
    make: Callable[..., PackedProduct], dtype: torch.dtype, num_outputs: int, num_inputs: int
) -> None:
    """For every number of rows and any number of panels, the last not whole; the first of equal outputs, of which every
    row has two; the same on one thread and on several.
    """
    generator = torch.Generator().manual_seed(1)
    half = -(-num_outputs // 2)
    bias = torch.randint(-2, 3, (half,), generator=generator).float().repeat(2)[:num_outputs]
    product = make(whole_numbers(half, num_inputs).repeat(2, 1)[:num_outputs], dtype, bias)
    for num_rows in (2, 3, 7, 8, 9, 17, 64, 65, 130, 520):
        rows = torch.randint(-2, 3, (num_rows, num_inputs), generator=generator).to(dtype)
        outputs = product(rows).float().numpy()
        expected = first_largest(outputs)
        assert ((outputs == outputs.max(1, keepdims=True)).sum(1) >= min(2, num_outputs)).all()
        for num_threads in (1, 3):
            with Computing(num_threads):
                assert np.array_equal(picked(product, rows, num_outputs), expected)


@each_dtype
@each_product
def test_rows_that_are_not_valid(make: Callable[..., PackedProduct], dtype: torch.dtype) -> None:
    """Rows with NaN or infinity have no largest output, whatever panel it is in, and the others have theirs."""
    product = make(whole_numbers(200, 64), dtype, None)
    rows = torch.randn(12, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    alone = picked(product, rows, 200)
    rows[1, 5], rows[4, 0], rows[9, 63] = NAN, INF, -INF
    found = picked(product, rows, 200)
    outputs = product(rows).float().numpy()
    assert np.array_equal(found, first_largest(outputs))
    assert found[[1, 4, 9]].tolist() == [-1] * 3
    others = np.delete(np.arange(12), [1, 4, 9])
    assert np.array_equal(found[others], alone[others])


@each_dtype
@each_product
def test_barred_outputs_are_no_candidates(make: Callable[..., PackedProduct], dtype: torch.dtype) -> None:
    """Of some rows one output, several in one panel or in two, or all are barred, the largest among them, and rows keep
    theirs of which none is; what is not a number stays seen.
    """
    product = make(whole_numbers(150, 64), dtype, None)
    rows = torch.randn(9, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    rows[6, 1] = NAN
    outputs = product(rows).float().numpy()
    order = np.argsort(-outputs, axis=1, kind="stable")
    pairs = [(0, int(order[0, 0])), *((2, int(place)) for place in order[2, :40]), *((3, i) for i in range(150)),
             (5, int(order[5, 7])), (6, 3), *((8, i) for i in (0, 63, 64, 149, 150, 191))]  # fmt: skip
    expected = outputs.copy()
    for row, place in pairs:
        if place < 150 and expected[row, place] < INF:
            expected[row, place] = -INF
    in_order = sorted(pairs, key=lambda pair: pair[1])
    barred = torch.tensor([len(pairs), *(number for pair in in_order for number in pair), 0, 0])
    found = picked(product, rows, 150, barred)
    assert np.array_equal(found, first_largest(expected))
    assert found[[0, 2, 3, 6]].tolist() == [order[0, 1], order[2, 40], -1, -1]
    assert found[[1, 4, 5, 7]].tolist() == order[[1, 4, 5, 7], 0].tolist()


@pytest.mark.parametrize(("bias", "expected"), [
    ({7: NAN}, -1), ({150: NAN, 3: 5.0}, -1), ({150: INF}, -1), ({3: -INF}, 0), ({0: -INF}, 1), ({199: 1.0}, 199),
    ({64: 2.0, 63: 2.0}, 63), ({127: 2.0, 128: 2.0}, 127), (dict.fromkeys(range(200), -INF), -1),
    (dict.fromkeys(range(199), -INF), 199), (dict.fromkeys(range(200), -3.0), 0), ({5: DENORMAL, 90: 2 * DENORMAL}, 90),
    ({i: -1.0 - i for i in range(200)}, 0), ({i: i - 1000.0 for i in range(200)}, 199),
])  # fmt: skip
def test_every_kind_of_number(bias: dict[int, float], expected: int) -> None:
    """NaN and infinities of both signs, negative numbers, denormals and equal ones in two panels are in order."""
    of_outputs = torch.zeros(200)
    for place, number in bias.items():
        of_outputs[place] = number
    product = PackedMatmul(torch.zeros(200, 2), of_outputs)
    rows = torch.ones(3, 2)
    assert picked(product, rows, 200).tolist() == [expected] * 3
    assert first_largest(product(rows).numpy()).tolist() == [expected] * 3


def candidate_kernel(is_bf16: int) -> Kernel:
    """Compile a kernel of nothing else."""

    def keep(parameters: Any) -> None:
        p = address_of(parameters)
        keep_candidate(is_bf16, load_int64(p, 1), load_int64(p, 2), load_int64(p, 3), load_int64(p, 4))

    return compile_kernel(keep)


@each_dtype
def test_zeros_of_both_signs_are_equal(dtype: torch.dtype) -> None:
    """Of minus zero and zero the first is the largest; what lies past the outputs is not looked at."""
    is_bf16 = int(dtype == torch.bfloat16)
    kernel, block = candidate_kernel(is_bf16), ParameterBlock(4)
    for values, count, expected in [
        ([-1.0, -0.0, 0.0, -0.0], 4, 1), ([0.0, -0.0], 2, 0), ([-0.0, 0.0], 2, 0), ([-2.0, -1.0, 9.0], 2, 1),
        ([-2.0, -1.0, NAN], 2, 1), ([-2.0, NAN, -1.0], 3, -1), ([3.0] * 64, 64, 0), ([-3.0] * 17 + [4.0], 18, 17),
    ]:
        outputs = torch.full((PANEL,), 7.0).to(dtype)
        outputs[: len(values)] = torch.tensor(values)
        candidate = np.zeros(1, np.int64)
        block.fill(outputs.data_ptr(), count, 1000, candidate.ctypes.data)
        kernel.run(block, 1)
        found = int(largest_outputs(candidate[:, None])[0])
        assert found == (expected + 1000 if expected >= 0 else -1)


@each_product
def test_memory_of_another_size_is_refused(make: Callable[..., PackedProduct]) -> None:
    """The kernel writes a candidate for each panel and row, and not beyond what there is."""
    product = make(whole_numbers(130, 64), torch.float32, None)
    assert isinstance(product, PicksLargest)
    rows = torch.ones(4, 64)
    for candidates in (torch.zeros(2, 4, dtype=torch.int64), torch.zeros(3, 3, dtype=torch.int64),
                       torch.zeros(3, 4, dtype=torch.int32), torch.zeros(4, 3, dtype=torch.int64).t()):  # fmt: skip
        with pytest.raises(InternalError, match=r"candidates: .* expected torch.int64 \(3, 4\)"):
            product.pick_to(candidates, rows, NOTHING_BARRED)
    with pytest.raises(InternalError, match=r"rows: .* expected torch.float32 \(4, 64\)"):
        product.pick_to(torch.zeros(3, 4, dtype=torch.int64), torch.ones(4, 63), NOTHING_BARRED)
    for barred in (torch.tensor([1]), torch.tensor([2, 0, 0, 1]), torch.tensor([-1, 0, 0]), torch.zeros(1),
                   torch.zeros(0, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.int64)):  # fmt: skip
        with pytest.raises(InternalError, match=r"barred: .* expected how many, then pairs"):
            product.pick_to(torch.zeros(3, 4, dtype=torch.int64), rows, barred)


@each_dtype
def test_zeros_of_both_signs_in_two_panels(dtype: torch.dtype) -> None:
    """The first is the largest there too."""
    kernel, block = candidate_kernel(int(dtype == torch.bfloat16)), ParameterBlock(4)
    for signs in ((-0.0, 0.0), (0.0, -0.0), (-0.0, -0.0)):
        candidates = np.zeros((2, 1), np.int64)
        for panel, zero in enumerate(signs):
            outputs = torch.full((PANEL,), zero).to(dtype)
            block.fill(outputs.data_ptr(), PANEL, panel * PANEL, candidates[panel:].ctypes.data)
            kernel.run(block, 1)
        assert largest_outputs(candidates).tolist() == [0]

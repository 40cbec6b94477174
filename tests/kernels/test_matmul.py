"""Our matrix products against float64, and their bits against themselves under every arrangement of the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from pagedcore.errors import InternalError
from pagedcore_kernels.cpu import matmul
from pagedcore_kernels.cpu.matmul import CHUNK_STEPS, PackedMatmul, can_multiply

#: Inputs of a chunk in bfloat16, of two in float32.
CHUNK = 2 * CHUNK_STEPS

DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(not can_multiply(dtype, 2), reason="no such vectors"), id=str(dtype))
    for dtype in (torch.float32, torch.bfloat16)
]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)

#: Outputs and inputs: one and several panels, whole or not; less than a chunk, whole chunks, a chunk and a rest.
SHAPES = [(1, 2), (64, 2), (63, 40), (65, CHUNK), (200, CHUNK + 2), (128, 2 * CHUNK), (320, 3 * CHUNK - 6)]


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def many_threads() -> Iterator[None]:
    """Let torch use more threads than there are panels, and set the number back."""
    before = torch.get_num_threads()
    torch.set_num_threads(7)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 64, 65, 131])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_biased", [False, True])
@each_dtype
def test_products(dtype: torch.dtype, shape: tuple[int, int], num_rows: int, is_biased: bool) -> None:
    """Each output is the float64 product within float32's error of the sum and one rounding to bfloat16."""
    weight, rows = numbers(1, *shape, dtype=dtype), numbers(2, num_rows, shape[1], dtype=dtype)
    bias = numbers(3, shape[0], dtype=dtype) if is_biased else None
    actual = PackedMatmul(weight, bias)(rows)
    wide_rows, wide_weight = rows.double(), weight.double()
    expected = wide_rows @ wide_weight.T + (0 if bias is None else bias.double())
    magnitude = wide_rows.abs() @ wide_weight.abs().T + 4
    assert actual.shape == expected.shape
    bound = (2**-8 if dtype == torch.bfloat16 else 0) * expected.abs() + 2**-20 * magnitude
    assert ((actual.double() - expected).abs() <= bound).all()


@each_dtype
def test_exact_sums_are_exact(dtype: torch.dtype) -> None:
    """Of small integers nothing is lost: every weight meets its own input, in every panel and chunk."""
    generator = np.random.default_rng(0)
    weight = torch.from_numpy(generator.integers(-1, 2, (130, 2 * CHUNK + 4))).to(dtype)
    rows = torch.from_numpy((generator.random((9, 2 * CHUNK + 4)) < 0.1).astype(np.float32)).to(dtype)
    assert torch.equal(PackedMatmul(weight, None)(rows).double(), rows.double() @ weight.double().T)


@each_dtype
def test_a_row_has_its_bits_in_any_company(dtype: torch.dtype) -> None:
    """Alone, at any place among up to 200 rows, and whatever rows those are."""
    weight, rows = (numbers(seed, 200, 2 * CHUNK + 6, dtype=dtype) for seed in (1, 2))
    product = PackedMatmul(weight, None)
    expected = product(rows)
    for begin, end in [(0, 1), (7, 8), (3, 5), (11, 14), (60, 69), (1, 67), (0, 129), (199, 200)]:
        assert torch.equal(product(rows[begin:end]), expected[begin:end])
    assert torch.equal(product(rows.flip(0)), expected.flip(0))


@pytest.mark.usefixtures("many_threads")
@each_dtype
def test_threads_do_not_change_bits(dtype: torch.dtype) -> None:
    """With fewer panels than threads the rows are shared out too, and nothing else changes."""
    product = PackedMatmul(numbers(1, 70, CHUNK + 10, dtype=dtype), numbers(2, 70, dtype=dtype))
    rows = numbers(3, 300, CHUNK + 10, dtype=dtype)
    shared = product(rows)
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


@each_dtype
def test_nothing_is_written_beside_the_outputs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last panel is not whole; memory around the outputs stays as it was."""
    room = torch.full((5, 100), 7.0, dtype=dtype)
    product, rows = PackedMatmul(numbers(1, 100, 8, dtype=dtype), None), numbers(2, 3, 8, dtype=dtype)
    expected = product(rows)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda tensor, *shape: room[1:4])
    assert torch.equal(product(rows), expected)
    assert (room[0] == 7).all()
    assert (room[4] == 7).all()


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


@pytest.mark.parametrize("setting", ["CPU_NAME", "CPU_FEATURES"])
def test_code_for_another_processor_is_not_tried(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    """Numba told to compile for something else than this processor would not know the instruction."""
    monkeypatch.setattr(matmul.config, setting, "generic")
    assert not can_multiply(torch.bfloat16, 8)
    assert not can_multiply(torch.float32, 8)

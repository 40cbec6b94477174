"""Int8 products against integers in NumPy, bit for bit, and against themselves under every arrangement of the work."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import edge_of_memory
from kernels.test_matmul import on_another_processor
from pagedcore.errors import InternalError
from pagedcore_kernels.cpu import features
from pagedcore_kernels.cpu.matmul import packed_int8
from pagedcore_kernels.cpu.matmul.packed import CHUNK_STEPS
from pagedcore_kernels.cpu.matmul.packed_int8 import MOST_INPUTS, PackedInt8Matmul, form_of_int8_product
from pagedcore_kernels.cpu.matmul.tiles import BYTES, WIDENED_BYTES
from support.apart import Apart
from support.products import require_same_bits_in_any_company

pytestmark = pytest.mark.skipif(form_of_int8_product(16) is None, reason="no such vectors")
#: Inputs of a chunk.
CHUNK = 4 * CHUNK_STEPS
SHAPES = [(1, 16), (3, 1), (64, 16), (63, 48), (65, CHUNK), (200, CHUNK + 16), (70, CHUNK + 27), (320, 3 * CHUNK - 32)]
DTYPES = (torch.float32, torch.bfloat16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(params=[BYTES, WIDENED_BYTES], ids=["vnni", "avx2"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Each way to multiply that this processor has."""
    if request.param == BYTES and form_of_int8_product(16) != BYTES:
        pytest.skip("no such instruction")
    monkeypatch.setattr(packed_int8, "form_of_int8_product", lambda num_inputs: request.param)
    return int(request.param)


def weight_of(num_outputs: int, num_inputs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values of the whole range, scales and a bias."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-128, 128, (num_outputs, num_inputs), dtype=np.int8)
    scales, bias = rng.uniform(1e-4, 2e-2, num_outputs), rng.normal(size=num_outputs)
    return torch.from_numpy(values), torch.from_numpy(scales).float(), torch.from_numpy(bias).float()


def rows_of(num_rows: int, num_inputs: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    """Return rows of very different sizes."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(num_rows, num_inputs)) * 10.0 ** rng.integers(-6, 6, (num_rows, 1))
    return torch.from_numpy(rows).to(dtype)


def expected(
    rows: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute by NumPy what the module's docstring says, with sums in int64."""
    numbers = rows.float().numpy()
    largest = np.abs(numbers).max(axis=1)
    row_scales, inverses = largest / np.float32(127), np.float32(127) / largest
    quantized = np.rint(numbers * inverses[:, None]).astype(np.int64)
    sums = (quantized @ weight.numpy().astype(np.int64).T).astype(np.float32)
    product = sums * row_scales[:, None] * scales.numpy()
    return torch.from_numpy(product + (np.float32(0) if bias is None else bias.numpy())).to(rows.dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_dtype
def test_products(dtype: torch.dtype, shape: tuple[int, int], form: int) -> None:
    """Every bit is that of integers in NumPy, with either instruction, with a bias and without."""
    weight, scales, bias = weight_of(*shape)
    for addend in (None, bias):
        product = PackedInt8Matmul(weight, scales, addend, dtype)
        for num_rows in (0, 1, 2, 3, 5, 17, 64, 65, 131):
            rows = rows_of(num_rows, shape[1], dtype)
            actual = product(rows)
            assert actual.dtype == dtype
            assert torch.equal(actual, expected(rows, weight, scales, addend)), f"{num_rows} rows"


@given(st.data())
@settings(max_examples=40)
def test_rows_of_any_numbers(data: st.DataObject) -> None:
    """Rows of any finite numbers: ties, zeros of both signs, denormals, numbers near the ends of the range."""
    width = data.draw(st.sampled_from([16, 32, 80]))
    magnitudes = st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda one: one == 0 or abs(one) > 2.0**-90)
    halves = st.integers(-254, 254).map(lambda one: one / 2)
    numbers = data.draw(st.lists(magnitudes | halves, min_size=width, max_size=width))
    rows, (weight, scales, bias) = torch.tensor([numbers, [127.0] * width]), weight_of(70, width)
    with np.errstate(all="ignore"):
        wanted = expected(rows, weight, scales, bias)
    if not any(numbers):
        wanted[0] = bias
    assert torch.equal(PackedInt8Matmul(weight, scales, bias, torch.float32)(rows), wanted)


def test_the_largest_sums_do_not_overflow(form: int) -> None:
    """As many inputs as may be, all at the ends of the range, in each combination of signs."""
    for weight_sign in (-1, 1):
        largest = 127 if weight_sign > 0 else 128
        weight = torch.full((3, MOST_INPUTS), largest * weight_sign, dtype=torch.int8)
        product = PackedInt8Matmul(weight, torch.ones(3), None, torch.float32)
        rows = torch.full((2, MOST_INPUTS), 127.0)
        rows[1] = -127.0
        wanted = float(np.float32(127 * largest * MOST_INPUTS)) * weight_sign
        assert product(rows).tolist() == [[wanted] * 3, [-wanted] * 3]


@each_dtype
def test_no_company_changes_bits(dtype: torch.dtype, form: int) -> None:
    """Any number of rows, at any place, on any number of threads."""
    num_inputs = 2 * CHUNK + 16
    weight, scales, bias = weight_of(100, num_inputs)
    product, rows = PackedInt8Matmul(weight, scales, bias, dtype), rows_of(300, num_inputs, dtype)
    require_same_bits_in_any_company(product, rows)


@each_dtype
def test_a_broken_row_breaks_no_other(dtype: torch.dtype, form: int) -> None:
    """A row with NaN or an infinity is NaN, so that somebody notices; rows of zeros are the bias."""
    weight, scales, bias = weight_of(70, 64)
    product, rows = PackedInt8Matmul(weight, scales, bias, dtype), rows_of(6, 64, dtype)
    rows[3] = 0.0
    whole = product(rows)
    rows[1, 5], rows[2, 63], rows[4, 0] = torch.nan, torch.inf, -torch.inf
    broken = product(rows)
    assert broken[[1, 2, 4]].isnan().all()
    assert torch.equal(broken[[0, 3, 5]], whole[[0, 3, 5]])
    assert torch.equal(whole[3], bias.to(dtype))


def test_nothing_is_read_or_written_beyond_its_end(apart: Apart) -> None:
    """Rows, weights, scales and outputs may end where memory ends."""
    out = apart.run("from kernels import edge_of_memory; edge_of_memory.main('int8 products')")
    assert out.count("torch.Size") == len(edge_of_memory.INT8_PRODUCTS)


@pytest.mark.parametrize("change", [
    lambda rows: rows[:, :16], lambda rows: rows.T, lambda rows: rows[:, ::2], lambda rows: rows.bfloat16(),
], ids=["size", "order", "gaps", "format"])  # fmt: skip
def test_other_rows_are_refused(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The kernels read raw memory: another size, order or number format is an error."""
    weight, scales, _ = weight_of(8, 32)
    with pytest.raises(InternalError, match="expected"):
        PackedInt8Matmul(weight, scales, None, torch.float32)(change(rows_of(32, 64)[:, :32].contiguous()))


@pytest.mark.parametrize("num_inputs", [0, MOST_INPUTS + 1])
def test_other_sizes_are_refused(num_inputs: int) -> None:
    """What cannot be multiplied here is known before, and an error if tried."""
    assert form_of_int8_product(num_inputs) is None
    weight = torch.zeros(4, num_inputs, dtype=torch.int8)
    with pytest.raises(InternalError, match="cannot be packed"):
        PackedInt8Matmul(weight, torch.ones(4), None, torch.float32)
    with pytest.raises(InternalError, match="cannot be packed"):
        PackedInt8Matmul(torch.zeros(4, 16), torch.ones(4), None, torch.float32)


def digest_of_products() -> str:
    """A checksum over outputs."""
    digest = hashlib.sha256()
    for shape in SHAPES[3:6]:
        weight, scales, bias = weight_of(*shape)
        product = PackedInt8Matmul(weight, scales, bias, torch.float32)
        for num_rows in (1, 3, 4, 65):
            digest.update(product(rows_of(num_rows, shape[1])).numpy().tobytes())
    return digest.hexdigest()


#: What ``on_another_processor`` runs.
OTHER_PROCESSOR = """
from kernels.test_matmul_int8 import digest_of_products
from pagedcore_kernels.cpu.matmul.packed_int8 import describe_int8_products
print(describe_int8_products(), digest_of_products())
"""


@pytest.mark.skipif(not features.has_instructions("avxvnni"), reason="no AVX-VNNI")
def test_vectors_of_256_bits_compute_the_same_bits() -> None:
    """AVX-VNNI, in a process that is made believe that nothing wider is there."""
    answer = on_another_processor("alderlake", "amx", "avx10", "avx512", "evex512", program=OTHER_PROCESSOR)
    assert answer.split() == ["AVX-VNNI", digest_of_products()]


def test_another_processor_gets_another_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without VNNI numbers are widened; without AVX2 there is no product."""
    monkeypatch.setattr(packed_int8, "has_sums_of_four", lambda: False)
    assert packed_int8.form_of_int8_product(64) == WIDENED_BYTES
    monkeypatch.setattr(features.config, "CPU_FEATURES", "")
    assert packed_int8.form_of_int8_product(64) is None

"""Weight-only products against float64, and their bits against themselves under every arrangement of the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from kernels import edge_of_memory
from kernels.test_matmul import on_another_processor
from pagedcore.errors import InternalError
from pagedcore_kernels.cpu import features
from pagedcore_kernels.cpu.matmul import packed_grouped
from pagedcore_kernels.cpu.matmul.grouped_tiles import CODEBOOKS
from pagedcore_kernels.cpu.matmul.packed_grouped import PackedGroupedMatmul, form_of_grouped_product
from pagedcore_kernels.cpu.matmul.tiles import MATRIX_UNITS, PAIRS, SINGLES
from support.apart import Apart
from support.products import require_same_bits_in_any_company

pytestmark = pytest.mark.skipif(form_of_grouped_product(torch.float32) is None, reason="no such vectors")
#: Outputs, inputs, groups: panels whole and not; groups of less than a chunk, of one, of several, with a rest; inputs
#: that are filled up.
SHAPES = [(1, 8, 1), (64, 128, 1), (63, 96, 6), (65, 256, 2), (200, 256, 8), (130, 608, 2), (70, 296, 1), (5, 13, 1)]
class Weight(NamedTuple):
    """A quantised weight, its bias, and what it stands for in float64."""

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    bias: torch.Tensor
    codebook: str = ""
    numbers: torch.Tensor | None = None
    """float64 [16]: what values of a codebook are, counted from zero up."""

    @property
    def exact(self) -> torch.Tensor:
        """Return the weight [out, in]."""
        (num_outputs, num_inputs), num_groups = self.values.shape, self.scales.shape[1]
        values, scales = self.values.numpy().astype(np.float64), self.scales.numpy().astype(np.float64)
        if self.numbers is not None:
            values = self.numbers.numpy()[(self.values.numpy().astype(np.int64) + 16) % 16]
        exact = np.empty((num_outputs, num_inputs))
        for i in range(num_inputs):
            group = i * num_groups // num_inputs
            zero = 0 if self.zeros is None else self.zeros[:, group].numpy().astype(np.float64)
            is_least = self.zeros is not None and self.zeros.is_floating_point()
            in_values, in_weights = (0, zero) if is_least else (zero, 0)
            exact[:, i] = (values[:, i] - in_values) * scales[:, group] - in_weights
        return torch.from_numpy(exact)

    def product(self, dtype: torch.dtype, bias: bool = True) -> PackedGroupedMatmul:
        """Pack it."""
        return PackedGroupedMatmul(*self[:4], self.bias if bias else None, dtype, self.codebook)


def weight_of(
    bits: int, shape: tuple[int, int, int], kind: str, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Weight:
    """Return values and zero points of the whole range, and scales and least weights of both signs; of a codebook the
    numbers that rows of ``dtype`` are multiplied by."""
    num_outputs, num_inputs, num_groups = shape
    rng, half = np.random.default_rng(seed), 2 ** (bits - 1)
    values = rng.integers(-half, half, (num_outputs, num_inputs), dtype=np.int8)
    zeros = rng.integers(-half, half + (bits == 4), (num_outputs, num_groups), dtype=np.int8)
    scales = rng.uniform(1e-3, 2e-2, zeros.shape) * rng.choice([-1, 1], zeros.shape)
    bias = torch.from_numpy(rng.normal(size=num_outputs)).bfloat16().float()
    if kind == "least":
        values += 8 * (bits == 4)
    given = {"zeros": torch.from_numpy(zeros), "least": torch.from_numpy(zeros / 64).float()}.get(kind)
    weight = Weight(torch.from_numpy(values), torch.from_numpy(scales).float(), given, bits, bias)
    if kind in CODEBOOKS:
        form = packed_grouped.form_of_grouped_product(dtype)
        numbers = torch.tensor(CODEBOOKS[kind]).to(torch.float32 if form == SINGLES else torch.bfloat16)
        weight = weight._replace(codebook=kind, numbers=numbers.double())
    return weight


def rows_of(num_rows: int, num_inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return rows of very different sizes."""
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(num_rows, num_inputs)) * 10.0 ** rng.integers(-6, 6, (num_rows, 1))
    return torch.from_numpy(rows).to(dtype)


CASES = {
    "float32": (torch.float32, SINGLES), "matrix units": (torch.bfloat16, MATRIX_UNITS),
    "bfloat16": (torch.bfloat16, PAIRS), "widened": (torch.bfloat16, SINGLES),
}
#: Bits and kinds that `make test` multiplies in each way; a kernel takes seconds to compile, and `make slow` has all.
QUICK = {
    "float32": [(4, "symmetric"), (4, "zeros"), (8, "zeros"), (4, "nf4"), (4, "least")],
    "matrix units": [(4, "symmetric"), (8, "symmetric"), (4, "least")],
    "bfloat16": [(4, "zeros"), (8, "symmetric"), (4, "nf4")],
    "widened": [(8, "zeros")],
}


def each_kind(*kinds: str) -> pytest.MarkDecorator:
    """Parametrize with every way to multiply, and weights of these kinds, or of all."""
    return pytest.mark.parametrize(("dtype", "bits", "kind"), [
        pytest.param(case, bits, kind, id=f"{way}-{bits}-{kind}",
                     marks=[] if (bits, kind) in QUICK[way] else [pytest.mark.slow])
        for way, case in CASES.items() for kind in kinds or ("symmetric", "zeros", "nf4", "least") for bits in (4, 8)
        # Why: what is alike with 8 bits, the tests of GGUF multiply.
        if bits == 4 or kind not in ("nf4", "least")
    ], indirect=["dtype"])  # fmt: skip


@pytest.fixture
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Each number format of rows, and each way to multiply it that this processor has."""
    kind, form = request.param
    if form == PAIRS and form_of_grouped_product(kind) != PAIRS:
        pytest.skip("no such instruction")
    if form == MATRIX_UNITS:
        if form_of_grouped_product(kind, 128) != MATRIX_UNITS:
            pytest.skip("no such units")
        return kind  # type: ignore[no-any-return]
    monkeypatch.setattr(packed_grouped, "form_of_grouped_product", lambda dtype, group_inputs=0: form)
    return kind  # type: ignore[no-any-return]


@each_kind()
def test_products(dtype: torch.dtype, bits: int, kind: str) -> None:
    """Each output is the float64 product within float32's error of the sum and one rounding to bfloat16."""
    for shape in SHAPES:
        weight = weight_of(bits, shape, kind, dtype=dtype)
        exact = weight.exact
        products = [(weight.product(dtype), weight.bias.double()), (weight.product(dtype, bias=False), torch.zeros(1))]
        for num_rows in (0, 1, 2, 3, 4, 5, 17, 64, 65, 131):
            rows = rows_of(num_rows, shape[1], dtype)
            for product, bias in products:
                expected = rows.double() @ exact.T + bias
                magnitude = rows.double().abs() @ exact.abs().T + bias.abs()
                actual = product(rows)
                assert (actual.dtype, actual.shape) == (dtype, expected.shape)
                rounding = 2**-8 * expected.abs() if dtype == torch.bfloat16 else 0
                assert ((actual.double() - expected).abs() <= rounding + 2**-20 * magnitude).all()


@each_kind()
def test_exact_sums_are_exact(dtype: torch.dtype, bits: int, kind: str) -> None:
    """With scales that are powers of two and few small inputs nothing is lost: every weight meets its own input, scale
    and zero point."""
    for shape in SHAPES:
        weight = weight_of(bits, shape, kind, dtype=dtype)
        weight = weight._replace(scales=2.0 ** torch.randint(-1, 2, weight.scales.shape, dtype=torch.float32))
        rows = torch.zeros(shape[1], shape[1])
        rows.fill_diagonal_(1.0)
        wanted = weight.exact.T.to(dtype)
        assert torch.equal(weight.product(dtype, bias=False)(rows.to(dtype)), wanted)


def test_fp4_is_its_sixteen_numbers() -> None:
    """A sign, two bits of an exponent and one of a mantissa, the largest one being 1: the formula of the format."""
    values = torch.arange(-8, 8, dtype=torch.int8)[:, None].repeat(1, 8)
    product = PackedGroupedMatmul(values, torch.ones(16, 1), None, 4, None, torch.float32, "fp4")
    rows = torch.zeros(2, 8)
    rows[1, 5] = 1.0
    magnitudes = [0.0625, 8, 12, 4, 6, 2, 3]
    wanted = [0.0, *(-one / 12 for one in magnitudes), 0.0, *(one / 12 for one in magnitudes)]
    assert torch.equal(product(rows)[1], torch.tensor(wanted))


@each_kind()
def test_no_company_changes_bits(dtype: torch.dtype, bits: int, kind: str) -> None:
    """Any number of rows, at any place, on any number of threads: sums of cancelling numbers, which nothing hides."""
    weight = weight_of(bits, (100, 608, 2), kind, dtype=dtype)
    rows = torch.randn(300, 304).repeat(1, 2).to(dtype)
    weight.values[:, 304:] = (15 if kind == "least" else -1) - weight.values[:, :304]
    weight.scales[:, 1] = weight.scales[:, 0]
    if weight.zeros is not None:
        weight.zeros[:, 1] = weight.zeros[:, 0] = 0
    product = weight.product(dtype, bias=False)
    require_same_bits_in_any_company(product, rows)


@pytest.mark.parametrize("kind", ["zeros", "least"])
def test_sums_are_made_in_the_order_that_is_said(kind: str) -> None:
    """In float32 each output has the bits of the module's formula, number by number."""
    weight, rows = weight_of(4, (70, 320, 2), kind), rows_of(3, 320)
    assert weight.zeros is not None
    values, besides = weight.values.numpy().astype(np.int64), weight.zeros.numpy().astype(np.float64)
    zeros, least = (besides, 0 * besides) if kind == "zeros" else (0 * besides, besides)
    expected = np.zeros((3, 70), np.float32)
    for group in range(2):
        for start in (0, 64, 128):
            total, inputs = np.zeros((3, 70), np.float32), np.zeros((3, 1), np.float32)
            for i in range(group * 160 + start, group * 160 + min(start + 64, 160)):
                number = values[:, i] - zeros[:, group]
                inputs += rows[:, i, None].numpy()
                # The product has 29 bits, so that float64 rounds nothing before the sum is rounded to float32.
                total = (rows[:, i, None].numpy().astype(np.float64) * number + total).astype(np.float32)
            scale = weight.scales[:, group].numpy().astype(np.float64)
            expected = (total.astype(np.float64) * scale + expected).astype(np.float32)
            expected = (expected - inputs.astype(np.float64) * least[:, group]).astype(np.float32)
    assert np.array_equal(weight.product(torch.float32, bias=False)(rows).numpy(), expected)


@each_kind()
def test_a_broken_row_breaks_no_other(dtype: torch.dtype, bits: int, kind: str) -> None:
    """A row with NaN or an infinity has no finite output; a row of zeros is the bias, and others keep their bits."""
    weight = weight_of(bits, (70, 96, 3), kind, dtype=dtype)
    product, rows = weight.product(dtype), torch.randn(9, 96).to(dtype)
    rows[3] = 0.0
    whole, few = product(rows), product(rows[1:4])
    rows[1, 5], rows[2, 63], rows[4, 0] = torch.nan, torch.inf, -torch.inf
    broken = product(rows)
    assert broken[1].isnan().all()
    assert not broken[[2, 4]].isfinite().any()
    assert torch.equal(broken[[0, 3, *range(5, 9)]], whole[[0, 3, *range(5, 9)]])
    assert torch.equal(whole[3], weight.bias.to(dtype))
    assert torch.equal(few[2], whole[3])


@each_kind("symmetric", "zeros")
def test_scales_of_zero_and_nan(dtype: torch.dtype, bits: int, kind: str) -> None:
    """A group whose scale is zero adds nothing, and one whose scale is NaN makes its outputs NaN, and no others."""
    weight = weight_of(bits, (70, 96, 3), kind)
    rows = torch.randn(5, 96).to(dtype)
    weight.scales[7, 1], weight.scales[9, 2] = 0.0, torch.nan
    expected = weight.product(dtype, bias=False)(rows)
    weight.values[7, 32:64] = 3
    actual = weight.product(dtype, bias=False)(rows)
    assert torch.equal(actual[:, 7], expected[:, 7])
    assert actual.isnan().nonzero()[:, 1].unique().tolist() == [9]
    weight.scales[:] = 0.0
    assert torch.equal(weight.product(dtype)(rows), weight.bias.to(dtype).expand(5, -1))


#: What ``test_matmul.on_another_processor`` runs: prints a digest of bits that ``test_other_processors`` compares.
OTHER_PROCESSOR = """
import hashlib
import torch
from kernels.test_matmul_grouped import SHAPES, rows_of, weight_of
from pagedcore_kernels.cpu.matmul.packed_grouped import form_of_grouped_product

digest = hashlib.sha256()
for dtype, bits, kind in CASES:
    for shape in SHAPES[2:6]:
        product, rows = weight_of(bits, shape, kind).product(dtype), rows_of(9, shape[1], dtype)
        whole = product(rows)
        assert all(torch.equal(product(rows[:count]), whole[:count]) for count in range(1, 9))
        digest.update(whole.float().numpy().tobytes())
print(form_of_grouped_product(torch.bfloat16), digest.hexdigest())
"""


# Why slow: each kernel is compiled twice, for seconds. Products without groups and of int8 rows are compared each time.
@pytest.mark.slow
@pytest.mark.skipif(not features.has_wide_vectors(), reason="no vectors of 512 bits")
@pytest.mark.parametrize("cases", [
    '(torch.bfloat16, 4, "zeros"), ',
    '(torch.float32, 4, "nf4"), (torch.float32, 4, "least"), (torch.float32, 8, "zeros")',
])
def test_other_processors_compute_the_same_bits(cases: str) -> None:
    """Vectors of 256 and of 512 bits, tables and shifts: rows of float32, and of bfloat16 that is widened."""
    program = OTHER_PROCESSOR.replace("CASES", cases)
    wide = on_another_processor("skylake-avx512", "amx", "avx512bf16", "avx512fp16", "avx10", program=program)
    narrow = on_another_processor("haswell", "amx", "avx512", "avx10", "evex512", program=program)
    assert wide.startswith(str(SINGLES))
    assert narrow == wide


def test_nothing_is_read_or_written_beyond_its_end(apart: Apart) -> None:
    """Rows, weights, biases and outputs may end where memory ends, also while memory is asked for ahead."""
    out = apart.run("from kernels import edge_of_memory; edge_of_memory.main('grouped products')")
    assert out.count("torch.Size") == len(edge_of_memory.GROUPED_KINDS) * len(edge_of_memory.GROUPED_PRODUCTS)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_take_their_bits(bits: int) -> None:
    """Half a byte or a byte for each value of a whole panel, 4 bytes for a scale, 1 for a zero point, 4 for a least
    weight."""
    for kind, besides in (("symmetric", 0), ("zeros", 1), ("least", 4)):
        product = weight_of(bits, (100, 256, 2), kind).product(torch.bfloat16)
        assert product.memory[1] == 128 * 256 * bits // 8 + 128 * 2 * (4 + besides)
        assert (product.weight.numel(), product.weight.dtype) == (0, torch.bfloat16)


@pytest.mark.parametrize(("bits", "kind"), [
    (4, "least"), *(pytest.param(bits, kind, marks=pytest.mark.slow)
                    for bits, kind in ((4, "symmetric"), (4, "zeros"), (8, "symmetric"))),
])  # fmt: skip
def test_scales_in_halves_have_the_bits_of_float32(bits: int, kind: str) -> None:
    """Scales and least weights in float16, subnormal ones included, take half the memory and change no bit."""
    for shape in ((130, 608, 2), (63, 96, 6)):
        weight = weight_of(bits, shape, kind)
        scales, zeros = weight.scales.half(), weight.zeros
        scales[0] = 2.0**-24
        wide = weight._replace(scales=scales.float())
        if zeros is not None and zeros.is_floating_point():
            zeros = zeros.half()
            wide = wide._replace(zeros=zeros.float())
        for dtype in (torch.float32, torch.bfloat16):
            small, product = weight._replace(scales=scales, zeros=zeros).product(dtype), wide.product(dtype)
            for num_rows in (1, 4, 5, 17, 70):
                rows = torch.randn(num_rows, shape[1]).to(dtype)
                assert torch.equal(small(rows), product(rows))
            saved = 2 * scales.shape[1] * -(-shape[0] // 64) * 64 * (2 if kind == "least" else 1)
            assert product.memory[1] - small.memory[1] == saved


def test_the_original_may_change() -> None:
    """Values, scales, zero points and bias are copied."""
    weight, rows = weight_of(4, (70, 64, 2), "zeros"), rows_of(3, 64)
    product = weight.product(torch.float32)
    expected = product(rows)
    for tensor in (weight.values, weight.scales, weight.zeros, weight.bias):
        assert tensor is not None
        tensor.zero_()
    assert torch.equal(product(rows), expected)


@pytest.mark.parametrize("change", [
    lambda rows: rows[:, :16], lambda rows: rows.T, lambda rows: rows[:, ::2], lambda rows: rows.bfloat16(),
], ids=["size", "order", "gaps", "format"])  # fmt: skip
def test_other_rows_are_refused(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The kernels read raw memory: another size, order or number format is an error."""
    product = weight_of(4, (8, 32, 1), "symmetric").product(torch.float32)
    with pytest.raises(InternalError, match="expected"):
        product(change(rows_of(32, 64)[:, :32].contiguous()))


@pytest.mark.parametrize(("change", "message"), [
    ({"values": torch.full((8, 64), 8, dtype=torch.int8)}, "values: .* from -8 to 7"),
    ({"values": torch.full((8, 64), -9, dtype=torch.int8)}, "values: .* from -8 to 7"),
    ({"values": torch.zeros(8, 64)}, "values: torch.float32"),
    ({"values": torch.zeros(0, 64, dtype=torch.int8)}, "values"),
    ({"values": torch.zeros(8, 68, dtype=torch.int8)}, "68 inputs are not 2 groups of a multiple of 8"),
    ({"values": torch.zeros(8, 72, dtype=torch.int8)}, "72 inputs are not 2 groups of a multiple of 8"),
    ({"scales": torch.zeros(8, 2, dtype=torch.bfloat16)}, "scales: torch.bfloat16"),
    ({"values": torch.zeros(8, 64, dtype=torch.int8), "scales": torch.zeros(8, 2, dtype=torch.float16),
      "zeros": torch.zeros(8, 2)}, "zeros: .* or torch.float16"),
    ({"scales": torch.zeros(7, 2)}, "scales"),
    ({"scales": torch.zeros(8)}, "scales"),
    ({"scales": torch.zeros(8, 0)}, "scales"),
    ({"zeros": torch.full((8, 2), 9, dtype=torch.int8)}, "zeros: .* from -8 to 8"),
    ({"zeros": torch.zeros(8, 1, dtype=torch.int8)}, "zeros"),
    ({"zeros": torch.zeros(8, 2, dtype=torch.uint8)}, "zeros: torch.uint8"),
    ({"bits": 3}, "bits: got 3"),
    ({"codebook": "nf4"}, "codebook: got 'nf4' for 4 bits, zero points"),
    ({"codebook": "nf4", "zeros": None, "bits": 8}, "codebook: got 'nf4' for 8 bits"),
    ({"codebook": "af4", "zeros": None}, "codebook: got 'af4'"),
    ({"bias": torch.zeros(64)}, "bias"),
])  # fmt: skip
def test_other_weights_are_refused(change: dict[str, Any], message: str) -> None:
    """What would be read beyond its end, or does not fit in the bits, is an error that names it."""
    weight = weight_of(4, (8, 64, 2), "zeros")
    weight.product(torch.float32)
    with pytest.raises(InternalError, match=message):
        weight._replace(**change).product(torch.float32)


def test_another_processor_gets_another_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without products of bfloat16 rows are widened; without AVX2, and for float16, there is no product."""
    assert form_of_grouped_product(torch.float16) is None
    with pytest.raises(InternalError, match="float16 cannot be multiplied"):
        weight_of(4, (8, 64, 2), "symmetric").product(torch.float16)
    monkeypatch.setattr(packed_grouped, "has_instructions", lambda *names: False)
    assert form_of_grouped_product(torch.bfloat16) == SINGLES
    monkeypatch.setattr(features.config, "CPU_FEATURES", "")
    assert form_of_grouped_product(torch.bfloat16) is None

"""Products of int8 rows with weights of 4 and 8 bits in groups: integers in NumPy, bit for bit, on every processor."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from kernels.test_matmul import on_another_processor
from kernels.test_matmul_grouped import SHAPES, Weight, rows_of, weight_of
from pagedcore.errors import InternalError
from pagedcore_kernels.cpu import features
from pagedcore_kernels.cpu.matmul import packed_grouped
from pagedcore_kernels.cpu.matmul.amx import may_use_tiles
from pagedcore_kernels.cpu.matmul.packed_grouped import (
    MOST_BYTE_GROUP_INPUTS,
    PackedGroupedMatmul,
    form_of_byte_groups,
)
from pagedcore_kernels.cpu.matmul.tiles import BYTES, GROUP_MATRIX_UNITS, WIDENED_BYTES
from support.products import require_same_bits_in_any_company

pytestmark = pytest.mark.skipif(form_of_byte_groups(16) is None, reason="no such vectors")
NUMBERS_OF_ROWS = (0, 1, 2, 3, 4, 5, 7, 17, 65)
FORMS = {"vnni": BYTES, "avx2": WIDENED_BYTES, "amx": GROUP_MATRIX_UNITS}
#: Bits and kinds that `make test` multiplies in every form; a kernel takes seconds to compile, and `make slow` has all.
QUICK = [(4, "symmetric"), (8, "least")]


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Each way to multiply that this processor has; ``test_matmul_grouped_amx.py`` emulates matrix units."""
    if request.param == GROUP_MATRIX_UNITS:
        if not may_use_tiles(GROUP_MATRIX_UNITS):
            pytest.skip("no matrix units")
        return GROUP_MATRIX_UNITS
    if request.param == BYTES and form_of_byte_groups(16) != BYTES:
        pytest.skip("no such instruction")
    monkeypatch.setattr(packed_grouped, "form_of_byte_groups", lambda group_inputs, bits: request.param)
    monkeypatch.setattr(packed_grouped, "tiles_of_byte_groups", lambda group_inputs: None)
    return int(request.param)


def product_of(weight: Weight, dtype: torch.dtype = torch.float32) -> PackedGroupedMatmul:
    """Pack it for rows that become int8."""
    return PackedGroupedMatmul(*weight[:4], weight.bias, dtype, quantizes_rows=True)


def expected(rows: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Compute by NumPy what ``grouped_bytes.py`` says, with sums in int64 and fused operations in float64."""
    numbers, values = rows.float().numpy(), weight.values.numpy().astype(np.int64)
    total, num_groups = np.zeros((len(rows), len(values)), np.float32), weight.scales.shape[1]
    # Shape: inputs are filled up to a multiple of 8, which is of interest where there is one group only.
    size = -(-values.shape[1] // (8 * num_groups)) * 8
    for group in range(num_groups):
        part = slice(group * size, (group + 1) * size)
        largest = np.abs(numbers[:, part]).max(axis=1)
        scales, inverses = largest / np.float32(127), np.float32(127) / largest
        quantized = np.rint(numbers[:, part] * inverses[:, None]).astype(np.int64)
        zeros = np.zeros(len(values), np.int64) if weight.zeros is None else weight.zeros[:, group].numpy()
        is_least = weight.zeros is not None and weight.zeros.is_floating_point()
        sums = quantized @ (values[:, part] - (0 if is_least else zeros.astype(np.int64)[:, None])).T
        scaled = sums.astype(np.float32) * scales[:, None]
        total = (scaled.astype(np.float64) * weight.scales[:, group].double().numpy() + total).astype(np.float32)
        if is_least:
            inputs = quantized.sum(1).astype(np.float32) * scales
            total = (total - inputs[:, None].astype(np.float64) * zeros.astype(np.float64)).astype(np.float32)
    return torch.from_numpy(total + weight.bias.numpy()).to(rows.dtype)


@pytest.mark.parametrize(("form", "bits", "kind", "dtype"), [
    pytest.param(form, bits, kind, dtype, id=f"{way}-{bits}-{kind}-{dtype}",
                 marks=[] if form == BYTES or (bits, kind) in QUICK else [pytest.mark.slow])
    for way, form in FORMS.items() for bits, kind, dtype in (
        (4, "symmetric", torch.float32), (4, "symmetric", torch.bfloat16), (4, "zeros", torch.float32),
        (4, "least", torch.float32), (8, "symmetric", torch.float32), (8, "least", torch.float32),
    )
], indirect=["form"])  # fmt: skip
def test_products(form: int, bits: int, kind: str, dtype: torch.dtype) -> None:
    """Every bit is that of integers in NumPy, for groups and rows of all sizes."""
    for shape in SHAPES:
        weight = weight_of(bits, shape, kind)
        product = product_of(weight, dtype)
        for num_rows in NUMBERS_OF_ROWS:
            rows = rows_of(num_rows, shape[1], dtype)
            assert torch.equal(product(rows), expected(rows, weight)), f"{shape}, {num_rows} rows"


def test_scales_in_halves_have_the_bits_of_float32(form: int) -> None:
    """As files of llama.cpp have them."""
    weight = weight_of(4, (130, 96, 3), "least")
    small = weight._replace(scales=weight.scales.half(), zeros=weight.zeros.half())  # type: ignore[union-attr]
    rows = rows_of(9, 96)
    assert torch.equal(product_of(small)(rows), expected(rows, small))


def test_the_largest_sums_do_not_overflow(form: int) -> None:
    """The largest magnitudes of both signs, in int16 for 32 inputs and in int32 for as many as a group may have."""
    for bits, value, zero, sign in ((4, 7, -8, 1), (4, -8, 8, -1), (4, -8, 8, 1), (8, -128, 0, 1), (8, 127, 0, -1)):
        num_inputs = MOST_BYTE_GROUP_INPUTS[bits]
        values = torch.full((3, num_inputs), value, dtype=torch.int8)
        zeros = torch.full((3, 1), zero, dtype=torch.int8) if bits == 4 else None
        product = PackedGroupedMatmul(values, torch.ones(3, 1), zeros, bits, None, torch.float32, quantizes_rows=True)
        rows = torch.full((2, num_inputs), 127.0 * sign)
        wanted = float(np.float32(127 * sign * (value - zero) * num_inputs))
        assert product(rows).tolist() == [[wanted] * 3] * 2


def test_no_company_changes_bits(form: int) -> None:
    """Any number of rows, at any place, on any number of threads."""
    require_same_bits_in_any_company(product_of(weight_of(4, (100, 608, 2), "zeros")), rows_of(300, 608))


def test_a_broken_group_breaks_its_row_alone(form: int) -> None:
    """A row with NaN or an infinity is NaN; groups of zeros, and of numbers next to zero, add nothing."""
    weight = weight_of(4, (70, 96, 3), "symmetric")
    product, rows = product_of(weight), rows_of(6, 96)
    rows[3], rows[5, :32], rows[5, 32:64] = 0.0, 0.0, 2.0**-101
    whole = product(rows)
    rows[1, 5], rows[2, 63], rows[4, 0] = torch.nan, torch.inf, -torch.inf
    broken = product(rows)
    assert broken[[1, 2, 4]].isnan().all()
    assert torch.equal(broken[[0, 3, 5]], whole[[0, 3, 5]])
    assert torch.equal(whole[3], weight.bias)
    last = Weight(weight.values[:, 64:], weight.scales[:, 2:], None, 4, weight.bias)
    assert torch.equal(whole[5:], expected(rows[5:, 64:].contiguous(), last))


def digest_of_products() -> str:
    """A checksum over outputs, for few rows and many, each number of which has the same bits."""
    digest = hashlib.sha256()
    for bits, shape in (4, (63, 96, 6)), (4, (130, 608, 2)), (4, (70, 320, 8)), (8, (70, 192, 6)):
        product, rows = product_of(weight_of(bits, shape, "symmetric")), rows_of(70, shape[1])
        whole = product(rows)
        assert all(torch.equal(product(rows[:count]), whole[:count]) for count in range(1, 9))
        digest.update(whole.numpy().tobytes())
    return digest.hexdigest()


#: What ``on_another_processor`` runs.
OTHER_PROCESSOR = """
from kernels.test_matmul_grouped_bytes import digest_of_products, form_of_byte_groups
print(form_of_byte_groups(128), digest_of_products())
"""
#: By the processor that is made believe: what is missing beside matrix units, and the form.
PROCESSORS = {
    "alderlake": (("avx512", "evex512"), BYTES),
    "skylake-avx512": (("avx512bf16", "avx512fp16", "avx512vnni", "avxvnni"), WIDENED_BYTES),
}


# Why slow: each compiles kernels for itself. ``test_other_processors`` asks for AVX2 each time, which differs in most.
@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSORS)
def test_every_processor_computes_the_same_bits(name: str) -> None:
    """AVX-VNNI and AVX-512 without VNNI, as far as they are here, against what this process computes."""
    missing, form = PROCESSORS[name]
    if name == "alderlake" and not features.has_instructions("avxvnni"):
        pytest.skip("no AVX-VNNI")
    if name == "skylake-avx512" and not features.has_wide_vectors():
        pytest.skip("no vectors of 512 bits")
    answer = on_another_processor(name, "amx", "avx10", *missing, program=OTHER_PROCESSOR)
    assert answer.split() == [str(form), digest_of_products()]


def test_another_processor_gets_another_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """What multiplies is said in words, and without AVX2 there is no product."""
    for given, said in (
        ("+avx512f,+avx512vnni", "AVX-512 VNNI"), ("+avx2,+fma,+avxvnni", "AVX-VNNI"), ("+avx2,+fma", "AVX2"),
        ("+avx512f,+avxvnni", "AVX2"), ("", "needs an x86 processor with AVX2"),
    ):  # fmt: skip
        names = {one.removeprefix("+"): True for one in given.split(",")}
        monkeypatch.setattr(features, "_host", lambda names=names: names)
        monkeypatch.setattr(features.config, "CPU_FEATURES", given)
        monkeypatch.setattr(packed_grouped, "may_use_tiles", lambda form: False)
        assert packed_grouped.describe_byte_groups() == said
    assert form_of_byte_groups(16) is None


@pytest.mark.parametrize(("bits", "codebook", "num_inputs", "zeros"), [
    (8, "", 64, torch.ones(3, 1, dtype=torch.int8)), (4, "nf4", 64, None), (4, "", MOST_BYTE_GROUP_INPUTS[4] + 1, None),
    (8, "", MOST_BYTE_GROUP_INPUTS[8] + 1, None),
], ids=str)  # fmt: skip
def test_other_weights_are_refused(bits: int, codebook: str, num_inputs: int, zeros: torch.Tensor | None) -> None:
    """What no such product is made for is an error that names it."""
    values = torch.zeros(3, num_inputs, dtype=torch.int8)
    with pytest.raises(InternalError, match="quantizes_rows: got True"):
        PackedGroupedMatmul(values, torch.ones(3, 1), zeros, bits, None, torch.float32, codebook, quantizes_rows=True)

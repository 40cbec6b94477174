"""Norm, gated activation and rotary embedding, executed by the PTX interpreter, against float64 and exact bits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.cuda.simulated_driver import SimulatedDriver
from pagedcore.errors import InternalError, InvalidConfig
from pagedcore_kernels.cuda.build.toolchain import missing_compiler_parts
from pagedcore_kernels.cuda.elementwise import GatedActivation, RmsNorm, RotaryEmbedding, RowQuantizer
from pagedcore_kernels.layout import LayerShape, ScaledKVLayout, TokenMajorLayout
from pagedcore_kernels.reference import ReferenceAttention

pytestmark = pytest.mark.skipif(bool(missing_compiler_parts()), reason="needs pagedcore[cuda] to compile kernels")

BF16, F16, E4M3, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
TOLERANCE = {BF16: 2**-8, F16: 2**-11}
"""Largest error relative to the exact value: one rounding of the last operation, and one more at a tie before it."""
ARCHITECTURES = [
    pytest.param("sm_80", marks=pytest.mark.kernels), "sm_90", pytest.param("sm_100", marks=pytest.mark.kernels),
]
Double = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def random_rows(seed: int, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers of a number format."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def double(tensor: torch.Tensor) -> Double:
    return tensor.double().numpy().copy()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def assert_close(actual: torch.Tensor, expected: Double) -> None:
    """Every element within two roundings of the exact one."""
    allowed = 2.5 * TOLERANCE[actual.dtype] * np.abs(expected) + 1e-6 * np.abs(expected).max()
    assert (np.abs(double(actual) - expected) <= allowed).all()


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "hidden"), [
    (BF16, 896), (F16, 8), (F16, 4096),
    *[pytest.param(d, h, marks=pytest.mark.kernels) for d in (BF16, F16) for h in (2048, 2056, 5120, 8200, 16384)],
])
def test_norm_after_add(arch: str, dtype: torch.dtype, hidden: int) -> None:
    """The residual becomes the rounded sum, exactly; the output is the norm of that sum, of every length of rows."""
    residual, addend, weight = (random_rows(seed, 5, hidden, dtype=dtype) for seed in range(3))
    total = (residual.double() + addend.double()).to(dtype)
    out = torch.full_like(residual, torch.nan)
    RmsNorm(weight[0], 1e-5, SimulatedDriver(arch, check_races=True))(residual, addend, out)
    assert torch.equal(bits(residual), bits(total))
    exact = double(total) / np.sqrt((double(total) ** 2).mean(-1, keepdims=True) + 1e-5) * double(weight[0])
    assert_close(out, exact)


@pytest.mark.parametrize("dtype", [BF16, pytest.param(F16, marks=pytest.mark.kernels)])
def test_norm_alone(dtype: torch.dtype) -> None:
    """Without an addend the residual keeps its bits; zeros stay zeros; NaN and infinity spoil their own rows alone."""
    residual, weight = random_rows(0, 6, 896, dtype=dtype), random_rows(1, 896, dtype=dtype)
    residual[1], residual[3, 5], residual[4, 895] = 0, torch.nan, torch.inf
    before, out = residual.clone(), torch.full_like(residual, torch.nan)
    norm = RmsNorm(weight, 1e-6, SimulatedDriver(check_races=True))
    norm(residual, None, out)
    assert torch.equal(bits(residual), bits(before))
    assert not out[1].any()
    assert out.isnan().any(1).tolist() == [False, False, False, True, True, False]
    single = torch.empty_like(out[:1])
    norm(residual[5:], None, single)
    assert torch.equal(bits(single[0]), bits(out[5]))
    norm(residual[:0], None, out[:0])


@pytest.mark.parametrize(("dtype", "hidden"), [(BF16, 904), pytest.param(F16, 5120, marks=pytest.mark.kernels)])
def test_norm_by_a_weight_in_float32(dtype: torch.dtype, hidden: int) -> None:
    """The product alone is rounded, to what is nearest, and may take the place of the row."""
    rows, weight = random_rows(0, 4, hidden, dtype=dtype), 1 + random_rows(1, hidden, dtype=dtype).float()
    exact = double(rows) / np.sqrt((double(rows) ** 2).mean(-1, keepdims=True) + 1e-6) * double(weight)
    RmsNorm(weight, 1e-6, SimulatedDriver(check_races=True), dtype)(rows, None, rows)
    # Why not all: float32 before the rounding is a little off, and shows where the exact number is near a tie.
    assert (bits(rows) == bits(torch.from_numpy(exact).to(dtype))).double().mean() > 0.99
    assert_close(rows, exact)


def silu(x: Double) -> Double:
    return x / (1 + np.exp(-x))


def gelu_tanh(x: Double) -> Double:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "name", "function"), [
    (BF16, "silu", silu), (F16, "gelu_tanh", gelu_tanh),
    pytest.param(F16, "silu", silu, marks=pytest.mark.kernels),
    pytest.param(BF16, "gelu_tanh", gelu_tanh, marks=pytest.mark.kernels),
])
@pytest.mark.parametrize(("rows", "size"), [(7, 184), (3, 1024), (1, 8)])
def test_gated_activation(
    arch: str, dtype: torch.dtype, name: str, function: Callable[[Double], Double], rows: int, size: int
) -> None:
    """The first half of a row goes through the activation, is rounded, and multiplies the second half."""
    gate_up = random_rows(0, rows, 2 * size, dtype=dtype, scale=3.0)
    out = torch.full((rows, size), torch.nan, dtype=dtype)
    GatedActivation(name, dtype, SimulatedDriver(arch))(gate_up, out)
    gate, up = np.split(double(gate_up), 2, axis=1)
    assert_close(out, function(gate) * up)


@pytest.mark.parametrize("name", ["silu", pytest.param("gelu_tanh", marks=pytest.mark.kernels)])
def test_activation_of_extremes(name: str) -> None:
    """Large gates pass, large negative ones vanish, NaN stays where it was, and nothing overflows."""
    gates = torch.tensor([3e38, 100.0, -100.0, -3e38, torch.nan, 0.0, torch.inf, 1.0]).to(BF16)
    out = torch.empty(1, 8, dtype=BF16)
    GatedActivation(name, BF16, SimulatedDriver())(torch.cat([gates, torch.ones(8, dtype=BF16)])[None], out)
    assert out[0, :2].tolist() == gates[:2].tolist()
    assert abs(out[0, 2]) < 1e-30
    assert out[0, 5:7].tolist() == [0, torch.inf]
    assert out.isnan().nonzero().tolist() == [[0, 4]]


@pytest.mark.parametrize("arch", ["sm_90", *(
    pytest.param(one, marks=pytest.mark.kernels) for one in ("sm_89", "sm_100", "sm_120"))])
@pytest.mark.parametrize(("dtype", "size", "given"), [
    (BF16, 904, 0.0), (F16, 16, 0.0), (BF16, 4112, 0.013), pytest.param(F16, 14336, 0.0, marks=pytest.mark.kernels)])
def test_rows_in_e4m3(arch: str, dtype: torch.dtype, size: int, given: float) -> None:
    """The scale is the given one, or exactly a 448th of the row's largest magnitude; a code is the number of e4m3
    nearest to what is exact, at most half a step away; a row is quantised alone as in company; nothing beyond is read
    or written.
    """
    rows = random_rows(0, 5, size, dtype=dtype) * torch.tensor([[1.0], [300.0], [1e-3], [0.0], [5.0]], dtype=dtype)
    quantize = RowQuantizer(dtype, SimulatedDriver(arch, check_races=True))
    codes, scales = quantize(rows, given)
    largest = np.abs(double(rows)).max(1, keepdims=True)
    expected = np.full((5, 1), np.float32(given)) if given else (largest / 448).astype(np.float32)
    assert np.array_equal(scales.numpy(), expected)
    exact = np.clip(np.divide(double(rows), double(scales), out=np.zeros(rows.shape), where=expected > 0), -448, 448)
    steps = 2.0 ** np.maximum(np.floor(np.log2(np.maximum(np.abs(exact), 1e-9))) - 3, -9)
    assert (np.abs(double(codes) - exact) <= steps / 2 * (1 + 1e-6)).all()
    alone = quantize(rows[4:], given)
    assert torch.equal(alone[0].view(torch.uint8), codes[4:].view(torch.uint8))
    assert torch.equal(alone[1], scales[4:])
    assert quantize(rows[:0])[0].shape == (0, size)


@pytest.mark.parametrize("given", [0.0, 0.5])
def test_a_row_that_is_not_finite_spoils_itself_alone(given: float) -> None:
    """Its codes are 0 and its scale NaN, whichever is given. Rows of a broken vector, and GPUs without the format, are
    refused.
    """
    rows, quantize = random_rows(0, 3, 264, dtype=BF16), RowQuantizer(BF16, SimulatedDriver(check_races=True))
    whole = quantize(rows, given)
    rows[0, 263], rows[1, 0] = torch.inf, torch.nan
    codes, scales = quantize(rows, given)
    assert not codes[:2].view(torch.uint8).any()
    assert scales.isnan().flatten().tolist() == [True, True, False]
    assert torch.equal(codes[2].view(torch.uint8), whole[0][2].view(torch.uint8))
    with pytest.raises(InternalError, match="rows of 12 elements"):
        quantize(torch.zeros(1, 12, dtype=BF16))
    with pytest.raises(InvalidConfig, match="needed is sm_89"):
        RowQuantizer(BF16, SimulatedDriver("sm_86"))


def make_angles(num_positions: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Cosines and sines of ordinary rotary embeddings in a model's precision."""
    turns = torch.arange(num_positions)[:, None] * 100.0 ** (-torch.arange(0, size, 2) / max(size, 1))
    return torch.cat([turns.cos(), turns.sin()], dim=-1).to(dtype).float()


def turned(heads: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Turn the first elements of [T, H, D] by angles [T, R] as a model in its own number format does: exact bits."""
    half = angles.shape[1] // 2
    cosines, sines = (a.to(heads.dtype)[:, None] for a in (angles[:, :half], angles[:, half:]))
    if interleaved:
        x, y = heads[..., 0 : 2 * half : 2], heads[..., 1 : 2 * half : 2]
    else:
        x, y = heads[..., :half], heads[..., half : 2 * half]
    both = [x * cosines - y * sines, y * cosines + x * sines]
    first = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    return torch.cat([first, heads[..., 2 * half :]], -1)


class Rotation:
    """A batch whose q, k and v lie in one packed matrix, as a fused projection leaves them, and a pool of 0xFF."""

    def __init__(self, dtype: torch.dtype, pool_dtype: torch.dtype, size: int, rotary: int | None, **options: Any):
        self.heads, self.kv_heads, self.size, count = 5, 2, size, 23
        layer = LayerShape(self.kv_heads, size, size)
        self.layout = TokenMajorLayout(16, pool_dtype, (layer, layer)) if pool_dtype == dtype else \
            ScaledKVLayout(16, pool_dtype, (layer, layer), dtype)
        self.pool = self.layout.allocate(4).fill_(0xFF)
        packed = random_rows(0, count, (self.heads + 2 * self.kv_heads) * size, dtype=dtype)
        parts = packed.view(count, -1, size).split([self.heads, self.kv_heads, self.kv_heads], 1)
        self.query, self.key, self.value = parts
        self.positions = (torch.arange(count, dtype=torch.int32) * 3) % 50
        self.slots = torch.randperm(64, generator=torch.Generator().manual_seed(3))[:count].int()
        self.slots[5] = self.slots[22] = -1
        self.rotary = size if rotary is None else rotary
        self.interleaved = options.get("interleaved", False)
        self.angles = make_angles(50, self.rotary, dtype)
        self.driver = SimulatedDriver(options.pop("arch", "sm_90"))
        self.embedding = RotaryEmbedding(self.layout, self.pool, self.driver, rotary_size=rotary, **options)

    def run(self, **options: Any) -> None:
        """Launch for layer 1, and see that key and value are as they were."""
        before = self.key.clone(), self.value.clone()
        self.embedding(1, self.query, self.key, self.value, self.positions, self.angles, self.slots, **options)
        assert torch.equal(bits(self.key), bits(before[0]))
        assert torch.equal(bits(self.value), bits(before[1]))

    def turn(self, heads: torch.Tensor) -> torch.Tensor:
        return turned(heads, self.angles[self.positions.long()], self.interleaved)

    def written_by_the_reference(self, key: torch.Tensor) -> torch.Tensor:
        """The pool after the reference has stored these keys and the values."""
        pool = self.layout.allocate(4).fill_(0xFF)
        reference = ReferenceAttention(self.layout, pool)
        reference._plan = SimpleNamespace(slots=self.slots.numpy(), num_tokens=len(key))  # type: ignore[assignment]
        reference.write_kv(1, key, self.value)
        return pool


ROTATIONS = [
    (BF16, BF16, 128, None, {}), (F16, E4M3, 64, 32, {"interleaved": True}),
    *[pytest.param(*case, marks=pytest.mark.kernels) for case in [
        (BF16, BF16, 64, None, {"arch": "sm_80"}), (F16, F16, 80, None, {}), (BF16, BF16, 96, 32, {}),
        (BF16, BF16, 16, None, {}), (F16, F16, 256, 64, {"interleaved": True}), (BF16, BF16, 128, 0, {}),
        (BF16, E4M3, 128, None, {"arch": "sm_100"}), (BF16, INT8, 96, 48, {}), (F16, INT8, 128, None, {}),
        (BF16, INT8, 64, None, {"interleaved": True}), (BF16, BF16, 80, 16, {"interleaved": True, "arch": "sm_100"}),
        (BF16, E4M3, 256, None, {"interleaved": True}), (F16, F16, 64, None, {"arch": "sm_100"}),
    ]],
]


@pytest.mark.parametrize(("dtype", "pool_dtype", "size", "rotary", "options"), ROTATIONS)
def test_one_launch_does_what_separate_ones_do(
    dtype: torch.dtype, pool_dtype: torch.dtype, size: int, rotary: int | None, options: dict[str, Any]
) -> None:
    """Queries have the bits of a model's own rotary embedding, and the pool those of the reference after it.

    Tokens without a slot are stored nowhere, and no other byte of the pool changes.
    """
    case = Rotation(dtype, pool_dtype, size, rotary, **options)
    query, key = case.turn(case.query), case.turn(case.key)
    case.run()
    assert torch.equal(bits(case.query), bits(query))
    assert torch.equal(case.pool, case.written_by_the_reference(key))


@pytest.mark.parametrize(("dtype", "pool_dtype", "size", "rotary", "options"), [
    (BF16, BF16, 128, 64, {}), *[pytest.param(*case, marks=pytest.mark.kernels) for case in [
        (F16, F16, 80, None, {}), (BF16, INT8, 96, None, {"interleaved": True}), (F16, F16, 16, None, {}),
        (BF16, E4M3, 256, None, {"arch": "sm_100"}), (BF16, BF16, 64, None, {"arch": "sm_80"}),
    ]],
])
def test_queries_and_keys_are_normed_first(
    dtype: torch.dtype, pool_dtype: torch.dtype, size: int, rotary: int | None, options: dict[str, Any]
) -> None:
    """With norms each query head and key head is RMS-normed as its model does; values are not."""
    case = Rotation(dtype, pool_dtype, size, rotary, **options)
    weights = [random_rows(seed, size, dtype=dtype) for seed in (1, 2)]
    expected = []
    for heads, weight in zip((case.query, case.key), weights, strict=True):
        x = heads.double()
        scaled = (x / ((x * x).mean(-1, keepdim=True) + 1e-6).sqrt()).to(dtype)
        expected.append(case.turn(weight * scaled))
    case.run(norms=weights, epsilon=1e-6)
    # Why: the float32 sum of squares may round a normed element the other way; after a turn that is two last places.
    assert (case.query.double() - expected[0].double()).abs().max() <= 4 * TOLERANCE[dtype] * expected[0].abs().max()
    assert (bits(case.query) == bits(expected[0])).double().mean() > 0.97
    same = case.pool == case.written_by_the_reference(expected[1])
    assert same.double().mean() > 0.98
    values = case.layout.value_view(case.pool, 1), case.layout.value_view(case.written_by_the_reference(expected[1]), 1)
    assert torch.equal(values[0].contiguous().view(torch.uint8), values[1].contiguous().view(torch.uint8))


@pytest.mark.parametrize(("dtype", "size", "rotary", "options"), [
    (BF16, 64, None, {}), pytest.param(F16, 96, 32, {"interleaved": True}, marks=pytest.mark.kernels),
])
def test_weights_of_head_norms_may_be_float32(
    dtype: torch.dtype, size: int, rotary: int | None, options: dict[str, Any]
) -> None:
    """The product alone is rounded then."""
    case = Rotation(dtype, dtype, size, rotary, **options)
    weights = [1 + random_rows(seed, size, dtype=dtype).float() for seed in (1, 2)]
    expected = []
    for heads, weight in zip((case.query, case.key), weights, strict=True):
        x = heads.double()
        expected.append(case.turn((x / ((x * x).mean(-1, keepdim=True) + 1e-6).sqrt() * weight).to(dtype)))
    case.run(norms=weights, epsilon=1e-6)
    assert (case.query.double() - expected[0].double()).abs().max() <= 4 * TOLERANCE[dtype] * expected[0].abs().max()
    assert (bits(case.query) == bits(expected[0])).double().mean() > 0.97
    assert (case.pool == case.written_by_the_reference(expected[1])).double().mean() > 0.98


def test_without_slots_queries_turn_and_nothing_is_stored() -> None:
    """Slots of None leave the pool alone; NaN stays in its own head."""
    case = Rotation(BF16, BF16, 128, None)
    case.query[3, 1, 7] = torch.nan
    expected = case.turn(case.query)
    case.slots = None  # type: ignore[assignment]
    case.run()
    assert (case.pool == 0xFF).all()
    assert case.query.isnan().any(-1).nonzero().tolist() == [[3, 1]]
    whole = ~expected.isnan()
    assert torch.equal(case.query[whole], expected[whole])


@pytest.mark.parametrize(("call", "message"), [
    (lambda d: RmsNorm(torch.ones(12, dtype=BF16), 0.0, d), "multiples of 8"),
    (lambda d: RmsNorm(torch.ones(16392, dtype=BF16), 0.0, d), "16384"),
    (lambda d: RmsNorm(torch.ones(16), 0.0, d), "bfloat16 and float16"),
    (lambda d: RmsNorm(torch.ones(16, dtype=F16), 0.0, d, BF16), "allowed for rows of torch.bfloat16"),
    (lambda d: GatedActivation("relu", BF16, d), "gelu_tanh"),
    (lambda d: _embedding(d, size=128, rotary_size=24), "multiples of 16"),
    (lambda d: _embedding(d, size=24), "multiples of 16"),
    (lambda d: _embedding(d, value_size=32), "one size"),
    (lambda d: _embedding(d, dtype=INT8, block_size=8), "power of two from 16 on"),
    (lambda d: _embedding(d, block_size=24), "power of two"),
    (lambda d: _embedding(SimulatedDriver("sm_80"), dtype=E4M3), "cannot store"),
])
def test_what_has_no_kernel_is_refused(call: Callable[[SimulatedDriver], object], message: str) -> None:
    """Sizes, formats and GPUs without a kernel are an InvalidConfig that says what has one."""
    with pytest.raises(InvalidConfig, match=message):
        call(SimulatedDriver())


def _embedding(
    driver: SimulatedDriver, size: int = 64, value_size: int | None = None, dtype: torch.dtype = BF16,
    block_size: int = 16, **options: Any,
) -> RotaryEmbedding:
    layers = (LayerShape(1, size, value_size or size),)
    layout = TokenMajorLayout(block_size, dtype, layers) if dtype == BF16 else \
        ScaledKVLayout(block_size, dtype, layers, BF16)
    return RotaryEmbedding(layout, layout.allocate(1), driver, **options)


def test_tensors_that_do_not_fit_are_refused() -> None:
    """What a kernel would read by address is checked before anything is launched."""
    driver = SimulatedDriver()
    rows, out = torch.zeros(2, 64, dtype=BF16), torch.zeros(2, 32, dtype=BF16)
    norm = RmsNorm(torch.ones(64, dtype=BF16), 0.0, driver)
    for bad in (rows[:, :32], rows.float(), rows[:1], torch.zeros(64, 2, dtype=BF16).T):
        with pytest.raises(InternalError, match="out"):
            norm(rows, None, bad)
    for bad in (rows[:1], rows[:, :48], rows.half()):
        with pytest.raises(InternalError, match="gate_up"):
            GatedActivation("silu", BF16, driver)(bad, out)
    case = Rotation(BF16, BF16, 64, None)
    good = case.query, case.key, case.value, case.positions, case.angles, case.slots
    shifted = torch.zeros(23, 5, 65, dtype=BF16)[..., 1:]
    for place, bad in ((0, shifted), (1, case.key[:5]), (2, case.value.half()), (3, case.positions.long()),
                       (4, case.angles[:, :32]), (5, case.slots[:4])):
        with pytest.raises(InternalError):
            case.embedding(0, *[bad if i == place else each for i, each in enumerate(good)])
    assert driver.launched == case.driver.launched == []

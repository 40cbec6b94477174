"""The fused kernels against float64 arithmetic that rounds where transformers rounds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pagedcore.errors import InternalError
from pagedcore_kernels.cpu.layers.elementwise import (
    GatedActivation,
    KVDestination,
    RmsNorm,
    RotaryEmbedding,
    SoftCap,
    can_compute,
    rows_at_once,
    threads_for,
    tokens_at_once,
)
from pagedcore_kernels.layout import KVLayout, LayerShape

DTYPES = [torch.float32, torch.bfloat16]
#: Largest error relative to a row's largest element: one rounding of the last operation.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8}

Double = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def random_rows(seed: int, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Return normal numbers of a number format."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def double(tensor: torch.Tensor) -> Double:
    """Return a float64 copy."""
    return tensor.double().numpy().copy()


def rounded(values: Double, dtype: torch.dtype) -> Double:
    """Round float64 to a number format."""
    return double(torch.from_numpy(values).to(dtype))


def assert_close(actual: torch.Tensor, expected: Double) -> None:
    """Compare within the tolerance of the number format."""
    error = np.abs(double(actual) - expected).max() / np.abs(expected).max()
    assert error <= TOLERANCE[actual.dtype]


def rms_norm(x: Double, weight: Double, epsilon: float, dtype: torch.dtype) -> Double:
    """Return weight * x / rms(x), the quotient rounded."""
    return weight * rounded(x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (5, 96), (70, 896)])
def test_add_and_norm(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """The residual becomes the rounded sum, the output is the norm of that sum."""
    residual, addend, weight = (random_rows(seed, *shape, dtype=dtype) for seed in range(3))
    total = rounded(double(residual) + double(addend), dtype)
    out = torch.full_like(residual, torch.nan)
    RmsNorm(weight[0], 1e-5)(residual, addend, out)
    assert np.array_equal(double(residual), total)
    assert_close(out, rms_norm(total, double(weight[0]), 1e-5, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_without_addend_leaves_the_residual(dtype: torch.dtype) -> None:
    """Without an addend the residual keeps its bits; epsilon keeps a row of zeros finite."""
    residual, weight = random_rows(0, 3, 32, dtype=dtype), random_rows(1, 32, dtype=dtype)
    residual[1] = 0
    before, out = residual.clone(), torch.full_like(residual, torch.nan)
    RmsNorm(weight, 1e-6)(residual, None, out)
    assert torch.equal(residual, before)
    assert torch.equal(out[1], torch.zeros(32, dtype=dtype))
    assert_close(out, rms_norm(double(before), double(weight), 1e-6, dtype))


def test_a_weight_of_float32_is_rounded_once() -> None:
    """With rows of bfloat16 and a wider weight only the product is rounded, and the norm may take its rows' place."""
    rows, weight = random_rows(0, 9, 64, dtype=torch.bfloat16), 1 + random_rows(1, 64, dtype=torch.float32)
    x = double(rows)
    exact = double(weight) * (x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6))
    RmsNorm(weight, 1e-6, torch.bfloat16)(rows, None, rows)
    # Why a few: float32 may fall on the other side of a tie.
    assert (double(rows) != rounded(exact, torch.bfloat16)).mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_cap(dtype: torch.dtype) -> None:
    """Logits are bounded by tanh, each step rounded; extremes are the bound, and what is no number stays none."""
    logits = random_rows(0, 3, 9001, dtype=dtype, scale=20.0)
    logits[0, :4] = torch.tensor([1e30, -1e30, torch.inf, 0.0])
    logits[2, 9000] = torch.nan
    expected = rounded(np.tanh(rounded(double(logits) / 7.0, dtype)), dtype) * 7.0
    SoftCap(7.0, dtype)(logits)
    assert logits[0, :4].tolist() == [7.0, -7.0, 7.0, 0.0]
    assert logits.isnan().nonzero().tolist() == [[2, 9000]]
    assert_close(logits[:2], expected[:2])


def test_a_soft_cap_has_the_same_bits_at_every_place() -> None:
    """An element is computed alike in a vector, after the last one, alone, and on any number of threads."""
    logits = random_rows(0, 20_011, dtype=torch.float32, scale=10.0)
    whole, parts = logits.clone(), [part.clone() for part in logits.split(7)]
    SoftCap(30.0, torch.float32)(whole)
    for part in parts:
        SoftCap(30.0, torch.float32)(part)
    assert torch.equal(torch.cat(parts), whole)


def silu(x: Double) -> Double:
    """x / (1 + exp(-x))"""
    return x / (1 + np.exp(-x))


def gelu_tanh(x: Double) -> Double:
    """The approximation of GELU by tanh."""
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "function"), [("silu", silu), ("gelu_tanh", gelu_tanh)])
def test_gated_activation(dtype: torch.dtype, name: str, function: Callable[[Double], Double]) -> None:
    """The first half of a row goes through the activation, is rounded, and multiplies the second half."""
    gate_up = random_rows(0, 40, 2 * 48, dtype=dtype, scale=4.0)
    out = torch.full((40, 48), torch.nan, dtype=dtype)
    GatedActivation(name, dtype)(gate_up, out)
    gate, up = np.split(double(gate_up), 2, axis=1)
    assert_close(out, rounded(function(gate), dtype) * up)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_activation_of_extremes_is_finite(name: str) -> None:
    """Large gates pass, large negative ones vanish, and nothing overflows."""
    gates = torch.tensor([1e4, 100.0, -100.0, -1e4] * 4)
    out = torch.empty(1, 16)
    GatedActivation(name, torch.float32)(torch.cat([gates, torch.ones(16)])[None], out)
    assert out[0, :2].tolist() == [1e4, 100.0]
    assert out[0, 2:4].abs().max() < 1e-30


def make_angles(num_positions: int, head_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return cosines and sines of ordinary rotary embeddings in a model's precision."""
    frequencies = 100.0 ** (-torch.arange(0, head_size, 2) / head_size)
    turns = torch.arange(num_positions)[:, None] * frequencies
    return torch.cat([turns.cos(), turns.sin()], dim=-1).to(dtype).float()


def rotate(heads: Double, angles: Double, dtype: torch.dtype) -> Double:
    """Rotate [T, heads, D] by angles [T, D], rounding every product."""
    half = heads.shape[-1] // 2
    cosines, sines = angles[:, None, :half], angles[:, None, half:]
    x, y = heads[..., :half], heads[..., half:]
    product = lambda left, right: rounded(left * right, dtype)  # noqa: E731
    return np.concatenate([
        product(x, cosines) - product(y, sines), product(y, cosines) + product(x, sines)
    ], axis=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [8, 16, 64, 96])
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotary_embedding_writes_the_pool(dtype: torch.dtype, head_size: int, has_norms: bool) -> None:
    """Queries and keys are normed, rotated in place, and keys and values land in their slots and nowhere else."""
    num_rows, heads, kv_heads = 21, 4, 2
    layout = KVLayout(16, dtype, (LayerShape(kv_heads, head_size, head_size),) * 2)
    pool = layout.allocate(4).zero_()
    qkv = random_rows(0, num_rows, (heads + 2 * kv_heads) * head_size, dtype=dtype)
    weights = random_rows(1, head_size, dtype=dtype), random_rows(2, head_size, dtype=dtype)
    positions = torch.arange(num_rows) * 3 % 50
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(3))[:num_rows]
    slots[5] = -1
    angles = make_angles(50, head_size, dtype)
    before = double(qkv).reshape(num_rows, -1, head_size)
    rotary = RotaryEmbedding(heads, kv_heads, head_size, dtype, norms=weights if has_norms else None, epsilon=1e-6)
    rotary(qkv, positions, angles, KVDestination(layout, pool, slots), layer=1)

    turned = before[:, : heads + kv_heads]
    if has_norms:
        weight = np.stack([double(weights[0])] * heads + [double(weights[1])] * kv_heads)
        turned = rounded(rms_norm(turned, weight, 1e-6, dtype), dtype)
    after = qkv.view(num_rows, -1, head_size)
    assert_close(after[:, : heads + kv_heads], rotate(turned, double(angles)[positions], dtype))
    assert np.array_equal(double(after[:, heads + kv_heads :]), before[:, heads + kv_heads :])

    keys, values = layout.key_view(pool, 1), layout.value_view(pool, 1)
    expected_keys, expected_values = torch.zeros_like(keys), torch.zeros_like(values)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected_keys[slot // 16, :, :, slot % 16] = after[row, heads : heads + kv_heads]
            expected_values[slot // 16, :, slot % 16] = after[row, heads + kv_heads :]
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, expected_values)
    assert not layout.key_view(pool, 0).any()
    assert not layout.value_view(pool, 0).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding_without_a_pool(dtype: torch.dtype) -> None:
    """Without a destination the rows are rotated all the same."""
    layout = KVLayout(16, dtype, (LayerShape(1, 32, 32),))
    qkv = random_rows(0, 6, 4 * 32, dtype=dtype)
    other, positions, angles = qkv.clone(), torch.arange(6), make_angles(6, 32, dtype)
    rotary = RotaryEmbedding(2, 1, 32, dtype)
    rotary(qkv, positions, angles)
    rotary(other, positions, angles, KVDestination(layout, layout.allocate(1), torch.arange(6)))
    assert torch.equal(qkv, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding_of_a_part_and_norms_of_rows(dtype: torch.dtype) -> None:
    """The first elements of a head are turned, the others stay; a norm is one of all query or all key heads."""
    heads, kv_heads, size, turned = 4, 2, 32, 16
    qkv, angles = random_rows(0, 5, (heads + 2 * kv_heads) * size, dtype=dtype), make_angles(9, turned, dtype)
    weights = random_rows(1, heads * size, dtype=dtype), random_rows(2, kv_heads * size, dtype=dtype)
    positions, before = torch.arange(5) * 2, double(qkv)
    rotary = RotaryEmbedding(heads, kv_heads, size, dtype, norms=weights, epsilon=1e-6, rotary_size=turned)
    rotary(qkv, positions, angles)
    parts = np.split(before, [heads * size, (heads + kv_heads) * size], axis=1)
    normed = [rounded(rms_norm(x, double(w), 1e-6, dtype), dtype) for x, w in zip(parts, weights, strict=False)]
    every = np.concatenate(normed, axis=1).reshape(5, -1, size)
    expected = np.concatenate(
        [rotate(every[..., :turned], double(angles)[positions], dtype), every[..., turned:]], axis=-1
    )
    assert_close(qkv[:, : (heads + kv_heads) * size].reshape(5, -1, size), expected)
    assert np.array_equal(double(qkv)[:, (heads + kv_heads) * size :], parts[2])


def test_rotary_embedding_that_rounds_sums_only() -> None:
    """With angles of float32, bfloat16 heads are rounded once."""
    qkv, angles = random_rows(0, 50, 3 * 16, dtype=torch.bfloat16), make_angles(50, 16, torch.float32)
    exact = rotate(double(qkv).reshape(50, 3, 16)[:, :2], double(angles), torch.float64)
    RotaryEmbedding(1, 1, 16, torch.bfloat16, rounds=False)(qkv, torch.arange(50), angles)
    after = double(qkv).reshape(50, 3, 16)[:, :2]
    assert (after != rounded(exact, torch.bfloat16)).mean() < 0.01


def test_rotary_embedding_refuses_rows_of_another_width() -> None:
    """Rows that do not hold the heads the kernel was made for are refused before it runs."""
    with pytest.raises(InternalError, match="96 elements, expected 128"):
        RotaryEmbedding(2, 1, 32, torch.float32)(torch.zeros(1, 96), torch.zeros(1), torch.zeros(1, 32))


def test_rotary_embedding_refuses_positions_of_another_type() -> None:
    """Narrower positions, which the kernel would read as rows beyond the table, are refused before it runs."""
    qkv = torch.ones(2, 128)
    with pytest.raises(InternalError, match=r"positions: torch\.int32, expected torch\.int64"):
        RotaryEmbedding(2, 1, 32, torch.float32)(qkv, torch.zeros(2, dtype=torch.int32), torch.zeros(1, 32))
    assert (qkv == 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_company_or_threads(dtype: torch.dtype) -> None:
    """A row has the same bits alone, among others, at another place, and on another number of threads."""
    rows, gate_up = random_rows(0, 600, 64, dtype=dtype), random_rows(1, 600, 128, dtype=dtype)
    qkv, positions = random_rows(2, 600, 4 * 16, dtype=dtype), torch.arange(600) % 90
    norm, activation = RmsNorm(random_rows(3, 64, dtype=dtype), 1e-6), GatedActivation("silu", dtype)
    rotary, angles = RotaryEmbedding(2, 1, 16, dtype), make_angles(90, 16, dtype)

    def compute(picked: torch.Tensor) -> torch.Tensor:
        residual, addend, heads = rows[picked], rows[picked].flip(1).contiguous(), qkv[picked]
        normed, gated = torch.empty_like(residual), torch.empty_like(residual)
        norm(residual, addend, normed)
        activation(gate_up[picked], gated)
        rotary(heads, positions[picked], angles)
        return torch.cat([residual, normed, gated, heads], dim=1)

    everything = compute(torch.arange(600))
    threads = torch.get_num_threads()
    try:
        for num_threads, picked in ((1, [7]), (2, [599, 7]), (3, list(range(599, -1, -1)))):
            torch.set_num_threads(num_threads)
            assert torch.equal(compute(torch.tensor(picked)), everything[picked])
    finally:
        torch.set_num_threads(threads)


def test_nan_stays_in_its_row() -> None:
    """A row that is not a number spoils itself alone."""
    rows, gates = random_rows(0, 40, 32, dtype=torch.bfloat16), random_rows(1, 40, 64, dtype=torch.bfloat16)
    rows[3, 5] = gates[3, 5] = torch.nan
    out, gated = torch.empty_like(rows), torch.empty_like(rows)
    RmsNorm(torch.ones(32, dtype=torch.bfloat16), 1e-6)(rows, None, out)
    GatedActivation("silu", torch.bfloat16)(gates, gated)
    assert out.isnan().any(1).nonzero().flatten().tolist() == [3]
    assert gated.isnan().nonzero().tolist() == [[3, 5]]


def test_sizes_that_kernels_handle() -> None:
    """Rows must be whole vectors, half a head a small one, and the dtype one that kernels store."""
    fits = {"hidden_size": 64, "intermediate_size": 96, "head_size": 16, "dtype": torch.float32}
    assert can_compute(**fits)
    for change in ({"hidden_size": 65}, {"intermediate_size": 100}, {"head_size": 12}, {"head_size": 9},
                   {"dtype": torch.float16}, {"rotary_size": 4}):
        assert not can_compute(**{**fits, **change})
    assert [rows_at_once(n) for n in (1, 2, 64, 10_000)] == [1, 1, 8, 32]
    assert [tokens_at_once(n, are_apart=False) for n in (1, 31, 32, 64, 10_000)] == [1, 3, 32, 32, 32]
    assert [tokens_at_once(n, are_apart=True) for n in (1, 31, 32, 64)] == [1, 3, 4, 8]
    assert [threads_for(n, 1024) for n in (1, 32, 33)] == [1, 1, None]

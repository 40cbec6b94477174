"""Gates of token mixers, against torch's operations in float32 and float64, and their bits in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import silu, softplus

from kernels.test_elementwise import DTYPES, make_angles, random_rows
from pagedcore.errors import InternalError
from pagedcore_kernels.cpu.layers.elementwise import RotaryEmbedding
from pagedcore_kernels.cpu.layers.gates import DeltaGates, GatedNorm, HeadGate
from pagedcore_kernels.cpu.runtime.recorded_calls import RecordedCalls, StepShape
from pagedcore_kernels.cpu.runtime.threads import Computing

T, H = 40, 3
SIZES = pytest.mark.parametrize("size", [32, 20, 7])


def assert_near(found: torch.Tensor, expected: torch.Tensor, roundings: int = 1) -> None:
    """Within so many roundings to storage; in float32 within 1e-6."""
    limit = roundings * 2.0**-8 if found.dtype == torch.bfloat16 else 1e-6
    error = (found.double() - expected.double()).abs() / expected.double().abs().clamp(min=1e-30)
    assert float(error.max()) <= limit


def heads_in(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Gates [T, H, size] that lie between other elements of rows, with gaps between heads too."""
    return rows[:, 5 : 5 + H * 2 * size].view(len(rows), H, 2 * size)[..., size:]


@SIZES
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_gate(dtype: torch.dtype, size: int) -> None:
    """Every head is multiplied with the sigmoid of its gate, rounded first, wherever the gates lie."""
    rows, gate = random_rows(0, T, H, size, dtype=dtype), heads_in(random_rows(1, T, 400, dtype=dtype, scale=4), size)
    found = rows.clone()
    HeadGate(dtype)(found, gate)
    assert_near(found, rows.double() * gate.double().sigmoid(), 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_gate_for_a_head(dtype: torch.dtype) -> None:
    """A gate may be one number for all elements of a head."""
    rows, gate = random_rows(0, T, H, 20, dtype=dtype), random_rows(1, T, 9, dtype=dtype, scale=4)[:, 4 : 4 + H, None]
    found = rows.clone()
    HeadGate(dtype)(found, gate)
    assert_near(found, rows.double() * gate.double().sigmoid(), 2)


@SIZES
@pytest.mark.parametrize(("dtype", "weight_dtype"), [
    (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
])  # fmt: skip
def test_gated_norm(dtype: torch.dtype, weight_dtype: torch.dtype, size: int) -> None:
    """Each head is normed by itself, weighed, and multiplied with SiLU of its gate, as transformers' module does."""
    rows, gate = random_rows(0, T, H, size, dtype=dtype), heads_in(random_rows(1, T, 400, dtype=dtype, scale=4), size)
    weight, out = random_rows(2, size, dtype=weight_dtype), torch.empty_like(rows)
    GatedNorm(weight, 1e-5, dtype)(rows, gate, out)
    wide = rows.double()
    normed = (wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()).to(dtype)
    weighed = weight * normed if weight_dtype == dtype else weight.double() * normed.double()
    assert_near(out, weighed.double() * silu(gate.double()), 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [32, 20, 3])
def test_delta_gates(dtype: torch.dtype, heads: int) -> None:
    """Decays are in float32, from a hundred below zero to a hundred above; betas are rounded to the model's format."""
    fused = random_rows(0, T, 2 * heads + 9, dtype=dtype, scale=30)
    a, b = fused[:, 4 : 4 + heads], fused[:, 5 + heads : 5 + 2 * heads]
    rates, bias = random_rows(1, heads, dtype=torch.float32), random_rows(2, heads, dtype=dtype)
    log_decay, beta = torch.empty(T, heads), torch.empty(T, heads)
    DeltaGates(rates, bias, dtype)(a, b, log_decay, beta)
    x = (a.float() + bias.float()).double()
    expected = -rates.double().exp() * softplus(x, threshold=200)
    # Why: exp(-60) of a float32 has a relative error of 60 roundings; it is no decay any more.
    torch.testing.assert_close(log_decay.double(), expected, rtol=2e-6, atol=1e-13)
    assert float(log_decay.min()) < -50
    # Why an absolute bound: sigmoids below float32's normal numbers are no gates any more.
    assert float((beta.double() - b.double().sigmoid()).abs().max()) <= (2.0**-9 if dtype == torch.bfloat16 else 1e-7)
    assert torch.equal(beta, beta.to(dtype).float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_company_threads_and_recording_change_no_bit(dtype: torch.dtype) -> None:
    """A row has the same bits alone, among others, on several threads, and when recorded calls are repeated."""
    size = 32
    rows, wide = random_rows(0, T, H, size, dtype=dtype), random_rows(1, T, 400, dtype=dtype)
    gate, a, b = heads_in(wide, size), wide[:, :4], wide[:, 4:8]
    norm = GatedNorm(random_rows(2, size, dtype=dtype), 1e-6, dtype)
    head_gate, gates = HeadGate(dtype), DeltaGates(torch.zeros(4), torch.zeros(4), dtype)

    def outputs() -> list[torch.Tensor]:
        return [torch.zeros_like(rows), torch.zeros(T, 4), torch.zeros(T, 4)]

    def compute(into: list[torch.Tensor], begin: int, end: int) -> None:
        part = slice(begin, end)
        norm(rows[part], gate[part], into[0][part])
        head_gate(into[0][part], gate[part])
        gates(a[part], b[part], into[1][part], into[2][part])

    compute(everything := outputs(), 0, T)
    for num_threads in (1, 3):
        with Computing(num_threads):
            compute(found := outputs(), 3, 4)
            assert all(torch.equal(one[3], whole[3]) for one, whole in zip(found, everything, strict=True))
            with RecordedCalls() as calls:
                compute(again := outputs(), 0, 1)
            calls.run(StepShape(T))
            assert all(torch.equal(one, whole) for one, whole in zip(again, everything, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotary_embedding_steps_over_gates(dtype: torch.dtype, has_norms: bool) -> None:
    """With a gate after every query head, queries, keys and values are those of rows without, and gates are left."""
    heads, kv_heads, size, rotary = 4, 2, 16, 8
    plain = random_rows(0, T, heads + 2 * kv_heads, size, dtype=dtype)
    gates = random_rows(1, T, heads, size, dtype=dtype)
    queries = torch.stack([plain[:, :heads], gates], 2).flatten(1, 2)
    gated = torch.cat([queries, plain[:, heads:]], 1).flatten(1).contiguous()
    weight = random_rows(2, size, dtype=torch.float32)
    options: dict[str, Any] = {"rotary_size": rotary, "norms": (weight, weight + 1) if has_norms else None}
    angles, positions = make_angles(90, rotary, dtype), torch.arange(T)
    flat = plain.flatten(1).contiguous()
    RotaryEmbedding(heads, kv_heads, size, dtype, **options)(flat, positions, angles)
    RotaryEmbedding(heads, kv_heads, size, dtype, **options, has_gates=True)(gated, positions, angles)
    found = gated.view(T, -1, size)
    assert torch.equal(found[:, : 2 * heads : 2], flat.view(T, -1, size)[:, :heads])
    assert torch.equal(found[:, 1 : 2 * heads : 2], gates)
    assert torch.equal(found[:, 2 * heads :], flat.view(T, -1, size)[:, heads:])


def test_what_does_not_fit_is_refused() -> None:
    """A kernel writes to no tensor of another shape or format, and reads no gates that lie apart."""
    rows = torch.zeros(2, 3, 8)
    for bad in (torch.zeros(2, 3, 8, dtype=torch.bfloat16), torch.zeros(2, 8, 3).transpose(1, 2), torch.zeros(1, 3, 8)):
        with pytest.raises(InternalError, match="rows"):
            HeadGate(torch.float32)(bad, rows)
        with pytest.raises(InternalError, match="out"):
            GatedNorm(torch.ones(8), 1e-6, torch.float32)(rows, rows, bad)
    with pytest.raises(InternalError, match="gate: stride 3"):
        HeadGate(torch.float32)(rows, torch.zeros(2, 8, 3).transpose(1, 2))
    with pytest.raises(InternalError, match="beta"):
        DeltaGates(torch.zeros(3), torch.zeros(3), torch.float32)(*[torch.zeros(2, 3)] * 3, torch.zeros(2, 4))
    with pytest.raises(InternalError, match="b:"):
        DeltaGates(torch.zeros(3), torch.zeros(3), torch.float32)(
            torch.zeros(2, 3), torch.zeros(2, 3).bfloat16(), torch.zeros(2, 3), torch.zeros(2, 3)
        )
    weights = torch.ones(32), torch.ones(8)
    with pytest.raises(InternalError, match="gates"):
        RotaryEmbedding(4, 1, 8, torch.float32, norms=weights, has_gates=True)
